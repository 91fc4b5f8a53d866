package bgp

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
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
