package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/api"
	"pgregory.net/rapid"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// TestFailedResetIsRepeated: a judgement that could not be repeated stays pending,
// also when the next configuration is the same.
func TestFailedResetIsRepeated(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	r := newRun(t, SpeakerOptions{})
	p := waiting(tor(h[0], h[1], 64999))
	c := testConfig(h[0], 64512, nil, p)
	r.apply(c)
	ctx := t.Context()
	if err := r.engine.(*gobgp).remove(ctx, Peer{Addr: h[1]}); err != nil { // GoBGP refuses whatever is asked about it
		t.Fatal(err)
	}
	p.Filters = "f"
	c = testConfig(h[0], 64512, nil, p)
	c.Filters = map[string]Filter{"f": {Import4: []FilterRule{{Max: 32}}, Export4: []FilterRule{{Max: 32}}}}
	for i := range 2 {
		err := r.Apply(ctx, c)
		if err == nil || !strings.Contains(err.Error(), "judge received routes again") || !strings.Contains(err.Error(), "is told again") {
			t.Errorf("attempt %d: %v", i, err)
		}
	}
	if err := r.engine.(*gobgp).add(ctx, &c, p, false); err != nil {
		t.Fatal(err)
	}
	r.apply(c)
	if pending := r.engine.(*gobgp).pending; len(pending) != 0 {
		t.Errorf("still pending: %v", pending)
	}
}

// TestLimitedPeerIsNotReset: a peer that is cut off for its number of prefixes
// is unknown to GoBGP; a change of its filters is no error.
func TestLimitedPeerIsNotReset(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	r, sw := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	p := waiting(tor(h[0], h[1], 64999))
	p.MaxPrefixes = 1
	r.apply(testConfig(h[0], 64512, nil, p))
	sw.apply(testConfig(h[1], 64999, []string{"203.0.113.0/24", "198.51.100.0/24"}, tor(h[1], h[0], 64512)))
	r.waitInfo(h[1], "announced more than 1 prefixes")
	poll(t, r.dump, func() bool {
		e := r.engine.(*gobgp)
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.peers[h[1]].removed
	})
	p.Filters = "f"
	c := testConfig(h[0], 64512, nil, p)
	c.Filters = map[string]Filter{"f": {Import4: []FilterRule{{Max: 32}}, Export4: []FilterRule{{Max: 32}}}}
	r.apply(c)
}

// TestOnlyConcernedPeersAreJudgedAgain changes what import goes by and looks
// for whom GoBGP was asked to look at the received routes again.
func TestOnlyConcernedPeersAreJudgedAgain(t *testing.T) {
	t.Parallel()
	h := hosts(t, 4)
	log := &syncBuffer{}
	us := newRun(t, SpeakerOptions{Log: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	config := func(change func(*Config)) Config {
		c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, waiting(to(h[0], h[1], 64512)), waiting(to(h[0], h[2], 64512)), waiting(tor(h[0], h[3], 64999)))
		if change != nil {
			change(&c)
		}
		return c
	}
	us.apply(config(nil))
	for i, said := range [][]string{{"192.168.1.7/32", "192.168.2.0/26"}, {"192.168.3.0/26", "192.168.9.0/26"}, {"203.0.113.0/24", "192.168.1.9/32"}} {
		p := to(h[i+1], h[0], 64512)
		p.Passive, p.PoolsOnly = false, false
		asn := uint32(64512)
		if i == 2 {
			asn = 64999
		}
		newRun(t, SpeakerOptions{}).apply(testConfig(h[i+1], asn, said, p))
	}
	for _, p := range []string{"192.168.2.0/26", "192.168.9.0/26", "203.0.113.0/24"} {
		us.waitPath(p)
	}
	poll(t, us.dump, func() bool { return us.status(h[1]).Received == 2 && us.status(h[3]).Received == 2 })
	for _, step := range []struct {
		name   string
		change func(*Config)
		asked  []int // hosts
	}{
		{"nothing", nil, nil},
		{"an address is borrowed", func(c *Config) { c.Borrowed = prefixes("192.168.1.7/32") }, []int{1}},
		{"another one that nobody announces", func(c *Config) { c.Borrowed = prefixes("192.168.1.7/32", "192.168.1.8/32") }, nil},
		{"one that a stranger announces", func(c *Config) { c.Borrowed = prefixes("192.168.1.7/32", "192.168.1.8/32", "192.168.1.9/32") }, nil},
		{"all are given back", nil, []int{1}},
		{"a block that nobody announced", func(c *Config) { c.Own = append(c.Own, prefixes("192.168.77.0/26")...) }, nil},
		{"a block that a node announced", func(c *Config) { c.Own = append(c.Own, prefixes("192.168.9.0/26")...) }, []int{2}},
		{"a block is given up", func(c *Config) { c.Own = nil }, []int{1, 2, 3}},
		{"another pool", func(c *Config) { c.Pools = append(c.Pools, prefixes("10.9.0.0/16")...) }, []int{1, 2, 3}},
	} {
		from := len(log.String())
		us.apply(config(step.change))
		var asked []int
		for i, a := range h {
			if strings.Contains(log.String()[from:], fmt.Sprintf(`msg="Neighbor soft reset in" Topic=Operation Key=%s`, a)) {
				asked = append(asked, i)
			}
		}
		if diff := cmp.Diff(step.asked, asked); diff != "" {
			t.Errorf("%s: judged again (-want +got):\n%s", step.name, diff)
		}
	}
	us.waitPath("192.168.9.0/26") // it was let in again
}

// TestChangedPrefixSets holds the lists that grew and shrank bit by bit to what
// a new start would have made.
func TestChangedPrefixSets(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := testConfig(netip.MustParseAddr("10.77.255.1"), 64512, nil)
	e, err := startGoBGP(ctx, testLog(t), newQueue(), &c, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.stop(context.Background(), false); err != nil {
			t.Error(err)
		}
	})
	list := rapid.SliceOfDistinct(rapid.SampledFrom(prefixes(
		"192.168.0.0/16", "192.168.1.0/26", "192.168.1.7/32", "192.168.0.0/26", "10.0.0.0/8", "fd00::/64", "fd00::/122", "fd00::7/128",
	)), func(p netip.Prefix) netip.Prefix { return p })
	rapid.Check(t, func(t *rapid.T) {
		for range 5 {
			n := c
			n.Pools, n.Own = list.Draw(t, "pools"), list.Draw(t, "own")
			n.Borrowed, n.Hidden = list.Draw(t, "borrowed"), list.Draw(t, "hidden")
			if err := e.changePolicies(ctx, &c, &n); err != nil {
				t.Fatal(err)
			}
			c = n
		}
		var got, want []string
		err := e.srv.ListDefinedSet(ctx, &api.ListDefinedSetRequest{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX}, func(s *api.DefinedSet) {
			got = append(got, setText(s)...)
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range policies(&c).DefinedSets {
			if s.DefinedType == api.DefinedType_DEFINED_TYPE_PREFIX {
				want = append(want, setText(s)...)
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

func setText(s *api.DefinedSet) []string {
	var out []string
	for _, p := range s.Prefixes {
		out = append(out, fmt.Sprintf("%s %s %d-%d", s.Name, p.IpPrefix, p.MaskLengthMin, p.MaskLengthMax))
	}
	return out
}
