package hostile

import (
	"fmt"
	"net"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

// mostConnections is how many a pod may have open.
const mostConnections = 50

// floodConnections opens flow after flow as a pod. It gets as many as it may have, and
// another pod of its host has its own.
func floodConnections(t *testing.T, l *lab.Lab) {
	const most, asked = mostConnections, 80
	port := 30000 // another one each time: a process that is about to be started may hold the last one for a moment
	arrived := func(from, to string, f dataplane.Family) (n int) {
		t.Helper()
		port++
		src := addrOf(t, l, from, f)
		heard, err := l.Capture(to, "eth0", func(p lab.Packet) bool { return p.Outer.Src == src && p.DstPort >= 20000 && p.DstPort < 20000+asked })
		if err != nil {
			t.Fatal(err)
		}
		if err := ns.Do(l.Space(from), func() error {
			for i := range asked {
				c, err := net.Dial("udp", net.JoinHostPort(addrOf(t, l, to, f).String(), fmt.Sprint(20000+i)))
				if err != nil {
					return err
				}
				_, err = c.Write([]byte("?")) // an answer that nobody listens says nothing of the flow
				_ = c.Close()
				if err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if why := asks(t, l, to, "node1", port); why != "" {
			t.Errorf("%s reaches node1: %s", to, why)
		}
		return len(heard.Stop())
	}
	// Both families count as one; what the pod opened before counts too.
	if n := arrived("node1/pod1", "node2/pod1", dataplane.IPv4); n > most || n < most/2 {
		t.Errorf("IPv4: %d of %d flows of a pod that may have %d", n, asked, most)
	}
	if n := arrived("node1/pod1", "node2/pod1", dataplane.IPv6); n > most/2 {
		t.Errorf("IPv6: %d flows more of a pod that has what it may have", n)
	}
	if n := arrived("node1/pod2", "node2/pod2", dataplane.IPv4); n > most || n < most/2 {
		t.Errorf("another pod: %d of %d flows", n, asked)
	}
}
