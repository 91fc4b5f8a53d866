package scenarios

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// joinWithin is how long a host that joins may take until it is ready, from its token on.
const joinWithin = 10 * time.Second

// TestDatastoreGrows: one host's datastore becomes one of three members and is led from
// another host, with pods talking all the time. Two hosts join, in ten seconds each, two are
// promoted, a member dies and comes back, the first one leaves; nothing is lost, and
// workloads come and go with what is left.
func TestDatastoreGrows(t *testing.T) {
	beside(t)
	top := topology(4, 1, store.VXLAN)
	top.Join = true
	later := []string{"node3", "node4"}
	l := bring.UpWith(t, 2*time.Minute, labPrefix, "grows", lab.Options{Topology: top, BinDir: binDir(t), Later: later})
	flows, stop := startFlows(t, l, [2]string{"node1/pod1", "node2/pod1"}, [2]string{"node2/pod1", "node1/pod1"})
	best := time.Duration(math.MaxInt64) // of a busy machine one may have had little
	for _, h := range later {
		began := time.Now()
		if err := l.Join(await.Context(t), h); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		t.Logf("%s was ready %.1f s after it began to join", h, took.Seconds())
		best = min(best, took)
		if _, err := l.AttachPod(await.Context(t), h+"/pod1"); err != nil {
			t.Fatal(err)
		}
	}
	if best > joinWithin {
		t.Errorf("the faster of the hosts took %s to join, want %s", best, joinWithin)
	}
	reach(t, l, traffic.Options{})
	more, stopMore := startFlows(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node2/pod1", "node4/pod1"}, [2]string{"node4/pod1", "node1/pod1"})
	flows = append(flows, more...)
	members := func(host string, want ...string) {
		t.Helper()
		poll(t, "the members are "+strings.Join(want, ", "), func() string {
			out, err := tryRouterctl(t, l, host, "", "cluster", "members")
			if err != nil {
				return err.Error()
			}
			if got := strings.Count(out, " voter "); got != len(want) {
				return fmt.Sprintf("%d voters:\n%s", got, out)
			}
			for _, h := range want {
				if !strings.Contains(out, h) {
					return fmt.Sprintf("no %s:\n%s", h, out)
				}
			}
			return ""
		})
	}
	works := func(host, pod string) {
		t.Helper()
		if _, err := l.AttachPod(await.Context(t), host+"/"+pod); err != nil {
			t.Fatalf("%s/%s: %v", host, pod, err)
		}
		// A network set by each: a write that no reserve stands in for.
		routerctl(t, l, host, fmt.Sprintf("{apiVersion: projectcalico.org/v3, kind: GlobalNetworkSet, metadata: {name: %s-%s}, spec: {nets: [198.51.100.0/24]}}\n", host, pod), "apply", "-f", "-")
		reach(t, l, traffic.Options{})
	}

	routerctl(t, l, "node1", "", "cluster", "promote", "node2")
	routerctl(t, l, "node1", "", "cluster", "promote", "node3")
	members("node3", "node1", "node2", "node3")

	if err := l.Kill(await.Context(t), "node1", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	works("node4", "alone")
	if err := l.Start(await.Context(t), "node1"); err != nil {
		t.Fatal(err)
	}
	members("node1", "node1", "node2", "node3")

	routerctl(t, l, "node1", "", "cluster", "leave")
	members("node2", "node2", "node3")
	works("node1", "client")
	routerctl(t, l, "node2", "", "cluster", "promote", "node4")
	members("node4", "node2", "node3", "node4")
	works("node2", "last")

	waitFlows(t, flows, 500*time.Millisecond)
	stop()
	stopMore()
}
