package bgp

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/nexthop"
)

// PathSet is the paths of equal cost that prefixes share. It never changes.
type PathSet struct {
	*Hop       // the best path, or of several of equal cost that of the lowest peer address
	More []Hop // the others of equal cost

	// Announced is the same for equal next hops, whatever their other
	// attributes are.
	Announced nexthop.Announced

	hops []Hop  // one from each peer, in the order of the peers' addresses
	id   uint32 // its number, from 1
	key  string // of several: the numbers of each
	refs int    // prefixes, and sets that it is part of
}

// newPathSet returns the set of some paths in the order of their peers'
// addresses.
func newPathSet(hops ...Hop) *PathSet {
	s := &PathSet{hops: hops}
	best := preferred(hops)
	s.Hop, s.More = &best[0], best[1:]
	others, named := make([]netip.Addr, len(s.More)), s.Named
	for i, h := range s.More {
		others[i], named = h.NextHop, min(named, h.Named)
	}
	peer := s.Peer
	if a := s.PeerAddr; a.IsValid() && engine.Name(a) != peer {
		peer += " (" + engine.Name(a) + ")"
	}
	s.Announced = nexthop.Announce(named, peer, s.NextHop, others...)
	return s
}

func longLived(h Hop) bool { return h.LongLived }

// preferred leaves long-lived stale paths out if there is any other (RFC 9494
// section 4.3).
func preferred(hops []Hop) []Hop {
	if len(hops) == 1 || !slices.ContainsFunc(hops, longLived) {
		return hops
	}
	fresh := slices.DeleteFunc(slices.Clone(hops), longLived)
	if len(fresh) == 0 {
		return hops
	}
	return fresh
}

// pathSets keeps one [PathSet] for each set in use, so that equal sets are the same
// pointer. Not safe for concurrent use.
type pathSets struct {
	singles map[Hop]*PathSet
	several map[string]*PathSet
	list    []*PathSet // by number
	free    []uint32   // numbers
}

func newPathSets() pathSets {
	return pathSets{singles: map[Hop]*PathSet{}, several: map[string]*PathSet{}, list: make([]*PathSet, 1)}
}

// numbered returns the set with a number; nil: 0.
func (t *pathSets) numbered(id uint32) *PathSet { return t.list[id] }

// number gives a new set a number.
func (t *pathSets) number(s *PathSet) {
	if n := len(t.free) - 1; n >= 0 {
		s.id, t.free = t.free[n], t.free[:n]
	} else {
		s.id = uint32(len(t.list))
		t.list = append(t.list, nil)
	}
	t.list[s.id] = s
}

// single returns the set of one path.
func (t *pathSets) single(h Hop) *PathSet {
	s := t.singles[h]
	if s == nil {
		s = newPathSet(h)
		t.number(s)
		t.singles[h] = s
	}
	return s
}

// with returns s with h in place of what it has from h's peer.
func (t *pathSets) with(s *PathSet, h Hop) *PathSet {
	if s == nil || len(s.hops) == 1 && s.hops[0].PeerAddr == h.PeerAddr {
		return t.single(h)
	}
	hops := make([]Hop, 0, len(s.hops)+1)
	for _, x := range s.hops {
		if x.PeerAddr != h.PeerAddr {
			hops = append(hops, x)
		}
	}
	hops = append(hops, h)
	slices.SortFunc(hops, func(a, b Hop) int { return a.PeerAddr.Compare(b.PeerAddr) })
	return t.of(hops)
}

// without returns s without the path of a peer; nil if none is left.
func (t *pathSets) without(s *PathSet, peer netip.Addr) *PathSet {
	i := slices.IndexFunc(s.hops, func(h Hop) bool { return h.PeerAddr == peer })
	switch {
	case i < 0:
		return s
	case len(s.hops) == 1:
		return nil
	}
	return t.of(slices.Delete(slices.Clone(s.hops), i, i+1))
}

// of returns the set of some paths in order.
func (t *pathSets) of(hops []Hop) *PathSet {
	if len(hops) == 1 {
		return t.single(hops[0])
	}
	var key []byte
	for _, h := range hops {
		key = binary.NativeEndian.AppendUint32(key, t.single(h).id)
	}
	s := t.several[string(key)]
	if s == nil {
		s = newPathSet(hops...)
		s.key = string(key)
		t.number(s)
		t.several[s.key] = s
		for _, h := range hops { // their numbers are in the key
			t.single(h).refs++
		}
	}
	return s
}

// release takes back one user of s, and reports whether it was the last.
func (t *pathSets) release(s *PathSet) bool {
	if s == nil {
		return false
	}
	if s.refs--; s.refs > 0 {
		return false
	}
	t.list[s.id] = nil
	t.free = append(t.free, s.id)
	if len(s.hops) == 1 {
		delete(t.singles, s.hops[0])
		return true
	}
	delete(t.several, s.key)
	for _, h := range s.hops {
		t.release(t.singles[h])
	}
	return true
}

// only returns the next hops that a peer gave and no other did.
func (t *pathSets) only(peer netip.Addr) []netip.Addr {
	own, others := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for h := range t.singles {
		switch {
		case h.PeerAddr == peer:
			own[h.NextHop] = true
		default:
			others[h.NextHop] = true
		}
	}
	var out []netip.Addr
	for a := range own {
		if !others[a] {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}
