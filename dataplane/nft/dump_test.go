package nft

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

func TestUndisturbed(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for _, tt := range []struct {
		name        string
		interrupted int // reads that others interrupt before the last one
		last, want  error
		calls       int
	}{
		{"quiet", 0, nil, nil, 1},
		{"others come in between", 3, nil, nil, 4},
		{"an error is told at once", 1, refused, refused, 2},
		{"others never end", 1000, nil, nl.ErrInterrupted, 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			err := undisturbed(func() error {
				if calls++; calls <= tt.interrupted {
					return nl.ErrInterrupted
				}
				return tt.last
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("%d calls, %v; want %d, %v", calls, err, tt.calls, tt.want)
			}
		})
	}
}

// A table that goes and comes while it is read is read once more: what was listed and
// is not there any more is no error.
func TestReadWhileDeleted(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	var reader, writer conn
	for _, c := range []*conn{&reader, &writer} {
		if err := n.Do(func() (err error) { *c, err = open(); return err }); err != nil {
			t.Fatal(err)
		}
		defer c.Close() //nolint:errcheck // the test is over
	}
	ctx, cancel := context.WithCancel(t.Context())
	written := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			put, del := new(batch), new(batch)
			put.putTable(0)
			for i := range 50 {
				put.putSet(fmt.Sprintf("s%d", i), workloadsSet())
			}
			del.delTable()
			if err := errors.Join(writer.commit(put), writer.commit(del)); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	interrupted := 0
	for range 5000 {
		switch _, err := reader.dumpOnce(); {
		case errors.Is(err, nl.ErrInterrupted):
			interrupted++
		case err != nil:
			t.Error(err)
		}
	}
	cancel()
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of 5000 readings were interrupted", interrupted)
}
