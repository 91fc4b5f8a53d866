package rib

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestPrefixTable holds the table to a map: whatever comes and goes, each prefix has
// one record, which keeps what it was given, and others are not found.
func TestPrefixTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, want := newPrefixTable(), map[netip.Prefix]uint32{}
		// Few different ones, so that they are found again, of both families, and some
		// that differ in length or family alone.
		prefix := func() netip.Prefix {
			b := byte(rapid.IntRange(0, 255).Draw(t, "byte"))
			switch bits := rapid.IntRange(0, 32).Draw(t, "bits"); rapid.IntRange(0, 3).Draw(t, "family") {
			case 0:
				return netip.PrefixFrom(netip.AddrFrom16([16]byte{b}), bits).Masked()
			case 1:
				return netip.PrefixFrom(netip.AddrFrom16([16]byte{10: 0xff, 11: 0xff, 12: b}), 96+bits) // mapped
			default:
				return netip.PrefixFrom(netip.AddrFrom4([4]byte{b}), bits).Masked()
			}
		}
		for i := range rapid.IntRange(1, 3000).Draw(t, "steps") {
			p := prefix()
			at := table.find(p)
			if v, ok := want[p]; ok != (at != 0) || ok && (table.at(at).path != v || table.at(at).prefix() != p) {
				t.Fatalf("%s: found %t with %d, want %t with %d", p, at != 0, table.at(at).path, ok, v)
			}
			if at != 0 && rapid.IntRange(0, 1).Draw(t, "drop") == 0 {
				table.drop(at) // not empty: it stays
				if table.find(p) != at {
					t.Fatalf("%s was dropped, and is not empty", p)
				}
				table.at(at).path = 0
				table.drop(at)
				delete(want, p)
				continue
			}
			table.at(table.make(p)).path = uint32(i + 1)
			want[p] = uint32(i + 1)
		}
		got := map[netip.Prefix]uint32{}
		for at, rec := range table.all() {
			got[rec.prefix()] = rec.path
			if table.find(rec.prefix()) != at {
				t.Fatalf("%s is at %d and is found at %d", rec.prefix(), at, table.find(rec.prefix()))
			}
		}
		if len(got) != len(want) || table.n != len(want) {
			t.Fatalf("%d records, %d counted; want %d", len(got), table.n, len(want))
		}
		for p, v := range want {
			if got[p] != v {
				t.Fatalf("%s has %d, want %d", p, got[p], v)
			}
		}
	})
}

// TestNumbered: a value has one number while it has users, and one that nobody has any
// more is another's.
func TestNumbered(t *testing.T) {
	t.Parallel()
	n := newNumbered[string]()
	a, first := n.take("a")
	again, second := n.take("a")
	b, _ := n.take("b")
	if a == 0 || a != again || !first || second || b == a || n.value(a) != "a" || n.value(0) != "" {
		t.Fatalf("a is %d and %d (first %t, %t), b %d", a, again, first, second, b)
	}
	if n.leave(a) || n.value(a) != "a" || !n.leave(a) || n.value(a) != "" {
		t.Error("a has two users")
	}
	if c, first := n.take("c"); c != a || !first || n.value(c) != "c" {
		t.Errorf("c is %d, want the number %d, which is free", c, a)
	}
	if d, _ := n.take("a"); slices.Contains([]uint32{0, a, b}, d) {
		t.Errorf("a is %d again, which others have", d)
	}
}
