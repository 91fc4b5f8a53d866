package kernel

import "testing"

// The room that a burst took for its work goes back, and that of a small change stays.
func TestShrink(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ room, want int }{{turnSize, 0}, {batchSize, 0}, {16, 16}} {
		wr := &writer{ops: make([]op, 0, tt.room), sent: make([]op, 0, 16), results: make([]result, 0, 16)}
		wr.shrink()
		if got := cap(wr.ops); got != tt.want {
			t.Errorf("room for %d objects: %d is left, want %d", tt.room, got, tt.want)
		}
	}
}
