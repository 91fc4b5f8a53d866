package bgp

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine"
)

// rejudge has looked at again what c judges otherwise than old.
func (b *backend) rejudge(_ context.Context, old, c *Config) error {
	b.change.Lock()
	defer b.change.Unlock()
	was := runningPeers(old)
	var in, out []netip.Addr
	var errs []error
	hidden := hiddenMoves(old, c)
	for addr, p := range runningPeers(c) {
		before, known := was[addr]
		if !known {
			continue
		}
		if before.PoolsOnly != p.PoolsOnly || !old.sameFilters(before, c, p, false) {
			in = append(in, addr)
		}
		if !old.sameExport(before, c, p) || hidden {
			out = append(out, addr)
		}
		if w := enginePeer(c, p); b.want[addr] != w {
			b.want[addr] = w // what is live of it
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

func runningPeers(c *Config) map[netip.Addr]Peer {
	out := make(map[netip.Addr]Peer, len(c.Peers))
	for _, p := range c.Peers {
		if p.runs() {
			out[p.id()] = p
		}
	}
	return out
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
