package bgp

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/store"
)

// TestJudgedAgain changes what import goes by, and looks at which routes are let in
// then, without a session or a route being sent again.
func TestJudgedAgain(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	us := newRun(t, SpeakerOptions{})
	config := func(change func(*Config)) Config {
		c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, waiting(to(h[0], h[1], 64512)), waiting(tor(h[0], h[2], 64999)))
		if change != nil {
			change(&c)
		}
		return c
	}
	us.apply(config(nil))
	for i, said := range [][]string{{"192.168.1.7/32", "192.168.9.0/26", "10.9.0.0/26"}, {"203.0.113.0/24", "192.168.1.9/32"}} {
		p := to(h[i+1], h[0], 64512)
		p.Passive, p.PoolsOnly = false, false
		newRun(t, SpeakerOptions{}).apply(testConfig(h[i+1], []uint32{64512, 64999}[i], said, p))
	}
	poll(t, us.dump, func() bool { return us.status(h[1]).Received == 3 && us.status(h[2]).Received == 2 })
	for _, step := range []struct {
		name   string
		change func(*Config)
		want   []string
	}{
		{"at first", nil, []string{"192.168.9.0/26", "203.0.113.0/24"}},
		{"an address is borrowed", func(c *Config) { c.Borrowed = prefixes("192.168.1.7/32") }, []string{"192.168.1.7/32", "192.168.9.0/26", "203.0.113.0/24"}},
		{"it is given back", nil, []string{"192.168.9.0/26", "203.0.113.0/24"}},
		{"a block that a node announced", func(c *Config) { c.Own = append(c.Own, prefixes("192.168.9.0/26")...) }, []string{"203.0.113.0/24"}},
		{"a block is given up", func(c *Config) { c.Own = nil }, []string{"192.168.1.7/32", "192.168.1.9/32", "192.168.9.0/26", "203.0.113.0/24"}},
		{"another pool", func(c *Config) { c.Pools = append(c.Pools, prefixes("10.9.0.0/16")...) }, []string{"10.9.0.0/26", "192.168.9.0/26", "203.0.113.0/24"}},
		{"a stranger is a node", func(c *Config) { c.Peers[1].PoolsOnly = true }, []string{"192.168.9.0/26"}},
	} {
		us.apply(config(step.change))
		var got []string
		same := func() bool {
			us.mu.Lock()
			defer us.mu.Unlock()
			got = nil
			for p := range us.paths {
				got = append(got, p.String())
			}
			return cmp.Equal(step.want, got, cmpopts.SortSlices(strings.Compare))
		}
		poll(t, func() string {
			return step.name + ": " + cmp.Diff(step.want, got, cmpopts.SortSlices(strings.Compare)) + us.dump()
		}, same)
	}
	for _, a := range h[1:] {
		if st := us.status(a); st.Established != 1 || st.In.Refresh+st.Out.Refresh != 0 {
			t.Errorf("%s: %+v", a, st)
		}
	}
}

// TestLimitedPeerIsJudged: a peer that is cut off for its number of prefixes takes a
// change of its filters.
func TestLimitedPeerIsJudged(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	r, sw := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	p := waiting(tor(h[0], h[1], 64999))
	p.MaxPrefixes = 1
	r.apply(testConfig(h[0], 64512, nil, p))
	sw.apply(testConfig(h[1], 64999, []string{"203.0.113.0/24", "198.51.100.0/24"}, tor(h[1], h[0], 64512)))
	r.waitInfo(h[1], "announced more than 1 prefixes")
	p.Filters = "f"
	c := testConfig(h[0], 64512, nil, p)
	c.Filters = map[string]Filter{"f": {Import4: []FilterRule{{Max: 32}}, Export4: []FilterRule{{Max: 32}}}}
	r.apply(c)
	r.waitInfo(h[1], "announced more than 1 prefixes")
	r.waitNoPath("203.0.113.0/24")
}

// TestOwnAddressIsNoNextHop: when this host has another address, paths with it as
// their next hop lead nowhere, and are found again when it has it no more.
func TestOwnAddressIsNoNextHop(t *testing.T) {
	t.Parallel()
	four, six := hosts6(t, 2)
	here, there := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	there.apply(testConfig6(four[1], six[1], 64999, []string{"2001:db8:1::/64"}, waiting(tor(six[1], six[0], 64512))))
	for i, own := range []int{0, 1, 0} {
		c := testConfig6(four[0], six[0], 64512, nil, tor(six[0], six[1], 64999))
		c.NextHop6 = six[own]
		here.apply(c)
		if i == 1 {
			here.waitNoPath("2001:db8:1::/64")
		} else {
			here.waitPath("2001:db8:1::/64")
		}
	}
}

// TestApplyAsAnew: whatever changes, and in whichever steps, what the speaker and its engine have of the peers, and whose
// paths are judged again, is what follows from the configurations alone.
func TestApplyAsAnew(t *testing.T) {
	t.Parallel()
	base, err := Desired(view(t, bgpNode(t, "node1", "10.1.0.11/24")), "node1")
	if err != nil {
		t.Fatal(err)
	}
	base.ListenPort, base.ListenAddrs, base.Peers, base.Announce = 0, nil, nil, prefixes("10.3.0.0/24")
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(i)}) }
	rapid.Check(t, func(rt *rapid.T) {
		one := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(rt, what) }
		seldom := func(what string) bool { return rapid.IntRange(0, 5).Draw(rt, what) == 0 }
		drawPeer := func(i int) Peer {
			p := Peer{Name: one("name", "p", "p", "q"), Type: PeerMesh, Addr: addr(i), ASN: 64512, Passive: true, PoolsOnly: seldom("node"), HoldTime: 90 * time.Second, Filters: one("filters", "", "f", "f,g")}
			if seldom("hold") {
				p.HoldTime = time.Minute
			}
			if seldom("limit") {
				p.MaxPrefixes = 7
			}
			if seldom("problem") {
				p.Problem = "it is wrong"
			}
			if seldom("self") {
				p.NextHopMode = NextHopSelf
			}
			p.Reflect, p.Beside = seldom("reflect"), seldom("beside")
			if p.Beside {
				p.Port = 1790
			}
			return p
		}
		drawFilter := func(name string) Filter {
			r := FilterRule{Max: 32, Accept: seldom(name + " accepts"), Interface: one(name+" device", "", "", "eth*")}
			f := Filter{Import4: []FilterRule{r}, Export4: []FilterRule{r}}
			if seldom(name + " import") {
				f.Export4 = nil
			}
			return f
		}
		s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
		defer func() {
			if err := s.Stop(context.WithoutCancel(t.Context()), false); err != nil {
				rt.Error(err)
			}
		}()
		peers := map[int]Peer{}
		c := base
		c.Filters = map[string]Filter{"f": drawFilter("f"), "g": drawFilter("g")}
		ran := map[netip.Addr]Peer{} // who has run since the engine was started
		for range rapid.IntRange(1, 8).Draw(rt, "steps") {
			old, fresh := c, s.engine == nil
			was := s.policy
			for range rapid.IntRange(0, 2).Draw(rt, "changes") {
				i := rapid.IntRange(1, 5).Draw(rt, "peer")
				if delete(peers, i); !seldom("gone") {
					peers[i] = drawPeer(i)
				}
			}
			switch rapid.IntRange(0, 8).Draw(rt, "other") {
			case 1:
				c.Filters = maps.Clone(c.Filters)
				c.Filters["g"] = drawFilter("g")
			case 2:
				c.Pools = prefixes(one("pool", "10.0.0.0/8", "11.0.0.0/8"))
			case 3:
				c.Drain = store.Drain(one("drain", "", string(store.DrainShift), string(store.DrainWithdrawn)))
			case 4:
				c.Links = map[string][]netip.Prefix{"eth0": prefixes(one("link", "10.9.0.0/24", "10.8.0.0/24"))}
			case 5:
				c.Hidden = prefixes(one("hidden", "10.3.0.0/16", "10.4.0.0/16"))
			case 6:
				c.ASN, fresh = c.ASN^1, true
			}
			c.Peers = nil
			for _, i := range slices.Sorted(maps.Keys(peers)) {
				c.Peers = append(c.Peers, peers[i])
			}
			if err := s.Apply(t.Context(), c); err != nil {
				rt.Fatal(err)
			}

			if fresh {
				clear(ran)
			}
			running, settings := map[netip.Addr]Peer{}, map[netip.Addr]engine.Peer{}
			for _, p := range c.Peers {
				if p.runs() {
					running[p.id()], settings[p.id()], ran[p.id()] = p, enginePeer(&c, p), p
				}
			}
			configured := map[netip.Addr]engine.Peer{}
			for _, p := range s.engine.Configured() {
				configured[p.Addr] = p
			}
			if !maps.Equal(configured, settings) || !maps.Equal(s.engine.want, settings) {
				rt.Fatalf("the engine has %v, and is to have %v; want %v", configured, s.engine.want, settings)
			}
			have := map[netip.Addr]Peer{}
			for id, ss := range s.sessions {
				have[id] = ss.peer
			}
			if !maps.Equal(have, running) {
				rt.Fatalf("sessions with %v, want %v", have, running)
			}
			if s.policy != s.engine.policy || !reflect.DeepEqual(s.policy.imports, newPolicy(&c).imports) {
				rt.Fatal("another policy than the configuration's")
			}
			for i := range 6 {
				for _, id := range []netip.Addr{addr(i), engine.Identity(addr(i), 1790)} {
					if got, judged := *s.engine.reader().from(&engine.Path{Peer: id}), s.policy.peer(id); got != ran[id] || judged != running[id] {
						rt.Fatalf("a path is from %v, and judged as from %v; want %v and %v", got, judged, ran[id], running[id])
					}
				}
			}
			if fresh {
				continue
			}
			var in, out []netip.Addr
			for id, p := range running {
				before := was.peer(id)
				if before == (Peer{}) {
					continue
				}
				if before.PoolsOnly != p.PoolsOnly || !old.sameFilters(before, &c, p, false) {
					in = append(in, id)
				}
				if !old.sameExport(before, &c, p) || hiddenMoves(&old, &c) {
					out = append(out, id)
				}
			}
			gotIn, gotOut, _ := moved(&old, was.running, s.policy)
			for _, l := range [][]netip.Addr{in, out, gotIn, gotOut} {
				slices.SortFunc(l, netip.Addr.Compare)
			}
			if !slices.Equal(in, gotIn) || !slices.Equal(out, gotOut) {
				rt.Fatalf("judged again are import of %v and export to %v, want %v and %v", gotIn, gotOut, in, out)
			}
		}
	})
}
