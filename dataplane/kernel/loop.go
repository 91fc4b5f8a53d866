package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// heartbeat is how often an idle loop turns, for the watchdog.
	heartbeat = time.Second
	// maxListBackoff bounds the delay after a listing that failed.
	maxListBackoff = 10 * time.Second
)

// Run owns the kernel until ctx ends: it makes the tables what is wanted and
// keeps them so. It leaves everything in place when it returns, nil if ctx
// ended, or else the error that the notifications' socket died of. It may be
// called once.
func (k *Kernel) Run(ctx context.Context) error {
	if k.started.Swap(true) {
		return errors.New("run: called twice")
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer k.Close()
	wg.Go(func() { k.lis.run(k.wakeLoop) })
	wg.Go(func() { k.settings.run(k.wakeLoop) })
	if k.offs != nil {
		wg.Go(func() { k.offs.run(k.wakeLoop) })
	}

	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		k.turned()
		more, err := k.step(ctx)
		if err != nil {
			return err
		}
		if more {
			continue
		}
		timer.Reset(k.pause())
		select {
		case <-ctx.Done():
		case <-k.poke:
		case <-timer.C:
		}
	}
	return nil
}

// step is one turn of the loop. It reports whether the next is due at once.
func (k *Kernel) step(ctx context.Context) (more bool, err error) {
	if err := k.drain(); err != nil {
		return false, fmt.Errorf("read the kernel's notifications: %w", err)
	}
	now := time.Now()
	if k.dirty == "" && !now.Before(k.fullAt) {
		k.dirty = "time"
	}
	if k.dirty != "" {
		if now.Before(k.listAt) || !k.relist(ctx) {
			k.show()
			return false, nil // nothing is written while we do not know
		}
		k.logDrift()
	}
	// Asked before the pass: what is said while it runs is for the next one.
	silent := len(k.want.Silent()) > 0
	more = k.turn()
	if !more && !silent {
		k.mu.Lock()
		k.passed = true
		k.mu.Unlock()
	}
	k.show()
	return more && k.dirty == "", nil
}

// relist makes a complete listing, and reports whether that worked.
func (k *Kernel) relist(ctx context.Context) bool {
	why, start := k.dirty, time.Now()
	err := k.check(ctx)
	if ctx.Err() != nil {
		return false
	}
	k.mu.Lock()
	k.listErr = err
	k.listed = k.listed || err == nil
	k.mu.Unlock()
	if err != nil {
		k.listTries++
		delay := min(maxListBackoff, 100*time.Millisecond<<min(k.listTries, 10))
		k.log.Error("cannot list the kernel's tables", "reason", why, "error", err, "retry", delay)
		k.redial(err)
		k.listAt = time.Now().Add(delay)
		return false
	}
	k.listTries = 0
	every := max(k.cfg.FullCheck, time.Duration(k.cfg.ListingShare)*time.Since(start))
	k.fullAt = time.Now().Add(every*9/10 + rand.N(every/5+1))
	return true
}

// pause is how long the loop may sleep.
func (k *Kernel) pause() time.Duration {
	d := min(heartbeat, time.Until(k.fullAt))
	if k.dirty != "" {
		d = time.Until(k.listAt)
	} else if next, ok := k.want.Next(); ok {
		d = min(d, time.Until(next))
	}
	if !k.showAt.IsZero() {
		d = min(d, time.Until(k.showAt))
	}
	return max(0, min(d, heartbeat))
}
