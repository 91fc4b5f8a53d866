package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/store"
)

// datastore is the store, and whether there is a point in asking it.
type datastore struct {
	store.Store
	timeout time.Duration // of a step that needs it
	mayHold func() error  // why this host must not write: see Config.Held; nil: it may

	mu           sync.Mutex
	away, synced bool // as the watch says
}

// handle takes account of a batch of the watch. It reports whether what waited
// for the datastore, or for the host's name, can go on.
func (d *datastore) handle(s cluster.Step) (back bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	back = s.Err == nil && (d.away || s.Synced && !d.synced || slices.ContainsFunc(s.Changes, func(c *cluster.Change) bool {
		return c.Key.Kind == store.KindClusterInformation // it may be unlocked
	}))
	d.away, d.synced = s.Err != nil, d.synced || s.Synced
	return back
}

func (d *datastore) isAway() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.away
}

// held says, as [ErrNotReady], why the datastore must not be written: this host
// does not hold its name; nil: it does.
func (d *datastore) held() error {
	if d.mayHold == nil {
		return nil
	}
	if err := d.mayHold(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return nil
}

// locked reports whether an operator has the datastore locked.
func (d *datastore) locked() bool { return errors.Is(d.held(), lock.ErrLocked) }

// writable reports whether the datastore is there and may be written.
func (d *datastore) writable() bool { return d.held() == nil && !d.isAway() }

// context bounds a step that needs the datastore.
func (d *datastore) context(ctx context.Context) (context.Context, context.CancelFunc) {
	return bounded(ctx, d.timeout)
}

// bounded bounds a step. It leaves a tenth of the caller's time for the answer.
func bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(deadline)*9/10)
	}
	return context.WithTimeout(ctx, timeout)
}

// storeError names the step, and the datastore when waiting for it is what
// took too long.
func storeError(step string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, store.ErrUnavailable) {
		return fmt.Errorf("%s: %w: %w", step, store.ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", step, err)
}
