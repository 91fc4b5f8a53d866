package nft

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// splitNet draws networks that do not overlap: parts of a network, some of which are left out.
func splitNet(t *rapid.T, p netip.Prefix, deepest int) (out []netip.Prefix) {
	switch kind := rapid.IntRange(0, 4).Draw(t, "part"); {
	case kind == 0:
		return nil
	case kind == 1 || p.Bits() == deepest:
		return []netip.Prefix{p}
	}
	a := p.Addr().As4()
	a[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	low, high := netip.PrefixFrom(p.Addr(), p.Bits()+1), netip.PrefixFrom(netip.AddrFrom4(a), p.Bits()+1)
	return append(splitNet(t, low, deepest), splitNet(t, high, deepest)...)
}

// A set of networks takes on what replaces them, whatever bounds they share, by single changes as by a ruleset in another's place:
// a pool is split, or put together again.
func TestNetworksChange(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	whole := netip.MustParsePrefix("10.16.0.0/12")
	table := openTable(t, n, Config{})
	defer table.Close()
	rapid.Check(t, func(rt *rapid.T) {
		var now []filter.Member
		if err := table.Replace(rulesetOf(t, small())); err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(1, 3).Draw(rt, "changes") {
			var next []filter.Member
			for _, p := range splitNet(rt, whole, 15) {
				next = append(next, filter.Member{Prefix: p})
			}
			not := func(in []filter.Member) func(filter.Member) bool {
				return func(m filter.Member) bool { return slices.Contains(in, m) }
			}
			c := filter.MemberChange{Set: filter.NATExempt, Del: slices.DeleteFunc(slices.Clone(now), not(next)), Add: slices.DeleteFunc(slices.Clone(next), not(now))}
			var err error
			if rapid.Bool().Draw(rt, "replace") {
				err = table.Replace(rulesetOf(t, small(), filter.Delta{Members: []filter.MemberChange{{Set: filter.NATExempt, Add: next}}}))
			} else {
				err = table.Apply(filter.Delta{Members: []filter.MemberChange{c}})
			}
			if err != nil {
				rt.Fatalf("from %v to %v: %v", now, next, err)
			}
			p, err := table.compare()
			if err != nil || len(p.prepare)+len(p.change)+len(p.remove) > 0 {
				rt.Fatalf("from %v to %v: the kernel has something else: %+v, %v", now, next, p, err)
			}
			now = next
		}
	})
}
