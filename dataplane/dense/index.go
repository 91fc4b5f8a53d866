package dense

// index finds numbers other than 0 by the hash of what they stand for: open addressing,
// linear probing. At most three quarters of the places are full, and there are a power of
// two. Beside a number stands what there is room for of the hash, so that hardly a record
// is read that is not the key's: in a large table each costs a turn to the host's memory.
// Where something was removed stands grave, past which a search goes on.
type index struct {
	places []uint32
	graves int
}

// numberBits are those of a number in the index: 67 million. The others are of the hash.
const (
	numberBits = 26
	numberMask = 1<<numberBits - 1
	grave      = 1 << numberBits // no number
)

func newIndex() index { return index{places: make([]uint32, 16)} }

// tag is what stands of a hash beside a number; by the lower bits it has its place.
func tag(h uint64) uint32 { return uint32(h>>32) &^ numberMask }

// find returns the number with this hash for which is holds; 0: there is none. It also
// returns where that is, or would be.
func (x *index) find(h uint64, is func(id uint32) bool) (id uint32, at int) {
	mask, tag := len(x.places)-1, tag(h)
	open := -1
	for at = int(uint32(h)) & mask; ; at = (at + 1) & mask {
		switch v := x.places[at]; {
		case v == 0 && open >= 0:
			return 0, open
		case v == 0:
			return 0, at
		case v == grave:
			if open < 0 {
				open = at
			}
		case v&^numberMask == tag:
			if id = v & numberMask; is(id) {
				return id, at
			}
		}
	}
}

// put notes a number where [index.find] found a place for it.
func (x *index) put(at int, id uint32, h uint64) {
	if x.places[at] == grave {
		x.graves--
	}
	x.places[at] = id | tag(h)
}

// remove forgets the number in a place.
func (x *index) remove(at int) {
	mask := len(x.places) - 1
	x.places[at] = grave
	x.graves++
	// No search has to go past graves behind which is nothing.
	for x.places[(at+1)&mask] == 0 && x.places[at] == grave {
		x.places[at] = 0
		x.graves--
		at = (at - 1) & mask
	}
}

// full reports whether an index of n numbers has no room for one more, and with how many
// places it is to be made anew.
func (x *index) full(n int) (size int, due bool) {
	size = len(x.places)
	if n+x.graves < size/4*3 {
		return size, false
	}
	if n >= size/2 {
		size *= 2
	}
	return size, true
}

// empty reports whether an index has many more places than its n numbers need, and with how
// many it is to be made anew.
func (x *index) empty(n int) (size int, due bool) {
	return len(x.places) / 2, len(x.places) > 1024 && n < len(x.places)/8
}

// reset forgets all, and returns what fills the index again.
func (x *index) reset(size int) *filling {
	x.places, x.graves = make([]uint32, size), 0
	return &filling{x: x}
}

// filling adds numbers to an index without graves, which has none of them. It keeps some
// back, so that the turns to the host's memory that they cost are waited for together and
// not one after the other.
type filling struct {
	x     *index
	n     int
	waits [64]struct {
		id uint32
		h  uint64
	}
}

func (f *filling) add(id uint32, h uint64) {
	f.waits[f.n].id, f.waits[f.n].h = id, h
	if f.n++; f.n == len(f.waits) {
		f.done()
	}
}

// done adds what waits yet.
func (f *filling) done() {
	places := f.x.places
	mask := len(places) - 1
	for i := range f.waits[:f.n] {
		w := &f.waits[i]
		at := int(uint32(w.h)) & mask
		for places[at] != 0 {
			at = (at + 1) & mask
		}
		places[at] = w.id | tag(w.h)
	}
	f.n = 0
}
