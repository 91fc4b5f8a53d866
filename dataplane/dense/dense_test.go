package dense_test

import (
	"maps"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane/dense"
)

type key struct{ a, b uint16 }

type record struct {
	key   key
	value uint64
}

func newTable() *dense.Table[key, record] {
	return dense.New(func(r *record) *key { return &r.key })
}

// TestTable holds a table to a map: whatever comes and goes, each key has one record,
// which stays where it is and keeps what it was given.
func TestTable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		table, want := newTable(), map[key]uint64{}
		at := map[key]*record{}
		some := rapid.IntRange(1, 600).Draw(t, "keys") // few are found again, many make it grow
		for i := range rapid.IntRange(1, 3000).Draw(t, "steps") {
			k := key{uint16(rapid.IntRange(0, some).Draw(t, "key")), 7}
			r := table.Find(k)
			if v, ok := want[k]; ok != (r != 0) || ok && (table.At(r) != at[k] || *at[k] != record{k, v}) {
				t.Fatalf("%v is record %d; want %v, at %p", k, r, want, at[k])
			}
			if r != 0 && rapid.IntRange(0, 2).Draw(t, "drop") == 0 {
				table.Drop(r)
				delete(want, k)
				delete(at, k)
				continue
			}
			made, fresh := table.Make(k)
			if fresh != (r == 0) || !fresh && made != r || fresh && *table.At(made) != (record{key: k}) {
				t.Fatalf("%v is made as %d, fresh %t, and was found as %d: %v", k, made, fresh, r, *table.At(made))
			}
			at[k] = table.At(made)
			at[k].value = uint64(i + 1)
			want[k] = uint64(i + 1)
		}
		got := map[key]uint64{}
		for r, rec := range table.All() {
			got[rec.key] = rec.value
			if table.Find(rec.key) != r {
				t.Fatalf("%v is at %d and is found at %d", rec.key, r, table.Find(rec.key))
			}
		}
		if !maps.Equal(got, want) || table.Len() != len(want) {
			t.Fatalf("records %v, %d counted; want %v", got, table.Len(), want)
		}
		for r := range table.All() {
			table.Drop(r)
		}
		if table.Len() != 0 || len(slices.Collect(maps.Keys(maps.Collect(table.All())))) != 0 {
			t.Fatal("records are left")
		}
	})
}

// TestTableSize: a record takes its size and a few bytes, and so does a value that is
// numbered, in a handful of objects.
func TestTableSize(t *testing.T) {
	const n = 200_000
	heap := func() (bytes, objects uint64) {
		runtime.GC()
		runtime.GC() // what the first one made collectable
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, m.HeapObjects
	}
	bytes, objects := heap()
	table := newTable()
	for i := range n {
		table.Make(key{uint16(i), uint16(i >> 16)})
	}
	nowBytes, nowObjects := heap()
	if each := float64(nowBytes-bytes) / n; each > 16+14 || nowObjects-objects > n/100 {
		t.Errorf("%.1f bytes a record of 16 in %d objects", each, nowObjects-objects)
	}
	runtime.KeepAlive(table)
	// A value has besides how many users it has, a place in the index that may be half
	// empty, and the list's room to grow.
	bytes, objects = heap()
	numbers := dense.NewNumbers[[48]byte]()
	for i := range n {
		numbers.Take([48]byte{byte(i), byte(i >> 8), byte(i >> 16), 1})
	}
	nowBytes, nowObjects = heap()
	if each := float64(nowBytes-bytes) / n; each > 56*1.25+11 || nowObjects-objects > n/100 {
		t.Errorf("%.1f bytes a value of 48 in %d objects", each, nowObjects-objects)
	}
	runtime.KeepAlive(numbers)
}

// TestNumbers: a value has one number while it has users, and one that nobody has any
// more is another's.
func TestNumbers(t *testing.T) {
	t.Parallel()
	n := dense.NewNumbers[string]()
	a, first := n.Take("a")
	again, second := n.Take("a")
	b, _ := n.Take("b")
	if a == 0 || a != again || !first || second || b == a || n.Value(a) != "a" || n.Users(a) != 2 {
		t.Fatalf("a is %d and %d (first %t, %t), b %d", a, again, first, second, b)
	}
	if n.Leave(a) || n.Value(a) != "a" || !n.Leave(a) || n.Value(a) != "" {
		t.Error("a has two users")
	}
	if c, first := n.Take("c"); c != a || !first || n.Value(c) != "c" {
		t.Errorf("c is %d, want the number %d, which is free", c, a)
	}
	if d, _ := n.Take("a"); slices.Contains([]uint32{0, a, b}, d) || n.Len() != d+1 {
		t.Errorf("a is %d again, which others have", d)
	}
	if zero, first := n.Take(""); zero != 0 || first || n.Leave(zero) || n.Value(0) != "" {
		t.Errorf("the zero value is %d", zero)
	}
}

// TestNumbersModel holds numbers to a map of counts: whatever comes and goes, a value that
// has users has one number, which no other has.
func TestNumbersModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		numbers, want := dense.NewNumbers[key](), map[key]int{}
		ids := map[key]uint32{}
		some := rapid.IntRange(1, 3000).Draw(t, "values")
		for range rapid.IntRange(1, 6000).Draw(t, "steps") {
			k := key{uint16(rapid.IntRange(1, some).Draw(t, "value")), 7}
			if id, ok := numbers.Find(k); ok != (want[k] > 0) || ok && (id != ids[k] || numbers.Users(id) != want[k] || numbers.Value(id) != k) {
				t.Fatalf("%v has %d, %t; want %d with %d users", k, id, ok, ids[k], want[k])
			}
			if want[k] > 0 && rapid.IntRange(0, 2).Draw(t, "leave") > 0 {
				if want[k]--; numbers.Leave(ids[k]) != (want[k] == 0) {
					t.Fatalf("%v has %d users left", k, want[k])
				}
				continue
			}
			id, first := numbers.Take(k)
			if first != (want[k] == 0) || !first && id != ids[k] {
				t.Fatalf("%v gets %d, first %t; had %d with %d users", k, id, first, ids[k], want[k])
			}
			want[k]++
			ids[k] = id
		}
		taken := map[uint32]key{}
		for k, n := range want {
			if other, ok := taken[ids[k]]; ok && n > 0 {
				t.Fatalf("%v and %v have the number %d", k, other, ids[k])
			}
			if n > 0 {
				taken[ids[k]] = k
			}
			for range n {
				numbers.Leave(ids[k])
			}
			if _, ok := numbers.Find(k); ok {
				t.Fatalf("%v is found without users", k)
			}
		}
	})
}
