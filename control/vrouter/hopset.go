package vrouter

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// HopSet names several next hops as announced: their addresses in ascending
// order, separated by spaces, each as often as it is to count. Two sets of the
// same next hops are equal.
type HopSet string

// HopSetOf returns the set of some next hops; empty if they are fewer than two.
// One that several paths have counts once.
func HopSetOf(hops ...netip.Addr) HopSet {
	list := slices.Clone(hops)
	slices.SortFunc(list, netip.Addr.Compare)
	list = slices.Compact(list)
	if len(list) < 2 {
		return ""
	}
	var b strings.Builder
	for i, a := range list {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(a.String())
	}
	return HopSet(b.String())
}

// addrs returns the next hops. The set was made by HopSetOf.
func (s HopSet) addrs() []netip.Addr {
	var out []netip.Addr
	for part := range strings.FieldsSeq(string(s)) {
		if a, err := netip.ParseAddr(part); err == nil {
			out = append(out, a)
		}
	}
	return out
}

// hopKeyVia is the identity of a gateway that BGP named.
func hopKeyVia(a netip.Addr) hopKey { return hopKey{via: a, fam: dataplane.FamilyOf(a)} }

// hopKeyOf is the identity of a path's next hop or hops.
func hopKeyOf(p Path) hopKey {
	if p.Set != "" {
		return hopKey{set: p.Set, fam: dataplane.FamilyOf(p.Prefix.Addr())}
	}
	return hopKeyVia(p.NextHop)
}
