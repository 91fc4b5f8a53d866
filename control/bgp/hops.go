package bgp

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// hopSet is a set of paths that prefixes share: one from each peer, in the order
// of the peers' addresses. It never changes.
type hopSet struct {
	hops []Hop
	id   uint32 // of one path
	key  string // of several
	refs int    // prefixes
}

func (s *hopSet) path(p netip.Prefix) Path {
	hops := s.hops
	if len(hops) > 1 && slices.ContainsFunc(hops, longLived) {
		hops = preferred(hops)
	}
	out := Path{Prefix: p, Hop: hops[0]}
	if len(hops) > 1 {
		out.More = hops[1:]
	}
	return out
}

func longLived(h Hop) bool { return h.LongLived }

// preferred leaves long-lived stale paths out if there is any other (RFC 9494
// section 4.3): GoBGP takes them for paths of equal cost.
func preferred(hops []Hop) []Hop {
	fresh := slices.DeleteFunc(slices.Clone(hops), longLived)
	if len(fresh) == 0 {
		return hops
	}
	return fresh
}

// hopSets keeps one hopSet for each set in use, so that equal sets are the same
// pointer. Not safe for concurrent use.
type hopSets struct {
	singles map[Hop]*hopSet
	several map[string]*hopSet
	last    uint32
}

func newHopSets() hopSets {
	return hopSets{singles: map[Hop]*hopSet{}, several: map[string]*hopSet{}}
}

// single returns the set of one path.
func (t *hopSets) single(h Hop) *hopSet {
	s := t.singles[h]
	if s == nil {
		t.last++
		s = &hopSet{hops: []Hop{h}, id: t.last}
		t.singles[h] = s
	}
	return s
}

// with returns s with h in place of what it has from h's peer.
func (t *hopSets) with(s *hopSet, h Hop) *hopSet {
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
func (t *hopSets) without(s *hopSet, peer netip.Addr) *hopSet {
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
func (t *hopSets) of(hops []Hop) *hopSet {
	if len(hops) == 1 {
		return t.single(hops[0])
	}
	var key []byte
	for _, h := range hops {
		key = binary.NativeEndian.AppendUint32(key, t.single(h).id)
	}
	s := t.several[string(key)]
	if s == nil {
		s = &hopSet{hops: hops, key: string(key)}
		t.several[s.key] = s
		for _, h := range hops { // their numbers are in the key
			t.single(h).refs++
		}
	}
	return s
}

// release takes back one user of s.
func (t *hopSets) release(s *hopSet) {
	if s == nil {
		return
	}
	if s.refs--; s.refs > 0 {
		return
	}
	if len(s.hops) == 1 {
		delete(t.singles, s.hops[0])
		return
	}
	delete(t.several, s.key)
	for _, h := range s.hops {
		t.release(t.singles[h])
	}
}

// only returns the next hops that a peer gave and no other did.
func (t *hopSets) only(peer netip.Addr) []netip.Addr {
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
