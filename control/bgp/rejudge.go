package bgp

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine"
)

// rejudge has the engine judge again what now judges otherwise than old did, of which ran are the peers that ran.
func (b *backend) rejudge(old *Config, ran map[netip.Addr]*Peer, now *policy) error {
	b.change.Lock()
	defer b.change.Unlock()
	c := now.c
	in, out, others := moved(old, ran, now)
	var errs []error
	for _, p := range others {
		if w := enginePeer(c, *p); b.want[p.id()] != w {
			b.want[p.id()] = w // what is live of it
			errs = append(errs, b.SetPeer(w))
		}
	}
	if old.NextHop != c.NextHop || old.NextHop6 != c.NextHop6 {
		in = slices.Collect(maps.Keys(b.want)) // they are no next hops of what others announce
	}
	if len(in) > 0 {
		b.Rejudge(engine.Scope{Import: true, Peers: in, Notify: true}) // by which rule a path is let in is reported with it
	}
	if len(out) > 0 {
		b.Rejudge(engine.Scope{Export: true, Peers: out})
	}
	var within []netip.Prefix
	for _, l := range [][2][]netip.Prefix{{old.Pools, c.Pools}, {old.Own, c.Own}, {old.Borrowed, c.Borrowed}} {
		more, less := difference(l[0], l[1])
		within = slices.Concat(within, more, less)
	}
	if len(within) > 0 {
		b.Rejudge(engine.Scope{Import: true, Within: within})
	}
	return errors.Join(errs...)
}

// moved returns, of the peers that ran by old and run by now, those whose import and those whose export it judges otherwise, and those
// that have other settings. While the rules are the same, all that it does for a peer that is the same is to compare it.
func moved(old *Config, ran map[netip.Addr]*Peer, now *policy) (in, out []netip.Addr, others []*Peer) {
	c, hidden := now.c, hiddenMoves(old, now.c)
	stay := !hidden && old.sameRules(c)
	for id, p := range now.running {
		before := ran[id]
		same := before != nil && *before == *p
		if before == nil || same && stay {
			continue
		}
		if before.PoolsOnly != p.PoolsOnly || !old.sameFilters(*before, c, *p, false) {
			in = append(in, id)
		}
		if !old.sameExport(*before, c, *p) || hidden {
			out = append(out, id)
		}
		if !same {
			others = append(others, p)
		}
	}
	return in, out, others
}

// hiddenMoves reports whether something that was announced and stays so came
// into what is hidden, or left it; what is new is judged when it is announced.
func hiddenMoves(old, c *Config) bool {
	more, less := difference(old.Hidden, c.Hidden)
	moved := slices.Concat(more, less)
	if len(moved) == 0 {
		return false
	}
	before := make(map[netip.Prefix]bool, len(old.Announce))
	for _, p := range old.Announce {
		before[p] = true
	}
	return slices.ContainsFunc(c.Announce, func(p netip.Prefix) bool { return before[p] && inAny(moved, p) })
}

// difference returns what only b has and what only a has.
func difference(a, b []netip.Prefix) (more, less []netip.Prefix) {
	if slices.Equal(a, b) {
		return nil, nil
	}
	in := make(map[netip.Prefix]bool, len(a))
	for _, p := range a {
		in[p] = true
	}
	for _, p := range b {
		if !in[p] {
			more = append(more, p)
		}
		delete(in, p)
	}
	for _, p := range a {
		if in[p] {
			less = append(less, p)
		}
	}
	return more, less
}
