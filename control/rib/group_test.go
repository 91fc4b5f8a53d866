package rib

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// learnedPath is a path with these next hops.
func learnedPath(prefix string, hops ...string) Path {
	a := addrs(hops...)
	return Path{Prefix: netip.MustParsePrefix(prefix), Announced: nexthop.Announce(0, "tor", a[0], a[1:]...)}
}

// reached says where each learned prefix goes: the gateways, through whatever
// objects.
func reached(t *host) map[string]string {
	hops, groups := map[dataplane.NextHopID]string{}, map[dataplane.NextHopID]dataplane.GroupMembers{}
	for _, o := range desiredOf(t) {
		switch o := o.(type) {
		case dataplane.NextHop:
			hops[o.ID] = fmt.Sprintf("%s %s", o.Gateway, o.Link)
		case dataplane.NextHopGroup:
			groups[o.ID] = o.Members
		}
	}
	out := map[string]string{}
	for _, o := range desiredOf(t) {
		r, ok := o.(dataplane.Route)
		if !ok || r.NextHop == 0 {
			continue
		}
		ids := []dataplane.GroupMember{{ID: r.NextHop}}
		if g, ok := groups[r.NextHop]; ok {
			ids = slices.Collect(g.All())
		}
		var via []string
		for _, m := range ids {
			h, ok := hops[m.ID]
			if !ok {
				h = "DANGLING"
			}
			via = append(via, h)
		}
		slices.Sort(via)
		out[r.Prefix.String()] = strings.Join(via, ", ")
	}
	return out
}

func TestGroups(t *testing.T) {
	const p1, p2, p3 = "172.20.1.0/24", "172.20.2.0/24", "172.20.3.0/24"
	tab := newHost(t)
	step := func(what string, u Update, want map[string]string, put, del int) {
		t.Helper()
		gotPut, gotDel := changes(tab, func() { tab.SetPaths(u) })
		if diff := cmp.Diff(want, reached(tab)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		if len(gotPut) != put || len(gotDel) != del {
			t.Errorf("%s: %d put %q, %d deleted %q; want %d and %d", what, len(gotPut), gotPut, len(gotDel), gotDel, put, del)
		}
	}
	both, one, two := "10.1.0.2 eth0, 10.1.0.3 eth0", "10.1.0.2 eth0", "10.1.0.3 eth0"
	a, b := "10.1.0.2", "10.1.0.3"
	step("two prefixes of two ToRs share one group", Update{Put: []Path{learnedPath(p1, a, b), learnedPath(p2, b, a), learnedPath(p3, b)}},
		map[string]string{p1: both, p2: both, p3: two}, 6, 0)
	step("a ToR lost is one group replaced", Update{Down: addrs(a)},
		map[string]string{p1: two, p2: two, p3: two}, 1, 1)
	step("its withdrawals move no route", Update{Put: []Path{learnedPath(p1, b), learnedPath(p2, b)}, Up: addrs(a)},
		map[string]string{p1: two, p2: two, p3: two}, 0, 0)
	step("it is back with one prefix", Update{Put: []Path{learnedPath(p1, a, b)}},
		map[string]string{p1: both, p2: two, p3: two}, 3, 0)
	step("and with the other, and the old group goes", Update{Put: []Path{learnedPath(p2, a, b)}},
		map[string]string{p1: both, p2: both, p3: two}, 1, 1)
	step("both lost", Update{Down: addrs(a, b)}, map[string]string{}, 0, 6)
	step("one found again", Update{Up: addrs(a)}, map[string]string{p1: one, p2: one}, 4, 0)
	step("the other too", Update{Up: addrs(b)}, map[string]string{p1: both, p2: both, p3: two}, 3, 0)

	// The underlay loses the way to one.
	u := rack()
	u.Routes = append(u.Routes, dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("10.9.0.0/24"), Gateway: netip.MustParseAddr("10.1.0.9"), Link: "eth0"})
	tab.setUnderlay(u)
	tab.settle()
	step("a next hop that the underlay resolves", Update{Put: []Path{learnedPath(p3, b, "10.9.0.1")}},
		map[string]string{p1: both, p2: both, p3: "10.1.0.3 eth0, 10.1.0.9 eth0"}, 3, 0)
	u.Routes = slices.Clone(u.Routes)
	u.Routes[2].Gateway = netip.MustParseAddr("10.1.0.8")
	put, del := changes(tab, func() { tab.setUnderlay(u) })
	if len(put)+len(del) != 1 || reached(tab)[p3] != "10.1.0.3 eth0, 10.1.0.8 eth0" {
		t.Errorf("the underlay changed: %q, %q, %v", put, del, reached(tab))
	}
	u.Routes = u.Routes[1:2] // neither a default route nor that one
	put, del = changes(tab, func() { tab.setUnderlay(u) })
	if len(put) != 1 || len(del) != 1 || reached(tab)[p3] != two {
		t.Errorf("the underlay lost it: %q, %q, %v", put, del, reached(tab))
	}
}

// TestLossOfManyPrefixes: what a ToR lost costs does not grow with the prefixes
// behind it, and neither do its withdrawals.
func TestLossOfManyPrefixes(t *testing.T) {
	const n = 100_000
	tab := newHost(t)
	var both, left Update
	for i := range n {
		p := fmt.Sprintf("%d.%d.%d.0/24", 20+i>>16, i>>8&0xff, i&0xff)
		both.Put = append(both.Put, learnedPath(p, "10.1.0.2", "10.1.0.3"))
		left.Put = append(left.Put, learnedPath(p, "10.1.0.3"))
	}
	if put, _ := changes(tab, func() { tab.SetPaths(both) }); len(put) != n+3 {
		t.Fatalf("%d objects, want a route each, two next hops and one group", len(put))
	}
	put, del := changes(tab, func() { tab.SetPaths(Update{Down: addrs("10.1.0.2")}) })
	if len(put) != 1 || len(del) != 1 || !strings.Contains(put[0], "group") {
		t.Errorf("lost: %q, %q", put, del)
	}
	left.Up = addrs("10.1.0.2")
	if put, del = changes(tab, func() { tab.SetPaths(left) }); len(put)+len(del) != 0 {
		t.Errorf("withdrawn: %d put, %d deleted", len(put), len(del))
	}
	if put, del = changes(tab, func() { tab.SetPaths(Update{Reset: true}) }); len(put) != 0 || len(del) != n+2 {
		t.Errorf("all withdrawn: %d put, %d deleted", len(put), len(del))
	}
}

// TestLossOneAfterAnother: of four ToRs one after the other is lost, before and
// after what each had is withdrawn. Each time one group is replaced and no
// prefix is looked at.
func TestLossOneAfterAnother(t *testing.T) {
	const n = 2000
	tab := newHost(t)
	tors := []string{"10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5"}
	announce := func(from, to int, tors ...string) (u Update) {
		for i := from; i < to; i++ {
			u.Put = append(u.Put, learnedPath(fmt.Sprintf("20.%d.%d.0/24", i>>8, i&0xff), tors...))
		}
		return u
	}
	if put, _ := changes(tab, func() { tab.SetPaths(announce(0, n, tors...)) }); len(put) != n+5 {
		t.Fatalf("%d objects, want a route each, four next hops and one group", len(put))
	}
	lose := func(tor string) {
		t.Helper()
		tab.SetPaths(Update{Down: addrs(tor)})
		if len(tab.turned)+tab.dirty.Len() != 0 {
			t.Errorf("%s lost: all behind %d keys and %d prefixes are to be chosen for anew", tor, len(tab.turned), tab.dirty.Len())
		}
		put, del := handedOver(tab)
		if len(put) != 1 || put[0].Key().Kind() != dataplane.KindNextHopGroup || len(del) != 1 || del[0].Kind() != dataplane.KindNextHop {
			t.Errorf("%s lost: %v, %v", tor, put, del)
		}
		tab.settle()
		if put, del := handedOver(tab); len(put)+len(del) != 0 {
			t.Errorf("%s lost: then %v, %v", tor, put, del)
		}
	}
	withdraw := func(u Update) {
		t.Helper()
		if put, del := changes(tab, func() { tab.SetPaths(u) }); len(put)+len(del) != 0 {
			t.Errorf("withdrawn: %v, %v", put, del)
		}
	}
	lose(tors[0])
	withdraw(announce(0, n/2, tors[1:]...))
	lose(tors[1]) // while what the first had is being withdrawn
	withdraw(announce(n/2, n, tors[1:]...))
	withdraw(announce(0, n, tors[2:]...))
	lose(tors[2])
	last := announce(0, n, tors[3])
	last.Up = addrs(tors[:3]...)
	withdraw(last)
	for p, via := range reached(tab) {
		if via != "10.1.0.5 eth0" {
			t.Fatalf("%s goes %s", p, via)
		}
	}
}

// TestNextHopLeftBehind: a next hop that only a route uses which is to be chosen
// anew is no more usable for others than it is.
func TestNextHopLeftBehind(t *testing.T) {
	t.Parallel()
	const gone = "172.20.0.0/24"
	for i := range 32 { // prefixes are chosen for in any order
		tab := newHost(t)
		tab.SetPaths(Update{Put: []Path{learnedPath(gone, "fe80::1%eth0")}})
		tab.settle()
		tab.SetPaths(Update{Del: []netip.Prefix{netip.MustParsePrefix(gone)}})
		u := rack()
		u.Links[1].Up = false
		tab.setUnderlay(u)
		tab.SetPaths(Update{Put: []Path{learnedPath("172.20.1.0/24", "fe80::1%eth0", "10.1.0.2")}})
		tab.settle()
		want := map[string]string{"172.20.1.0/24": "10.1.0.2 eth0"}
		if diff := cmp.Diff(want, reached(tab)); diff != "" {
			t.Fatalf("attempt %d (-want +got):\n%s", i, diff)
		}
	}
}

// TestGroupsModel: whatever happened, every prefix goes where a table that
// knows only how things are sends it, and nothing is left over.
func TestGroupsModel(t *testing.T) {
	hops := []string{"10.1.0.2", "10.1.0.3", "10.1.0.4", "fe80::1%eth0", "10.9.0.1"}
	rapid.Check(t, func(rt *rapid.T) {
		tab := newHost(t)
		known, lost, u := map[string]Path{}, map[string]bool{}, rack()
		fresh := func() *host {
			f := newHost(t)
			f.setUnderlay(u)
			all := Update{Put: slices.Collect(maps.Values(known))}
			for a := range lost {
				all.Down = append(all.Down, netip.MustParseAddr(a))
			}
			f.SetPaths(all)
			f.settle()
			return f
		}
		prefix := func() string { return fmt.Sprintf("172.20.%d.0/24", rapid.IntRange(0, 5).Draw(rt, "prefix")) }
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				p := learnedPath(prefix(), rapid.SliceOfNDistinct(rapid.SampledFrom(hops), 1, 3, rapid.ID[string]).Draw(rt, "hops")...)
				known[p.Prefix.String()] = p
				tab.SetPaths(Update{Put: []Path{p}})
			},
			"del": func(*rapid.T) {
				p := prefix()
				delete(known, p)
				tab.SetPaths(Update{Del: []netip.Prefix{netip.MustParsePrefix(p)}})
			},
			"lose": func(rt *rapid.T) {
				a := rapid.SampledFrom(hops).Draw(rt, "hop")
				lost[a] = true
				tab.SetPaths(Update{Down: addrs(a)})
			},
			"find": func(rt *rapid.T) {
				a := rapid.SampledFrom(hops).Draw(rt, "hop")
				delete(lost, a)
				tab.SetPaths(Update{Up: addrs(a)})
			},
			"underlay": func(rt *rapid.T) {
				u = rack()
				u.Links[1].Up = rapid.Bool().Draw(rt, "up")
				if !rapid.Bool().Draw(rt, "default") {
					u.Routes = u.Routes[1:]
				}
				tab.setUnderlay(u)
			},
			"": func(rt *rapid.T) {
				if rapid.Bool().Draw(rt, "settle") {
					return // several changes at once
				}
				tab.settle()
				want := fresh()
				if diff := cmp.Diff(reached(want), reached(tab)); diff != "" {
					rt.Fatalf("differs from a fresh table (-fresh +this):\n%s", diff)
				}
				tab.HandedOver()
				checkCounts(rt, tab)
				checkBehind(rt, tab)
				for k, h := range tab.hops {
					if h.refs < 1 || h.key != k {
						rt.Fatalf("%s, known as %s, has %d users", h.key, k, h.refs)
					}
				}
				if routes, hops := tab.Counts(); routes == 0 && hops > 0 {
					rt.Fatalf("%d next hops are left over", hops)
				}
				if tab.prefixes.Len() != len(known) {
					rt.Fatalf("there are records of %d prefixes; %d are known", tab.prefixes.Len(), len(known))
				}
			},
		})
	})
}

// checkCounts holds that the routes in use have the users that are counted.
func checkCounts(t *rapid.T, tab *host) {
	users := map[uint32]int{}
	for _, rec := range tab.prefixes.All() {
		if rec.route == 0 {
			continue
		}
		users[rec.route]++
		c := tab.choices.Value(rec.route)
		if c.on != nil && tab.hops[c.on.key] != c.on {
			t.Fatalf("%s is on a next hop that is forgotten", rec.prefix())
		}
		if c.on != nil && !c.on.key.group() && c.on.key != c.desired.Value() {
			t.Fatalf("%s desires %s and is on %s", rec.prefix(), c.desired.Value(), c.on.key)
		}
	}
	on := map[*hop]int{}
	for id := range tab.choices.Len() {
		c, n := tab.choices.Value(id), tab.choices.Users(id)
		if n != users[id] {
			t.Fatalf("route %+v has %d prefixes; counted %d", c, n, users[id])
		}
		if n > 0 && c.on != nil {
			on[c.on]++
			if !slices.Contains(c.on.choices, id) {
				t.Fatalf("%s does not know route %+v", c.on.key, c)
			}
		}
	}
	for k, h := range tab.hops {
		if len(h.choices) != on[h] {
			t.Fatalf("%s knows %d routes; counted %d", k, len(h.choices), on[h])
		}
	}
}

// checkBehind holds that what BGP says is found by its next hops.
func checkBehind(t *rapid.T, tab *host) {
	behind, users := map[*learned]int{}, map[uint32]int{}
	for _, rec := range tab.prefixes.All() {
		if rec.path == 0 {
			continue
		}
		users[rec.path]++
		says := tab.said.Value(rec.path)
		behind[says.by]++
		if k := learnedKey(rec.family, says.Announced); tab.byHop[k] != says.by || says.by.key != k {
			t.Fatalf("%s is noted behind %s, and not behind %s", rec.prefix(), says.by.key, k)
		}
	}
	for id := range tab.said.Len() {
		if n := tab.said.Users(id); n != users[id] {
			t.Fatalf("%+v is said of %d prefixes; counted %d", tab.said.Value(id), n, users[id])
		}
	}
	for k, by := range tab.byHop {
		n := 0
		for _, rec := range tab.behind(by) {
			if tab.said.Value(rec.path).by != by {
				t.Fatalf("%s is listed behind %s", rec.prefix(), k)
			}
			n++
		}
		if n != by.n || n != behind[by] || n == 0 {
			t.Fatalf("%d prefixes are listed behind %s and %d noted; counted %d", n, k, by.n, behind[by])
		}
	}
}
