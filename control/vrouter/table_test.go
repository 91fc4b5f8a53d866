package vrouter

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

func nodeEvent(name, addr, ipip, vtep string) store.Event {
	key := store.ResourceKey(store.KindNode, name)
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: addr, IPv4IPIPTunnelAddr: ipip}
	n.Spec.IPv4VXLANTunnelAddr = vtep
	return store.Event{Key: key, Object: store.Object{Key: key, Value: n}}
}

func poolEvent(name, cidr string, e store.Encapsulation) store.Event {
	key := store.ResourceKey(store.KindIPPool, name)
	p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.CIDR = cidr
	store.SetEncapsulation(p, e)
	return store.Event{Key: key, Object: store.Object{Key: key, Value: p}}
}

// blockEvent makes a block of a node; borrowed maps ordinals to the nodes that
// took them.
func blockEvent(cidr, node string, borrowed map[int]string) store.Event {
	key := store.BlockKey(netip.MustParsePrefix(cidr))
	b := &store.Block{CIDR: cidr, Allocations: make([]*int, 64)}
	if node != "" {
		aff := "host:" + node
		b.Affinity = &aff
	}
	for ord, holder := range borrowed {
		i := len(b.Attributes)
		b.Attributes = append(b.Attributes, store.Attribute{Secondary: map[string]string{"node": holder}})
		b.Allocations[ord] = &i
	}
	return store.Event{Key: key, Object: store.Object{Key: key, Value: b}}
}

func gone(ev store.Event) store.Event { return store.Event{Key: ev.Key} }

// rack is the underlay of a host at 10.1.0.11 behind the gateway 10.1.0.1.
func rack() dataplane.Underlay {
	return dataplane.Underlay{
		Links:     []dataplane.UnderlayLink{{Index: 1, Name: "lo", MTU: 65536, Up: true, Loopback: true}, {Index: 2, Name: "eth0", MTU: 1500, Up: true}},
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("10.1.0.11/24")}},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.1.0.1"), Link: "eth0"},
			{Prefix: netip.MustParsePrefix("10.1.0.0/24"), Link: "eth0", Protocol: 2},
		},
	}
}

func testCluster(e store.Encapsulation) []store.Event {
	return []store.Event{
		poolEvent("pool", "192.168.0.0/16", e),
		nodeEvent("node1", "10.1.0.11/24", "192.168.1.0", "192.168.1.1"),
		nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"),
		nodeEvent("node3", "10.2.0.11/24", "192.168.3.0", "192.168.3.1"),
		blockEvent("192.168.1.0/26", "node1", nil),
		blockEvent("192.168.2.0/26", "node2", map[int]string{5: "node3", 6: "node1", 7: "node2"}),
		blockEvent("192.168.3.0/26", "node3", nil),
	}
}

func newTestTable(events ...store.Event) *table {
	t := newTable("node1")
	t.setUnderlay(rack())
	for _, ev := range events {
		t.take(ev)
	}
	t.settle()
	return t
}

// render shows the wish with next-hop numbers replaced by what they lead to,
// so that expectations can be written by hand.
func render(t *table) []string {
	hops := map[dataplane.NextHopID]dataplane.NextHop{}
	var out []string
	for _, o := range desiredOf(t) {
		if nh, ok := o.(dataplane.NextHop); ok {
			hops[nh.ID] = nh
		}
	}
	for _, o := range desiredOf(t) {
		switch o := o.(type) {
		case dataplane.NextHop:
		case dataplane.Route:
			s := o.String()
			if o.NextHop != 0 {
				nh, ok := hops[o.NextHop]
				s = fmt.Sprintf("%s via %s dev %s", o.Prefix, nh.Gateway, nh.Link)
				if !ok {
					s += " DANGLING"
				}
			}
			out = append(out, s)
		default:
			out = append(out, o.String())
		}
	}
	return out
}

// desiredOf is what the kernel is to have, in a fixed order.
func desiredOf(t *table) []dataplane.Object {
	return slices.SortedFunc(slices.Values(t.desired()), func(a, b dataplane.Object) int { return dataplane.CompareKeys(a.Key(), b.Key()) })
}

func lines(s string) []string {
	return strings.Split(strings.ReplaceAll(strings.TrimSpace(s), "\t", ""), "\n")
}

func TestWishByEncapsulation(t *testing.T) {
	const (
		common = "net/ipv4/ip_forward=1\n"
		uplink = "net/ipv4/conf/eth0/forwarding=1\n"
	)
	tests := []struct {
		encap store.Encapsulation
		want  string
	}{
		{store.Direct, uplink + common + `
			blackhole 192.168.1.0/26
			192.168.2.0/26 via 10.1.0.12 dev eth0`},
		{store.IPIP, `
			tunl0 type ipip mtu 1480
			192.168.1.0/32 dev tunl0
			` + uplink + `
			net/ipv4/conf/tunl0/forwarding=1
			net/ipv4/conf/tunl0/rp_filter=2
			` + common + `
			blackhole 192.168.1.0/26
			192.168.2.0/26 via 10.1.0.12 dev tunl0
			192.168.2.5/32 via 10.2.0.11 dev tunl0
			192.168.3.0/26 via 10.2.0.11 dev tunl0`},
		{store.VXLAN, `
			vxlan.calico type vxlan mtu 1450 address 66:f9:37:c3:7e:94 id 4096 dstport 4789 local 10.1.0.11 dev eth0 nolearning
			192.168.1.1/32 dev vxlan.calico
			` + uplink + `
			net/ipv4/conf/vxlan.calico/forwarding=1
			net/ipv4/conf/vxlan.calico/rp_filter=2
			` + common + `
			66:2d:bf:44:a6:8b dev vxlan.calico dst 10.1.0.12 self permanent
			66:a4:6f:e0:c4:da dev vxlan.calico dst 10.2.0.11 self permanent
			192.168.2.1 dev vxlan.calico lladdr 66:2d:bf:44:a6:8b PERMANENT
			192.168.3.1 dev vxlan.calico lladdr 66:a4:6f:e0:c4:da PERMANENT
			blackhole 192.168.1.0/26
			192.168.2.0/26 via 192.168.2.1 dev vxlan.calico
			192.168.2.5/32 via 192.168.3.1 dev vxlan.calico
			192.168.3.0/26 via 192.168.3.1 dev vxlan.calico`},
		{store.IPIPCrossSubnet, `
			tunl0 type ipip mtu 1480
			192.168.1.0/32 dev tunl0
			` + uplink + `
			net/ipv4/conf/tunl0/forwarding=1
			net/ipv4/conf/tunl0/rp_filter=2
			` + common + `
			blackhole 192.168.1.0/26
			192.168.2.0/26 via 10.1.0.12 dev eth0
			192.168.2.5/32 via 10.2.0.11 dev tunl0
			192.168.3.0/26 via 10.2.0.11 dev tunl0`},
		{store.VXLANCrossSubnet, `
			vxlan.calico type vxlan mtu 1450 address 66:f9:37:c3:7e:94 id 4096 dstport 4789 local 10.1.0.11 dev eth0 nolearning
			192.168.1.1/32 dev vxlan.calico
			` + uplink + `
			net/ipv4/conf/vxlan.calico/forwarding=1
			net/ipv4/conf/vxlan.calico/rp_filter=2
			` + common + `
			66:a4:6f:e0:c4:da dev vxlan.calico dst 10.2.0.11 self permanent
			192.168.3.1 dev vxlan.calico lladdr 66:a4:6f:e0:c4:da PERMANENT
			blackhole 192.168.1.0/26
			192.168.2.0/26 via 10.1.0.12 dev eth0
			192.168.2.5/32 via 192.168.3.1 dev vxlan.calico
			192.168.3.0/26 via 192.168.3.1 dev vxlan.calico`},
	}
	for _, tt := range tests {
		t.Run(string(tt.encap), func(t *testing.T) {
			got := render(newTestTable(testCluster(tt.encap)...))
			want := slices.DeleteFunc(lines(tt.want), func(s string) bool { return s == "" })
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("wish (-want +got):\n%s", diff)
			}
		})
	}
}

// TestDirectTakesBGP: where the store has no usable next hop, the path of BGP
// is resolved through the underlay.
func TestDirectTakesBGP(t *testing.T) {
	tab := newTestTable(testCluster(store.Direct)...)
	far := netip.MustParsePrefix("192.168.3.0/26")
	near := netip.MustParsePrefix("192.168.2.0/26")
	tor := netip.MustParsePrefix("172.20.0.0/16")
	tab.rib.SetPaths(rib.Update{Put: []rib.Path{
		{Prefix: far, Announced: nexthop.Announce(0, "node3", netip.MustParseAddr("10.2.0.11"))},
		{Prefix: near, Announced: nexthop.Announce(0, "tor", netip.MustParseAddr("10.1.0.1"))},
		{Prefix: tor, Announced: nexthop.Announce(0, "tor", netip.MustParseAddr("10.1.0.1"))},
	}})
	tab.settle()
	got := render(tab)
	for _, want := range []string{
		"192.168.3.0/26 via 10.1.0.1 dev eth0",
		"192.168.2.0/26 via 10.1.0.12 dev eth0",
		"172.20.0.0/16 via 10.1.0.1 dev eth0",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, strings.Join(got, "\n"))
		}
	}
	// The loser is still visible, with the reason.
	var reasons []string
	for _, c := range tab.rib.Explain(near) {
		if c.Prefix != near {
			continue
		}
		reasons = append(reasons, fmt.Sprintf("%v %s: %s", c.Best, c.Source, c.Reason))
	}
	want := []string{"true store: block of node node2 in pool pool", "false bgp: store is preferred to bgp"}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Errorf("explain (-want +got):\n%s", diff)
	}
	// The underlay loses its way, and finds another.
	u := rack()
	u.Routes = u.Routes[1:]
	tab.setUnderlay(u)
	tab.settle()
	if got := render(tab); slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, "192.168.3.0/26") }) {
		t.Errorf("route kept whose next hop cannot be resolved:\n%s", strings.Join(got, "\n"))
	}
	u.Routes = append(u.Routes, dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("10.2.0.0/16"), Gateway: netip.MustParseAddr("10.1.0.2"), Link: "eth0"})
	tab.setUnderlay(u)
	tab.settle()
	if got := render(tab); !slices.Contains(got, "192.168.3.0/26 via 10.1.0.2 dev eth0") {
		t.Errorf("route did not come back:\n%s", strings.Join(got, "\n"))
	}
}

// TestOwnPrefixOfBGP: what this host has is not looked for elsewhere, whoever
// announces it, until it is another's.
func TestOwnPrefixOfBGP(t *testing.T) {
	borrowed, whole := netip.MustParsePrefix("192.168.2.6/32"), netip.MustParsePrefix("192.168.1.0/26")
	tab := newTestTable(testCluster(store.Direct)...)
	tor := netip.MustParseAddr("10.1.0.1")
	tab.rib.SetPaths(rib.Update{Put: []rib.Path{{Prefix: borrowed, Announced: nexthop.Announce(0, "tor", tor)}, {Prefix: whole, Announced: nexthop.Announce(0, "tor", tor)}}})
	tab.settle()
	if got := routesOf(tab); slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, "192.168.2.6/32") }) || !slices.Contains(got, "blackhole 192.168.1.0/26") {
		t.Errorf("routes %v", got)
	}
	for _, p := range []netip.Prefix{borrowed, whole} {
		cs := slices.DeleteFunc(tab.rib.Explain(p), func(c rib.Candidate) bool { return c.Prefix != p || c.Source != rib.SourceBGP })
		if len(cs) != 1 || cs[0].Best || cs[0].Reason != "the prefix is this host's own" {
			t.Errorf("%s: %+v", p, cs)
		}
	}
	tab.take(gone(blockEvent("192.168.2.0/26", "", nil)))
	tab.settle()
	if got := render(tab); !slices.Contains(got, "192.168.2.6/32 via 10.1.0.1 dev eth0") {
		t.Errorf("without its block it is not taken from BGP: %v", got)
	}
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// learnedPath is a path with these next hops.
func learnedPath(prefix string, hops ...string) rib.Path {
	a := addrs(hops...)
	return rib.Path{Prefix: netip.MustParsePrefix(prefix), Announced: nexthop.Announce(0, "tor", a[0], a[1:]...)}
}

// handedOver is what of the wish changed since it was last called.
func handedOver(tab *table) ([]dataplane.Object, []dataplane.Key) {
	put, del := slices.Collect(maps.Values(tab.objects.Put)), slices.Collect(maps.Keys(tab.objects.Del))
	put, del = withRoutes(tab.rib.Changes(), put, del)
	tab.objects.HandedOver()
	tab.rib.HandedOver()
	return put, del
}

// changes returns what one change put and deleted.
func changes(tab *table, f func()) (put, del []string) {
	handedOver(tab)
	f()
	tab.settle()
	puts, dels := handedOver(tab)
	for _, o := range puts {
		put = append(put, o.Key().Kind().String())
	}
	for _, k := range dels {
		del = append(del, k.Kind().String())
	}
	slices.Sort(put)
	slices.Sort(del)
	return put, del
}

// TestCostFollowsChange counts what an event writes.
func TestCostFollowsChange(t *testing.T) {
	events := testCluster(store.IPIP)
	for i := range 500 {
		events = append(events, blockEvent(fmt.Sprintf("192.168.%d.%d/26", 64+i/4, i%4*64), "node3", nil))
	}
	tab := newTestTable(events...)

	put, del := changes(tab, func() { tab.take(nodeEvent("node3", "10.2.0.99/24", "192.168.3.0", "192.168.3.1")) })
	if diff := cmp.Diff([]string{"nexthop"}, put); diff != "" || del != nil {
		t.Errorf("a peer's new address put %v, deleted %v; want one next hop whatever the number of routes", put, del)
	}
	put, del = changes(tab, func() { tab.take(blockEvent("192.168.250.0/26", "node2", nil)) })
	if diff := cmp.Diff([]string{"route"}, put); diff != "" || del != nil {
		t.Errorf("a new block put %v, deleted %v; want one route", put, del)
	}
	put, del = changes(tab, func() { tab.take(poolEvent("pool", "192.168.0.0/16", store.VXLAN)) })
	want := []string{"address", "fdb", "fdb", "link", "neighbour", "neighbour", "nexthop", "nexthop", "sysctl", "sysctl"}
	if diff := cmp.Diff(want, put); diff != "" {
		t.Errorf("a change of encapsulation put %v: no route may be among them", put)
	}
	if diff := cmp.Diff([]string{"address", "link", "sysctl", "sysctl"}, del); diff != "" {
		t.Errorf("a change of encapsulation deleted %v", del)
	}
	if put, del := changes(tab, func() {
		for _, ev := range append(events[1:3:3], events[4:]...) {
			tab.take(ev)
		}
		tab.take(nodeEvent("node3", "10.2.0.99/24", "192.168.3.0", "192.168.3.1"))
	}); put != nil || del != nil {
		t.Errorf("events that change nothing put %v, deleted %v", put, del)
	}
}

func TestLastKnownGood(t *testing.T) {
	tab := newTestTable(testCluster(store.VXLAN)...)
	before := render(tab)
	put, del := changes(tab, func() {
		tab.take(gone(nodeEvent("node1", "", "", "")))
		u := rack()
		u.Addresses = nil // the address is gone for a moment
		tab.setUnderlay(u)
		ev := testCluster(store.VXLAN)[5]
		ev.Object.Value, ev.Err = nil, store.ErrDecode
		tab.take(ev)
	})
	if put != nil || del != nil {
		t.Errorf("put %v, deleted %v; want the last known good kept", put, del)
	}
	if diff := cmp.Diff(before, render(tab)); diff != "" {
		t.Errorf("wish (-before +after):\n%s", diff)
	}
}

func TestMTU(t *testing.T) {
	for e, want := range map[store.Encapsulation]int{
		store.Direct: 1500, store.IPIP: 1480, store.VXLAN: 1450, store.IPIPCrossSubnet: 1480, store.VXLANCrossSubnet: 1450,
	} {
		if got := newTestTable(testCluster(e)...).encap.MTU(dataplane.IPv4); got != want {
			t.Errorf("%s: MTU = %d, want %d", e, got, want)
		}
	}
	mtu := 1400
	felix := &v3.FelixConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	felix.Spec.VXLANMTU = &mtu
	key := store.ResourceKey(store.KindFelixConfiguration, "default")
	tab := newTestTable(append(testCluster(store.VXLAN), store.Event{Key: key, Object: store.Object{Key: key, Value: felix}})...)
	if got := tab.encap.MTU(dataplane.IPv4); got != mtu {
		t.Errorf("MTU = %d, want the configured %d", got, mtu)
	}
}

// TestPathIndependence: any sequence of events leaves the same wish as a fresh
// start on the final state, and the changes that were handed over lead there.
func TestPathIndependence(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tab := newTable("node1")
		kernel := map[dataplane.Key]dataplane.Object{}
		state := map[store.Key]store.Event{}
		paths := map[netip.Prefix]rib.Path{}
		var under dataplane.Underlay
		flush := func() {
			tab.settle()
			put, del := handedOver(tab)
			for _, k := range del {
				delete(kernel, k)
			}
			for _, o := range put {
				kernel[o.Key()] = o
			}
		}
		setUnderlay := func(u dataplane.Underlay) { under = u; tab.setUnderlay(u) }
		setUnderlay(rack())
		self := nodeEvent("node1", "10.1.0.11/24", "192.168.1.0", "192.168.1.1")
		apply := func(ev store.Event) {
			state[ev.Key] = ev
			if ev.Deleted() {
				delete(state, ev.Key)
			}
			tab.take(ev)
		}
		apply(self)

		nodes := []string{"node1", "node2", "node3", "node4"}
		// Hostile ones too: an address that is a block and borrowed, a block in
		// which a node's own address lies.
		cidrs := []string{"192.168.1.0/26", "192.168.2.0/26", "192.168.2.64/26", "10.50.0.0/26", "192.168.3.0/32", "192.168.2.1/32"}
		addrs := []string{"10.1.0.12/24", "10.2.0.11/24", "10.2.0.12/24", "192.168.2.70/24", ""}
		steps := rapid.IntRange(1, 60).Draw(rt, "steps")
		for range steps {
			switch rapid.IntRange(0, 8).Draw(rt, "event") {
			case 0, 1:
				n := rapid.SampledFrom(nodes[1:]).Draw(rt, "node")
				apply(nodeEvent(n, rapid.SampledFrom(addrs).Draw(rt, "addr"), "", rapid.SampledFrom([]string{"", "192.168.9.1", "192.168.9.2"}).Draw(rt, "vtep")))
			case 2:
				apply(gone(nodeEvent(rapid.SampledFrom(nodes[1:]).Draw(rt, "node"), "", "", "")))
			case 3:
				name, cidr := "pool", "192.168.0.0/16"
				switch rapid.IntRange(0, 3).Draw(rt, "which") {
				case 0:
					name, cidr = "other", "10.50.0.0/16"
				case 1:
					name = "rival" // of the same CIDR
				case 2:
					name, cidr = "inner", "192.168.2.0/24"
				}
				ev := poolEvent(name, cidr, rapid.SampledFrom(store.Encapsulations()).Draw(rt, "encap"))
				if rapid.IntRange(0, 4).Draw(rt, "delete") == 0 {
					ev = gone(ev)
				}
				apply(ev)
			case 4, 5:
				ev := blockEvent(rapid.SampledFrom(cidrs).Draw(rt, "cidr"), rapid.SampledFrom(append(nodes, "")).Draw(rt, "owner"),
					map[int]string{rapid.IntRange(0, 3).Draw(rt, "ordinal"): rapid.SampledFrom(nodes).Draw(rt, "borrower")})
				if rapid.IntRange(0, 3).Draw(rt, "delete") == 0 {
					ev = gone(ev)
				}
				apply(ev)
			case 6:
				p := netip.MustParsePrefix(rapid.SampledFrom(append(cidrs, "172.16.0.0/12", "192.168.77.0/24", "192.168.2.64/27", "192.168.2.66/32", "192.168.2.0/31")).Draw(rt, "prefix"))
				nh := netip.MustParseAddr(rapid.SampledFrom([]string{"10.1.0.1", "10.1.0.12", "10.2.0.11", "10.9.9.9"}).Draw(rt, "next hop"))
				if rapid.IntRange(0, 3).Draw(rt, "withdraw") == 0 {
					delete(paths, p)
					tab.rib.SetPaths(rib.Update{Del: []netip.Prefix{p}})
				} else {
					named := rapid.SampledFrom([]int{0, 26, 27}).Draw(rt, "named")
					paths[p] = rib.Path{Prefix: p, Announced: nexthop.Announce(named, "peer", nh)}
					tab.rib.SetPaths(rib.Update{Put: []rib.Path{paths[p]}})
				}
			case 7:
				u := rack()
				if rapid.Bool().Draw(rt, "no default") {
					u.Routes = u.Routes[1:]
				}
				if rapid.Bool().Draw(rt, "jumbo") {
					u.Links[1].MTU = 9000
				}
				setUnderlay(u)
			case 8:
				flush()
			}
		}
		flush()

		fresh := newTable("node1")
		fresh.setUnderlay(under)
		for _, ev := range state {
			fresh.take(ev)
		}
		fresh.rib.SetPaths(rib.Update{Reset: true, Put: slices.Collect(maps.Values(paths))})
		fresh.settle()

		want := map[dataplane.Key]dataplane.Object{}
		for _, o := range desiredOf(fresh) {
			want[o.Key()] = o
		}
		if diff := cmp.Diff(want, kernel, cmp.Comparer(func(a, b dataplane.Object) bool { return a == b })); diff != "" {
			rt.Fatalf("after the events (-fresh start +this):\n%s", diff)
		}
		for _, o := range kernel {
			if r, ok := o.(dataplane.Route); ok && r.NextHop != 0 && kernel[dataplane.NextHopKey{ID: r.NextHop}] == nil {
				rt.Fatalf("route %s has no next hop", r)
			}
		}
	})
}

// TestIPv6PoolSaysSo: an IPv6 pool may be in the store, and is not passed off
// as served.
func TestIPv6PoolSaysSo(t *testing.T) {
	tab := newTestTable(append(testCluster(store.VXLAN), poolEvent("six", "fd00:10::/48", store.Direct))...)
	got := map[string]bool{}
	for _, p := range tab.encap.Status() {
		got[p.Name] = p.Err == nil
	}
	if diff := cmp.Diff(map[string]bool{"pool": true, "six": false}, got); diff != "" {
		t.Errorf("pools served (-want +got):\n%s", diff)
	}
}
