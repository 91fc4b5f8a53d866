package rib

import (
	"math/bits"

	"github.com/routerd/routerd/control/bgp/engine/wire"
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

// slab is records of one kind, found by ids that are used again. 0 is no id.
type slab[T any] struct {
	pieces [][]T
	next   uint32 // ids from here on were never used; 0 before the first
	free   []uint32
}

func (s *slab[T]) at(id uint32) *T { return &s.pieces[id>>shift][id&(piece-1)] }

func (s *slab[T]) allocate() uint32 {
	if n := len(s.free); n > 0 {
		id := s.free[n-1]
		s.free = s.free[:n-1]
		return id
	}
	s.next = max(s.next, 1)
	id := s.next
	s.next++
	if int(id>>shift) == len(s.pieces) {
		s.pieces = append(s.pieces, make([]T, piece))
	}
	return id
}

func (s *slab[T]) release(id uint32) { s.free = append(s.free, id) }

// entry is what is kept of a prefix.
type entry struct {
	head    uint32 // its paths, the best one first; 0: none
	pending bool   // its reader is still to see it
}

type record[K key] struct {
	key K
	entry
}

// table finds the record of a prefix.
type table[K key] struct {
	seed    uint64
	index   []uint32 // id of a record and upper bits of its hash; 0: empty
	records slab[record[K]]
	live    int
}

func newTable[K key](seed uint64) table[K] { return table[K]{seed: seed, index: make([]uint32, 64)} }

// idBits are those of an id in the index: 67 million prefixes. The others are of the
// hash, so that a lookup seldom reads a record that is not the prefix's.
const (
	idBits = 26
	idMask = 1<<idBits - 1
)

// find returns the id of a prefix, or 0, where in the index it belongs, and what
// stands there beside the id.
func (t *table[K]) find(k K) (id uint32, slot int, tag uint32) {
	mask := len(t.index) - 1
	hash := k.hash(t.seed)
	tag = hash &^ idMask
	for slot = int(hash) & mask; ; slot = (slot + 1) & mask {
		v := t.index[slot]
		if v == 0 {
			return 0, slot, tag
		}
		if v&^idMask == tag && t.records.at(v&idMask).key == k {
			return v & idMask, slot, tag
		}
	}
}

// obtain returns the id of a prefix, which it adds if need be.
func (t *table[K]) obtain(k K) uint32 {
	id, slot, tag := t.find(k)
	if id != 0 {
		return id
	}
	id = t.records.allocate()
	*t.records.at(id) = record[K]{key: k}
	t.index[slot] = id | tag
	if t.live++; t.live*4 > len(t.index)*3 {
		t.grow()
	}
	return id
}

func (t *table[K]) grow() {
	old := t.index
	t.index = make([]uint32, 2*len(old))
	mask := len(t.index) - 1
	for _, v := range old {
		if v == 0 {
			continue
		}
		slot := t.home(v)
		for t.index[slot] != 0 {
			slot = (slot + 1) & mask
		}
		t.index[slot] = v
	}
}

// home returns where in the index an entry of it would best stand.
func (t *table[K]) home(v uint32) int {
	return int(t.records.at(v&idMask).key.hash(t.seed)) & (len(t.index) - 1)
}

// remove forgets a prefix and closes the gap in the index (no tombstones).
func (t *table[K]) remove(id uint32) {
	mask := len(t.index) - 1
	_, gap, _ := t.find(t.records.at(id).key)
	for at := (gap + 1) & mask; t.index[at] != 0; at = (at + 1) & mask {
		if home := t.home(t.index[at]); (at-home)&mask >= (at-gap)&mask {
			t.index[gap] = t.index[at]
			gap = at
		}
	}
	t.index[gap] = 0
	*t.records.at(id) = record[K]{}
	t.records.release(id)
	t.live--
}
