package probe

import (
	"container/heap"
	"time"
)

// wake is when something is to be looked at, and its place in a [schedule]. What
// is scheduled embeds it.
type wake struct {
	at    time.Time
	place int // in the heap, counted from 1; 0: it is not scheduled
}

func (w *wake) when() *wake { return w }

// schedule orders what is probed by when it is due. Its zero value is empty.
type schedule[T interface{ when() *wake }] struct{ heap wakes[T] }

// set schedules t, also where it is scheduled for another time.
func (s *schedule[T]) set(t T, at time.Time) {
	w := t.when()
	w.at = at
	if w.place == 0 {
		heap.Push(&s.heap, t)
	} else {
		heap.Fix(&s.heap, w.place-1)
	}
}

// drop takes t out, if it is in.
func (s *schedule[T]) drop(t T) {
	if w := t.when(); w.place != 0 {
		heap.Remove(&s.heap, w.place-1)
	}
}

// first returns what is due first.
func (s *schedule[T]) first() (t T, ok bool) {
	if len(s.heap) == 0 {
		return t, false
	}
	return s.heap[0], true
}

// wakes implements [heap.Interface].
type wakes[T interface{ when() *wake }] []T

func (h wakes[T]) Len() int           { return len(h) }
func (h wakes[T]) Less(i, j int) bool { return h[i].when().at.Before(h[j].when().at) }
func (h wakes[T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].when().place, h[j].when().place = i+1, j+1
}

// Push implements [heap.Interface].
func (h *wakes[T]) Push(x any) {
	t := x.(T)
	*h = append(*h, t)
	t.when().place = len(*h)
}

// Pop implements [heap.Interface].
func (h *wakes[T]) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	t.when().place = 0
	clear((*h)[last:])
	*h = (*h)[:last]
	return t
}

// bucket is a token bucket.
type bucket struct {
	rate, most float64 // tokens a second, and at a time
	tokens     float64
	at         time.Time
}

func newBucket(rate, most float64, now time.Time) *bucket { return &bucket{rate, most, most, now} }

// take takes n tokens if there are as many. What needs more than the bucket holds
// needs a full one.
func (b *bucket) take(now time.Time, n int) bool {
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(b.most, b.tokens+d.Seconds()*b.rate)
		b.at = now
	}
	if b.tokens < min(float64(n), b.most) {
		return false
	}
	b.tokens -= float64(n)
	return true
}
