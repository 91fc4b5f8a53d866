package bgp

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/store"
)

// TestJudgement: what becomes of a route by the package's own rules, by filters, and
// what changes of it.
func TestJudgement(t *testing.T) {
	t.Parallel()
	self := netip.MustParseAddr("10.0.0.1")
	node, client, sw, link := to(self, netip.MustParseAddr("10.0.0.2"), 64512), to(self, netip.MustParseAddr("10.0.0.3"), 64512),
		tor(self, netip.MustParseAddr("10.0.0.9"), 64999), tor(self, netip.MustParseAddr("fe80::9%eth1"), 64998)
	node.Reflect, client.Reflect = true, true
	link.Interface, link.NextHopMode = "eth1", NextHopKeep
	sw.Filters, sw.NextHopMode = "f,g", NextHopSelf
	c := testConfig(self, 64512, []string{"192.168.1.0/26"}, node, client, sw, link)
	c.Borrowed, c.Hidden = prefixes("192.168.1.7/32"), prefixes("192.168.99.0/24")
	c.Links = map[string][]netip.Prefix{"eth0": prefixes("10.0.0.0/24")}
	c.Filters = map[string]Filter{
		"f": parse(t, `{"importV4":[{"cidr":"10.1.0.0/16","matchOperator":"In","prefixLength":{"max":24},"interface":"eth0","action":"Accept",
				"operations":[{"addCommunity":{"value":"64512:1"}},{"addCommunity":{"value":"1:2:3"}},{"prependASPath":{"prefix":[1,2]}},{"prependASPath":{"prefix":[3]}},{"setPriority":{"value":512}}]},
			{"cidr":"10.2.0.0/16","matchOperator":"Equal","asPathPrefix":[64999,7],"action":"Reject"},
			{"communities":{"values":["0:0"]},"action":"Reject"},{"cidr":"0.0.0.0/0","matchOperator":"Equal","action":"Accept"}],
			"exportV4":[{"source":"RemotePeers","priority":512,"action":"Accept","operations":[{"addCommunity":{"value":"64512:2"}}]}]}`),
		"g": parse(t, `{"importV4":[{"cidr":"10.3.0.0/16","matchOperator":"NotIn","peerType":"iBGP","action":"Reject"}],"exportV4":[{"cidr":"192.168.1.0/26","matchOperator":"Equal","action":"Reject"}]}`),
	}
	p := newPolicy(&c)
	shifting, withdrawn := c, c
	shifting.Drain, withdrawn.Drain = store.DrainShift, store.DrainWithdrawn
	least := uint32(drainPreference)
	pref := localPref(512)
	hop := netip.MustParseAddr("10.0.0.9")
	route := func(prefix string, change func(*Route)) Route {
		r := Route{Prefix: netip.MustParsePrefix(prefix), Hop: Hop{NextHop: hop}, path: []uint32{64999, 7}}
		if change != nil {
			change(&r)
		}
		return r
	}
	own := func(r *Route) { r.Own, r.path = true, nil }
	inside := func(r *Route) { r.IBGP = true }
	leaving := func(r *Route) { r.leaving = true }
	type judgement struct {
		Accept bool
		Reason string
		Edit   *attrs.Edit
	}
	for _, tt := range []struct {
		name   string
		peer   Peer
		export bool
		route  Route
		want   judgement
	}{
		{"a martian", sw, false, route("127.1.0.0/16", nil), judgement{Reason: "loopback, link-local, multicast or reserved"}},
		{"no next hop", sw, false, route("10.9.0.0/16", func(r *Route) { r.NextHop = self }), judgement{Reason: "its next hop, 10.0.0.1, is no other host's address"}},
		{"borrowed, from a node", node, false, route("192.168.1.7/32", nil), judgement{Accept: true, Reason: "an address of this node's block that another node borrowed"}},
		{"borrowed, from a switch", sw, false, route("192.168.1.7/32", nil), judgement{Reason: "inside this node's own subnet, blocks or borrowed addresses, or a range of services"}},
		{"the block", node, false, route("192.168.1.0/26", nil), judgement{Reason: "inside this node's own subnet, blocks or borrowed addresses, or a range of services"}},
		{"beside the pools", node, false, route("10.9.0.0/16", nil), judgement{Reason: "outside the pools, from a node of the cluster"}},
		{"a pool's", node, false, route("192.168.2.0/26", nil), judgement{Accept: true}},
		{"anything from a switch", sw, false, route("10.9.0.0/16", nil), judgement{Accept: true}},
		{"a default route", link, false, route("0.0.0.0/0", nil), judgement{Reason: "the default route: only a filter that names exactly it accepts it"}},
		{"a default route that is named", sw, false, route("0.0.0.0/0", nil), judgement{Accept: true, Reason: "BGPFilter f: importV4[3] accepts it"}},
		{"all operations", sw, false, route("10.1.2.0/24", nil), judgement{
			true, "BGPFilter f: importV4[0] accepts it",
			&attrs.Edit{LocalPref: &pref, Communities: []uint32{64512<<16 | 1}, Large: []attrs.Large{{1, 2, 3}}, Prepend: []uint32{3, 1, 2}},
		}},
		{"longer than the rule's", sw, false, route("10.1.2.0/25", nil), judgement{Accept: true}},
		{"not by the device", sw, false, route("10.1.2.0/24", func(r *Route) { r.NextHop = netip.MustParseAddr("10.0.0.77") }), judgement{Accept: true}},
		{"by its path", sw, false, route("10.2.0.0/16", nil), judgement{Reason: "BGPFilter f: importV4[1] rejects it"}},
		{"another path", sw, false, route("10.2.0.0/16", func(r *Route) { r.path = []uint32{64999} }), judgement{Accept: true}},
		{"a community of zeros", sw, false, route("10.9.0.0/16", func(r *Route) { r.Communities = []string{"0:0"} }), judgement{Reason: "BGPFilter f: importV4[2] rejects it"}},
		{"about to go", link, false, route("10.9.0.0/16", leaving), judgement{Accept: true, Edit: &attrs.Edit{LocalPref: new(uint32)}}},
		{"about to go, by iBGP", node, false, route("192.168.2.0/26", func(r *Route) { r.leaving, r.IBGP = true, true }), judgement{Accept: true}},
		{"about to go, and refused", node, false, route("10.9.0.0/16", leaving), judgement{Reason: "outside the pools, from a node of the cluster"}},
		{"own, hidden", node, true, route("192.168.99.0/26", own), judgement{Reason: "its pool has disableBGPExport"}},
		{"own, to a node", node, true, route("192.168.1.0/26", own), judgement{Accept: true}},
		{"own, rejected by the second filter", sw, true, route("192.168.1.0/26", own), judgement{Reason: "BGPFilter g: exportV4[0] rejects it"}},
		{"own, with the switch's mode", sw, true, route("192.168.2.0/26", own), judgement{Accept: true, Edit: &attrs.Edit{NextHop: attrs.NextHopSelf}}},
		{"own, over a link", link, true, route("192.168.1.0/26", own), judgement{Accept: true, Edit: &attrs.Edit{NextHop: attrs.NextHopSelf}}},
		{"reflected", client, true, route("192.168.2.0/26", inside), judgement{Accept: true, Reason: "reflected"}},
		{"reflected, of no pool", client, true, route("10.9.0.0/16", inside), judgement{Reason: "learned routes are not passed on"}},
		{"a switch's, to a node", node, true, route("192.168.2.0/26", nil), judgement{Reason: "learned routes are not passed on"}},
		{"by a filter, tagged", sw, true, route("10.9.0.0/16", func(r *Route) { r.LocalPref = pref }), judgement{
			true, "BGPFilter f: exportV4[0] accepts it", &attrs.Edit{Communities: []uint32{64512<<16 | 2}, NextHop: attrs.NextHopSelf},
		}},
		{"by a filter, another priority", sw, true, route("10.9.0.0/16", nil), judgement{Reason: "learned routes are not passed on"}},
		{"reflected by a host that is drained", client, true, route("192.168.2.0/26", inside), judgement{
			true, "reflected", &attrs.Edit{LocalPref: &least, Communities: []uint32{gracefulShutdown}},
		}},
		{"by a filter of a host that is drained", sw, true, route("10.9.0.0/16", func(r *Route) { r.LocalPref = pref }), judgement{
			true, "BGPFilter f: exportV4[0] accepts it", &attrs.Edit{LocalPref: &least, Communities: []uint32{64512<<16 | 2, gracefulShutdown}, NextHop: attrs.NextHopSelf},
		}},
		{"own, of a host that is drained", node, true, route("192.168.1.0/26", own), judgement{Accept: true}},
		{"to a host that is drained", node, false, route("192.168.2.0/26", nil), judgement{Accept: true}},
		{"of a host that has been drained", client, true, route("192.168.2.0/26", inside), judgement{Reason: "this host is drained: it advertises no routes"}},
	} {
		p := p
		switch {
		case strings.Contains(tt.name, "is drained"):
			p = newPolicy(&shifting)
		case strings.Contains(tt.name, "has been drained"):
			p = newPolicy(&withdrawn)
		}
		judge := p.importsOf(tt.peer)
		if tt.export {
			judge = p.exportsOf(tt.peer)
		}
		v := judge(tt.route.judged())
		if diff := cmp.Diff(tt.want, judgement{v.accept, v.reason(), v.edit}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
		if again := judge(tt.route.judged()); again.edit != v.edit {
			t.Errorf("%s: the same change twice is two", tt.name)
		}
	}
}
