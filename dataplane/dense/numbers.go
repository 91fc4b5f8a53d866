package dense

// Numbers gives equal values one number, from 1, as long as it has users. The zero value
// has the number 0 and is not counted. It is not safe for concurrent use.
type Numbers[V comparable] struct {
	ids  map[V]uint32
	list []users[V] // by number
	free []uint32
	last uint32 // taken: the next is often the same
}

type users[V comparable] struct {
	value V
	n     int
}

// NewNumbers returns no numbers.
func NewNumbers[V comparable]() *Numbers[V] {
	return &Numbers[V]{ids: map[V]uint32{}, list: make([]users[V], 1)}
}

// Value returns the value of a number.
func (t *Numbers[V]) Value(id uint32) V { return t.list[id].value }

// Find returns the number of a value, if it has users.
func (t *Numbers[V]) Find(v V) (id uint32, ok bool) {
	id, ok = t.ids[v]
	return id, ok
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
	delete(t.ids, u.value)
	*u = users[V]{}
	t.free = append(t.free, id)
	return true
}
