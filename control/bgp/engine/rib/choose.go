package rib

import (
	"cmp"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// choose chooses among the paths of a prefix, notes the prefix for the reader if it
// sees a difference (visible: it does anyway), and forgets a prefix without paths.
//
// The order is that of RFC 4271 section 9.1.2 with RFC 4456 section 9: not stale for
// long (RFC 9494), LOCAL_PREF, originated here, AS path, origin, MED within one AS,
// from another AS; those that are left are of equal cost, and of them the best has the
// lowest router id or ORIGINATOR_ID, the shortest CLUSTER_LIST, the lowest address, the
// lowest path identifier. Each rule removes what others are better than, so the
// result does not depend on the order of paths, MED included.
func (r *RIB) choose(f wire.Family, id uint32, e *entry, visible bool) {
	c := r.candidates[:0]
	for at := e.head; at != 0; at = r.paths.At(at).next {
		if r.paths.At(at).flags&refused == 0 {
			c = append(c, at)
		}
	}
	r.candidates = c[:0]
	if len(c) > 1 {
		c = lowest(c, func(at uint32) uint64 { return r.rank(f, at) })
		c = r.lowestMED(c)
		c = lowest(c, r.external)
	}
	first := uint32(0)
	for _, at := range c {
		if first == 0 || r.precedes(at, first) {
			first = at
		}
	}
	for _, at := range c {
		r.paths.At(at).flags |= candidate
	}
	for before, at := uint32(0), e.head; at != 0; {
		n := r.paths.At(at)
		next := n.next
		state := n.flags &^ (chosen | candidate)
		if at == first {
			state |= best
		}
		if n.flags&candidate != 0 {
			state |= multipath
		}
		visible = visible || state != n.flags&^candidate
		n.flags = state
		if at == first && before != 0 {
			r.paths.At(before).next = next
			n.next, e.head = e.head, at
		} else {
			before = at
		}
		at = next
	}
	if visible {
		r.note(f, id, e)
	}
	if e.head == 0 && e.pending == 0 {
		r.prefixes.Remove(f, id)
	}
}

// note has all readers see a prefix.
func (r *RIB) note(f wire.Family, id uint32, e *entry) {
	for reader := range Reader(Readers) {
		if e.pending&(1<<reader) == 0 {
			e.pending |= 1 << reader
			r.changed[reader][f].Add(id)
		}
	}
}

// rank is what the rules up to the origin compare, lowest first.
func (r *RIB) rank(f wire.Family, at uint32) uint64 {
	n := r.paths.At(at)
	q, s := &r.peers[n.peer], r.sets.Summary(n.set)
	pref := uint32(attrs.DefaultLocalPref)
	if s.Flags&attrs.HasLocalPref != 0 {
		pref = s.LocalPref
	}
	rank := uint64(^pref)<<19 | uint64(s.PathLen)<<2 | uint64(s.Origin)
	if g := &q.families[f]; g.longLived && n.epoch != g.epoch || s.Flags&attrs.LLGRStale != 0 {
		rank |= 1 << 51
	}
	if !q.Local {
		rank |= 1 << 18
	}
	return rank
}

func (r *RIB) external(at uint32) uint64 {
	if r.peers[r.paths.At(at).peer].External {
		return 0
	}
	return 1
}

// lowest keeps those whose rank is the lowest.
func lowest(c []uint32, rank func(uint32) uint64) []uint32 {
	least, n := rank(c[0]), 1
	for _, at := range c[1:] {
		switch k := rank(at); {
		case k < least:
			least, n = k, 1
			c[0] = at
		case k == least:
			c[n] = at
			n++
		}
	}
	return c[:n]
}

// lowestMED keeps those with the lowest MED of each AS (an absent one is 0).
func (r *RIB) lowestMED(c []uint32) []uint32 {
	summary := func(at uint32) *attrs.Summary { return r.sets.Summary(r.paths.At(at).set) }
	slices.SortFunc(c, func(a, b uint32) int {
		x, y := summary(a), summary(b)
		return cmp.Or(cmp.Compare(x.FirstAS, y.FirstAS), cmp.Compare(x.MED, y.MED))
	})
	n := 0
	var least *attrs.Summary
	for _, at := range c {
		s := summary(at)
		if least == nil || s.FirstAS != least.FirstAS {
			least = s
		}
		if s.MED == least.MED {
			c[n] = at
			n++
		}
	}
	return c[:n]
}

// precedes reports whether a is better than b by what makes no difference to traffic.
func (r *RIB) precedes(a, b uint32) bool {
	x, y := r.paths.At(a), r.paths.At(b)
	p, q := &r.peers[x.peer], &r.peers[y.peer]
	s, t := r.sets.Summary(x.set), r.sets.Summary(y.set)
	return cmp.Or(
		cmp.Compare(routerID(p, s), routerID(q, t)),
		cmp.Compare(s.ClusterLen, t.ClusterLen),
		p.Addr.Compare(q.Addr),
		cmp.Compare(x.id, y.id),
		cmp.Compare(x.peer, y.peer),
	) < 0
}

// routerID returns that of the speaker from which a path came into this AS (RFC 4456
// section 9).
func routerID(p *peer, s *attrs.Summary) uint32 {
	if s.Flags&attrs.HasOriginator != 0 {
		return s.Originator
	}
	return p.RouterID
}
