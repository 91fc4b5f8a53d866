package topology

import "slices"

// Index maps a key to a set of values. It is for sets that are of one nearly always,
// thousands of them.
type Index[K, V comparable] map[K][]V

// Add adds v to the set of k.
func (x Index[K, V]) Add(k K, v V) {
	if !slices.Contains(x[k], v) {
		x[k] = append(x[k], v)
	}
}

// Remove takes v out of the set of k.
func (x Index[K, V]) Remove(k K, v V) {
	left := slices.DeleteFunc(x[k], func(o V) bool { return o == v })
	if x[k] = left; len(left) == 0 {
		delete(x, k)
	}
}
