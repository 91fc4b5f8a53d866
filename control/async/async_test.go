package async

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSignalCountsOnce(t *testing.T) {
	t.Parallel()
	s := NewSignal()
	s.Set()
	s.Set()
	<-s
	select {
	case <-s:
		t.Error("two signals before the receiver looked count twice")
	default:
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	b := Backoff{Min: 100 * time.Millisecond, Max: 350 * time.Millisecond}
	var got []time.Duration
	for range 4 {
		got = append(got, b.Next())
	}
	b.Reset()
	got = append(got, b.Next())
	want := []time.Duration{100e6, 200e6, 350e6, 350e6, 100e6}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("pauses (-want +got):\n%s", d)
	}
	b = Backoff{Min: time.Second, Max: time.Second, Jitter: 0.5}
	for range 100 {
		if d := b.Next(); d < time.Second/2 || d > time.Second {
			t.Fatalf("pause %s with half left to chance: want 500ms to 1s", d)
		}
	}
}

func TestSleepAndRetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := Sleep(t.Context(), time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Errorf("slept %s, %v", time.Since(start), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := Sleep(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("sleep past the end of its context: %v", err)
		}

		start = time.Now()
		tries := 0
		err := Retry(t.Context(), Backoff{Min: time.Second, Max: 2 * time.Second}, func(context.Context) error {
			if tries++; tries < 4 {
				return errors.New("not yet")
			}
			return nil
		})
		if err != nil || tries != 4 || time.Since(start) != 5*time.Second {
			t.Errorf("%d tries in %s, %v; want 4 in 5s", tries, time.Since(start), err)
		}
		if err := Retry(ctx, Backoff{Min: time.Hour, Max: time.Hour}, func(context.Context) error { return errors.New("never") }); err == nil {
			t.Error("Retry succeeds without a success")
		}
	})
}

// TestStill: the wait begins anew when the counter moves or is not known, and is told
// of what it grew by.
func TestStill(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		steps := []struct {
			n     uint64
			known bool
		}{{7, true}, {9, true}, {0, false}, {9, true}, {4, true}}
		start, call := time.Now(), -1
		var moved []uint64
		err := Still(t.Context(), 3*time.Second, func() (uint64, bool, error) {
			call++
			s := steps[min(call, len(steps)-1)]
			return s.n, s.known, nil
		}, func(by uint64, _ time.Duration) { moved = append(moved, by) })
		if took := time.Since(start); err != nil || took != 7*time.Second {
			t.Errorf("over after %v, %v; want 7s", took, err)
		}
		if d := cmp.Diff([]uint64{2}, moved); d != "" {
			t.Errorf("it grew by (-want +got):\n%s", d)
		}
		broken := errors.New("broken")
		if err := Still(t.Context(), time.Second, func() (uint64, bool, error) { return 0, false, broken }, nil); !errors.Is(err, broken) {
			t.Errorf("%v, want what count says", err)
		}
	})
}
