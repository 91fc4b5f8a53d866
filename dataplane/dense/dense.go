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
	// quarters are full, and there are a power of two.
	index []Ref
}

type chunk[R any] struct {
	records [chunkSize]R
	used    [chunkSize]bool
}

// New returns a table without records; key says where a record has its key. The hash is
// seeded: nobody who chooses keys can have them collide.
func New[K comparable, R any](key func(*R) *K) *Table[K, R] {
	return &Table[K, R]{key: key, seed: maphash.MakeSeed(), made: 1, index: make([]Ref, 16)}
}

// Len is how many records there are.
func (t *Table[K, R]) Len() int { return t.n }

// At returns the record of a reference other than 0. It stays where it is until it is
// dropped.
func (t *Table[K, R]) At(r Ref) *R { return &t.chunks[r/chunkSize].records[r%chunkSize] }

// place returns where in the index a key is, or would be.
func (t *Table[K, R]) place(k K) int {
	mask := len(t.index) - 1
	for i := int(maphash.Comparable(t.seed, k)) & mask; ; i = (i + 1) & mask {
		if r := t.index[i]; r == 0 || *t.key(t.At(r)) == k {
			return i
		}
	}
}

// Find returns the record of a key; 0: there is none.
func (t *Table[K, R]) Find(k K) Ref { return t.index[t.place(k)] }

// Make returns the record of a key; a new one has its key, and is zero otherwise.
func (t *Table[K, R]) Make(k K) (r Ref, fresh bool) {
	i := t.place(k)
	if r := t.index[i]; r != 0 {
		return r, false
	}
	if t.n >= len(t.index)/4*3 {
		t.reindex(2 * len(t.index))
		i = t.place(k)
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
	t.index[i] = r
	t.n++
	return r, true
}

// Drop forgets a record.
func (t *Table[K, R]) Drop(r Ref) {
	// Those after it that are not where their hash has them move up.
	mask := len(t.index) - 1
	hole := t.place(*t.key(t.At(r)))
	for i := (hole + 1) & mask; t.index[i] != 0; i = (i + 1) & mask {
		home := int(maphash.Comparable(t.seed, *t.key(t.At(t.index[i])))) & mask
		if (i-home)&mask >= (i-hole)&mask {
			t.index[hole] = t.index[i]
			hole = i
		}
	}
	t.index[hole] = 0
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

func (t *Table[K, R]) reindex(size int) {
	old := t.index
	t.index = make([]Ref, size)
	for _, r := range old {
		if r != 0 {
			t.index[t.place(*t.key(t.At(r)))] = r
		}
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
