package attach

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// maxRetry is the longest pause between tries of [Attacher.Run].
const maxRetry = time.Minute

// retries says when to try again what failed: each attachment has pauses of its
// own, so that one that keeps failing delays no other. The zero ID is
// [Attacher.reclaim]'s.
type retries struct {
	first time.Duration
	by    map[ID]retry
}

type retry struct {
	pause time.Duration
	at    time.Time
}

// failed notes that a try failed just now.
func (r *retries) failed(id ID, now time.Time) {
	pause := r.first
	if old, ok := r.by[id]; ok {
		if old.at.After(now) {
			return // more failures do not put off a try that is to come
		}
		pause = min(2*old.pause, maxRetry)
	}
	r.by[id] = retry{pause, now.Add(pause)}
}

// waits reports whether a try is to come and not due.
func (r *retries) waits(id ID, now time.Time) bool {
	e, ok := r.by[id]
	return ok && e.at.After(now)
}

// done forgets past failures.
func (r *retries) done(id ID) { delete(r.by, id) }

// tried forgets what was due at a time and has not failed since: it was tried, or
// is there no more.
func (r *retries) tried(at time.Time) {
	maps.DeleteFunc(r.by, func(_ ID, e retry) bool { return !e.at.After(at) })
}

// next returns when the first try is due.
func (r *retries) next() (at time.Time, ok bool) {
	for _, e := range r.by {
		if !ok || e.at.Before(at) {
			at, ok = e.at, true
		}
	}
	return at, ok
}

// completeLater makes [Attacher.Run] complete attachments after a pause:
// something of them failed just now, and trying at once would only repeat it.
func (a *Attacher) completeLater(ids ...ID) {
	for _, id := range ids {
		a.failed(id)
	}
	select {
	case a.poke <- struct{}{}:
	default:
	}
}

// reclaimLater makes [Attacher.Run] take up again what the datastore forgot. A
// try that is to come, or due, is not put off by more reasons for it. The caller
// has the lock.
func (a *Attacher) reclaimLater() {
	if _, armed := a.retries.by[ID{}]; armed && a.forgotten {
		return
	}
	a.forgotten = true
	a.retries.failed(ID{}, time.Now())
	a.completeLater()
}

func (a *Attacher) failed(id ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.retries.failed(id, time.Now())
}

// fresh forgets past failures: what is to be done about the attachment now is
// something else.
func (a *Attacher) fresh(id ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.retries.done(id)
}

// writeLater has the writer look, a moment later, so that what comes at one
// time is written together.
func (a *Attacher) writeLater() {
	select {
	case a.dirty <- struct{}{}:
	default:
	}
}

// Run completes what was cut short: releases that the datastore's absence or
// the daemon's end interrupted. It also gives the datastore back what it forgot
// of living workloads; see [Attacher.HandleStore]. It returns when ctx ends.
func (a *Attacher) Run(ctx context.Context) {
	var cutter sync.WaitGroup
	defer cutter.Wait()
	cutter.Go(func() { a.runCuts(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	var linger time.Time // when to write what has come; zero: nothing has
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.back:
			a.mu.Lock()
			clear(a.retries.by)
			a.mu.Unlock()
			linger = time.Now()
		case <-a.dirty:
			if linger.IsZero() {
				linger = time.Now().Add(a.cfg.Linger)
			}
		case <-a.poke:
		case <-timer.C:
			linger = time.Time{}
			a.workThrough(ctx)
		}
		timer.Stop()
		a.mu.Lock()
		next, due := a.retries.next()
		a.mu.Unlock()
		if !linger.IsZero() && (!due || linger.Before(next)) {
			next, due = linger, true
		}
		if due {
			timer.Reset(time.Until(next))
		}
	}
}

// workThrough tries everything that is due.
func (a *Attacher) workThrough(ctx context.Context) {
	start := time.Now()
	a.confirmAll(ctx, a.retries.waits)
	a.mu.Lock()
	wait := a.retries.waits(ID{}, time.Now())
	a.mu.Unlock()
	if !wait {
		// Before releases, which may take long: until then others may get the
		// addresses of workloads that live here.
		a.reclaim(ctx)
	}
	a.complete(ctx, a.retries.waits)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.retries.tried(start)
}

// waiting returns the attachments on their way out that are to be tried again
// later.
func (a *Attacher) waiting(later func(ID, time.Time) bool) map[ID]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	out, now := map[ID]bool{}, time.Now()
	for id, r := range a.records {
		if r.State == stateReleasing && later(id, now) {
			out[id] = true
		}
	}
	return out
}

// parallelReleases bounds how many attachments are released at once by
// background work and GC.
const parallelReleases = 16

// complete tries to finish every interrupted release, but for those that are to
// be tried again later, and reports whether none is left.
func (a *Attacher) complete(ctx context.Context, later func(ID, time.Time) bool) bool {
	var (
		mu   sync.Mutex
		left int
	)
	note := func(id ID, err error) {
		mu.Lock()
		defer mu.Unlock()
		if left++; left == 1 && err != nil {
			a.log.Warn("release of an attachment is still incomplete; will try again", append(logID(id), "error", err)...)
		}
	}
	var g errgroup.Group
	g.SetLimit(parallelReleases)
	waits := a.waiting(later)
	for id, r := range a.snapshot() {
		switch {
		case r.State != stateReleasing:
		case waits[id]:
			note(id, nil)
		case r.cut && a.needsStore(r):
			// It would only wait for the datastore, whose return or first answer wakes Run.
			a.failed(id)
			note(id, nil)
		default:
			g.Go(func() error {
				err := a.completeOne(ctx, id)
				if err == nil {
					return nil
				}
				a.failed(id)
				if errors.Is(err, context.Canceled) {
					err = nil // somebody needed its locks
				}
				note(id, err)
				return nil
			})
		}
	}
	_ = g.Wait()
	return left == 0
}

// needsStore reports whether a release waits for a datastore that is known to be
// away, or must not be written by this host.
func (a *Attacher) needsStore(r record) bool {
	local, unheld := a.localOnly(r) || a.disowned(r.id()), a.held() != nil
	a.mu.Lock()
	defer a.mu.Unlock()
	return (a.storeAway || unheld) && !local
}

func (a *Attacher) completeOne(ctx context.Context, id ID) error {
	// Who asks for the container or its device does not wait for the datastore,
	// nor for who waits for it with the other lock.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unlock, r, known, err := a.lockBy(ctx, id, Workload{}, func(ctx context.Context, key string) (func(), error) {
		free, err := a.locks.await(ctx, key)
		if err == nil {
			a.locks.yield(key, cancel)
		}
		return free, err
	})
	if err != nil {
		return err
	}
	defer unlock()
	if !known || r.State != stateReleasing {
		a.fresh(id)
		return nil
	}
	if err := a.release(ctx, r); err != nil {
		return err
	}
	a.log.Debug("release completed", logID(id)...)
	return nil
}
