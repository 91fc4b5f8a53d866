package dense

import "iter"

// queuePiece is how many values of a [Queue] lie together.
const queuePiece = 1 << 11

// Queue hands values out in the order in which they were added. It grows by pieces, so
// that nothing is copied, and a piece that was taken goes. The zero Queue is empty.
type Queue[T any] struct {
	pieces [][]T // all but the last are full
	read   int   // values of the first piece that were taken
	n      int
}

// Len returns the number of values.
func (q *Queue[T]) Len() int { return q.n }

// Add adds a value.
func (q *Queue[T]) Add(v T) {
	last := len(q.pieces) - 1
	switch {
	case last < 0:
		q.pieces, last = append(q.pieces, nil), 0 // grows as far as it is of use: most queues are short
	case len(q.pieces[last]) == queuePiece:
		q.pieces, last = append(q.pieces, make([]T, 0, queuePiece)), last+1
	}
	q.pieces[last] = append(q.pieces[last], v)
	q.n++
}

// First returns the value that is next. There must be one.
func (q *Queue[T]) First() T { return q.pieces[0][q.read] }

// Next takes the value that is next. There must be one.
func (q *Queue[T]) Next() T {
	piece := q.pieces[0]
	v := piece[q.read]
	var zero T
	piece[q.read] = zero
	q.read++
	q.n--
	switch {
	case q.read < len(piece):
		return v
	case len(q.pieces) == 1:
		q.pieces[0] = piece[:0]
	default:
		q.pieces[0] = nil
		q.pieces = q.pieces[1:]
	}
	q.read = 0
	return v
}

// All yields the values in their order. The queue must not change meanwhile.
func (q *Queue[T]) All() iter.Seq[T] {
	return func(yield func(T) bool) {
		from := q.read
		for _, piece := range q.pieces {
			for _, v := range piece[from:] {
				if !yield(v) {
					return
				}
			}
			from = 0
		}
	}
}
