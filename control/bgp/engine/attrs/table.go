package attrs

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Handle stands for a set of path attributes with its next hop. 0 is none. Two sets
// with different handles may say the same in different bytes.
type Handle uint32

// Flags say what a set has.
type Flags uint16

// The flags; from NoExport on, well-known communities (RFC 1997, 9494, 8326).
const (
	HasMED Flags = 1 << iota
	HasLocalPref
	HasOriginator
	Hop4 // the next hop is an IPv4 address
	NoExport
	NoAdvertise
	NoExportSubconfed
	LLGRStale
	NoLLGR
	GracefulShutdown
)

// Summary is what the choice among paths and their policies ask of a set.
type Summary struct {
	LocalPref  uint32 // with HasLocalPref
	MED        uint32
	FirstAS    uint32 // the AS that the path was learned from; 0: the path is empty, or begins with a set
	Originator uint32 // ORIGINATOR_ID, with HasOriginator
	NextHop    [16]byte
	PathLen    uint16
	ClusterLen uint16
	Flags      Flags
	Origin     uint8
}

func (s *Summary) setNextHop(hop []byte) {
	if copy(s.NextHop[:], hop) == 4 {
		s.Flags |= Hop4
	}
}

// set is a record of the table; refs 0: it is free, and chunk is the next such.
type set struct {
	chunk, at uint32
	refs      uint32
	hash      uint32
	base      Handle // that it was derived from, and holds
	sum       Summary
	result    Result
}

const (
	piece     = 1024      // sets that are allocated at once
	chunkSize = 256 << 10 // of the arena, in bytes; a set's block is never larger
	blockHead = 12        // id, length of the key, length of the canonical form if it is another
)

// Table holds the sets of all peers. A set is held as long as its references, of
// which [Table.Intern] gives the first. Not safe for concurrent use.
type Table struct {
	seed  maphash.Seed
	sets  [][]set // in pieces; the first is never used
	next  uint32  // ids from here on were never used
	free  uint32
	live  int
	index []uint32 // open addressing; 0: empty

	chunkSize int
	chunks    []chunk
	current   int   // the chunk that is filled
	spare     []int // of chunks

	key []byte // scratch
}

// chunk is a piece of the arena.
type chunk struct {
	data []byte
	dead int // bytes of blocks without a holder
}

// NewTable returns an empty table.
func NewTable() *Table { return newTable(chunkSize) }

func newTable(size int) *Table {
	t := &Table{seed: maphash.MakeSeed(), next: 1, index: make([]uint32, 64), chunkSize: size}
	t.chunks = []chunk{{data: make([]byte, 0, size)}}
	return t
}

func (t *Table) set(h Handle) *set { return &t.sets[h/piece][h%piece] }

// Len is the number of sets.
func (t *Table) Len() int { return t.live }

// Intern returns the handle of the attributes of an UPDATE and what becomes of it.
// nextHop is MP_REACH_NLRI's for the prefixes of that attribute, and empty for those
// of the NLRI field. A Result of Withdraw, and a context that is not Reachable, come
// without a handle; Reset comes with an error, a [*wire.Error]. The caller has to
// release the handle.
func (t *Table) Intern(c Context, attrs, nextHop []byte) (Handle, Result, error) {
	hop := nextHop
	kept := -1 // where NEXT_HOP was
	size := 0
	if len(hop) == 0 {
		hop, kept, size = findNextHop(attrs)
	}
	t.key = append(t.key[:0], c.bits(), byte(len(hop)))
	t.key = append(t.key, hop...)
	if kept >= 0 {
		t.key = append(append(t.key, attrs[:kept]...), attrs[kept+size:]...)
	} else {
		t.key = append(t.key, attrs...)
	}
	hash := t.hash()
	slot, h := t.find(hash)
	if h != 0 {
		s := t.set(h)
		s.refs++
		return h, s.result, nil
	}
	j := judge(c, t.key[2+len(hop):], hop)
	switch {
	case j.Verdict == Reset:
		return 0, j.Result, j.notified
	case j.Verdict == Withdraw || !c.Reachable:
		return 0, j.Result, nil
	}
	return t.insert(slot, hash, j), j.Result, nil
}

// hash is that of t.key.
func (t *Table) hash() uint32 { return uint32(maphash.Bytes(t.seed, t.key)) }

// findNextHop returns the value of NEXT_HOP if it is there once and without fault, so
// that sets that differ in nothing else have one form.
func findNextHop(attrs []byte) (hop []byte, at, size int) {
	at = -1
	for list := attrs; ; {
		flags, typ, value, rest, ok := wire.Attribute(list)
		if !ok {
			return hop, at, size
		}
		if typ == nextHop {
			if at >= 0 || flags != transitive || len(value) != 4 || !hostAddress(value) {
				return nil, -1, 0
			}
			hop, at, size = value, len(attrs)-len(list), len(list)-len(rest)
		}
		list = rest
	}
}

// find returns the set that t.key is, or the slot where it belongs.
func (t *Table) find(hash uint32) (slot int, h Handle) {
	mask := len(t.index) - 1
	for slot = int(hash) & mask; ; slot = (slot + 1) & mask {
		id := Handle(t.index[slot])
		if id == 0 {
			return slot, 0
		}
		if s := t.set(id); s.hash == hash {
			if key, _ := t.block(s); bytes.Equal(key, t.key) {
				return slot, id
			}
		}
	}
}

// block returns what the arena has of a set: its key, and its canonical form if
// that is not the key's.
func (t *Table) block(s *set) (key, canonical []byte) {
	b := t.chunks[s.chunk].data[s.at:]
	n, m := binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint32(b[8:])
	return b[blockHead : blockHead+n], b[blockHead+n : blockHead+n+m]
}

func (t *Table) insert(slot int, hash uint32, j *judgement) Handle {
	id := t.free
	if id != 0 {
		t.free = t.set(Handle(id)).chunk
	} else {
		id = t.next
		t.next++
		if id/piece == uint32(len(t.sets)) {
			t.sets = append(t.sets, make([]set, piece))
		}
	}
	s := t.set(Handle(id))
	*s = set{refs: 1, hash: hash, sum: j.sum, result: j.Result}
	canonical := append([]byte{byte(len(j.hop))}, j.hop...)
	canonical = append(canonical, j.out...)
	if bytes.Equal(canonical, t.key[headOf(t.key):]) {
		canonical = nil
	}
	filled := t.current
	b := t.allocate(s, blockHead+len(t.key)+len(canonical))
	binary.LittleEndian.PutUint32(b, id)
	binary.LittleEndian.PutUint32(b[4:], uint32(len(t.key)))
	binary.LittleEndian.PutUint32(b[8:], uint32(len(canonical)))
	copy(b[blockHead:], t.key)
	copy(b[blockHead+len(t.key):], canonical)
	t.index[slot] = id
	if t.live++; t.live*4 > len(t.index)*3 {
		t.grow()
	}
	t.compact(filled)
	return Handle(id)
}

// allocate returns n bytes of the arena for a set.
func (t *Table) allocate(s *set, n int) []byte {
	c := &t.chunks[t.current]
	if len(c.data)+n > cap(c.data) {
		if k := len(t.spare); k > 0 {
			t.current, t.spare = t.spare[k-1], t.spare[:k-1]
			t.chunks[t.current].data = make([]byte, 0, t.chunkSize)
		} else {
			t.current = len(t.chunks)
			t.chunks = append(t.chunks, chunk{data: make([]byte, 0, t.chunkSize)})
		}
		c = &t.chunks[t.current]
	}
	s.chunk, s.at = uint32(t.current), uint32(len(c.data))
	c.data = c.data[:len(c.data)+n]
	return c.data[s.at:]
}

// compact moves what is left of a chunk, once that is less than half, so the arena is
// at most twice what is in use. It costs one chunk's copy at a time.
func (t *Table) compact(i int) {
	c := &t.chunks[i]
	if i == t.current || c.data == nil || 2*c.dead <= len(c.data) {
		return
	}
	data, filled := c.data, t.current
	for at := uint32(0); at < uint32(len(data)); {
		b := data[at:]
		size := blockHead + binary.LittleEndian.Uint32(b[4:]) + binary.LittleEndian.Uint32(b[8:])
		s := t.set(Handle(binary.LittleEndian.Uint32(b)))
		if s.refs > 0 && s.chunk == uint32(i) && s.at == at {
			copy(t.allocate(s, int(size)), b[:size])
		}
		at += size
	}
	t.chunks[i] = chunk{}
	t.spare = append(t.spare, i)
	t.compact(filled)
}

func (t *Table) grow() {
	old := t.index
	t.index = make([]uint32, 2*len(old))
	mask := len(t.index) - 1
	for _, id := range old {
		if id == 0 {
			continue
		}
		slot := int(t.set(Handle(id)).hash) & mask
		for t.index[slot] != 0 {
			slot = (slot + 1) & mask
		}
		t.index[slot] = id
	}
}

// headOf is the length of what a key has before the next hop.
func headOf(key []byte) int {
	if key[0] == derived {
		return 5
	}
	return 1
}

// Retain adds a reference.
func (t *Table) Retain(h Handle) { t.set(h).refs++ }

// Release takes a reference away. With the last the set goes and its handle is used
// again.
func (t *Table) Release(h Handle) {
	s := t.set(h)
	if s.refs--; s.refs > 0 {
		return
	}
	if s.base != 0 {
		defer t.Release(s.base)
	}
	t.live--
	t.remove(uint32(h))
	key, canonical := t.block(s)
	i := int(s.chunk)
	t.chunks[i].dead += blockHead + len(key) + len(canonical)
	s.chunk, t.free = t.free, uint32(h)
	t.compact(i)
}

// remove takes an id out of the index and closes the gap (no tombstones).
func (t *Table) remove(id uint32) {
	mask := len(t.index) - 1
	gap := int(t.set(Handle(id)).hash) & mask
	for t.index[gap] != id {
		gap = (gap + 1) & mask
	}
	for at := (gap + 1) & mask; t.index[at] != 0; at = (at + 1) & mask {
		home := int(t.set(Handle(t.index[at])).hash) & mask
		if (at-home)&mask >= (at-gap)&mask {
			t.index[gap] = t.index[at]
			gap = at
		}
	}
	t.index[gap] = 0
}

// Summary returns what was decoded of a set; valid until it is released.
func (t *Table) Summary(h Handle) *Summary { return &t.set(h).sum }

// Canonical returns the next hop of a set, of 4, 16 or 32 bytes, and its attributes
// as they are kept: AS numbers of four octets, without NEXT_HOP and the attributes
// that were discarded. They are valid until the table changes.
func (t *Table) Canonical(h Handle) (nextHop, attrs []byte) {
	key, b := t.block(t.set(h))
	if len(b) == 0 {
		b = key[headOf(key):]
	}
	return b[1 : 1+b[0]], b[1+b[0]:]
}
