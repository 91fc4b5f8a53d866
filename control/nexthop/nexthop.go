// Package nexthop has what routing protocols say of many prefixes at once: the
// set of next hops, and who announced it. Both are interned, from BGP's table
// to the core's: equal ones are one in memory, compare with == and may be map
// keys, and what no table holds any more is collected. All is safe for
// concurrent use.
package nexthop

import (
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unique"
)

// Set is a set of next hops as announced, in ascending order. The zero Set is
// empty.
type Set struct{ first unique.Handle[member] }

// member is a next hop of a set, and the set of those that follow.
type member struct {
	addr netip.Addr
	n    int // it and those that follow
	rest Set
}

// SetOf returns the set of some next hops. One that comes several times counts
// once.
func SetOf(hops ...netip.Addr) Set {
	list := slices.Clone(hops)
	slices.SortFunc(list, netip.Addr.Compare)
	var s Set
	for _, a := range slices.Backward(slices.Compact(list)) {
		s = Set{unique.Make(member{a, s.Len() + 1, s})}
	}
	return s
}

// Len is how many next hops s has.
func (s Set) Len() int {
	if s == (Set{}) {
		return 0
	}
	return s.first.Value().n
}

// All yields the next hops in ascending order.
func (s Set) All() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for s != (Set{}) {
			m := s.first.Value()
			if !yield(m.addr) {
				return
			}
			s = m.rest
		}
	}
}

// Contains reports whether a is in s.
func (s Set) Contains(a netip.Addr) bool {
	for m := range s.All() {
		if m == a {
			return true
		}
	}
	return false
}

// Single returns the next hop of a set of one; invalid for others.
func (s Set) Single() netip.Addr {
	if s.Len() != 1 {
		return netip.Addr{}
	}
	return s.first.Value().addr
}

// Join writes the next hops one after the other.
func (s Set) Join(sep string) string {
	var list []string
	for a := range s.All() {
		list = append(list, a.String())
	}
	return strings.Join(list, sep)
}

// Announcement is what BGP says of a prefix, apart from the prefix.
type Announcement struct {
	NextHop netip.Addr // of the best path, as announced
	Peer    string     // who announced the best path, for people
	Hops    Set        // of all paths of equal cost, NextHop among them

	// Named is the length of the prefix by which the operator let the paths in: that
	// of the rule of each peer's BGPFilter which accepted it, the least of them; 0: a
	// path came in without such a rule.
	Named int
}

// Announced is an interned [Announcement].
type Announced = unique.Handle[Announcement]

// Announce interns what a peer announces with several next hops of equal cost,
// or with the first alone. See [Announcement.Named]; 0: the operator named none of it.
func Announce(named int, peer string, best netip.Addr, others ...netip.Addr) Announced {
	return unique.Make(Announcement{NextHop: best, Peer: peer, Hops: SetOf(append(slices.Clip(others), best)...), Named: named})
}
