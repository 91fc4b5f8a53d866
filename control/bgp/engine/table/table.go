// Package table finds what is kept of a prefix by small numbers. It is made for
// millions of prefixes: they are integers in open addressing, and their records
// stand in pieces without a pointer, unless what is kept has one.
package table

import (
	"math/bits"
	"math/rand/v2"

	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/dataplane/dense"
)

// key is a prefix of one family as a table compares it.
type key interface {
	comparable
	hash(seed uint64) uint32
	prefix() wire.Prefix
}

// key4 is an IPv4 prefix: the address in the upper half, the length in the lower.
type key4 uint64

func (k key4) hash(seed uint64) uint32 { return mix(uint64(k), seed) }

func (k key4) prefix() wire.Prefix {
	return wire.Prefix{Hi: uint64(k) &^ 0xff, Bits: uint8(k), Family: wire.IPv4}
}

// key6 is an IPv6 prefix.
type key6 struct{ hi, lo, bits uint64 }

func (k key6) hash(seed uint64) uint32 {
	return mix(k.lo^k.bits, seed^uint64(mix(k.hi, seed))<<17)
}

func (k key6) prefix() wire.Prefix {
	return wire.Prefix{Hi: k.hi, Lo: k.lo, Bits: uint8(k.bits), Family: wire.IPv6}
}

func keyOf4(p wire.Prefix) key4 { return key4(p.Hi | uint64(p.Bits)) }

func keyOf6(p wire.Prefix) key6 { return key6{p.Hi, p.Lo, uint64(p.Bits)} }

// mix is a multiplication whose halves are folded; the seed keeps peers from
// choosing prefixes that collide.
func mix(v, seed uint64) uint32 {
	hi, lo := bits.Mul64(v^seed, 0x9e3779b97f4a7c15)
	hi, lo = bits.Mul64(hi^lo^seed>>32, 0xd6e8feb86659fd93)
	return uint32((hi ^ lo) >> 32)
}

const (
	shift = 13
	piece = 1 << shift // records that are allocated at once
)

// Slab is records of one kind, found by ids that are used again. 0 is no id.
type Slab[T any] struct {
	pieces [][]T
	next   uint32 // ids from here on were never used; 0 before the first
	free   dense.Queue[uint32]
}

// At returns the record of an id.
func (s *Slab[T]) At(id uint32) *T { return &s.pieces[id>>shift][id&(piece-1)] }

// Allocate returns an id, whose record is as it was left.
func (s *Slab[T]) Allocate() uint32 {
	if s.free.Len() > 0 {
		return s.free.Next()
	}
	s.next = max(s.next, 1)
	id := s.next
	s.next++
	if int(id>>shift) == len(s.pieces) {
		s.pieces = append(s.pieces, make([]T, piece))
	}
	return id
}

// Release gives an id back.
func (s *Slab[T]) Release(id uint32) { s.free.Add(id) }

// Table has a record of kind V for each prefix, whatever its path identifier. Ids are
// those of a family. Not safe for concurrent use.
type Table[V any] struct {
	four one[key4, V]
	six  one[key6, V]
}

// New returns an empty table.
func New[V any]() *Table[V] {
	return &Table[V]{four: newOne[key4, V](rand.Uint64()), six: newOne[key6, V](rand.Uint64())}
}

// Find returns the id of a prefix; 0: it has none.
func (t *Table[V]) Find(p wire.Prefix) (id uint32) {
	if p.Family == wire.IPv4 {
		id, _, _ = t.four.find(keyOf4(p))
	} else {
		id, _, _ = t.six.find(keyOf6(p))
	}
	return id
}

// Obtain returns the id of a prefix, which it adds with an empty record if need be.
func (t *Table[V]) Obtain(p wire.Prefix) uint32 {
	if p.Family == wire.IPv4 {
		return t.four.obtain(keyOf4(p))
	}
	return t.six.obtain(keyOf6(p))
}

// At returns the record of an id. That of an id which is not in use is empty.
func (t *Table[V]) At(f wire.Family, id uint32) *V {
	if f == wire.IPv4 {
		return &t.four.records.At(id).value
	}
	return &t.six.records.At(id).value
}

// Prefix returns the prefix of an id.
func (t *Table[V]) Prefix(f wire.Family, id uint32) wire.Prefix {
	if f == wire.IPv4 {
		return t.four.records.At(id).key.prefix()
	}
	return t.six.records.At(id).key.prefix()
}

// Remove forgets a prefix.
func (t *Table[V]) Remove(f wire.Family, id uint32) {
	if f == wire.IPv4 {
		t.four.remove(id)
	} else {
		t.six.remove(id)
	}
}

// Len is the number of prefixes of a family.
func (t *Table[V]) Len(f wire.Family) int {
	if f == wire.IPv4 {
		return t.four.live
	}
	return t.six.live
}

// End is the first id that was never used: whoever goes over all prefixes goes from
// 1 to it.
func (t *Table[V]) End(f wire.Family) uint32 {
	if f == wire.IPv4 {
		return max(t.four.records.next, 1)
	}
	return max(t.six.records.next, 1)
}

type record[K key, V any] struct {
	key   K
	value V
}

// one finds the records of one family.
type one[K key, V any] struct {
	seed    uint64
	index   []uint32 // id of a record and upper bits of its hash; 0: empty
	records Slab[record[K, V]]
	live    int
}

func newOne[K key, V any](seed uint64) one[K, V] {
	return one[K, V]{seed: seed, index: make([]uint32, 64)}
}

// idBits are those of an id in the index: 67 million prefixes. The others are of the
// hash, so that a lookup seldom reads a record that is not the prefix's.
const (
	idBits = 26
	idMask = 1<<idBits - 1
)

// find returns the id of a prefix, or 0, where in the index it belongs, and what
// stands there beside the id.
func (t *one[K, V]) find(k K) (id uint32, slot int, tag uint32) {
	mask := len(t.index) - 1
	hash := k.hash(t.seed)
	tag = hash &^ idMask
	for slot = int(hash) & mask; ; slot = (slot + 1) & mask {
		v := t.index[slot]
		if v == 0 {
			return 0, slot, tag
		}
		if v&^idMask == tag && t.records.At(v&idMask).key == k {
			return v & idMask, slot, tag
		}
	}
}

func (t *one[K, V]) obtain(k K) uint32 {
	id, slot, tag := t.find(k)
	if id != 0 {
		return id
	}
	id = t.records.Allocate()
	*t.records.At(id) = record[K, V]{key: k}
	t.index[slot] = id | tag
	if t.live++; t.live*4 > len(t.index)*3 {
		t.grow()
	}
	return id
}

// grow makes the index anew. It takes several records at once, so that the turns to the
// host's memory that they cost are waited for together and not one after the other.
func (t *one[K, V]) grow() {
	old := t.index
	t.index = make([]uint32, 2*len(old))
	mask := len(t.index) - 1
	var entries [64]uint32
	var homes [64]int
	for len(old) > 0 {
		n := 0
		for len(old) > 0 && n < len(entries) {
			if v := old[0]; v != 0 {
				entries[n] = v
				n++
			}
			old = old[1:]
		}
		for i, v := range entries[:n] {
			homes[i] = t.home(v)
		}
		for i, v := range entries[:n] {
			slot := homes[i]
			for t.index[slot] != 0 {
				slot = (slot + 1) & mask
			}
			t.index[slot] = v
		}
	}
}

// home returns where in the index an entry of it would best stand.
func (t *one[K, V]) home(v uint32) int {
	return int(t.records.At(v&idMask).key.hash(t.seed)) & (len(t.index) - 1)
}

// remove closes the gap in the index (no tombstones).
func (t *one[K, V]) remove(id uint32) {
	mask := len(t.index) - 1
	_, gap, _ := t.find(t.records.At(id).key)
	for at := (gap + 1) & mask; t.index[at] != 0; at = (at + 1) & mask {
		if home := t.home(t.index[at]); (at-home)&mask >= (at-gap)&mask {
			t.index[gap] = t.index[at]
			gap = at
		}
	}
	t.index[gap] = 0
	*t.records.At(id) = record[K, V]{}
	t.records.Release(id)
	t.live--
}
