package policy

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/dataplane/filter"
)

// set is the membership of one set. It counts how often each member is given,
// since several endpoints may have one address, and hides members that lie
// within others: what is reported never overlaps.
type set struct {
	def     filter.Set
	sel     *selected   // who its members come from; nil: from a Service, from nowhere, or fed by hand
	service serviceName // likewise; empty: from none
	refs    int         // policies in force that use it

	names    []string // of ports, for those sets
	protocol uint8    // of those ports

	count map[filter.Member]int32
	wide  int        // members that are more than one address
	nets  *bart.Lite // all members' prefixes; nil while wide is 0

	fresh   bool                   // not reported yet
	pending map[filter.Member]bool // reported next: true come, false gone
}

func newSet(def filter.Set) *set {
	return &set{
		def: def, fresh: true,
		count: make(map[filter.Member]int32), pending: make(map[filter.Member]bool),
	}
}

// note records that a member becomes visible or ceases to be.
func (s *set) note(m filter.Member, visible bool) {
	if s.fresh {
		return // everything is reported
	}
	if was, ok := s.pending[m]; ok && was != visible {
		delete(s.pending, m)
		return
	}
	s.pending[m] = visible
}

func (s *set) insert(m filter.Member) {
	s.count[m]++
	if s.count[m] > 1 {
		return
	}
	if s.def.Type == filter.Nets && !m.Prefix.IsSingleIP() {
		s.wide++
	}
	if s.wide == 0 {
		s.note(m, true)
		return
	}
	if s.nets == nil {
		s.nets = new(bart.Lite)
		for other := range s.count {
			if other != m {
				s.nets.Insert(other.Prefix)
			}
		}
	}
	if !s.nets.LookupPrefix(m.Prefix) {
		s.widest(m.Prefix, func(p netip.Prefix) { s.note(filter.Member{Prefix: p}, false) })
		s.note(m, true)
	}
	s.nets.Insert(m.Prefix)
}

func (s *set) remove(m filter.Member) {
	if s.count[m]--; s.count[m] > 0 {
		return
	}
	delete(s.count, m)
	if s.wide == 0 {
		s.note(m, false)
		return
	}
	s.nets.Delete(m.Prefix)
	if !s.nets.LookupPrefix(m.Prefix) {
		s.note(m, false)
		s.widest(m.Prefix, func(p netip.Prefix) { s.note(filter.Member{Prefix: p}, true) })
	}
	if !m.Prefix.IsSingleIP() {
		if s.wide--; s.wide == 0 {
			s.nets = nil
		}
	}
}

// widest calls f with the members within p that lie in no other one.
func (s *set) widest(p netip.Prefix, f func(netip.Prefix)) {
	var last netip.Prefix
	// In order: what contains others comes before them.
	for sub := range s.nets.Subnets(p) {
		if !last.IsValid() || !last.Contains(sub.Addr()) {
			f(sub)
			last = sub
		}
	}
}

// visible returns the members to report, sorted.
func (s *set) visible() []filter.Member {
	if s.wide == 0 {
		// A set can have as many members as the cluster has endpoints.
		list := slices.AppendSeq(make([]filter.Member, 0, len(s.count)), maps.Keys(s.count))
		slices.SortFunc(list, filter.Member.Compare)
		return list
	}
	var list []filter.Member
	add := func(p netip.Prefix) { list = append(list, filter.Member{Prefix: p}) }
	s.widest(netip.PrefixFrom(netip.IPv4Unspecified(), 0), add)
	s.widest(netip.PrefixFrom(netip.IPv6Unspecified(), 0), add)
	return list
}

// take returns what is to be reported of the set's members and regards it as
// reported.
func (s *set) take() filter.MemberChange {
	c := filter.MemberChange{Set: s.def.ID}
	if s.fresh {
		s.fresh = false
		c.Add = s.visible()
		return c
	}
	for m, come := range s.pending {
		if come {
			c.Add = append(c.Add, m)
		} else {
			c.Del = append(c.Del, m)
		}
	}
	clear(s.pending)
	if len(s.pending) == 0 && len(c.Add)+len(c.Del) > 1024 {
		s.pending = make(map[filter.Member]bool) // a map never shrinks
	}
	slices.SortFunc(c.Add, filter.Member.Compare)
	slices.SortFunc(c.Del, filter.Member.Compare)
	return c
}
