package vrouter

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

func podCIDREvent(name, addr string, cidrs ...string) store.Event {
	ev := nodeEvent(name, addr, "", "")
	ev.Object.Value.(*store.Node).Status.PodCIDRs = cidrs
	return ev
}

// poolRoutes lists the routes to prefixes of the pools, in order.
func poolRoutes(tab *table) []string {
	return slices.DeleteFunc(render(tab), func(s string) bool {
		return !strings.Contains(s, "10.244.") && !strings.Contains(s, "172.30.")
	})
}

// TestPodCIDRRoutes: a Node's pod CIDR is routed to it where that is wanted, though it has no
// block; a block knows better, and what lies in no pool has no route.
func TestPodCIDRRoutes(t *testing.T) {
	t.Parallel()
	events := []store.Event{
		poolEvent("pods", "10.244.0.0/16", store.Direct),
		podCIDREvent("node1", "10.1.0.11/24", "10.244.1.0/24", "172.30.1.0/24"),
		podCIDREvent("node2", "10.1.0.12/24", "10.244.2.0/24", "172.30.2.0/24"),
		podCIDREvent("node3", "10.1.0.13/24", "10.244.3.0/24"),
		blockEvent("10.244.2.64/26", "node3", nil),
		blockEvent("10.244.3.0/24", "node3", nil),
	}
	tab := newTable("node1")
	tab.pods.on = true
	tab.setUnderlay(rack())
	for _, ev := range events {
		tab.take(ev)
	}
	tab.settle()
	want := []string{
		"blackhole 10.244.1.0/24",
		"10.244.2.0/24 via 10.1.0.12 dev eth0",
		"10.244.2.64/26 via 10.1.0.13 dev eth0",
		"10.244.3.0/24 via 10.1.0.13 dev eth0",
	}
	if diff := cmp.Diff(want, poolRoutes(tab)); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}

	// The block goes, and the Node that has its range is left.
	tab.take(gone(events[5]))
	tab.settle()
	if diff := cmp.Diff(want, poolRoutes(tab)); diff != "" {
		t.Errorf("without the block (-want +got):\n%s", diff)
	}
	// Another Node gets the range.
	tab.take(gone(events[3]))
	tab.take(podCIDREvent("node2", "10.1.0.12/24", "10.244.2.0/24", "10.244.3.0/24"))
	tab.settle()
	want[3] = "10.244.3.0/24 via 10.1.0.12 dev eth0"
	want = slices.Delete(want, 2, 3) // of a node that is gone
	if diff := cmp.Diff(want, poolRoutes(tab)); diff != "" {
		t.Errorf("with another Node (-want +got):\n%s", diff)
	}

	// Where pod CIDRs do not count, blocks alone do.
	off := newTestTable(events...)
	if diff := cmp.Diff([]string{"10.244.2.64/26 via 10.1.0.13 dev eth0", "10.244.3.0/24 via 10.1.0.13 dev eth0"}, poolRoutes(off)); diff != "" {
		t.Errorf("turned off (-want +got):\n%s", diff)
	}
}

// TestOtherPodsBridge: behind a bridge in this host's pod CIDR are pods of another network:
// nothing of the host's own drops what is for them, and these reach its workloads; without
// the bridge all is as ever.
func TestOtherPodsBridge(t *testing.T) {
	t.Parallel()
	bridged := rack()
	bridged.Links = append(bridged.Links,
		dataplane.UnderlayLink{Index: 3, Name: "cni0", Type: "bridge", MTU: 1450, Up: true},
		dataplane.UnderlayLink{Index: 4, Name: "flannel.1", Type: "vxlan", MTU: 1450, Up: true, RPFilter: 1})
	bridged.Addresses = append(bridged.Addresses,
		dataplane.UnderlayAddress{Link: "cni0", Prefix: netip.MustParsePrefix("10.244.1.1/24")},
		dataplane.UnderlayAddress{Link: "flannel.1", Prefix: netip.MustParsePrefix("10.244.1.0/32")})
	bridged.Routes = append(bridged.Routes, dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("10.244.1.0/24"), Link: "cni0", Protocol: 2})
	tab := newTable("node1")
	tab.pods.on = true
	tab.setUnderlay(bridged)
	for _, ev := range []store.Event{
		poolEvent("pods", "10.244.0.0/16", store.Direct),
		podCIDREvent("node1", "10.1.0.11/24", "10.244.1.0/24"),
		podCIDREvent("node2", "10.1.0.12/24", "10.244.2.0/24"),
		blockEvent("10.244.1.64/26", "node1", nil),
	} {
		tab.take(ev)
	}
	check := func(what string, routes []string, settings map[string]string) {
		t.Helper()
		tab.settle()
		if diff := cmp.Diff(routes, poolRoutes(tab)); diff != "" {
			t.Errorf("%s: routes (-want +got):\n%s", what, diff)
		}
		got := map[string]string{}
		for _, o := range desiredOf(tab) {
			if s, ok := o.(dataplane.Sysctl); ok && (strings.Contains(s.Name, "cni0") || strings.Contains(s.Name, "flannel")) {
				got[s.Name] = s.Value
			}
		}
		if diff := cmp.Diff(settings, got); diff != "" {
			t.Errorf("%s: settings (-want +got):\n%s", what, diff)
		}
	}
	other := "10.244.2.0/24 via 10.1.0.12 dev eth0"
	check("with the bridge", []string{other}, map[string]string{
		"net/ipv4/conf/cni0/forwarding": "1", "net/ipv4/conf/cni0/proxy_arp": "1", "net/ipv4/neigh/cni0/proxy_delay": "0",
		"net/ipv4/conf/flannel.1/rp_filter": "2",
	})
	why := ""
	for _, c := range tab.rib.Explain(netip.MustParsePrefix("10.244.1.0/24")) {
		why += c.Reason
	}
	if !strings.Contains(why, "are behind cni0, which has 10.244.1.1/24") {
		t.Errorf("why there is no route is said so: %q", why)
	}
	tab.setUnderlay(rack())
	own := []string{"blackhole 10.244.1.0/24", "blackhole 10.244.1.64/26", other}
	check("without it", own, map[string]string{})
	// The pod CIDR is known after the bridge.
	tab.take(podCIDREvent("node1", "10.1.0.11/24"))
	tab.setUnderlay(bridged)
	check("no pod CIDR", []string{"blackhole 10.244.1.64/26", other}, map[string]string{})
	tab.take(podCIDREvent("node1", "10.1.0.11/24", "10.244.1.0/24"))
	check("the pod CIDR comes later", []string{other}, map[string]string{
		"net/ipv4/conf/cni0/forwarding": "1", "net/ipv4/conf/cni0/proxy_arp": "1", "net/ipv4/neigh/cni0/proxy_delay": "0",
		"net/ipv4/conf/flannel.1/rp_filter": "2",
	})
}

// TestOtherNetworksRouteStays: another network's route to a node whose pods it wired is left in
// place until the node says that it accepts what would be sent; without that route nothing
// is waited for, as with Calico's nodes, which say nothing.
func TestOtherNetworksRouteStays(t *testing.T) {
	t.Parallel()
	flannel := rack()
	flannel.Links = append(flannel.Links, dataplane.UnderlayLink{Index: 4, Name: "flannel.1", Type: "vxlan", MTU: 1450, Up: true})
	flannel.Routes = append(flannel.Routes, dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("10.244.2.0/24"), Gateway: netip.MustParseAddr("10.244.2.0"), Link: "flannel.1", Protocol: 3})
	own := "blackhole 10.244.1.0/24"
	all := []string{own, "10.244.2.0/24 via 10.1.0.12 dev eth0", "10.244.2.64/26 via 10.1.0.12 dev eth0"}
	says := saying(podCIDREvent("node2", "10.1.0.12/24", "10.244.2.0/24"), store.NodeEncaps{Accepts: []string{"direct"}})
	for what, change := range map[string]func(*table){
		"it accepts":              func(tab *table) { tab.take(says) },
		"the other route is gone": func(tab *table) { tab.setUnderlay(rack()) },
	} {
		tab := newTable("node1")
		tab.pods.on = true
		tab.setUnderlay(flannel)
		for _, ev := range []store.Event{
			poolEvent("pods", "10.244.0.0/16", store.Direct),
			podCIDREvent("node1", "10.1.0.11/24", "10.244.1.0/24"),
			podCIDREvent("node2", "10.1.0.12/24", "10.244.2.0/24"),
			blockEvent("10.244.2.64/26", "node2", nil),
		} {
			tab.take(ev)
		}
		tab.settle()
		if diff := cmp.Diff([]string{own}, poolRoutes(tab)); diff != "" {
			t.Errorf("it has said nothing (-want +got):\n%s", diff)
		}
		change(tab)
		tab.settle()
		if diff := cmp.Diff(all, poolRoutes(tab)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func TestPodCIDRConflicts(t *testing.T) {
	t.Parallel()
	pool := func(cidr string) *cluster.Pool { return &cluster.Pool{Name: cidr, CIDR: netip.MustParsePrefix(cidr)} }
	for _, tt := range []struct {
		name   string
		nodes  map[string]string // their pod CIDRs
		pools  []*cluster.Pool
		blocks map[string]string // who holds them
		want   []string          // what each says
	}{
		{"as it is to be", map[string]string{"a": "10.244.1.0/24 fd00::/64", "b": "10.244.2.0/24"}, []*cluster.Pool{pool("10.244.0.0/16"), pool("fd00::/48")}, map[string]string{"10.244.1.0/26": "a", "10.244.2.0/24": "b"}, nil},
		{"none for this host", map[string]string{"a": "", "b": "10.244.2.0/24"}, []*cluster.Pool{pool("10.244.0.0/16")}, nil, []string{"the Node a has no spec.podCIDRs"}},
		{"none for another", map[string]string{"a": "10.244.1.0/24", "b": ""}, []*cluster.Pool{pool("10.244.0.0/16")}, nil, nil},
		{"one for two", map[string]string{"a": "10.244.1.0/24", "b": "10.244.1.0/24", "c": "10.244.1.128/25"}, []*cluster.Pool{pool("10.244.0.0/16")}, nil, []string{"of node b overlaps 10.244.1.0/24 of node a", "10.244.1.128/25 of node c overlaps 10.244.1.0/24 of node a"}},
		{"without a pool", map[string]string{"a": "10.244.1.0/24"}, nil, nil, []string{"10.244.1.0/24 of node a lies in no pool"}},
		{"larger than its pool", map[string]string{"a": "10.244.1.0/24"}, []*cluster.Pool{pool("10.244.1.0/25")}, nil, []string{"is larger than the pool 10.244.1.0/25"}},
		{"another's block in it", map[string]string{"a": "10.244.1.0/24", "b": "10.244.2.0/24"}, []*cluster.Pool{pool("10.244.0.0/16")}, map[string]string{"10.244.1.64/26": "b", "10.244.2.0/26": "b"}, []string{"the block 10.244.1.64/26 of node b overlaps the pod CIDR 10.244.1.0/24 of node a"}},
		{"another's block around it", map[string]string{"a": "10.244.1.0/28", "b": "10.244.2.0/24"}, []*cluster.Pool{pool("10.244.0.0/16")}, map[string]string{"10.244.1.0/26": "b"}, []string{"the block 10.244.1.0/26 of node b overlaps the pod CIDR 10.244.1.0/28 of node a"}},
		{"nobody's block", map[string]string{"a": "10.244.1.0/24"}, []*cluster.Pool{pool("10.244.0.0/16")}, map[string]string{"10.244.1.64/26": ""}, nil},
	} {
		nodes, pools := map[string]*cluster.Node{}, map[string]*cluster.Pool{}
		var blocks []*cluster.Block
		for name, list := range tt.nodes {
			nodes[name] = &cluster.Node{Name: name}
			for s := range strings.FieldsSeq(list) {
				nodes[name].PodCIDRs = append(nodes[name].PodCIDRs, netip.MustParsePrefix(s))
			}
		}
		for _, p := range tt.pools {
			pools[p.Name] = p
		}
		for s, node := range tt.blocks {
			cidr := netip.MustParsePrefix(s)
			blocks = append(blocks, &cluster.Block{CIDR: cidr, Holder: node})
		}
		got := podCIDRConflicts("a", nodes, pools, blocks)
		if len(got) != len(tt.want) {
			t.Errorf("%s: %d conflicts, want %d: %q", tt.name, len(got), len(tt.want), got)
			continue
		}
		for i, says := range tt.want {
			if !strings.Contains(got[i], says) {
				t.Errorf("%s: %q, want one that says %q", tt.name, got[i], says)
			}
		}
	}
}
