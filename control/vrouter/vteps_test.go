package vrouter

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// tunnelBlock is a block of a node whose first address but one IPAM assigned to the
// node's VXLAN device.
func tunnelBlock(cidr, node string) store.Event {
	ev := blockEvent(cidr, node, map[int]string{1: node})
	b, ok := ev.Object.Value.(*store.Block)
	if !ok {
		panic("not a block")
	}
	b.Attributes[0].Secondary[store.AttrType] = "vxlanTunnelAddress"
	return ev
}

func withMAC(ev store.Event, mac string) store.Event {
	n, ok := ev.Object.Value.(*store.Node)
	if !ok {
		panic("not a node")
	}
	n.Spec.VXLANTunnelMACAddr = mac
	return ev
}

// TestVTEPTheft: who claims another node's VTEP gets none of its packets, is left
// out with a reason that names both, and comes in once he claims his own.
func TestVTEPTheft(t *testing.T) {
	const thief = "node0" // before all others by name
	mac := vxlan.MAC("node2").String()
	assigned := []store.Event{tunnelBlock("192.168.1.0/26", "node1"), tunnelBlock("192.168.2.0/26", "node2")}
	for name, tt := range map[string]struct {
		events []store.Event
		theft  store.Event
		reason string // of the thief
	}{
		"an address that IPAM assigned": {
			assigned, nodeEvent(thief, "10.1.0.99/24", "", "192.168.2.1"),
			"node node0 claims the VXLAN tunnel address 192.168.2.1, which IPAM assigned to node node2",
		},
		"this host's own": {
			assigned, nodeEvent(thief, "10.1.0.99/24", "", "192.168.1.1"),
			"node node0 claims the VXLAN tunnel address 192.168.1.1, which IPAM assigned to node node1",
		},
		"an address of which its owner says nothing yet": {
			append(slices.Clone(assigned), nodeEvent("node2", "10.1.0.12/24", "", "")), nodeEvent(thief, "10.1.0.99/24", "", "192.168.2.1"),
			"node node0 claims the VXLAN tunnel address 192.168.2.1, which IPAM assigned to node node2",
		},
		"a MAC": {
			assigned, withMAC(nodeEvent(thief, "10.1.0.99/24", "", "192.168.9.1"), mac),
			"nodes node2 and node0 both claim the VXLAN MAC " + mac + ": it counts as that of node2, from whose name it is derived",
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := append(testCluster(store.VXLAN), tt.events...)
			want := render(newTestTable(before...))
			block := blockEvent("192.168.9.0/26", thief, nil)
			for order, events := range map[string][]store.Event{
				"the owner first": append(slices.Clone(before), tt.theft, block),
				"the thief first": append([]store.Event{tt.theft, block}, before...),
			} {
				tab := newTestTable(events...)
				if diff := cmp.Diff(want, render(tab)); diff != "" {
					t.Errorf("%s: desired (-without the thief +with):\n%s", order, diff)
				}
				if got := tab.encap.Conflicts(); !slices.Equal(got, []string{tt.reason}) {
					t.Errorf("%s: conflicts %q, want %q", order, got, tt.reason)
				}
				cs := tab.rib.Explain(block.Key.CIDR())
				if len(cs) != 1 || cs[0].Best || cs[0].Reason != tt.reason {
					t.Errorf("%s: candidates for the thief's block %+v, want one with %q", order, cs, tt.reason)
				}
				tab.take(nodeEvent(thief, "10.1.0.99/24", "", "192.168.9.1"))
				tab.settle()
				if !slices.Contains(routesOf(tab), "192.168.9.0/26 via 192.168.9.1 dev vxlan.calico") || len(tab.encap.Conflicts()) > 0 {
					t.Errorf("%s: with its own: routes %q, conflicts %q", order, routesOf(tab), tab.encap.Conflicts())
				}
			}
		})
	}
}

// TestVTEPOfNobody: where IPAM assigned an address to neither of two that claim
// it, or to a node that is gone, the first by name has it on every host.
func TestVTEPOfNobody(t *testing.T) {
	tab := newTestTable(append(testCluster(store.VXLAN), nodeEvent("node9", "10.1.0.99/24", "", "192.168.2.1"), blockEvent("192.168.9.0/26", "node9", nil),
		tunnelBlock("192.168.2.0/26", "renamed"))...)
	conflicts := tab.encap.Conflicts()
	if len(conflicts) != 1 || !strings.Contains(conflicts[0], "nodes node2 and node9 both claim the VXLAN tunnel address 192.168.2.1") {
		t.Errorf("conflicts %q", conflicts)
	}
	if routes := routesOf(tab); slices.ContainsFunc(routes, func(s string) bool { return strings.HasPrefix(s, "192.168.9.0/26") }) {
		t.Errorf("node9's block has a route: %q", routes)
	}
	tab.take(gone(nodeEvent("node2", "", "", "")))
	tab.settle()
	if routes := routesOf(tab); !slices.Contains(routes, "192.168.9.0/26 via 192.168.2.1 dev vxlan.calico") {
		t.Errorf("node2 is gone: routes %q", routes)
	}
}

// TestNeverPlain: a pool that asks for a tunnel is not routed in plain for what
// somebody wrote into a Node, nor for what BGP says.
func TestNeverPlain(t *testing.T) {
	for _, e := range []store.Encapsulation{store.VXLAN, store.IPIP, store.VXLANCrossSubnet, store.IPIPCrossSubnet} {
		t.Run(string(e), func(t *testing.T) {
			tab := newTestTable(testCluster(e)...)
			want := routesOf(tab)
			tab.rib.SetPaths(rib.Update{Put: []rib.Path{learnedPath("192.168.3.0/26", "10.2.0.11")}})
			tab.take(nodeEvent("node7", "192.168.3.9/32", "", ""))
			tab.settle()
			if diff := cmp.Diff(want, routesOf(tab)); diff != "" {
				t.Errorf("a node's address in another's block: routes (-before +after):\n%s", diff)
			}
		})
	}
	// Of IPv6 the kernel has a route to the tunnel's address, which lies in the pool.
	own := netip.MustParsePrefix("fd10::1:1/128")
	u := sixRack()
	u.Links = append(u.Links, dataplane.UnderlayLink{Index: 3, Name: "vxlan-v6.calico", MTU: 1430, Up: true})
	u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: "vxlan-v6.calico", Prefix: own})
	u.Routes = append(u.Routes,
		dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("fd01::/64"), Link: "eth0", Protocol: 2}, dataplane.UnderlayRoute{Prefix: own, Link: "vxlan-v6.calico", Protocol: 2})
	six := newTestTable(
		poolEvent("six", "fd10::/48", store.VXLAN), blockEvent("fd10::2:0/122", "node2", nil),
		dual("node1", "", "fd01::11/64", "", own.Addr().String()), dual("node2", "", "fd01::12/64", "", "fd10::2:1"))
	six.setUnderlay(u)
	six.settle()
	want := routesOf(six)
	six.take(dual("node7", "", "fd10::2:9/128", "", ""))
	six.settle()
	if diff := cmp.Diff(want, routesOf(six)); diff != "" || !slices.ContainsFunc(want, func(s string) bool { return strings.HasPrefix(s, "fd10::2:0/122 via") }) {
		t.Errorf("a node's address in another's block of IPv6: routes (-before +after):\n%s\n%q", diff, want)
	}
	// node3 loses its VTEP, and a ToR switch announces its block.
	tab := newTestTable(testCluster(store.VXLAN)...)
	tab.take(nodeEvent("node3", "10.2.0.11/24", "", ""))
	tab.rib.SetPaths(rib.Update{Put: []rib.Path{learnedPath("192.168.3.0/26", "10.1.0.1")}})
	tab.settle()
	if routes := routesOf(tab); slices.ContainsFunc(routes, func(s string) bool { return strings.HasPrefix(s, "192.168.3.0/26") }) {
		t.Errorf("a block without a VTEP goes in plain: %q", routes)
	}
}
