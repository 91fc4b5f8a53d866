package vrouter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// TestPartOfBlock: what BGP says of a part of a block does not take its packets from
// the node that holds the block, whoever says it.
func TestPartOfBlock(t *testing.T) {
	t.Parallel()
	const node2, node3, tor = "10.1.0.12", "10.2.0.11", "10.1.0.1"
	part := func(prefix string, named int, hops ...string) rib.Path {
		a := addrs(hops...)
		return rib.Path{Prefix: netip.MustParsePrefix(prefix), Announced: nexthop.Announce(named, "peer", a[0], a[1:]...)}
	}
	for name, tt := range map[string]struct {
		put  rib.Path
		used bool
	}{
		"an address, by another node":                  {put: part("192.168.3.9/32", 0, node2)},
		"half of it, by another node":                  {put: part("192.168.3.0/27", 0, node2)},
		"the other half, by a ToR switch":              {put: part("192.168.3.32/27", 0, tor)},
		"by its holder":                                {put: part("192.168.3.0/27", 0, node3), used: true},
		"by its holder and another":                    {put: part("192.168.3.0/27", 0, node3, tor)},
		"a part of this host's block":                  {put: part("192.168.1.0/27", 0, tor)},
		"accepted by name":                             {put: part("192.168.3.9/32", 32, tor), used: true},
		"accepted as what lies in half of the block":   {put: part("192.168.3.9/32", 27, tor), used: true},
		"accepted as what lies in the block":           {put: part("192.168.3.9/32", 26, tor)},
		"accepted as what lies in the pool":            {put: part("192.168.3.9/32", 16, tor)},
		"of no block":                                  {put: part("192.168.77.0/27", 0, tor), used: true},
		"of nobody's block":                            {put: part("192.168.4.0/27", 0, tor), used: true},
		"of a block whose node is not known":           {put: part("192.168.5.0/27", 0, tor)},
		"of the inner one of two blocks, its holder's": {put: part("192.168.6.8/29", 0, node3), used: true},
		"of the inner one, by the outer one's holder":  {put: part("192.168.6.8/29", 0, node2)},
		"more than the block":                          {put: part("192.168.3.0/25", 0, tor), used: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			more := []store.Event{
				blockEvent("192.168.4.0/26", "", nil), blockEvent("192.168.5.0/26", "node9", nil),
				blockEvent("192.168.6.0/26", "node2", nil), blockEvent("192.168.6.0/28", "node3", nil),
			}
			for _, first := range []string{"blocks", "paths"} {
				tab := newTestTable(testCluster(store.Direct)...)
				paths := func() { tab.rib.SetPaths(rib.Update{Put: []rib.Path{tt.put}}) }
				if first == "paths" {
					tab = newTable("node1")
					tab.setUnderlay(rack())
					paths()
					tab.settle()
					more = append(testCluster(store.Direct), more...)
				}
				for _, ev := range more {
					tab.take(ev)
				}
				if first == "blocks" {
					paths()
				}
				tab.settle()
				if got := used(tab, tt.put.Prefix); got != tt.used {
					t.Errorf("%s first: used: %t, want %t: %+v", first, got, tt.used, tab.rib.Explain(tt.put.Prefix))
				}
			}
		})
	}
}

// used reports whether what BGP says of a prefix is its route.
func used(tab *table, p netip.Prefix) bool {
	for _, c := range tab.rib.Explain(p) {
		if c.Prefix == p && c.Source == rib.SourceBGP {
			routed := slices.ContainsFunc(slices.Collect(tab.rib.Routes()), func(r dataplane.Route) bool { return r.Prefix == p })
			return c.Best && routed
		}
	}
	return false
}

// TestPartFollows: whether a part of a block counts follows the block, who holds it and
// that node's address; a borrowed address is the borrower's.
func TestPartFollows(t *testing.T) {
	t.Parallel()
	tab := newTestTable(testCluster(store.Direct)...)
	p := netip.MustParsePrefix("192.168.3.16/28")
	var got []string
	step := func(what string, events ...store.Event) {
		for _, ev := range events {
			tab.take(ev)
		}
		tab.settle()
		got = append(got, fmt.Sprintf("%s: %t", what, used(tab, p)))
	}
	tab.rib.SetPaths(rib.Update{Put: []rib.Path{learnedPath(p.String(), "10.1.0.12")}})
	step("node2 announces a part of node3's block")
	step("node2 holds it", blockEvent("192.168.3.0/26", "node2", nil))
	step("node2 has another address", nodeEvent("node2", "10.1.0.13/24", "", ""))
	step("and the former one again", nodeEvent("node2", "10.1.0.12/24", "", ""))
	step("node3 holds it", blockEvent("192.168.3.0/26", "node3", nil))
	step("nobody does", gone(blockEvent("192.168.3.0/26", "", nil)))
	// A table in which it is cheaper to look for each part than to look at all.
	many := rib.Update{}
	for i := range 200 {
		many.Put = append(many.Put, learnedPath(fmt.Sprintf("172.16.%d.0/24", i), "10.1.0.1"))
	}
	tab.rib.SetPaths(many)
	step("with 200 paths more")
	step("node3 holds it", blockEvent("192.168.3.0/26", "node3", nil))
	step("node2 holds a block in it", blockEvent("192.168.3.0/27", "node2", nil))
	step("node3 does", blockEvent("192.168.3.0/27", "node3", nil))
	step("nobody does again", gone(blockEvent("192.168.3.0/27", "", nil)), gone(blockEvent("192.168.3.0/26", "", nil)))
	want := strings.Split(`node2 announces a part of node3's block: false
node2 holds it: true
node2 has another address: false
and the former one again: true
node3 holds it: false
nobody does: true
with 200 paths more: true
node3 holds it: false
node2 holds a block in it: true
node3 does: false
nobody does again: true`, "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the part of the block is used (-want +got):\n%s", diff)
	}

	tab = newTestTable(testCluster(store.Direct)...)
	tab.rib.SetPaths(rib.Update{Put: []rib.Path{learnedPath("192.168.2.5/32", "10.1.0.1")}})
	tab.settle()
	if cs := tab.rib.Explain(netip.MustParsePrefix("192.168.2.5/32")); len(cs) < 2 || strings.Contains(fmt.Sprint(cs), "is a part of") {
		t.Errorf("an address that node3 borrowed: %+v", cs)
	}
}
