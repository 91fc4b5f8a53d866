// Package await holds how tests wait for what must come, and for how long.
package await

import (
	"context"
	"errors"
	"testing"
	"time"
)

// Patience bounds every such wait. It is about the state, not about how fast it
// comes: where processors are taken away for most of the time, a second's work
// takes half a minute. A test that does ask for speed has a bound of its own.
const Patience = 2 * time.Minute

// The pause between two looks grows: what is nearly there is seen at once, and a
// long wait leaves the processor to what is waited for.
const firstPause, longestPause = 100 * time.Microsecond, 10 * time.Millisecond

// failer is what a wait needs of a test, a benchmark or a [pgregory.net/rapid]
// check.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// Until looks again and again until check returns nil. The test fails with its
// last error.
func Until(t failer, what string, check func() error) {
	t.Helper()
	until(t, Patience, what, check)
}

// True is [Until] for a condition of which there is nothing more to say.
func True(t failer, what string, holds func() bool) {
	t.Helper()
	until(t, Patience, what, func() error {
		if !holds() {
			return errNotYet
		}
		return nil
	})
}

var errNotYet = errors.New("it is not so")

func until(t failer, bound time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(bound)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		// What was begun in time may end late.
		late := time.Now().After(deadline)
		err := check()
		if err == nil {
			return
		}
		if late {
			t.Fatalf("%s: not within %s: %v", what, bound, err)
			return
		}
		<-time.After(pause)
	}
}

// Context is for calls that must succeed: it ends with the test, or when
// [Patience] does.
func Context(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), Patience)
	tb.Cleanup(cancel)
	return ctx
}
