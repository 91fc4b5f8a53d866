package group

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// client is a member's other side: what it was sent, applied.
type client struct {
	t       interface{ Fatalf(string, ...any) }
	member  *Member
	peer    rib.Peer
	woken   bool
	table   map[wire.Prefix]string // prefix → MED
	eor     [wire.Families]int
	began   [wire.Families]int // refreshes
	pending map[wire.Prefix]bool
	behind  bool // it has been, or a refresh was asked for: what it had may come again
	strict  bool // nothing is advertised that it has
	settled bool // it has had all once: what was withdrawn before it came to it may be said
}

// read applies what Next returns and reports whether there was something.
func (c *client) read(limit int) bool {
	out := c.member.Next(limit)
	d := wire.Decoder{Session: wire.Session{ExtendedNextHop: true}}
	for f := range d.Session.Family {
		d.Session.Family[f].Enabled = true
	}
	for _, b := range out {
		for len(b) > 0 {
			typ, body, n, err := wire.Frame(b, wire.MaxLen)
			if err != nil || n == 0 {
				c.t.Fatalf("%v in %x", err, b)
			}
			b = b[n:]
			if typ == wire.RouteRefresh {
				c.refresh(wire.Family(binary.BigEndian.Uint16(body)-1), body[2])
				continue
			}
			var u wire.Update
			if err := d.Decode(body, &u); err != nil {
				c.t.Fatalf("%v", err)
			}
			if f, ok := u.EndOfRIB(); ok {
				c.eor[f]++
				continue
			}
			for _, l := range []wire.NLRI{u.Withdrawn, u.Unreach} {
				for p, ok := l.Next(); ok; p, ok = l.Next() {
					if _, had := c.table[p]; !had && !c.behind && c.settled {
						c.t.Fatalf("%s is withdrawn from %d, which does not have it", p.Netip(), c.peer)
					}
					delete(c.table, p)
				}
			}
			for _, l := range []wire.NLRI{u.Announced, u.Reach} {
				for p, ok := l.Next(); ok; p, ok = l.Next() {
					if s := fmt.Sprintf("%x", u.Attrs); c.table[p] == s && c.strict {
						c.t.Fatalf("%s is advertised to %d, which has it", p.Netip(), c.peer)
					} else {
						c.table[p] = s
					}
					delete(c.pending, p)
				}
			}
		}
	}
	c.settled = c.settled || len(out) == 0
	return len(out) > 0
}

// refresh is a demarcation: at the end what did not come again goes.
func (c *client) refresh(f wire.Family, subtype byte) {
	if subtype == 1 {
		if c.eor[f] == 0 && !c.member.NoEOR { // RFC 7313 section 4
			c.t.Fatalf("a refresh of %d begins before End-of-RIB", c.peer)
		}
		c.began[f]++
		c.pending = map[wire.Prefix]bool{}
		for p := range c.table {
			if p.Family == f {
				c.pending[p] = true
			}
		}
		return
	}
	for p := range c.pending {
		delete(c.table, p)
	}
	c.pending = nil
}

var universe = func() (out []wire.Prefix) {
	for i := range 12 {
		out = append(out, wire.Prefix{Hi: uint64(i) << 56, Bits: 24}, wire.Prefix{Hi: uint64(i) << 32, Bits: 64, Family: wire.IPv6})
	}
	return out
}()

// set returns a set that has a MED of its own, and how a member sees it.
func set(t *attrs.Table, med int) attrs.Handle {
	return t.Put(append(bytes.Repeat([]byte{0}, 15), 9), listOf(med))
}

func listOf(med int) []byte {
	return []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x80, 4, 4, 0, 0, 0, byte(med)}
}

func textOf(med int) string { return fmt.Sprintf("%x", listOf(med)) }

// TestGroup: members that come and go, ask for all again, read a lot, a little or nothing,
// and move to another group, all end with what their group advertises, without what
// came from themselves.
func TestGroup(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		sets := attrs.NewTable()
		type advertised struct {
			med    int
			source rib.Peer
		}
		groups := []*Group{New(sets, Options{}), New(sets, Options{})}
		want := []map[wire.Prefix]advertised{{}, {}}
		in := map[*client]int{}
		for _, g := range groups {
			g.log.limit = rapid.SampledFrom([]int{300, 1000, logLimit}).Draw(t, "limit")
		}
		var clients []*client
		any := func(t *rapid.T) *client {
			if len(clients) == 0 {
				t.Skip()
			}
			return rapid.SampledFrom(clients).Draw(t, "client")
		}
		t.Repeat(map[string]func(*rapid.T){
			"update": func(t *rapid.T) {
				i := rapid.IntRange(0, 1).Draw(t, "group")
				for range rapid.IntRange(1, 8).Draw(t, "n") {
					p := rapid.SampledFrom(universe).Draw(t, "prefix")
					if rapid.IntRange(0, 2).Draw(t, "withdraw") == 0 {
						groups[i].Update(p, 0, None)
						delete(want[i], p)
						continue
					}
					a := advertised{rapid.IntRange(1, 3).Draw(t, "med"), rapid.SampledFrom([]rib.Peer{None, 0, 1, 2, 9}).Draw(t, "source")}
					if !groups[i].Update(p, set(sets, a.med), a.source) {
						t.Fatal("does not fit")
					}
					want[i][p] = a
				}
				if rapid.Bool().Draw(t, "flush") {
					groups[i].Flush()
				}
			},
			"join": func(t *rapid.T) {
				p := rib.Peer(rapid.IntRange(0, 3).Draw(t, "peer"))
				i := rapid.IntRange(0, 1).Draw(t, "group")
				if slices.ContainsFunc(clients, func(c *client) bool { return c.peer == p }) {
					t.Skip()
				}
				c := &client{t: t, peer: p, table: map[wire.Prefix]string{}}
				o := MemberOptions{Families: [wire.Families]bool{true, true}, HoldEOR: rapid.Bool().Draw(t, "hold"), NoEOR: rapid.Bool().Draw(t, "none"), Demarcate: rapid.Bool().Draw(t, "demarcate")}
				o.Wake = func() { c.woken = true }
				c.member = groups[i].Join(p, o)
				clients, in[c] = append(clients, c), i
			},
			"leave": func(t *rapid.T) {
				c := any(t)
				c.member.Leave()
				delete(in, c)
				clients = slices.DeleteFunc(clients, func(o *client) bool { return o == c })
			},
			"move": func(t *rapid.T) {
				c := any(t)
				in[c] = 1 - in[c]
				c.member, c.behind = groups[in[c]].Move(c.member), true
			},
			"refresh": func(t *rapid.T) {
				c := any(t)
				f := wire.Family(rapid.IntRange(0, 1).Draw(t, "family"))
				c.behind = true
				c.member.Refresh(f)
			},
			"eor": func(t *rapid.T) { any(t).member.AllowEOR() },
			"read": func(t *rapid.T) {
				c := any(t)
				limit := rapid.SampledFrom([]int{1, 60, 1 << 16}).Draw(t, "limit")
				if c.woken {
					c.member.group.Flush() // which may have it fall behind, and Next does first of all
					c.behind = c.behind || c.member.phase == behind || c.member.lost
					c.woken = c.read(limit)
				}
			},
			"": func(t *rapid.T) {
				for i, g := range groups {
					if g.log.size > g.log.limit+1000 {
						t.Fatalf("the log of group %d has %d bytes", i, g.log.size)
					}
					for _, p := range []rib.Peer{0, 3, 9} {
						for f := range wire.Family(wire.Families) {
							n := 0
							for prefix, a := range want[i] {
								if prefix.Family == f && a.source != p {
									n++
								}
							}
							if got := g.Advertised(p, f); got != n {
								t.Fatalf("peer %d is advertised %d of %s, counted %d", p, n, f, got)
							}
						}
					}
				}
			},
		})
		for _, c := range clients {
			c.member.AllowEOR()
			c.member.group.Flush()
			for n := 0; c.woken; n++ {
				c.behind = c.behind || c.member.phase == behind || c.member.lost
				if c.woken = c.read(1 << 12); n > 1000 {
					t.Fatalf("%d is sent messages without end", c.peer)
				}
			}
			expect := map[wire.Prefix]string{}
			for p, a := range want[in[c]] {
				if a.source != c.peer {
					expect[p] = textOf(a.med)
				}
			}
			if !maps.Equal(c.table, expect) {
				t.Fatalf("%d has %v, where %v is advertised", c.peer, c.table, expect)
			}
			ends := 1
			if c.member.NoEOR {
				ends = 0
			}
			if c.eor != [wire.Families]int{ends, ends} || c.member.refresh != [wire.Families]bool{} {
				t.Fatalf("%d was sent %v ends of its table; left to refresh: %v", c.peer, c.eor, c.member.refresh)
			}
			seen := map[wire.Prefix]bool{}
			for k := (Cursor{}); !groups[in[c]].Scan(&k, 1, c.peer, func(p wire.Prefix, h attrs.Handle) { seen[p] = groups[in[c]].Lookup(c.peer, p) == h }); {
			}
			if len(seen) != len(expect) || slices.Contains(slices.Collect(maps.Values(seen)), false) {
				t.Fatalf("listed %v, where %v is advertised", seen, expect)
			}
		}
		distinct := map[int]bool{}
		for i, g := range groups {
			g.Flush()
			if n := g.entries.Len(wire.IPv4) + g.entries.Len(wire.IPv6); n != len(want[i]) || g.log.size != 0 {
				t.Fatalf("%d entries, %d bytes of log, where %d are advertised and all was read", n, g.log.size, len(want[i]))
			}
			for _, a := range want[i] {
				distinct[a.med] = true
			}
		}
		if sets.Len() != len(distinct) {
			t.Fatalf("%d sets, %d are in use", sets.Len(), len(distinct))
		}
		for _, c := range clients {
			c.member.Leave()
		}
		for _, g := range groups {
			g.Close()
		}
		if sets.Len() != 0 {
			t.Fatalf("%d sets are left", sets.Len())
		}
	})
}

// TestSource is each change of where a prefix comes from, for a member that it comes
// from, came from, and for one that has nothing to do with it.
func TestSource(t *testing.T) {
	t.Parallel()
	const x, y, other = 0, 1, 2
	for _, from := range []rib.Peer{None - 1, None, x, y} { // None-1: it is not advertised
		for _, to := range []rib.Peer{None - 1, None, x, y} {
			for _, med := range []int{1, 2} {
				sets := attrs.NewTable()
				g := New(sets, Options{})
				p := universe[0]
				var clients []*client
				for _, peer := range []rib.Peer{x, y, other} {
					c := &client{t: t, peer: peer, table: map[wire.Prefix]string{}}
					c.member = g.Join(peer, MemberOptions{Families: [wire.Families]bool{true, true}, Wake: func() {}})
					clients = append(clients, c)
				}
				if from != None-1 {
					g.Update(p, set(sets, 1), from)
				}
				for _, c := range clients {
					for c.read(1 << 16) {
					}
					c.strict = true
				}
				had := []string{}
				for _, c := range clients {
					had = append(had, c.table[p])
				}
				if to == None-1 {
					g.Update(p, 0, None)
				} else {
					g.Update(p, set(sets, med), to)
				}
				for i, c := range clients {
					n := 0
					for c.read(1 << 16) { // which checks that nothing is said twice
						n++
					}
					want := textOf(med)
					if to == None-1 || to == c.peer {
						want = ""
					}
					if got := c.table[p]; got != want {
						t.Errorf("%d → %d: %d has %q", from, to, c.peer, got)
					}
					if (n > 0) != (had[i] != want) {
						t.Errorf("%d → %d with %d: %d had %s and is sent %d times", from, to, med, c.peer, had[i], n)
					}
				}
			}
		}
	}
}

// TestSourceWhileBehind is each change of where a prefix comes from, of two one after the
// other: one while a member that has the prefix is behind, and one while it walks the table and
// has not come to the prefix yet. It ends with what it is advertised.
func TestSourceWhileBehind(t *testing.T) {
	t.Parallel()
	const self, withdrawn = 0, None - 1
	first, p := universe[0], universe[1] // a walk comes to first before p
	for _, then := range []rib.Peer{withdrawn, None, self} {
		for _, last := range []rib.Peer{withdrawn, None, self} {
			for _, meds := range [][2]int{{1, 1}, {1, 2}, {2, 1}, {2, 2}} {
				t.Run(fmt.Sprintf("%d %d %v", then, last, meds), func(t *testing.T) {
					t.Parallel()
					sets := attrs.NewTable()
					g := New(sets, Options{})
					update := func(p wire.Prefix, source rib.Peer, med int) {
						if source == withdrawn {
							g.Update(p, 0, None)
						} else {
							g.Update(p, set(sets, med), source)
						}
					}
					c := &client{t: t, peer: self, table: map[wire.Prefix]string{}, behind: true}
					c.member = g.Join(self, MemberOptions{Families: [wire.Families]bool{true, true}, Wake: func() {}})
					update(first, None, 1)
					update(p, None, 1)
					for c.read(1 << 16) {
					}
					g.log.limit = 0 // what comes now is more than the log keeps
					update(first, None, 2)
					update(p, then, meds[0])
					g.Flush()
					if c.member.phase != behind {
						t.Fatal("it is not behind")
					}
					g.log.limit = logLimit
					c.read(1)
					if c.member.phase != scanning || c.member.family != first.Family {
						t.Fatal("the walk has come to the prefix")
					}
					update(p, last, meds[1])
					for c.read(1 << 16) {
					}
					want := ""
					if last == None {
						want = textOf(meds[1])
					}
					if got := c.table[p]; got != want {
						t.Errorf("it has %q, where %q is advertised", got, want)
					}
				})
			}
		}
	}
}

// TestNeverReads: a member that reads nothing costs no more than the log, and another
// is not held up.
func TestNeverReads(t *testing.T) { // not parallel: it measures the heap
	const n, limit = 5_000, 256 << 10
	sets := attrs.NewTable()
	g := New(sets, Options{})
	g.log.limit = limit
	families := [wire.Families]bool{true, true}
	slow := &client{t: t, peer: 0, table: map[wire.Prefix]string{}, behind: true}
	slow.member = g.Join(0, MemberOptions{Families: families, Wake: func() {}})
	quick := &client{t: t, peer: 1, table: map[wire.Prefix]string{}, behind: true}
	quick.member = g.Join(1, MemberOptions{Families: families, Wake: func() {}})
	for slow.read(1 << 16) {
	}
	before := heap()
	prefix := func(i int) wire.Prefix { return wire.Prefix{Hi: uint64(i) << 38, Bits: 26} }
	most := uint64(0)
	for round := range 40 {
		for i := range n {
			g.Update(prefix(i), set(sets, 1+round%2), 5)
			if i%1000 == 999 {
				g.Flush()
			}
		}
		for quick.read(1 << 16) {
		}
		if round%10 == 9 {
			most = max(most, heap()-before)
		}
	}
	if slow.member.phase != behind {
		t.Error("the member that reads nothing is not behind: the test is too short")
	}
	t.Logf("at most %d KiB", most>>10)
	if most > limit+2<<20 {
		t.Errorf("a member that reads nothing costs %d KiB", most>>10)
	}
	for slow.read(1 << 16) {
	}
	if len(slow.table) != n || len(quick.table) != n || slow.table[prefix(3)] != textOf(2) {
		t.Errorf("the members have %d and %d prefixes of %d", len(slow.table), len(quick.table), n)
	}
	runtime.KeepAlive(g)
}

// TestMemory: what a prefix costs that is advertised, and that a message of many is
// packed without an allocation for each.
func TestMemory(t *testing.T) { // not parallel: it measures the heap
	const n = 500_000
	sets := attrs.NewTable()
	h := set(sets, 1)
	before := heap()
	g := New(sets, Options{})
	for i := range n {
		sets.Retain(h)
		g.Update(wire.FromNetip(netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 16), byte(i >> 8), byte(i), 0}), 32)), h, 1)
		if i%700 == 699 {
			g.Flush()
		}
	}
	g.Flush()
	per := float64(heap()-before) / n
	t.Logf("%.1f bytes a prefix", per)
	if per > 40 {
		t.Errorf("%.1f bytes a prefix", per)
	}
	m := g.Join(2, MemberOptions{Families: [wire.Families]bool{true, true}, Wake: func() {}})
	for len(m.Next(1<<16)) > 0 {
	}
	med := 0
	allocs := testing.AllocsPerRun(100, func() {
		med = 1 + med%2
		for i := range 700 {
			g.Update(wire.Prefix{Hi: uint64(i) << 40, Bits: 24}, set(sets, med), 1)
		}
		g.Flush()
		m.Next(1 << 16)
	})
	t.Logf("%.2f allocations a prefix", allocs/700)
	if allocs/700 > 1.1*3 { // those of the test's own set
		t.Errorf("%.2f allocations a prefix", allocs/700)
	}
	runtime.KeepAlive(g)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
