package bgp

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// TestRIBModel holds the buffer against a plain map: whatever is told, taken
// and restarted in whatever order, a reader that has taken all knows what is
// there; and what comes again after a restart was never withdrawn.
func TestRIBModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		r := newRIB()
		there := map[netip.Prefix]map[netip.Addr]Hop{} // what the engine has
		reader := map[netip.Prefix]Path{}              // what the reader knows
		resets, syncing := 0, true
		take := func() Changes {
			c := r.take()
			if c.Reset {
				resets++
				clear(reader)
			}
			for _, p := range c.Put {
				reader[p.Prefix] = p
			}
			for _, p := range c.Del {
				delete(reader, p)
			}
			if len(c.Put)+len(c.Del) > 20 {
				rt.Fatalf("%d changes of 20 prefixes", len(c.Put)+len(c.Del))
			}
			return c
		}
		prefix := func() netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(rapid.IntRange(0, 19).Draw(rt, "prefix")), 0}), 24)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"add": func(rt *rapid.T) {
				p, h := prefix(), Hop{
					NextHop:  netip.AddrFrom4([4]byte{1, 1, 1, byte(rapid.IntRange(1, 3).Draw(rt, "hop"))}),
					PeerAddr: netip.AddrFrom4([4]byte{2, 2, 2, byte(rapid.IntRange(1, 3).Draw(rt, "peer"))}),
				}
				if there[p] == nil {
					there[p] = map[netip.Addr]Hop{}
				}
				there[p][h.PeerAddr] = h
				r.add(p, h)
			},
			"set": func(rt *rapid.T) {
				p, all := prefix(), map[netip.Addr]Hop{}
				for range rapid.IntRange(0, 3).Draw(rt, "paths") {
					h := Hop{
						NextHop:  netip.AddrFrom4([4]byte{1, 1, 1, byte(rapid.IntRange(1, 3).Draw(rt, "hop"))}),
						PeerAddr: netip.AddrFrom4([4]byte{2, 2, 2, byte(rapid.IntRange(1, 3).Draw(rt, "peer"))}),
					}
					all[h.PeerAddr] = h
				}
				if delete(there, p); len(all) > 0 {
					there[p] = all
				}
				r.set(wire.FromNetip(p), slices.Collect(maps.Values(all)))
			},
			"remove": func(rt *rapid.T) {
				p, peer := prefix(), netip.AddrFrom4([4]byte{2, 2, 2, byte(rapid.IntRange(1, 3).Draw(rt, "peer"))})
				if delete(there[p], peer); len(there[p]) == 0 {
					delete(there, p)
				}
				r.remove(p, peer)
			},
			"take": func(*rapid.T) { take() },
			"restart": func(*rapid.T) {
				r.restart()
				clear(there)
				syncing = true
			},
			"again": func(*rapid.T) { // after a restart the peers tell what the reader knows
				for p, path := range reader {
					if _, ok := there[p]; ok {
						continue
					}
					there[p] = map[netip.Addr]Hop{}
					for _, h := range append([]Hop{*path.Hop}, path.More...) {
						there[p][h.PeerAddr] = h
						r.add(p, h)
					}
				}
				take()
			},
			"sync": func(*rapid.T) {
				r.sync()
				if c := take(); !c.Synced {
					rt.Fatal("not synced")
				}
				syncing = false
			},
			"": func(rt *rapid.T) {
				if syncing {
					return
				}
				take()
				if len(reader) != len(there) {
					rt.Fatalf("reader knows %v, there is %v", reader, there)
				}
				for p, hops := range there {
					want := slices.SortedFunc(maps.Values(hops), func(a, b Hop) int { return a.PeerAddr.Compare(b.PeerAddr) })
					got := append([]Hop{*reader[p].Hop}, reader[p].More...)
					if !slices.Equal(got, want) {
						rt.Fatalf("%s: reader knows %v, there is %v", p, got, want)
					}
				}
				if n := len(r.sets.singles); n > 9 || len(there) == 0 && n+len(r.sets.several) > 0 {
					rt.Fatalf("%d paths and %d sets kept", n, len(r.sets.several))
				}
			},
		})
		if resets > 1 {
			rt.Fatalf("%d resets", resets)
		}
	})
}

func TestNextEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newRIB().next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

// TestRIBLoses: what a peer alone gave is lost at once, what another gives too
// is not, and it is found when the withdrawals have been taken.
func TestRIBLoses(t *testing.T) {
	t.Parallel()
	r := newRIB()
	hop := func(n, peer byte) Hop {
		return Hop{NextHop: netip.AddrFrom4([4]byte{1, 1, 1, n}), PeerAddr: netip.AddrFrom4([4]byte{2, 2, 2, peer})}
	}
	prefix := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
	}
	const n = batchSize + 10
	for i := range n {
		r.add(prefix(i), hop(1, 1))
		r.add(prefix(i), hop(2, 2))
	}
	r.add(prefix(n), hop(3, 1))
	r.add(prefix(n), hop(3, 2))
	for total := 0; total <= n; {
		c := r.take()
		if c.Empty() || len(c.Put) > batchSize {
			t.Fatalf("a batch of %d after %d", len(c.Put), total)
		}
		total += len(c.Put)
	}
	lost := hop(1, 1)
	r.lose(lost.PeerAddr)
	if c := r.take(); !slices.Equal(c.Down, []netip.Addr{lost.NextHop}) || len(c.Put)+len(c.Del)+len(c.Up) > 0 {
		t.Fatalf("lost: %+v", c)
	}
	for i := range n {
		r.remove(prefix(i), lost.PeerAddr)
	}
	r.recover(lost.PeerAddr)
	if c := r.take(); len(c.Put) != batchSize || c.Up != nil {
		t.Fatalf("first batch: %d changes, found %v", len(c.Put), c.Up)
	}
	if c := r.take(); len(c.Put) != n-batchSize || !slices.Equal(c.Up, []netip.Addr{lost.NextHop}) {
		t.Fatalf("second batch: %d changes, found %v", len(c.Put), c.Up)
	}
	if c := r.take(); !c.Empty() {
		t.Fatalf("left: %+v", c)
	}
}
