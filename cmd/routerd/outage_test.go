package main

import (
	"testing"

	"github.com/routerd/routerd/store"
)

// TestOutageEnds: whoever was told that the datastore is away is told that it is
// back, and what nobody was told yet is not told late.
func TestOutageEnds(t *testing.T) {
	t.Parallel()
	d := &router{away: make(chan store.Batch, 1)}
	next := func() error {
		t.Helper()
		select {
		case b := <-d.away:
			return b.Err
		default:
			t.Fatal("nothing is told")
			return nil
		}
	}
	d.outage(store.ErrUnavailable)
	if err := next(); err == nil {
		t.Error("the outage is not told")
	}
	d.outage(nil)
	if err := next(); err != nil {
		t.Errorf("its end is told as %v", err)
	}
	d.outage(store.ErrUnavailable)
	d.outage(nil)
	if err := next(); err != nil || len(d.away) != 0 {
		t.Errorf("an outage that is over is told: %v, and %d more", err, len(d.away))
	}
}
