package vrouter

import (
	"net/netip"
)

// announcement is what BGP says of a prefix, apart from the prefix.
type announcement struct {
	nextHop netip.Addr
	peer    string
	set     HopSet
}

// announced is one announcement for all prefixes that have it: with full tables
// there are a few of them for hundreds of thousands of prefixes.
type announced struct {
	announcement
	hop  hopKey
	at   *behind
	refs int // prefixes

	// What completes a candidate of it, in the round of choosing that seen
	// names.
	seen uint64
	with completed
}

// behind are the prefixes that one next hop, or one set of them, is named for.
type behind struct {
	prefixes set[netip.Prefix]
	refs     int // announcements
}

// setPaths takes in best paths from BGP.
func (t *table) setPaths(u PathUpdate) {
	if u.Reset {
		keep := make(set[netip.Prefix], len(u.Put))
		for _, p := range u.Put {
			keep[p.Prefix] = struct{}{}
		}
		for p := range t.paths {
			if _, ok := keep[p]; !ok {
				t.deletePath(p)
			}
		}
	}
	for _, p := range u.Del {
		t.deletePath(p)
	}
	t.setLost(u.Lost, nil)
	t.found = append(t.found, u.Found...)
	for _, p := range u.Put {
		t.putPath(p)
	}
}

func (t *table) putPath(p Path) {
	old := t.paths[p.Prefix]
	what := announcement{p.NextHop, p.Peer, p.Set}
	if old != nil && old.announcement == what {
		return
	}
	a := t.announced[what]
	if a == nil {
		a = &announced{announcement: what, hop: hopKeyOf(p)}
		t.announced[what] = a
		b := t.byHop[a.hop]
		if b == nil {
			b = &behind{prefixes: set[netip.Prefix]{}}
			t.byHop[a.hop] = b
			for _, addr := range hopAddrs(what) {
				t.hopsOf.add(addr, a.hop)
			}
		}
		b.refs++
		a.at = b
	}
	a.refs++
	if old != nil && old.at != a.at {
		delete(old.at.prefixes, p.Prefix)
	}
	a.at.prefixes[p.Prefix] = struct{}{}
	t.paths[p.Prefix] = a
	t.dirty[p.Prefix] = struct{}{}
	if old != nil {
		t.forget(old)
	}
}

func (t *table) deletePath(p netip.Prefix) {
	if a := t.paths[p]; a != nil {
		delete(a.at.prefixes, p)
		delete(t.paths, p)
		t.dirty[p] = struct{}{}
		t.forget(a)
	}
}

// forget takes back one prefix of a.
func (t *table) forget(a *announced) {
	if a.refs--; a.refs > 0 {
		return
	}
	delete(t.announced, a.announcement)
	if a.at.refs--; a.at.refs > 0 {
		return
	}
	delete(t.byHop, a.hop)
	for _, addr := range hopAddrs(a.announcement) {
		t.hopsOf.remove(addr, a.hop)
	}
}

func hopAddrs(a announcement) []netip.Addr {
	if a.set != "" {
		return a.set.addrs()
	}
	return []netip.Addr{a.nextHop}
}

func (t *table) markNextHop(a netip.Addr) {
	for k := range t.hopsOf[a] {
		t.turned[k] = struct{}{}
	}
}
