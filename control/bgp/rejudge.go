package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/store"
)

// resets are a peer's pending soft resets: its routes have to be judged again
// because the judgement has changed. What fails stays pending until the next
// [Speaker.Apply].
type resets struct{ in, out bool }

// rejudge has GoBGP judge again what is pending, and what c judges otherwise than
// old. It is in force already, so that what comes now needs no second look.
func (e *gobgp) rejudge(ctx context.Context, old, c *Config) error {
	e.change.Lock()
	defer e.change.Unlock()
	e.pendImport(old, c)
	e.pendExport(old, c)
	return e.softReset(ctx)
}

// pendImport notes the peers of which something received is, or may be, judged
// otherwise by c than by old. Peers that announced nothing of what has changed are
// left alone, however many routes they have.
func (e *gobgp) pendImport(old, c *Config) {
	was := runningPeers(old)
	note := func(a netip.Addr) {
		r := e.pending[a]
		r.in = true
		e.pending[a] = r
	}
	newPools := !slices.Equal(old.Pools, c.Pools)
	ownMore, ownLess := difference(old.Own, c.Own)
	borrowedMore, borrowedLess := difference(old.Borrowed, c.Borrowed)
	// What is refused now was let in before, if anybody said it.
	let, letOK := e.saidBy(netip.Addr{}, slices.Concat(ownMore, borrowedLess))
	for _, p := range c.Peers {
		before, known := was[p.Addr]
		switch {
		case !p.runs() || !known:
		case before.PoolsOnly != p.PoolsOnly || !old.sameFilters(before, c, p, false),
			newPools && p.PoolsOnly, !letOK || let[p.Addr]:
			note(p.Addr)
		default:
			more := ownLess
			if p.PoolsOnly {
				more = slices.Concat(ownLess, borrowedMore)
			}
			if said, ok := e.saidBy(p.Addr, more); !ok || said[p.Addr] {
				note(p.Addr)
			}
		}
	}
}

// pendExport notes the peers that c advertises to otherwise than old.
func (e *gobgp) pendExport(old, c *Config) {
	was := runningPeers(old)
	hidden := hiddenMoves(old, c)
	for _, p := range c.Peers {
		before, known := was[p.Addr]
		if !p.runs() || !known || old.sameExport(before, c, p) && !hidden {
			continue
		}
		r := e.pending[p.Addr]
		r.out = true
		e.pending[p.Addr] = r
	}
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

// softReset has GoBGP judge again what is pending. A peer that GoBGP does not know
// now is judged when it is back.
func (e *gobgp) softReset(ctx context.Context) error {
	var errs []error
	for addr, r := range e.pending {
		e.mu.Lock()
		p, ok := e.peers[addr]
		known := ok && !p.removed
		e.mu.Unlock()
		var in, out error
		if known && r.in {
			in = e.reimport(ctx, addr)
		}
		if known && r.out {
			out = e.reexport(ctx, addr)
		}
		if left := (resets{in != nil, out != nil}); left != (resets{}) {
			e.pending[addr] = left
			errs = append(errs, in, out)
			continue
		}
		delete(e.pending, addr)
	}
	return errors.Join(errs...)
}

func runningPeers(c *Config) map[netip.Addr]Peer {
	out := make(map[netip.Addr]Peer, len(c.Peers))
	for _, p := range c.Peers {
		if p.runs() {
			out[p.Addr] = p
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

// maxLookups bounds how many prefixes saidBy asks for one by one: GoBGP finds
// what lies inside another prefix only by walking the whole table.
const maxLookups = 1 << 10

// saidBy returns the peers of which a table has something inside one of the
// prefixes: the one of what was let in, or that of what a peer sent. It reports
// false when that cannot be told cheaply.
func (e *gobgp) saidBy(peer netip.Addr, prefixes []netip.Prefix) (map[netip.Addr]bool, bool) {
	said := map[netip.Addr]bool{}
	if len(prefixes) == 0 {
		return said, true
	}
	n := 0
	for _, p := range prefixes {
		host := p.Addr().BitLen() - p.Bits()
		if host > 10 {
			return nil, false
		}
		if n += 2<<host - 1; n > maxLookups {
			return nil, false
		}
	}
	for _, f := range families() {
		r := apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: toPacket(f)}
		if peer.IsValid() {
			r.TableType, r.Name = api.TableType_TABLE_TYPE_ADJ_IN, peer.String()
		}
		for _, p := range prefixes {
			if familyOf(p.Addr()) == f {
				r.Prefixes = appendInside(r.Prefixes, p)
			}
		}
		if len(r.Prefixes) == 0 {
			continue
		}
		err := e.srv.ListPath(r, func(_ packet.NLRI, paths []*apiutil.Path) {
			for _, p := range paths {
				if peer.IsValid() || p.PeerAddress.IsValid() {
					said[p.PeerAddress] = true
				}
			}
		})
		if err != nil {
			return nil, false // the reset that follows says why
		}
	}
	return said, true
}

// appendInside appends a prefix and each one inside it.
func appendInside(l []*apiutil.LookupPrefix, p netip.Prefix) []*apiutil.LookupPrefix {
	size := p.Addr().BitLen()
	for bits := p.Bits(); bits <= size; bits++ {
		for i := range 1 << (bits - p.Bits()) {
			a, ok := store.AddrAt(p, i<<(size-bits))
			if !ok {
				break // cannot be: it lies inside
			}
			l = append(l, &apiutil.LookupPrefix{Prefix: netip.PrefixFrom(a, bits).String(), LookupOption: apiutil.LOOKUP_EXACT})
		}
	}
	return l
}

func (e *gobgp) setPolicy(ctx context.Context, old, c *Config) error {
	if err := e.changePolicies(ctx, old, c); err != nil {
		return err
	}
	e.adopt(c)
	return nil
}

// adopt has what GoBGP tells read as c says.
func (e *gobgp) adopt(c *Config) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.policy = newPolicy(c)
	e.conv.policy, e.conv.lastPath = e.policy, nil
	e.changes++
	for addr, p := range runningPeers(c) {
		if known, ok := e.peers[addr]; ok && p.sameSession(known.Peer) {
			known.Peer = p
		}
	}
}

// changePolicies makes the judgement that of c. Lists of prefixes are changed
// by what has come and gone.
func (e *gobgp) changePolicies(ctx context.Context, old, c *Config) error {
	if !old.sameRules(c) {
		return e.setPolicies(ctx, c)
	}
	for _, s := range []struct {
		name     string
		was, now []netip.Prefix
	}{
		{setPools, old.Pools, c.Pools}, {setOwn, old.Own, c.Own}, {setBorrowed, old.Borrowed, c.Borrowed}, {setHidden, old.Hidden, c.Hidden},
	} {
		more, less := difference(s.was, s.now)
		if err := e.changeSet(ctx, s.name, more, less); err != nil {
			return errors.Join(err, e.setPolicies(ctx, c))
		}
	}
	return nil
}

func (e *gobgp) changeSet(ctx context.Context, name string, more, less []netip.Prefix) error {
	for _, f := range families() {
		if set := part(name, f, more); len(set.Prefixes) > 0 {
			if err := e.srv.AddDefinedSet(ctx, &api.AddDefinedSetRequest{DefinedSet: set}); err != nil {
				return fmt.Errorf("add to the prefixes of %s: %w", name, err)
			}
		}
		if set := part(name, f, less); len(set.Prefixes) > 0 {
			if err := e.srv.DeleteDefinedSet(ctx, &api.DeleteDefinedSetRequest{DefinedSet: set}); err != nil {
				return fmt.Errorf("take from the prefixes of %s: %w", name, err)
			}
		}
	}
	return nil
}
