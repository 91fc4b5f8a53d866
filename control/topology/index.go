package topology

import (
	"iter"
	"maps"
	"slices"
)

// Index maps a key to a set of values. It is for sets that are of one nearly always,
// thousands of them: those take no memory but that of their place in a map.
type Index[K, V comparable] struct {
	one  map[K]V
	more map[K][]V // the sets of several
}

// NewIndex returns an index without keys.
func NewIndex[K, V comparable]() Index[K, V] {
	return Index[K, V]{one: make(map[K]V), more: make(map[K][]V)}
}

// Of yields the set of k.
func (x Index[K, V]) Of(k K) iter.Seq[V] {
	return func(yield func(V) bool) {
		if v, ok := x.one[k]; ok {
			yield(v)
			return
		}
		for _, v := range x.more[k] {
			if !yield(v) {
				return
			}
		}
	}
}

// Len is how many values the set of k has.
func (x Index[K, V]) Len(k K) int {
	if _, ok := x.one[k]; ok {
		return 1
	}
	return len(x.more[k])
}

// Keys yields the keys of all sets that are not empty.
func (x Index[K, V]) Keys() iter.Seq[K] {
	return func(yield func(K) bool) {
		for k := range x.one {
			if !yield(k) {
				return
			}
		}
		for k := range x.more {
			if !yield(k) {
				return
			}
		}
	}
}

// AnyShared reports whether some set has several values.
func (x Index[K, V]) AnyShared() bool { return len(x.more) > 0 }

// Shared yields the keys of which several have the set, and the set, which nobody
// changes.
func (x Index[K, V]) Shared() iter.Seq2[K, []V] { return maps.All(x.more) }

// Add adds v to the set of k.
func (x Index[K, V]) Add(k K, v V) {
	switch have, ok := x.one[k]; {
	case ok && have != v:
		delete(x.one, k)
		x.more[k] = []V{have, v}
	case ok, slices.Contains(x.more[k], v):
	case len(x.more[k]) > 0:
		x.more[k] = append(x.more[k], v)
	default:
		x.one[k] = v
	}
}

// Remove takes v out of the set of k.
func (x Index[K, V]) Remove(k K, v V) {
	if have, ok := x.one[k]; ok {
		if have == v {
			delete(x.one, k)
		}
		return
	}
	left := slices.DeleteFunc(x.more[k], func(o V) bool { return o == v })
	switch len(left) {
	case 0:
	case 1:
		delete(x.more, k)
		x.one[k] = left[0]
	default:
		x.more[k] = left
	}
}
