// Package dense keeps records by the hundred thousand: found by key, without a pointer
// each, so that to the collector a large table is a few large objects. It also numbers
// values that many records share, and queues what waits of them.
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
	free   Queue[Ref]
	n      int
	index  index
}

type chunk[R any] struct {
	records [chunkSize]R
	used    [chunkSize]bool
}

// New returns a table without records; key says where a record has its key. The hash is
// seeded: nobody who chooses keys can have them collide.
func New[K comparable, R any](key func(*R) *K) *Table[K, R] {
	return &Table[K, R]{key: key, seed: maphash.MakeSeed(), made: 1, index: newIndex()}
}

// Len is how many records there are.
func (t *Table[K, R]) Len() int { return t.n }

// At returns the record of a reference other than 0. It stays where it is until it is
// dropped.
func (t *Table[K, R]) At(r Ref) *R { return &t.chunks[r/chunkSize].records[r%chunkSize] }

func (t *Table[K, R]) hash(k K) uint64 { return maphash.Comparable(t.seed, k) }

// place returns the record of a key; 0: there is none. It also returns the key's hash, and
// where in the index it is, or would be.
func (t *Table[K, R]) place(k K) (r Ref, i int, h uint64) {
	h = t.hash(k)
	id, i := t.index.find(h, func(id uint32) bool { return *t.key(t.At(Ref(id))) == k })
	return Ref(id), i, h
}

// Find returns the record of a key; 0: there is none.
func (t *Table[K, R]) Find(k K) Ref {
	r, _, _ := t.place(k)
	return r
}

// Make returns the record of a key; a new one has its key, and is zero otherwise.
func (t *Table[K, R]) Make(k K) (r Ref, fresh bool) {
	r, i, h := t.place(k)
	if r != 0 {
		return r, false
	}
	if size, due := t.index.full(t.n); due {
		t.reindex(size)
		_, i, _ = t.place(k)
	}
	if t.free.Len() > 0 {
		r = t.free.Next()
	} else {
		r = t.made
		if t.made++; int(r/chunkSize) == len(t.chunks) {
			t.chunks = append(t.chunks, new(chunk[R]))
		}
	}
	*t.key(t.At(r)) = k
	t.chunks[r/chunkSize].used[r%chunkSize] = true
	t.index.put(i, uint32(r), h)
	t.n++
	return r, true
}

// Drop forgets a record.
func (t *Table[K, R]) Drop(r Ref) { t.Remove(*t.key(t.At(r))) }

// Remove forgets the record of a key, if there is one.
func (t *Table[K, R]) Remove(k K) {
	r, i, _ := t.place(k)
	if r == 0 {
		return
	}
	t.index.remove(i)
	var zero R
	*t.At(r) = zero
	t.chunks[r/chunkSize].used[r%chunkSize] = false
	t.free.Add(r)
	if t.n--; t.n == 0 {
		*t = *New(t.key) // a large table that was emptied takes no room
	} else if size, due := t.index.empty(t.n); due {
		t.reindex(size)
	}
}

// reindex makes the index anew with that many places, in the order in which records lie in
// memory.
func (t *Table[K, R]) reindex(size int) {
	fill := t.index.reset(size)
	for r, rec := range t.All() {
		fill.add(uint32(r), t.hash(*t.key(rec)))
	}
	fill.done()
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
