package stall

import (
	"testing"
	"time"
)

func TestWithin(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	var r Recorder
	r.woke(at(0), at(6)) // in time
	r.woke(at(100), at(205))
	r.woke(at(400), at(505)) // of two processors, together 405 to 705
	r.woke(at(450), at(705))
	for _, tt := range []struct {
		from, to int
		want     time.Duration
	}{
		{0, 1000, 400},
		{0, 100, 0},
		{150, 155, 5},
		{150, 300, 55},
		{500, 600, 100},
		{300, 410, 5},
		{700, 1000, 5},
		{600, 500, 0},
	} {
		if got := r.Within(at(tt.from), at(tt.to)); got != tt.want*time.Millisecond {
			t.Errorf("from %d to %d ms: stalled for %v, want %v", tt.from, tt.to, got, tt.want*time.Millisecond)
		}
	}
	if got := r.Longest(); got != 250*time.Millisecond {
		t.Errorf("the longest stall is %v, want 250ms", got)
	}
}

// TestStart: recording ends when it is told to, and what it found is no longer
// than it lasted.
func TestStart(t *testing.T) {
	t.Parallel()
	from := time.Now()
	r, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Stop()
	to := time.Now()
	if got := r.Within(from, to); got < 0 || got > to.Sub(from) {
		t.Errorf("stalled for %v in %v", got, to.Sub(from))
	}
}
