package dense

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestQueue compares a queue with a list, and sees that what was taken takes no room.
func TestQueue(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var q Queue[*int]
		var want []*int
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			n := rapid.IntRange(1, queuePiece*2).Draw(t, "values")
			if rapid.Bool().Draw(t, "add") {
				for range n {
					v := new(int)
					q.Add(v)
					want = append(want, v)
				}
			}
			for range min(rapid.IntRange(0, n).Draw(t, "taken"), len(want)) {
				if first, v := q.First(), q.Next(); first != v || v != want[0] {
					t.Fatalf("%p is first and %p next; want %p", first, v, want[0])
				}
				want = want[1:]
			}
			if got := slices.Collect(q.All()); q.Len() != len(want) || !slices.Equal(got, want) {
				t.Fatalf("%d values of %d; want %d", len(got), q.Len(), len(want))
			}
			if most := 2 + len(want)/queuePiece; len(q.pieces) > most {
				t.Fatalf("%d pieces for %d values", len(q.pieces), len(want))
			}
		}
		for q.Len() > 0 {
			q.Next()
		}
		for _, piece := range q.pieces {
			if slices.ContainsFunc(piece[:cap(piece)], func(v *int) bool { return v != nil }) {
				t.Fatal("a value is held that was taken")
			}
		}
	})
}
