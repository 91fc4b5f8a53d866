package dense

import "hash/maphash"

// Numbers gives equal values one number, from 1, as long as it has users. The zero value
// has the number 0 and is not counted. A value stands in memory once: the index finds it
// by its hash. It is not safe for concurrent use.
type Numbers[V comparable] struct {
	seed  maphash.Seed
	index index
	n     int        // with users
	list  []users[V] // by number
	free  []uint32
	last  uint32 // taken: the next is often the same
}

type users[V comparable] struct {
	value V
	n     int
}

// NewNumbers returns no numbers.
func NewNumbers[V comparable]() *Numbers[V] {
	return &Numbers[V]{seed: maphash.MakeSeed(), index: newIndex(), list: make([]users[V], 1)}
}

// Value returns the value of a number.
func (t *Numbers[V]) Value(id uint32) V { return t.list[id].value }

// Find returns the number of a value, if it has users.
func (t *Numbers[V]) Find(v V) (id uint32, ok bool) {
	id, _, _ = t.place(v)
	return id, id != 0
}

// place returns the number of a value; 0: it has no users. It also returns the value's hash,
// and where in the index it is, or would be.
func (t *Numbers[V]) place(v V) (id uint32, at int, h uint64) {
	h = maphash.Comparable(t.seed, v)
	id, at = t.index.find(h, func(id uint32) bool { return t.list[id].value == v })
	return id, at, h
}

// Users is how many a number has.
func (t *Numbers[V]) Users(id uint32) int { return t.list[id].n }

// Len is the first number that was never given.
func (t *Numbers[V]) Len() uint32 { return uint32(len(t.list)) }

// Take gives a value one more user. It reports whether that is the first.
func (t *Numbers[V]) Take(v V) (id uint32, first bool) {
	if u := &t.list[t.last]; u.n > 0 && u.value == v {
		u.n++
		return t.last, false
	}
	var zero V
	if v == zero {
		return 0, false
	}
	id, at, h := t.place(v)
	if first = id == 0; first {
		if size, due := t.index.full(t.n); due {
			t.reindex(size)
			_, at, _ = t.place(v)
		}
		if last := len(t.free) - 1; last >= 0 {
			id, t.free = t.free[last], t.free[:last]
		} else {
			id = uint32(len(t.list))
			t.list = append(t.list, users[V]{})
		}
		t.list[id].value = v
		t.index.put(at, id, h)
		t.n++
	}
	t.list[id].n++
	t.last = id
	return id, first
}

// Leave takes back one [Numbers.Take]. It reports whether there is no user any more: then
// the number is free.
func (t *Numbers[V]) Leave(id uint32) bool {
	if id == 0 {
		return false
	}
	u := &t.list[id]
	if u.n--; u.n > 0 {
		return false
	}
	_, at, _ := t.place(u.value)
	t.index.remove(at)
	*u = users[V]{}
	t.free = append(t.free, id)
	t.n--
	if size, due := t.index.empty(t.n); due {
		t.reindex(size)
	}
	return true
}

// reindex makes the index anew with that many places.
func (t *Numbers[V]) reindex(size int) {
	fill := t.index.reset(size)
	for id := range t.list {
		if u := &t.list[id]; u.n > 0 {
			fill.add(uint32(id), maphash.Comparable(t.seed, u.value))
		}
	}
	fill.done()
}
