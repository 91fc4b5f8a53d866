package scenarios

import (
	"fmt"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestNotCarried changes a pool to plain packets in a cluster whose spine knows no route
// to pods: nothing is lost. Peers in the rack are moved, those across racks stay in the
// tunnel, and apply and pool status name them with the reason. When the spine learns the
// routes they are moved too.
func TestNotCarried(t *testing.T) {
	beside(t)
	top := topology(3, 2, store.VXLAN)
	top.Spine.BGP = new(false)
	c := &changing{Lab: bringUp(t, "dark", top)}
	c.store = openStore(t, c.Lab)
	reach(t, c.Lab, traffic.Options{})
	c.waitMode(t, store.VXLAN)
	c.load = startLoad(t, c.Lab, loadPairs()...)
	expectNoLoss(t, "before any change", c.load)

	said := c.setMode(t, store.Direct)
	if !strings.Contains(said, "stays in vxlan/4096/4789") || !strings.Contains(said, "do the routers between know the route") {
		t.Errorf("apply says nothing of who stays:\n%s", said)
	}
	for node, peer := range map[string]string{"node1": "node3", "node2": "node3", "node3": "node1"} {
		poll(t, node+" says who stays", func() string {
			out := routerctl(t, c.Lab, "node2", "", "pool", "status")
			for line := range strings.Lines(out) {
				if strings.HasPrefix(line, node+" ") && strings.Contains(line, peer+" stays in vxlan/4096/4789") {
					return ""
				}
			}
			return out
		})
	}
	poll(t, "the peer in the rack is sent plain packets", func() string {
		if out := output(t, c.Lab, "node1", "ip", "route", "get", addr(t, c.Lab, "node2/pod1").String()); !strings.Contains(out, "dev eth0") {
			return out
		}
		return ""
	})
	expectNoLoss(t, "to plain packets that the spine does not carry", c.load)

	// Whoever restarts meanwhile goes on as it was.
	if err := c.Restart(await.Context(t), "node3"); err != nil {
		t.Fatal(err)
	}
	expectNoLoss(t, "a restart meanwhile", c.load)

	for _, n := range c.Topology().Nodes {
		for i := range 2 {
			pod := addr(t, c.Lab, fmt.Sprintf("%s/pod%d", n.Name, i+1))
			output(t, c.Lab, "spine", "ip", "route", "replace", pod.String(), "via", n.Address.String())
		}
		for line := range strings.Lines(output(t, c.Lab, n.Name, "ip", "-4", "-o", "addr", "show", "dev", "vxlan.calico")) {
			if f := strings.Fields(line); len(f) > 3 {
				output(t, c.Lab, "spine", "ip", "route", "replace", f[3], "via", n.Address.String())
			}
		}
	}
	c.waitMode(t, store.Direct)
	expectNoLoss(t, "to plain packets that the spine carries", c.load)
}
