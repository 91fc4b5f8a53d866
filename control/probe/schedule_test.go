package probe

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestBucket(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	b := newBucket(echoRate, echoBurst, now)
	n := 0
	for b.take(now, 1) {
		n++
	}
	if n != echoBurst {
		t.Errorf("a burst of %d, want %d", n, echoBurst)
	}
	for range 5 * echoRate {
		now = now.Add(100 * time.Millisecond / echoRate * 10)
		if b.take(now, 1) {
			n++
		}
	}
	if got, want := n-echoBurst, 5*echoRate; got > want+1 || got < want-1 {
		t.Errorf("%d more in five seconds, want %d", got, want)
	}
}

type scheduled struct {
	wake
	n int
}

// Whatever is scheduled, put off and dropped, what is due first comes first.
func TestSchedule(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var s schedule[*scheduled]
		all := make([]*scheduled, 8)
		for i := range all {
			all[i] = &scheduled{n: i}
		}
		in := map[*scheduled]time.Time{}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			x := rapid.SampledFrom(all).Draw(t, "which")
			if rapid.IntRange(0, 3).Draw(t, "drop") == 0 {
				s.drop(x)
				delete(in, x)
			} else {
				at := time.Unix(int64(rapid.IntRange(0, 9).Draw(t, "at")), 0)
				s.set(x, at)
				in[x] = at
			}
		}
		var want []time.Time
		for _, at := range in {
			want = append(want, at)
		}
		slices.SortFunc(want, time.Time.Compare)
		for _, at := range want {
			x, ok := s.first()
			if !ok || !in[x].Equal(at) || !x.at.Equal(at) {
				t.Fatalf("first is %v, %t; want one of %v", x, ok, at)
			}
			s.drop(x)
			delete(in, x)
		}
		if x, ok := s.first(); ok || cmp.Compare(len(in), 0) != 0 {
			t.Fatalf("left: %v, %v", x, in)
		}
	})
}
