package hostile

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestSpoofedSource: nobody hears what a pod sends with another pod's address, of
// this host or of another.
func TestSpoofedSource(t *testing.T) {
	t.Parallel()
	l := bringUp(t, "spoof", topology(2, 2, store.VXLAN))
	const pod, target = "node1/pod1", "node2/pod2"
	poll(t, "the pods reach each other", func() string {
		m, err := l.Reachability(within(t, 10*time.Second), []string{pod, target}, traffic.Options{})
		if err != nil || !m.OK() {
			return fmt.Sprint(err, m.Failures())
		}
		return ""
	})
	dst, err := l.Addr(target)
	if err != nil {
		t.Fatal(err)
	}
	for _, victim := range []string{"node1/pod2", "node2/pod1"} {
		addr, err := l.Addr(victim)
		if err != nil {
			t.Fatal(err)
		}
		heard, err := l.Capture(target, "eth0", func(p lab.Packet) bool { return p.Payload().Src == addr })
		if err != nil {
			t.Fatal(err)
		}
		own := netip.PrefixFrom(addr, addr.BitLen()).String()
		output(t, l, pod, "ip", "address", "add", own, "dev", "eth0")
		if out, err := l.Output(await.Context(t), pod, "ping", "-c", "5", "-i", "0.1", "-W", "1", "-I", addr.String(), dst.String()); err == nil {
			t.Errorf("%s was answered as %s (%s):\n%s", pod, victim, addr, out)
		}
		output(t, l, pod, "ip", "address", "del", own, "dev", "eth0")
		if got := heard.Stop(); len(got) > 0 {
			t.Errorf("%s heard %d packets as from %s, the first %s", target, len(got), victim, got[0])
		}
	}
}
