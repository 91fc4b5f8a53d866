package rib

import (
	"encoding/binary"
	"iter"
	"math/bits"
	"math/rand/v2"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// ref names a record of a prefixTable; 0: none.
type ref uint32

// record is all that is kept of a prefix. There may be a million, so it has no
// pointers, which the collector would follow, and what prefixes share stands elsewhere
// and is named by its number.
type record struct {
	addr  [16]byte // the first four of IPv4
	bits  uint8
	flags flags
	path  uint32 // what BGP says of it, in learnedPaths.said; 0: nothing
	route uint32 // the route in use, in nextHops.choices; 0: none

	// The prefixes for which BGP names the same next hops.
	next, prev ref
}

type flags uint8

const (
	inUse flags = 1 << iota
	isIPv6
	isDirty // in RIB.dirty
	isMoved // in RIB.moved
	isKept  // of a Reset of the paths
)

// empty reports whether nothing is known of the prefix and nothing is to be done.
func (r *record) empty() bool {
	return r.path == 0 && r.route == 0 && r.flags&(isDirty|isMoved|isKept) == 0
}

func (r *record) prefix() netip.Prefix {
	if r.flags&isIPv6 != 0 {
		return netip.PrefixFrom(netip.AddrFrom16(r.addr), int(r.bits))
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(r.addr[:4])), int(r.bits))
}

func (r *record) family() dataplane.Family {
	if r.flags&isIPv6 != 0 {
		return dataplane.IPv6
	}
	return dataplane.IPv4
}

// chunkSize is how many records lie together: a table that grows does not move them.
const chunkSize = 1 << 12

// prefixTable has a record for each prefix of which something is known.
type prefixTable struct {
	chunks [][]record // the record 0 is not used
	made   ref        // records that were ever used, and 0
	free   []ref
	n      int

	// index finds records by hash: open addressing, linear probing. At most three
	// quarters are full, and there are a power of two.
	index []ref
	seed  [2]uint64 // so that nobody who announces prefixes can have them collide
}

func newPrefixTable() *prefixTable {
	return &prefixTable{made: 1, index: make([]ref, 16), seed: [2]uint64{rand.Uint64(), rand.Uint64()}}
}

// at returns the record of a reference other than 0. It stays where it is until it is
// dropped.
func (t *prefixTable) at(r ref) *record { return &t.chunks[r/chunkSize][r%chunkSize] }

// key is how a prefix stands in a record.
func key(p netip.Prefix) (k record) {
	k.bits, k.flags = uint8(p.Bits()), inUse
	if a := p.Addr(); a.Is4() {
		four := a.As4()
		copy(k.addr[:], four[:])
	} else {
		k.addr = a.As16()
		k.flags |= isIPv6
	}
	return k
}

func (t *prefixTable) hash(k *record) uint64 {
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(k.addr[:8])^t.seed[0], binary.LittleEndian.Uint64(k.addr[8:])^t.seed[1]^uint64(k.bits)<<8^uint64(k.flags&isIPv6))
	hi, lo = bits.Mul64(hi^lo^t.seed[1], t.seed[0]|1)
	return hi ^ lo
}

// place returns where in the index the record of a key is, or would be.
func (t *prefixTable) place(k *record) int {
	mask := len(t.index) - 1
	for i := int(t.hash(k)) & mask; ; i = (i + 1) & mask {
		r := t.index[i]
		if r == 0 {
			return i
		}
		if have := t.at(r); have.addr == k.addr && have.bits == k.bits && have.flags&isIPv6 == k.flags&isIPv6 {
			return i
		}
	}
}

// find returns the record of a prefix; 0: there is none.
func (t *prefixTable) find(p netip.Prefix) ref {
	k := key(p)
	return t.index[t.place(&k)]
}

// make returns the record of a prefix, a new one if there is none.
func (t *prefixTable) make(p netip.Prefix) ref {
	k := key(p)
	i := t.place(&k)
	if r := t.index[i]; r != 0 {
		return r
	}
	if t.n >= len(t.index)/4*3 {
		t.reindex(2 * len(t.index))
		i = t.place(&k)
	}
	var r ref
	if last := len(t.free) - 1; last >= 0 {
		r, t.free = t.free[last], t.free[:last]
	} else {
		r = t.made
		if t.made++; int(r/chunkSize) == len(t.chunks) {
			t.chunks = append(t.chunks, make([]record, chunkSize))
		}
	}
	*t.at(r) = k
	t.index[i] = r
	t.n++
	return r
}

// drop forgets the record of a prefix if it is empty.
func (t *prefixTable) drop(r ref) {
	rec := t.at(r)
	if !rec.empty() {
		return
	}
	// Those after it that are not where their hash has them move up.
	mask := len(t.index) - 1
	hole := t.place(rec)
	for i := (hole + 1) & mask; t.index[i] != 0; i = (i + 1) & mask {
		home := int(t.hash(t.at(t.index[i]))) & mask
		if (i-home)&mask >= (i-hole)&mask {
			t.index[hole] = t.index[i]
			hole = i
		}
	}
	t.index[hole] = 0
	*rec = record{}
	t.free = append(t.free, r)
	if t.n--; t.n == 0 {
		*t = *newPrefixTable() // a large table that was withdrawn takes no room
	} else if len(t.index) > 1024 && t.n < len(t.index)/8 {
		t.reindex(len(t.index) / 2)
	}
}

func (t *prefixTable) reindex(size int) {
	old := t.index
	t.index = make([]ref, size)
	for _, r := range old {
		if r != 0 {
			t.index[t.place(t.at(r))] = r
		}
	}
}

// all yields the records. They may be dropped meanwhile, and none made.
func (t *prefixTable) all() iter.Seq2[ref, *record] {
	return func(yield func(ref, *record) bool) {
		for c, chunk := range t.chunks {
			for i := range chunk {
				if chunk[i].flags&inUse != 0 && !yield(ref(c*chunkSize+i), &chunk[i]) {
					return
				}
			}
		}
	}
}

// numbered gives equal values one number, from 1, as long as it has users.
type numbered[V comparable] struct {
	ids  map[V]uint32
	list []users[V] // by number
	free []uint32
	last uint32 // taken: the next is often the same
}

type users[V comparable] struct {
	value V
	n     int
}

func newNumbered[V comparable]() *numbered[V] {
	return &numbered[V]{ids: map[V]uint32{}, list: make([]users[V], 1)}
}

// value returns the value of a number; the zero value for 0.
func (t *numbered[V]) value(id uint32) V { return t.list[id].value }

// take gives a value one more user. It reports whether that is the first.
func (t *numbered[V]) take(v V) (id uint32, first bool) {
	if u := &t.list[t.last]; u.n > 0 && u.value == v {
		u.n++
		return t.last, false
	}
	id, ok := t.ids[v]
	if !ok {
		if last := len(t.free) - 1; last >= 0 {
			id, t.free = t.free[last], t.free[:last]
		} else {
			id = uint32(len(t.list))
			t.list = append(t.list, users[V]{})
		}
		t.list[id].value = v
		t.ids[v] = id
	}
	t.list[id].n++
	t.last = id
	return id, !ok
}

// leave takes back one take. It reports whether there is no user any more: then the
// number is free.
func (t *numbered[V]) leave(id uint32) bool {
	u := &t.list[id]
	if u.n--; u.n > 0 {
		return false
	}
	delete(t.ids, u.value)
	*u = users[V]{}
	t.free = append(t.free, id)
	return true
}
