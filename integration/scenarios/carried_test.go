package scenarios

import (
	"fmt"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
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
	c.waitStays(t, "vxlan/4096/4789")
	poll(t, "the peer in the rack is sent plain packets", func() string { return c.goesBy(t, "node1", "node2/pod1", dataplane.IPv4, "eth0") })
	expectNoLoss(t, "to plain packets that the spine does not carry", c.load)

	// Whoever restarts meanwhile goes on as it was.
	if err := c.Restart(await.Context(t), "node3"); err != nil {
		t.Fatal(err)
	}
	expectNoLoss(t, "a restart meanwhile", c.load)

	spineKnows(t, c.Lab, dataplane.IPv4)
	c.waitMode(t, store.Direct)
	expectNoLoss(t, "to plain packets that the spine carries", c.load)
}

// TestNotCarriedIPv6 is TestNotCarried for the IPv6 of pods of both families whose IPv4
// the spine carries in every form: IPv4 moves, and of IPv6 nothing is lost, neither to
// plain packets that the spine has no route for nor to a tunnel that it drops.
func TestNotCarriedIPv6(t *testing.T) {
	beside(t)
	top := topology(3, 2, store.VXLAN)
	top.Underlay, top.Pool6, top.Spine.BGP = lab.UnderlayDual, &lab.Pool{}, new(false)
	c := &changing{Lab: bringUp(t, "dark6", top)}
	c.store = openStore(t, c.Lab)
	for _, six := range []bool{false, true} {
		reach(t, c.Lab, traffic.Options{IPv6: six})
	}
	c.waitMode6(t, store.VXLAN)
	spineKnows(t, c.Lab, dataplane.IPv4)
	c.load = startLoad6(t, c.Lab)
	expectNoLoss(t, "before any change", c.load)

	said := c.setMode(t, store.Direct)
	if !strings.Contains(said, "stays in vxlan6/4096/4789") || !strings.Contains(said, "do the routers between know the route") {
		t.Errorf("apply says nothing of who stays:\n%s", said)
	}
	c.waitStays(t, "vxlan6/4096/4789")
	poll(t, "the peer in the rack is sent plain packets", func() string { return c.goesBy(t, "node1", "node2/pod1", dataplane.IPv6, "eth0") })
	poll(t, "IPv4 is sent plain packets", func() string { return c.goesBy(t, "node1", "node3/pod1", dataplane.IPv4, "eth0") })
	expectNoLoss(t, "to plain packets that the spine does not carry", c.load)
	reach(t, c.Lab, traffic.Options{})
	spineKnows(t, c.Lab, dataplane.IPv6)
	c.waitMode6(t, store.Direct)
	expectNoLoss(t, "to plain packets that the spine carries", c.load)

	far := addrOf(t, c.Lab, "node3", dataplane.IPv6)
	output(t, c.Lab, "spine", "nft", fmt.Sprintf(`table ip6 shut { chain c { type filter hook forward priority 0
		udp dport 4789 ip6 saddr %s drop
		udp dport 4789 ip6 daddr %s drop
	}; }`, far, far))
	c.setMode(t, store.VXLAN)
	c.waitStays(t, "direct")
	poll(t, "the peer in the rack is sent VXLAN", func() string {
		return c.goesBy(t, "node1", "node2/pod1", dataplane.IPv6, "vxlan-v6.calico")
	})
	poll(t, "IPv4 is sent VXLAN", func() string { return c.goesBy(t, "node1", "node3/pod1", dataplane.IPv4, "vxlan.calico") })
	expectNoLoss(t, "to a tunnel that the spine does not carry", c.load)
	reach(t, c.Lab, traffic.Options{})
	output(t, c.Lab, "spine", "nft", "delete table ip6 shut")
	c.waitMode6(t, store.VXLAN)
	expectNoLoss(t, "to a tunnel that the spine carries", c.load)
}

// TestForcedNotCarried forces the change that TestNotCarried does without: all peers move,
// pool status says that it was forced, and across racks packets get lost from then on. Put back,
// each flow gets there from the moment that its host has moved, and in the rack none loses any.
func TestForcedNotCarried(t *testing.T) {
	beside(t)
	top := topology(3, 2, store.VXLAN)
	top.Spine.BGP = new(false)
	c := &changing{Lab: bringUp(t, "forced", top)}
	c.store = openStore(t, c.Lab)
	reach(t, c.Lab, traffic.Options{})
	c.waitMode(t, store.VXLAN)
	c.load = startLoad(t, c.Lab, loadPairs()...)
	expectNoLoss(t, "before any change", c.load)
	c.setMode(t, store.Direct)
	c.waitStays(t, "vxlan/4096/4789")
	expectNoLoss(t, "without --force", c.load)

	c.setMode(t, store.Direct, "--force")
	c.waitMode(t, store.Direct)
	c.expectForced(t, "3 of 3 nodes have moved to it, by --force")
	c.expectDark(t, "forced")

	said := c.setMode(t, store.VXLAN)
	c.waitMode(t, store.VXLAN)
	if strings.Contains(said, "stays in") {
		t.Errorf("put back, apply says that some stay:\n%s", said)
	}
	c.expectForced(t, "3 of 3 nodes have moved to it\n")
	c.expectDark(t, "until it is put back")
	for _, s := range c.load.streams {
		poll(t, "the connection goes on", func() string {
			if r := s.Interval(); r.Bytes == 0 {
				return r.String()
			}
			return ""
		})
	}
	expectNoLoss(t, "put back", c.load)
	reach(t, c.Lab, traffic.Options{Size: modeOf(store.VXLAN).mtu, DF: true})
}

// expectForced looks for what pool status says in its first line.
func (c *changing) expectForced(t *testing.T, want string) {
	t.Helper()
	if out := routerctl(t, c.Lab, "node2", "", "pool", "status"); !strings.Contains(out, want) || strings.Contains(out, "stays in") {
		t.Errorf("pool status, want %q:\n%s", want, out)
	}
}

// expectDark holds that since the last report flows across racks lost packets, all of them in one run,
// and those of a rack none.
func (c *changing) expectDark(t *testing.T, what string) {
	t.Helper()
	for _, f := range c.load.packets.Interval() {
		t.Logf("%s: %s", what, f)
		across := strings.HasPrefix(f.From, "node3") != strings.HasPrefix(f.To, "node3")
		switch {
		case across && len(f.Losses) != 1:
			t.Errorf("%s: %d times packets were lost, want once: %s", what, len(f.Losses), f)
		case !across && f.Lost() > 0:
			t.Errorf("%s: %s", what, f)
		}
	}
}

// spineKnows gives the spine routes to the pods of a family, and to the addresses of the
// hosts' tunnels.
func spineKnows(t *testing.T, l *lab.Lab, f dataplane.Family) {
	t.Helper()
	device := map[dataplane.Family]string{dataplane.IPv4: "vxlan.calico", dataplane.IPv6: "vxlan-v6.calico"}[f]
	for _, n := range l.Topology().Nodes {
		to := []string{addrOf(t, l, n.Name+"/pod1", f).String(), addrOf(t, l, n.Name+"/pod2", f).String()}
		for line := range strings.Lines(output(t, l, n.Name, "ip", "-o", "addr", "show", "dev", device, "scope", "global")) {
			if f := strings.Fields(line); len(f) > 3 {
				to = append(to, f[3])
			}
		}
		for _, a := range to {
			output(t, l, "spine", "ip", "route", "replace", a, "via", addrOf(t, l, n.Name, f).String())
		}
	}
}

// waitStays waits until pool status says of each host that a peer in the other rack stays
// in a form.
func (c *changing) waitStays(t *testing.T, form string) {
	t.Helper()
	for node, peer := range map[string]string{"node1": "node3", "node2": "node3", "node3": "node1"} {
		poll(t, node+" says who stays", func() string {
			out := routerctl(t, c.Lab, "node2", "", "pool", "status")
			for line := range strings.Lines(out) {
				if strings.HasPrefix(line, node+" ") && strings.Contains(line, peer+" stays in "+form) {
					return ""
				}
			}
			return out
		})
	}
}

// goesBy says by which device a host sends to a pod, unless it is this one.
func (c *changing) goesBy(t *testing.T, host, pod string, f dataplane.Family, device string) string {
	t.Helper()
	if out := output(t, c.Lab, host, "ip", "route", "get", addrOf(t, c.Lab, pod, f).String()); !strings.Contains(out, "dev "+device+" ") {
		return out
	}
	return ""
}
