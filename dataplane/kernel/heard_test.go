package kernel

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/routerd/routerd/dataplane"
)

// TestHeard: a wait is over when the loop has taken what the kernel had said at the
// time of the call, and not before; one that is given up is over at once.
func TestHeard(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var h heard
		var over [4]atomic.Bool
		for rev := range over {
			go func() { h.wait(t.Context(), dataplane.Revision(rev)); over[rev].Store(true) }()
		}
		check := func(upTo int) {
			t.Helper()
			synctest.Wait()
			for rev := range over {
				if got := over[rev].Load(); got != (rev <= upTo) {
					t.Errorf("up to %d: the wait for %d is over: %t", upTo, rev, got)
				}
			}
		}
		check(0)
		h.upTo(2)
		check(2)
		h.upTo(1)
		check(2)
		h.upTo(3)
		check(3)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		h.wait(ctx, 4)
	})
}
