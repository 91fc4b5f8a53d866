package vrouter

import (
	"net/netip"

	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
)

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
	k := hopKey{hops: a.Value().Hops, fam: dataplane.FamilyOf(p.Addr())}
	if via := k.hops.Single(); via.IsValid() {
		k.fam = dataplane.FamilyOf(via)
	}
	return k
}

// learnedPaths is what BGP says.
type learnedPaths struct {
	paths  map[netip.Prefix]nexthop.Announced
	byHop  map[hopKey]*learned
	hopsOf index[netip.Addr, hopKey] // gateway → the keys of byHop that have it
}

func newLearnedPaths() *learnedPaths {
	return &learnedPaths{paths: map[netip.Prefix]nexthop.Announced{}, byHop: map[hopKey]*learned{}, hopsOf: index[netip.Addr, hopKey]{}}
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
			l.hopsOf.add(a, k)
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
		l.hopsOf.remove(a, k)
	}
}
