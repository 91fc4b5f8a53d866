// Package dense keeps records by the hundred thousand: found by key, without a pointer
// each, so that to the collector a large table is a few large objects. It also numbers
// values that many records share.
package dense

import (
	"hash/maphash"
	"iter"
)

// Ref names a record of a [Table] until it is dropped; 0: none.
type Ref uint32

// chunkSize is how many records lie together: a table that grows moves none.
const chunkSize = 1 << 12

// Table has one record for each key. Its use of memory is that of the records and
// about six bytes each, where neither K nor R has pointers. It is not safe for
// concurrent use.
type Table[K comparable, R any] struct {
	key    func(*R) *K // where a record has its key
	seed   maphash.Seed
	chunks []*chunk[R]
	made   Ref // the first that was never used
	free   []Ref
	n      int

	// index finds records by hash: open addressing, linear probing. At most three
	// quarters are full, and there are a power of two. Beside a reference stands what
	// there is room for of the hash, so that hardly a record is read that is not the
	// key's: in a large table each costs a turn to the host's memory. Where a record was
	// dropped stands grave, past which a search goes on.
	index  []uint32
	graves int
}

// refBits are those of a reference in the index: 67 million records. The others are of
// the hash.
const (
	refBits = 26
	refMask = 1<<refBits - 1
	grave   = 1 << refBits // no reference
)

type chunk[R any] struct {
	records [chunkSize]R
	used    [chunkSize]bool
}

// New returns a table without records; key says where a record has its key. The hash is
// seeded: nobody who chooses keys can have them collide.
func New[K comparable, R any](key func(*R) *K) *Table[K, R] {
	return &Table[K, R]{key: key, seed: maphash.MakeSeed(), made: 1, index: make([]uint32, 16)}
}

// Len is how many records there are.
func (t *Table[K, R]) Len() int { return t.n }

// At returns the record of a reference other than 0. It stays where it is until it is
// dropped.
func (t *Table[K, R]) At(r Ref) *R { return &t.chunks[r/chunkSize].records[r%chunkSize] }

// hash returns where in an index of any size a key belongs, by its lower bits, and what
// stands there beside the reference.
func (t *Table[K, R]) hash(k K) (home, tag uint32) {
	h := maphash.Comparable(t.seed, k)
	return uint32(h), uint32(h>>32) &^ refMask
}

// place returns the record of a key; 0: there is none. It also returns where in the index
// it is, or would be, and with which tag.
func (t *Table[K, R]) place(k K) (r Ref, i int, tag uint32) {
	mask := len(t.index) - 1
	home, tag := t.hash(k)
	open := -1
	for i = int(home) & mask; ; i = (i + 1) & mask {
		switch v := t.index[i]; {
		case v == 0 && open >= 0:
			return 0, open, tag
		case v == 0:
			return 0, i, tag
		case v == grave:
			if open < 0 {
				open = i
			}
		case v&^refMask == tag:
			if r := Ref(v & refMask); *t.key(t.At(r)) == k {
				return r, i, tag
			}
		}
	}
}

// Is reports whether a reference names the record of a key now.
func (t *Table[K, R]) Is(r Ref, k K) bool {
	return r != 0 && r < t.made && t.chunks[r/chunkSize].used[r%chunkSize] && *t.key(t.At(r)) == k
}

// Find returns the record of a key; 0: there is none.
func (t *Table[K, R]) Find(k K) Ref {
	r, _, _ := t.place(k)
	return r
}

// Make returns the record of a key; a new one has its key, and is zero otherwise.
func (t *Table[K, R]) Make(k K) (r Ref, fresh bool) {
	r, i, tag := t.place(k)
	if r != 0 {
		return r, false
	}
	if t.n+t.graves >= len(t.index)/4*3 {
		size := len(t.index)
		if t.n >= size/2 {
			size *= 2
		}
		t.reindex(size)
		_, i, _ = t.place(k)
	}
	if last := len(t.free) - 1; last >= 0 {
		r, t.free = t.free[last], t.free[:last]
	} else {
		r = t.made
		if t.made++; int(r/chunkSize) == len(t.chunks) {
			t.chunks = append(t.chunks, new(chunk[R]))
		}
	}
	*t.key(t.At(r)) = k
	t.chunks[r/chunkSize].used[r%chunkSize] = true
	if t.index[i] == grave {
		t.graves--
	}
	t.index[i] = uint32(r) | tag
	t.n++
	return r, true
}

// Drop forgets a record.
func (t *Table[K, R]) Drop(r Ref) { t.Remove(*t.key(t.At(r))) }

// Remove forgets the record of a key, if there is one.
func (t *Table[K, R]) Remove(k K) {
	mask := len(t.index) - 1
	r, i, _ := t.place(k)
	if r == 0 {
		return
	}
	t.index[i] = grave
	t.graves++
	// No search has to go past graves behind which is nothing.
	for t.index[(i+1)&mask] == 0 && t.index[i] == grave {
		t.index[i] = 0
		t.graves--
		i = (i - 1) & mask
	}
	var zero R
	*t.At(r) = zero
	t.chunks[r/chunkSize].used[r%chunkSize] = false
	t.free = append(t.free, r)
	if t.n--; t.n == 0 {
		*t = *New(t.key) // a large table that was emptied takes no room
	} else if len(t.index) > 1024 && t.n < len(t.index)/8 {
		t.reindex(len(t.index) / 2)
	}
}

// reindex makes the index anew with that many places, in the order in which records lie in
// memory.
func (t *Table[K, R]) reindex(size int) {
	t.index, t.graves = make([]uint32, size), 0
	for r, rec := range t.All() {
		home, tag := t.hash(*t.key(rec))
		i := int(home) & (size - 1)
		for t.index[i] != 0 {
			i = (i + 1) & (size - 1)
		}
		t.index[i] = uint32(r) | tag
	}
}

// All yields the records. They may be dropped meanwhile, and none made.
func (t *Table[K, R]) All() iter.Seq2[Ref, *R] {
	return func(yield func(Ref, *R) bool) {
		for c, chunk := range t.chunks {
			for i := range chunk.records {
				if chunk.used[i] && !yield(Ref(c*chunkSize+i), &chunk.records[i]) {
					return
				}
			}
		}
	}
}
