package rib

import (
	"iter"
	"net/netip"
	"unique"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/dense"
)

// Path is the best path that BGP has for a prefix.
type Path struct {
	Prefix netip.Prefix
	nexthop.Announced
}

// Update is a step of BGP's best paths.
type Update struct {
	Reset bool // what was known before is void: Put is all there is
	Put   []Path
	Del   []netip.Prefix

	// Down names next hops to which nothing is to be sent any more, though the
	// withdrawals of the paths are still to come; Up those that may be used
	// again. Down counts before the paths of the same update, Up after them.
	Down, Up []netip.Addr

	// Synced says that the peers have announced all they know, so that what the
	// previous run left in the kernel may be swept.
	Synced bool
}

// learned are the prefixes for which BGP names one next hop, or one set of
// them. With full tables there are a few of these for hundreds of thousands of
// prefixes.
type learned struct {
	key     hopKey
	desired unique.Handle[hopKey] // the key
	first   ref                   // of the prefixes
	n       int                   // how many there are
	on      *hop                  // that has been in use last for the key; it may be gone

	// What completes a candidate by it, in the round of choosing that seen
	// names.
	seen uint64
	with completed
}

// learnedKey is the identity of the next hop or hops that BGP names for a prefix of a
// family. One next hop is the same for prefixes of both families.
func learnedKey(f dataplane.Family, a nexthop.Announced) hopKey {
	k := hopKey{Key: encap.Key{Family: f}, hops: a.Value().Hops}
	if via := k.hops.Single(); via.IsValid() {
		k.Family = dataplane.FamilyOf(via)
	}
	return k
}

// said is what BGP says of some prefixes.
type said struct {
	nexthop.Announced
	by *learned
}

// learnedPaths is what BGP says.
type learnedPaths struct {
	prefixes *prefixTable
	said     *dense.Numbers[said] // a record's path
	byHop    map[hopKey]*learned
	hopsOf   topology.Index[netip.Addr, hopKey] // gateway → the keys of byHop that have it

	// last are the numbers of what was said last, by family: most that follow is the same.
	last [dataplane.IPv6 + 1]uint32
}

func newLearnedPaths(t *prefixTable) *learnedPaths {
	return &learnedPaths{prefixes: t, said: dense.NewNumbers[said](), byHop: map[hopKey]*learned{}, hopsOf: topology.NewIndex[netip.Addr, hopKey]()}
}

// LearnedVia returns by which gateway and device packets to an address in a node's block
// would leave by what BGP says of the block, or of the address alone.
func (r *RIB) LearnedVia(a netip.Addr) (gateway netip.Addr, link string, ok bool) {
	single := netip.PrefixFrom(a, a.BitLen())
	prefixes := []netip.Prefix{single}
	if block, _, ok := r.blocks.Holder(single); ok {
		prefixes = append(prefixes, block)
	}
	for _, p := range prefixes {
		at := r.prefixes.find(p)
		if at == 0 {
			continue
		}
		path := r.prefixes.At(at).path
		if path == 0 {
			continue
		}
		for hop := range r.said.Value(path).Value().Hops.All() {
			if pl := r.planVia(hop, 0); pl.Err == nil {
				return pl.Hop.Gateway, pl.Hop.Link, true
			}
		}
	}
	return netip.Addr{}, "", false
}

// saidBy returns what an announcement is for a prefix of a family.
func (l *learnedPaths) saidBy(f dataplane.Family, a nexthop.Announced) said {
	if now := l.said.Value(l.last[f]); now.Announced == a {
		return now
	}
	k := learnedKey(f, a)
	at := l.byHop[k]
	if at == nil {
		at = &learned{key: k, desired: unique.Make(k)}
		l.byHop[k] = at
		for a := range k.hops.All() {
			l.hopsOf.Add(a, k)
		}
	}
	return said{a, at}
}

// putPath reports whether the path of a prefix is new.
func (l *learnedPaths) putPath(at ref, a nexthop.Announced) bool {
	rec := l.prefixes.At(at)
	old := l.said.Value(rec.path)
	if rec.path != 0 && old.Announced == a {
		return false
	}
	now := l.saidBy(rec.family, a)
	was := rec.path
	rec.path, _ = l.said.Take(now)
	l.last[rec.family] = rec.path
	if old.by != now.by {
		if was != 0 {
			l.unlink(rec, old.by)
		}
		l.link(at, rec, now.by)
	}
	if was != 0 {
		l.leave(was)
	}
	return true
}

// deletePath reports whether there was a path.
func (l *learnedPaths) deletePath(at ref) bool {
	rec := l.prefixes.At(at)
	if rec.path == 0 {
		return false
	}
	l.unlink(rec, l.said.Value(rec.path).by)
	l.leave(rec.path)
	rec.path = 0
	return true
}

// link notes that BGP names the next hops of by for a prefix.
func (l *learnedPaths) link(at ref, rec *record, by *learned) {
	rec.prev, rec.next = 0, by.first
	if by.first != 0 {
		l.prefixes.At(by.first).prev = at
	}
	by.first = at
	by.n++
}

// unlink takes back link.
func (l *learnedPaths) unlink(rec *record, by *learned) {
	if rec.prev != 0 {
		l.prefixes.At(rec.prev).next = rec.next
	} else {
		by.first = rec.next
	}
	if rec.next != 0 {
		l.prefixes.At(rec.next).prev = rec.prev
	}
	rec.prev, rec.next = 0, 0
	by.n--
}

// leave notes that one prefix less has a path.
func (l *learnedPaths) leave(path uint32) {
	by := l.said.Value(path).by
	if l.said.Leave(path) {
		for f, id := range l.last {
			if id == path {
				l.last[f] = 0
			}
		}
	}
	if by.n > 0 {
		return
	}
	delete(l.byHop, by.key)
	for a := range by.key.hops.All() {
		l.hopsOf.Remove(a, by.key)
	}
}

// behind yields the prefixes for which BGP names the next hops of by.
func (l *learnedPaths) behind(by *learned) iter.Seq2[ref, *record] {
	return func(yield func(ref, *record) bool) {
		for at := by.first; at != 0; {
			rec := l.prefixes.At(at)
			if !yield(at, rec) {
				return
			}
			at = rec.next
		}
	}
}
