package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
)

const (
	// heartbeat is how often an idle loop turns, for the watchdog.
	heartbeat = time.Second
	// The delay after a listing that failed.
	minListBackoff = 200 * time.Millisecond
	maxListBackoff = 10 * time.Second
)

// listing says when the kernel's tables are to be listed again.
type listing struct {
	why       string    // empty: they need not be
	notBefore time.Time // whatever the need
	fullAt    time.Time // without a reason
	backoff   async.Backoff
}

func (l *listing) needed() bool { return l.why != "" }

// ask asks for a listing; the first reason counts.
func (l *listing) ask(why string) {
	if l.why == "" {
		l.why = why
	}
}

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
	wg.Go(func() { k.observer.lis.run(k.wake.Set) })
	wg.Go(func() { k.actual.sysctls.watch.run(k.wake.Set) })
	if k.actual.offloads != nil {
		wg.Go(func() { k.actual.offloads.changes.run(k.wake.Set) })
	}

	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		k.writer.pulse.beat()
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
		case <-k.wake:
		case <-timer.C:
		}
	}
	return nil
}

// step is one turn of the loop. It reports whether the next is due at once.
func (k *Kernel) step(ctx context.Context) (more bool, err error) {
	last := k.want.Last()
	if err := k.observer.drain(); err != nil {
		return false, fmt.Errorf("read the kernel's notifications: %w", err)
	}
	k.heard.upTo(last)
	now := time.Now()
	if !k.listing.needed() && !now.Before(k.listing.fullAt) {
		k.listing.why = "time"
	}
	if k.listing.needed() {
		if now.Before(k.listing.notBefore) || !k.relist(ctx) {
			k.observer.publishUnderlay()
			return false, nil // nothing is written while we do not know
		}
		k.observer.drift.log()
	}
	// Asked before the pass: what is said while it runs is for the next one.
	silent := len(k.want.Silent()) > 0
	more = k.writer.turn()
	if !more && !silent {
		k.ready.passed()
	}
	k.observer.publishUnderlay()
	return more && !k.listing.needed(), nil
}

// relist makes a complete listing, and reports whether that worked.
func (k *Kernel) relist(ctx context.Context) bool {
	why, start := k.listing.why, time.Now()
	err := k.check(ctx)
	if ctx.Err() != nil {
		return false
	}
	k.ready.wasListed(err)
	if err != nil {
		delay := k.listing.backoff.Next()
		k.log.Error("cannot list the kernel's tables", "reason", why, "error", err, "retry", delay)
		k.writer.conn.redial(err)
		k.listing.notBefore = time.Now().Add(delay)
		return false
	}
	k.listing.backoff.Reset()
	every := max(k.cfg.FullCheck, time.Duration(k.cfg.ListingShare)*time.Since(start))
	k.listing.fullAt = time.Now().Add(every*9/10 + rand.N(every/5+1))
	return true
}

// heard is up to which call the loop has taken what the kernel had said by then.
type heard struct {
	mu   sync.Mutex
	rev  dataplane.Revision
	more chan struct{} // closed when rev grows; nil: no caller waits
}

func (h *heard) upTo(rev dataplane.Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if rev > h.rev {
		h.rev = rev
		if h.more != nil {
			close(h.more)
			h.more = nil
		}
	}
}

// wait returns when it has come to rev, or ctx ends.
func (h *heard) wait(ctx context.Context, rev dataplane.Revision) {
	for {
		h.mu.Lock()
		if h.rev >= rev {
			h.mu.Unlock()
			return
		}
		if h.more == nil {
			h.more = make(chan struct{})
		}
		more := h.more
		h.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
	}
}

// pause is how long the loop may sleep.
func (k *Kernel) pause() time.Duration {
	d := min(heartbeat, time.Until(k.listing.fullAt))
	if k.listing.needed() {
		d = time.Until(k.listing.notBefore)
	} else if next, ok := k.want.Next(); ok {
		d = min(d, time.Until(next))
	}
	if !k.observer.underlay.at.IsZero() {
		d = min(d, time.Until(k.observer.underlay.at))
	}
	return max(0, min(d, heartbeat))
}
