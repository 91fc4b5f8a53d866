package rib

import (
	"net/netip"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
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
	prefixes set[netip.Prefix]

	// What completes a candidate by it, in the round of choosing that seen
	// names.
	seen uint64
	with completed
}

// learnedKey is the identity of the next hop or hops that BGP names for p. One
// next hop is the same for prefixes of both families.
func learnedKey(p netip.Prefix, a nexthop.Announced) hopKey {
	k := hopKey{Key: encap.Key{Family: dataplane.FamilyOf(p.Addr())}, hops: a.Value().Hops}
	if via := k.hops.Single(); via.IsValid() {
		k.Family = dataplane.FamilyOf(via)
	}
	return k
}

// learnedPaths is what BGP says.
type learnedPaths struct {
	paths  map[netip.Prefix]nexthop.Announced
	byHop  map[hopKey]*learned
	hopsOf topology.Index[netip.Addr, hopKey] // gateway → the keys of byHop that have it
}

func newLearnedPaths() *learnedPaths {
	return &learnedPaths{paths: map[netip.Prefix]nexthop.Announced{}, byHop: map[hopKey]*learned{}, hopsOf: topology.Index[netip.Addr, hopKey]{}}
}

// putPath reports whether the path is new.
func (l *learnedPaths) putPath(p Path) bool {
	old, had := l.paths[p.Prefix]
	if had && old == p.Announced {
		return false
	}
	k := learnedKey(p.Prefix, p.Announced)
	if had {
		if was := learnedKey(p.Prefix, old); was != k {
			l.leave(was, p.Prefix)
		}
	}
	at := l.byHop[k]
	if at == nil {
		at = &learned{prefixes: set[netip.Prefix]{}}
		l.byHop[k] = at
		for a := range k.hops.All() {
			l.hopsOf.Add(a, k)
		}
	}
	at.prefixes[p.Prefix] = struct{}{}
	l.paths[p.Prefix] = p.Announced
	return true
}

// deletePath reports whether there was a path.
func (l *learnedPaths) deletePath(p netip.Prefix) bool {
	a, ok := l.paths[p]
	if ok {
		l.leave(learnedKey(p, a), p)
		delete(l.paths, p)
	}
	return ok
}

// leave notes that BGP no longer names k for p.
func (l *learnedPaths) leave(k hopKey, p netip.Prefix) {
	at := l.byHop[k]
	if delete(at.prefixes, p); len(at.prefixes) > 0 {
		return
	}
	delete(l.byHop, k)
	for a := range k.hops.All() {
		l.hopsOf.Remove(a, k)
	}
}
