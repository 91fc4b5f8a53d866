package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// TestRIBModel holds the buffer against a plain map: whatever is told, taken
// and restarted in whatever order, a reader that has taken all knows what is
// there; and what comes again after a restart was never withdrawn.
func TestRIBModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		r := newRIB()
		there := map[netip.Prefix]Path{}  // what GoBGP has
		reader := map[netip.Prefix]Path{} // what the reader knows
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
			"put": func(rt *rapid.T) {
				p := Path{Prefix: prefix(), Hop: Hop{NextHop: netip.AddrFrom4([4]byte{1, 1, 1, byte(rapid.IntRange(1, 3).Draw(rt, "hop"))})}}
				there[p.Prefix] = p
				r.put(p)
			},
			"del": func(rt *rapid.T) {
				p := prefix()
				delete(there, p)
				r.del(p)
			},
			"take": func(*rapid.T) { take() },
			"restart": func(rt *rapid.T) {
				var told []netip.Prefix
				for p := range there {
					told = append(told, p)
				}
				r.restart(told)
				clear(there)
				syncing = true
			},
			"again": func(rt *rapid.T) { // after a restart the peers tell what the reader knows
				for p, path := range reader {
					if _, ok := there[p]; !ok {
						there[p] = path
						r.put(path)
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
				for p, path := range there {
					if fmt.Sprint(reader[p]) != fmt.Sprint(path) {
						rt.Fatalf("%s: reader knows %v, there is %v", p, reader[p], path)
					}
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
