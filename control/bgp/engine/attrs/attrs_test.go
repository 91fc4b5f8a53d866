package attrs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

func attr(flags, typ byte, val ...byte) []byte {
	return append([]byte{flags, typ, byte(len(val))}, val...)
}

func join(b ...[]byte) []byte { return bytes.Join(b, nil) }

// sample is a right value of each attribute that is known, with its flags.
type sample struct {
	typ, flags byte
	value      []byte
}

func samples(as4 bool) []sample {
	path, agg := []byte{2, 1, 0, 0, 0xfd, 0xe7}, []byte{0, 0, 0xfd, 0xe7, 10, 0, 0, 1}
	if !as4 {
		path, agg = []byte{2, 1, 0xfd, 0xe7}, []byte{0xfd, 0xe7, 10, 0, 0, 1}
	}
	return []sample{
		{origin, 0x40, []byte{0}},
		{asPath, 0x40, path},
		{nextHop, 0x40, []byte{10, 77, 0, 1}},
		{med, 0x80, []byte{0, 0, 0, 1}},
		{localPref, 0x40, []byte{0, 0, 0, 100}},
		{atomicAggregate, 0x40, nil},
		{aggregator, 0xc0, agg},
		{communities, 0xc0, []byte{0xfd, 0xe7, 0, 1}},
		{originatorID, 0x80, []byte{10, 0, 0, 1}},
		{clusterList, 0x80, []byte{10, 0, 0, 1}},
		{extended, 0xc0, []byte{0, 2, 0xfd, 0xe7, 0, 0, 0, 1}},
		{as4Path, 0xc0, []byte{2, 1, 0, 0, 0xfd, 0xe7}},
		{as4Aggregator, 0xc0, []byte{0, 0, 0xfd, 0xe7, 10, 0, 0, 1}},
		{extended6, 0xc0, append([]byte{0, 2, 0xfd}, make([]byte, 17)...)},
		{largeCommunities, 0xc0, []byte{0, 0, 0xfd, 0xe7, 0, 0, 0, 1, 0, 0, 0, 2}},
		{onlyToCustomer, 0xc0, []byte{0, 0, 0xfd, 0xe7}},
		{200, 0xc0, []byte{1, 2, 3}}, // not known, passed on
		{201, 0x80, []byte{1, 2, 3}}, // not known, not passed on
		{202, 0x40, []byte{1, 2, 3}}, // not known, and says that it must be
	}
}

// changes are what is done to an attribute, in the order of the verdicts below.
var changes = []string{"right", "optional flipped", "transitive flipped", "partial", "short", "long", "twice", "truncated", "empty"}

// verdicts are one letter for each change: accepted, discarded, withdrawn, reset;
// a dash where the change cannot be made.
func verdicts(typ byte, external, as4 bool) string {
	switch typ {
	case origin, nextHop, med, communities, extended, extended6, largeCommunities, onlyToCustomer:
		return "AWWAWWDWW"
	case asPath:
		return "AWWAWWDWA"
	case atomicAggregate:
		return "AWWA-DDWA"
	case aggregator:
		return "AWWADDDWD"
	case localPref, originatorID, clusterList:
		if external {
			return "DWWDDDDWD"
		}
		return "AWWAWWDWW"
	case as4Path, as4Aggregator:
		if as4 {
			return "DWWDDDDWD"
		}
		return "AWWADDDWD"
	case 200:
		return "ARAAAADWA"
	case 201:
		return "ARAAAAAWA"
	default:
		return "RARRRRRWR"
	}
}

func change(how string, s sample) []byte {
	switch how {
	case "optional flipped":
		s.flags ^= optional
	case "transitive flipped":
		s.flags ^= transitive
	case "partial":
		s.flags |= partial
	case "short":
		if len(s.value) == 0 {
			return nil
		}
		s.value = s.value[:len(s.value)-1]
	case "long":
		s.value = append(slices.Clone(s.value), 1)
	case "empty":
		s.value = nil
	}
	a := attr(s.flags, s.typ, s.value...)
	switch how {
	case "twice":
		return append(a, a...)
	case "truncated":
		a[2] += 5
	}
	return a
}

// TestRFC7606 is each attribute in each way in which it may be wrong, from both
// kinds of peer, in messages that announce prefixes and in those that do not.
func TestRFC7606(t *testing.T) {
	t.Parallel()
	letters := map[byte]Verdict{'A': Accept, 'D': Discard, 'W': Withdraw, 'R': Reset}
	n := 0
	for bits := range 8 {
		c := Context{External: bits&1 != 0, AS4: bits&2 != 0, Reachable: bits&4 != 0}
		for _, s := range samples(c.AS4) {
			// Those that a message must have, before the one in question, which may end it.
			var before []byte
			for _, m := range samples(c.AS4)[:3] {
				if m.typ != s.typ {
					before = append(before, attr(m.flags, m.typ, m.value...)...)
				}
			}
			for i, how := range changes {
				letter := verdicts(s.typ, c.External, c.AS4)[i]
				if letter == '-' {
					continue
				}
				n++
				want := letters[letter]
				if want == Withdraw && !c.Reachable {
					want = Reset
				}
				h, got, err := NewTable().Intern(c, append(slices.Clone(before), change(how, s)...), nil)
				if got.Verdict != want || want > Accept && got.Type != s.typ {
					t.Errorf("%+v, attribute %d %s: %s, not %s", c, s.typ, how, got, want)
				}
				var e *wire.Error
				if (err != nil) != (want == Reset) || err != nil && (!errors.As(err, &e) || e.Code != wire.CodeUpdate || e.Subcode == 0) {
					t.Errorf("%+v, attribute %d %s: error %v", c, s.typ, how, err)
				}
				if (h != 0) != (c.Reachable && want <= Discard) {
					t.Errorf("%+v, attribute %d %s: handle %d", c, s.typ, how, h)
				}
			}
		}
	}
	if n != 8*(19*len(changes)-1) {
		t.Errorf("%d cases", n)
	}
}

// TestValues are faults that no length shows, and what is right all the same.
func TestValues(t *testing.T) {
	t.Parallel()
	o, p, h := attr(0x40, 1, 0), attr(0x40, 2, 2, 1, 0, 0, 0xfd, 0xe7), attr(0x40, 3, 10, 77, 0, 1)
	ibgp, ebgp := Context{AS4: true, Reachable: true}, Context{External: true, AS4: true, Reachable: true}
	hop6 := append([]byte{0xfd}, make([]byte, 15)...)
	path := func(v ...byte) []byte { return join(o, attr(0x40, 2, v...), h) }
	for _, c := range []struct {
		name  string
		c     Context
		attrs []byte
		hop   []byte
		want  Result
	}{
		{"origin 3", ibgp, join(attr(0x40, 1, 3), p, h), nil, Result{Withdraw, origin, WrongValue}},
		{"segment of type 9", ibgp, path(9, 1, 0, 0, 0, 1), nil, Result{Withdraw, asPath, WrongValue}},
		{"segment of nothing", ibgp, path(2, 0), nil, Result{Withdraw, asPath, WrongValue}},
		{"segment beyond the end", ibgp, path(2, 2, 0, 0, 0, 1), nil, Result{Withdraw, asPath, WrongValue}},
		{"one byte of a segment", ibgp, path(2, 1, 0, 0, 0, 1, 2), nil, Result{Withdraw, asPath, WrongValue}},
		{"AS 0", ibgp, path(2, 1, 0, 0, 0, 0), nil, Result{Withdraw, asPath, WrongValue}},
		{"confederation from outside", ebgp, path(3, 1, 0, 0, 0, 1), nil, Result{Withdraw, asPath, WrongValue}},
		{"confederation from inside", ibgp, path(3, 1, 0, 0, 0, 1), nil, Result{}},
		{"AS set", ebgp, path(1, 2, 0, 0, 0, 1, 0, 0, 0, 2), nil, Result{}},
		{"no origin", ibgp, join(p, h), nil, Result{Withdraw, origin, Missing}},
		{"no path", ibgp, join(o, h), nil, Result{Withdraw, asPath, Missing}},
		{"no next hop", ibgp, join(o, p), nil, Result{Withdraw, nextHop, Missing}},
		{"no attributes", ibgp, nil, nil, Result{Withdraw, origin, Missing}},
		{"next hop in MP_REACH_NLRI", ibgp, join(o, p), hop6, Result{}},
		{"both next hops", ibgp, join(o, p, attr(0x40, 3, 1)), hop6, Result{}},
		{"next hop 0.0.0.0", ibgp, join(o, p, attr(0x40, 3, 0, 0, 0, 0)), nil, Result{Withdraw, nextHop, WrongValue}},
		{"next hop 127.0.0.1", ibgp, join(o, p, attr(0x40, 3, 127, 0, 0, 1)), nil, Result{Withdraw, nextHop, WrongValue}},
		{"next hop 224.0.0.1", ibgp, join(o, p, attr(0x40, 3, 224, 0, 0, 1)), nil, Result{Withdraw, nextHop, WrongValue}},
		{"next hop 255.255.255.255", ibgp, join(o, p, attr(0x40, 3, 255, 255, 255, 255)), nil, Result{Withdraw, nextHop, WrongValue}},
		{"next hop ::", ibgp, join(o, p), make([]byte, 16), Result{Withdraw, nextHop, WrongValue}},
		{"next hop ff02::", ibgp, join(o, p), append([]byte{0xff, 2}, make([]byte, 14)...), Result{Withdraw, nextHop, WrongValue}},
		{"next hop fe80::", ibgp, join(o, p), append([]byte{0xfe, 0x80}, make([]byte, 14)...), Result{}},
		{"next hop mapped", ibgp, join(o, p), []byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}, Result{Withdraw, nextHop, WrongValue}},
		{"both, the global one wrong", ibgp, join(o, p), append(make([]byte, 16), hop6...), Result{Withdraw, nextHop, WrongValue}},
		{"no LOCAL_PREF", ibgp, join(o, p, h), nil, Result{}},
		{"AGGREGATOR with AS 0", ibgp, join(o, p, h, attr(0xc0, 7, 0, 0, 0, 0, 10, 0, 0, 1)), nil, Result{Discard, aggregator, WrongValue}},
		{"unknown extended community", ibgp, join(o, p, h, attr(0xc0, 16, 0x7f, 9, 9, 9, 9, 9, 9, 9)), nil, Result{}},
		{"length in two bytes", ibgp, join(o, p, h, []byte{0x90, 4, 0, 4, 0, 0, 0, 1}), nil, Result{}},
		{"one byte left", ibgp, join(o, p, h, []byte{0x80}), nil, Result{Withdraw, 0, Truncated}},
		{"the severest counts", ibgp, join(o, p, h, o, attr(0x80, 4, 1), attr(0x40, 99)), nil, Result{Reset, 99, Unrecognized}},
		{"of equal ones the first", ibgp, join(o, p, h, attr(0x80, 4, 1), attr(0xc0, 8, 1)), nil, Result{Withdraw, med, WrongLength}},
	} {
		if _, got, _ := NewTable().Intern(c.c, c.attrs, c.hop); got != c.want {
			t.Errorf("%s: %s, not %s", c.name, got, c.want)
		}
	}
}

func TestSummary(t *testing.T) {
	t.Parallel()
	tab := NewTable()
	hop := append([]byte{0xfd}, make([]byte, 31)...)
	h, r, err := tab.Intern(Context{AS4: true, Reachable: true}, join(
		attr(0x40, 1, 2),
		attr(0x40, 2, 3, 1, 0, 0, 0, 9, 2, 2, 0, 0, 0xfd, 0xe7, 0, 0, 0, 5, 1, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3),
		attr(0x80, 4, 0, 0, 0, 7), attr(0x40, 5, 0, 0, 0, 200), attr(0x80, 9, 10, 0, 0, 9), attr(0x80, 10, 1, 1, 1, 1, 2, 2, 2, 2),
		attr(0xc0, 8, 0xff, 0xff, 0xff, 1, 0xff, 0xff, 0, 6, 0xff, 0xff, 0, 0, 1, 2, 3, 4),
	), hop)
	if err != nil || r.Verdict != Accept {
		t.Fatal(r, err)
	}
	want := Summary{
		LocalPref: 200, MED: 7, FirstAS: 0, Originator: 0x0a000009, NextHop: [16]byte{0xfd}, PathLen: 3, ClusterLen: 2, Origin: 2,
		Flags: HasMED | HasLocalPref | HasOriginator | NoExport | LLGRStale | GracefulShutdown,
	}
	if got := *tab.Summary(h); got != want {
		t.Errorf("%+v, not %+v", got, want)
	}
	if got, _ := tab.Canonical(h); !bytes.Equal(got, hop) {
		t.Errorf("next hop %x", got)
	}
}

// TestTwoOctets: what comes without four-octet AS numbers is kept with them, merged as
// RFC 6793 section 4.2.3 has it.
func TestTwoOctets(t *testing.T) {
	t.Parallel()
	const trans1, trans2 = 0x5b, 0xa0
	o, h := attr(0x40, 1, 0), attr(0x40, 3, 10, 77, 0, 1)
	agg := attr(0xc0, 7, trans1, trans2, 10, 0, 0, 1)
	agg4 := attr(0xc0, 18, 0, 1, 0, 0, 10, 0, 0, 2)
	path4 := attr(0xc0, 17, 2, 2, 0, 1, 0, 0, 0, 1, 0, 1)
	for _, c := range []struct {
		name       string
		attrs      []byte
		path       string
		aggregator uint32
		first      uint32
	}{
		{"alone", join(o, attr(0x40, 2, 2, 2, 0, 7, 0, 8), h), "7 8", 0, 7},
		{"with AS4_PATH", join(o, attr(0x40, 2, 2, 3, 0, 7, trans1, trans2, trans1, trans2), h, path4), "7 65536 65537", 0, 7},
		{"AS4_PATH is all", join(o, attr(0x40, 2, 2, 2, trans1, trans2, trans1, trans2), h, path4), "65536 65537", 0, 65536},
		{"AS4_PATH is longer", join(o, attr(0x40, 2, 2, 1, trans1, trans2), h, path4), "23456", 0, 23456},
		{"a set before", join(o, attr(0x40, 2, 1, 2, 0, 7, 0, 8, 2, 2, trans1, trans2, trans1, trans2), h, path4), "{7,8} 65536 65537", 0, 0},
		{"a confederation in AS4_PATH", join(o, attr(0x40, 2, 2, 2, 0, 7, trans1, trans2), h, attr(0xc0, 17, 3, 1, 0, 0, 0, 9, 2, 1, 0, 1, 0, 0)), "7 65536", 0, 7},
		{"AS4_PATH is malformed", join(o, attr(0x40, 2, 2, 2, 0, 7, trans1, trans2), h, attr(0xc0, 17, 9, 1, 0, 0, 0, 9)), "7 23456", 0, 7},
		{"with AS4_AGGREGATOR", join(o, attr(0x40, 2, 2, 2, trans1, trans2, trans1, trans2), h, agg, path4, agg4), "65536 65537", 65536, 65536},
		{"AGGREGATOR behind it", join(o, attr(0x40, 2, 2, 2, trans1, trans2, trans1, trans2), h, attr(0xc0, 7, 0, 9, 10, 0, 0, 1), path4, agg4), "23456 23456", 9, 23456},
		{"AGGREGATOR without AS4_AGGREGATOR", join(o, attr(0x40, 2, 2, 2, trans1, trans2, trans1, trans2), h, attr(0xc0, 7, 0, 9, 10, 0, 0, 1), path4), "65536 65537", 9, 65536},
	} {
		tab := NewTable()
		handle, r, err := tab.Intern(Context{External: true, Reachable: true}, c.attrs, nil)
		if err != nil || handle == 0 {
			t.Fatalf("%s: %s, %v", c.name, r, err)
		}
		_, canonical := tab.Canonical(handle)
		var path string
		var as uint32
		for list := canonical; len(list) > 0; {
			_, typ, value, rest, ok := wire.Attribute(list)
			if !ok {
				t.Fatalf("%s: canonical form %x", c.name, canonical)
			}
			switch typ {
			case asPath:
				a, err := decode(asPath, value, false)
				if err != nil {
					t.Fatal(err)
				}
				path = packet.AsPathString(a.(*packet.PathAttributeAsPath))
			case aggregator:
				as = binary.BigEndian.Uint32(value)
			case nextHop, as4Path, as4Aggregator:
				t.Errorf("%s: attribute %d in the canonical form", c.name, typ)
			}
			list = rest
		}
		if path != c.path || as != c.aggregator || tab.Summary(handle).FirstAS != c.first {
			t.Errorf("%s: path %q, aggregator %d, first AS %d", c.name, path, as, tab.Summary(handle).FirstAS)
		}
	}
}

// TestCanonical: what is discarded is not kept, what is not known is Partial, and flags
// that mean nothing are not passed on.
func TestCanonical(t *testing.T) {
	t.Parallel()
	o, p, h := attr(0x40, 1, 0), attr(0x40, 2), attr(0x40, 3, 10, 77, 0, 1)
	lc := []byte{0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3}
	tab := NewTable()
	handle, _, _ := tab.Intern(Context{AS4: true, External: true, Reachable: true},
		join(o, o, p, h, attr(0x40, 5, 0, 0, 0, 1), attr(0xc0, 32, append(slices.Clone(lc), lc...)...), attr(0x80, 201, 1), attr(0xc0, 200, 1)), nil)
	hop, got := tab.Canonical(handle)
	if want := join(o, p, attr(0xc0, 32, lc...), attr(0xe0, 200, 1)); !bytes.Equal(got, want) || !bytes.Equal(hop, h[3:]) {
		t.Errorf("%x by %x, not %x", got, hop, want)
	}
	flagged := join(attr(0x6f, 1, 0), attr(0x61, 2), attr(0xa8, 4, 0, 0, 0, 1), attr(0xe1, 8, 1, 2, 3, 4), attr(0xc2, 200, 1))
	handle, r, _ := tab.Intern(Context{AS4: true, Reachable: true}, join(flagged, h), nil)
	if _, got := tab.Canonical(handle); r.Verdict != Accept || !bytes.Equal(got, join(o, p, attr(0x80, 4, 0, 0, 0, 1), attr(0xe0, 8, 1, 2, 3, 4), attr(0xe0, 200, 1))) {
		t.Errorf("flags that mean nothing: %s, %x", r, got)
	}
	again, _, _ := tab.Intern(Context{AS4: true, Reachable: true}, join(o, p, h), nil)
	if _, got := tab.Canonical(again); !bytes.Equal(got, join(o, p)) {
		t.Errorf("%x", got)
	}
}

// TestTable is the table against a map of counted sets, with few of them, so that
// handles are used again, and small chunks, so that they are emptied.
func TestTable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := newTable(256)
		c := Context{AS4: true, Reachable: true}
		set := func(n int) []byte {
			return join(attr(0x40, 1, byte(n%3)), attr(0x40, 2), attr(0x40, 3, 10, 0, 0, byte(1+n)), attr(0xc0, 8, bytes.Repeat([]byte{byte(n), 0, 0, 1}, 1+n%9)...))
		}
		refs, handles := map[int]int{}, map[int]Handle{}
		t.Repeat(map[string]func(*rapid.T){
			"intern": func(t *rapid.T) {
				n := rapid.IntRange(0, 99).Draw(t, "set")
				h, r, err := tab.Intern(c, set(n), nil)
				if err != nil || r.Verdict != Accept || refs[n] > 0 && h != handles[n] {
					t.Fatalf("set %d is %d, was %d: %s, %v", n, h, handles[n], r, err)
				}
				refs[n]++
				handles[n] = h
			},
			"retain": func(t *rapid.T) {
				if len(refs) == 0 {
					t.Skip()
				}
				n := rapid.SampledFrom(slices.Sorted(maps.Keys(refs))).Draw(t, "set")
				tab.Retain(handles[n])
				refs[n]++
			},
			"release": func(t *rapid.T) {
				if len(refs) == 0 {
					t.Skip()
				}
				n := rapid.SampledFrom(slices.Sorted(maps.Keys(refs))).Draw(t, "set")
				tab.Release(handles[n])
				if refs[n]--; refs[n] == 0 {
					delete(refs, n)
				}
			},
			"": func(t *rapid.T) {
				seen := map[Handle]bool{}
				size := 0
				for n := range refs {
					h := handles[n]
					if seen[h] {
						t.Fatalf("handle %d stands for two sets", h)
					}
					seen[h] = true
					want := set(n)
					hop, got := tab.Canonical(h)
					if !bytes.Equal(hop, []byte{10, 0, 0, byte(1 + n)}) || !bytes.Equal(got, slices.Delete(slices.Clone(want), 7, 14)) {
						t.Fatalf("set %d is %x by %x", n, got, hop)
					}
					if s := tab.Summary(h); s.Origin != uint8(n%3) {
						t.Fatalf("set %d has origin %d", n, s.Origin)
					}
					size += blockHead + 2 + len(want) - 3
				}
				held := 0
				for _, ch := range tab.chunks {
					held += cap(ch.data)
				}
				if tab.Len() != len(refs) || held > 4*size+3*tab.chunkSize {
					t.Fatalf("%d sets of %d bytes, %d in %d bytes of arena", len(refs), size, tab.Len(), held)
				}
			},
		})
	})
}

// TestMemory: a set that comes again costs no allocation, and 100,000 distinct sets
// of 54 bytes stay below 160 bytes each.
func TestMemory(t *testing.T) {
	tab := NewTable()
	c := Context{External: true, AS4: true, Reachable: true}
	set := join(attr(0x40, 1, 0), attr(0x40, 2, 2, 4, 0, 0, 0xfd, 0xe7, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3), attr(0x40, 3, 10, 0, 0, 1),
		attr(0x80, 4, 0, 0, 0, 1), attr(0xc0, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
	h, _, _ := tab.Intern(c, set, nil)
	if n := testing.AllocsPerRun(100, func() {
		if again, _, _ := tab.Intern(c, set, nil); again != h {
			t.Fatal("another handle")
		}
		tab.Release(h)
	}); n != 0 {
		t.Errorf("%v allocations for a set that is there", n)
	}
	const sets = 100_000
	before := heap()
	for i := range uint32(sets) {
		binary.BigEndian.PutUint32(set[len(set)-4:], i)
		tab.Intern(c, set, nil)
	}
	per := float64(heap()-before) / sets
	t.Logf("%d bytes each: %.0f", len(set), per)
	if tab.Len() != sets+1 || per > 160 {
		t.Errorf("%d sets of %.0f bytes", tab.Len(), per)
	}
	runtime.KeepAlive(tab)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// FuzzJudge holds the verdicts to GoBGP's, but for what is known to differ, and to
// themselves: what was accepted is accepted again, in its canonical form.
func FuzzJudge(f *testing.F) {
	for _, as4 := range []bool{true, false} {
		var all []byte
		for _, s := range samples(as4) {
			f.Add(attr(s.flags, s.typ, s.value...), true, as4)
			if s.typ < localPref || s.typ == communities || s.typ == largeCommunities {
				all = append(all, attr(s.flags, s.typ, s.value...)...)
			}
		}
		f.Add(all, false, as4)
	}
	f.Fuzz(func(t *testing.T, b []byte, external, as4 bool) {
		if len(b) > 60000 {
			return
		}
		c := Context{External: external, AS4: as4, Reachable: true}
		tab := NewTable()
		h, got, err := tab.Intern(c, b, nil)
		if (h == 0) != (got.Verdict > Discard) || (err != nil) != (got.Verdict == Reset) {
			t.Fatalf("%s with handle %d, %v", got, h, err)
		}
		if h != 0 {
			hop, out := tab.Canonical(h)
			again, r, err := tab.Intern(Context{External: external, AS4: true, Reachable: true}, out, hop)
			if err != nil || r.Verdict != Accept {
				t.Fatalf("the canonical form %x: %s, %v", out, r, err)
			}
			if _, twice := tab.Canonical(again); !bytes.Equal(out, twice) || *tab.Summary(h) != *tab.Summary(again) {
				t.Fatalf("canonical form %x, then %x", out, twice)
			}
		}
		if theirs, compared := oracle(b, c); compared && (theirs == nil) != (got.Verdict == Accept) {
			t.Errorf("%s, GoBGP: %v", got, theirs)
		}
	})
}

// oracle returns GoBGP's opinion, and whether it can be compared: it is not where
// the RFCs are known to say otherwise.
func oracle(b []byte, c Context) (err error, compared bool) {
	for list := b; len(list) > 0; {
		flags, typ, value, rest, ok := wire.Attribute(list)
		_, known := ruleOf(typ, c)
		switch {
		case !ok, !known, typ == onlyToCustomer,
			flags&(partial|unusedFlags) != 0,     // no fault (RFC 7606 section 3, RFC 4271 section 4.3)
			typ == as4Path, typ == as4Aggregator, // discarded (RFC 6793)
			typ == localPref && c.External,                         // discarded
			typ == originatorID || typ == clusterList,              // discarded, or not judged by GoBGP's
			len(value) == 0,                                        // RFC 7606 section 4
			typ == aggregator,                                      // its size depends on the session; AS 0
			typ == extended || typ == extended6,                    // only their length counts
			typ == nextHop && (len(value) != 4 || value[0] >= 224): // IPv6 is none; 240/4 and 127/8 are not host addresses
			return nil, false
		case typ == asPath:
			if _, ok := segments(value, !c.AS4); !ok { // AS 0
				return nil, false
			}
		}
		list = rest
	}
	body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(b)))
	body = append(append(body, b...), 24, 203, 0, 113)
	o := &packet.MarshallingOption{Use2ByteAS: !c.AS4, ExtendedMessage: true}
	var m packet.BGPUpdate
	if err := m.DecodeFromBytes(body, o); err != nil {
		return err, true
	}
	_, err = packet.ValidateUpdateMsg(&m, map[packet.Family]packet.BGPAddPathMode{packet.RF_IPv4_UC: 0}, c.External, false, false)
	return err, true
}

func TestResultText(t *testing.T) {
	t.Parallel()
	got := fmt.Sprint(Result{}, "; ", Result{Discard, localPref, External})
	if want := "accept; attribute discard: LOCAL_PREF comes from another AS"; got != want {
		t.Errorf("%q", got)
	}
}
