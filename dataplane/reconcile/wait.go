package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/dataplane"
)

func (e *entry) phase(tr *failure) phase {
	switch {
	case e.done():
		return phaseNone
	case tr != nil && tr.failed:
		return phaseFailed
	case tr != nil && tr.waiting:
		return phaseWaiting
	}
	return phaseUntried
}

// Wait blocks until all that the call which returned rev named is done, and
// all that its source named before was tried. It returns the errors of those
// keys of rev that were refused; keys of earlier calls answer for themselves,
// so that one bad key does not fail every later wait. When ctx ends first, the
// error says what is missing. Keys that a later call named again no longer
// count.
func (t *Tracker[K, V]) Wait(ctx context.Context, rev dataplane.Revision) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.revisions.await(rev)
	if w == nil {
		return t.errorsOf(rev)
	}
	t.mu.Unlock()
	select {
	case <-w.ready:
		t.mu.Lock()
		return t.errorsOf(rev)
	case <-ctx.Done():
		t.mu.Lock()
		delete(t.revisions.waiters, w)
		if err := t.errorsOf(rev); err != nil {
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return fmt.Errorf("not tried yet: %w", context.Cause(ctx))
	}
}

// maxErrors bounds how many errors one error names.
const maxErrors = 5

// errorsOf returns the errors of the keys of rev.
func (t *Tracker[K, V]) errorsOf(rev dataplane.Revision) error {
	if t.revisions.groups[rev] == nil {
		return nil
	}
	var errs []error
	more := 0
	for _, e := range t.table.All() {
		switch {
		case e.rev != rev || e.done() || !e.failing() || t.failure(e).err == nil:
		case len(errs) == maxErrors:
			more++
		default:
			errs = append(errs, fmt.Errorf("%v: %w", t.key(e), t.failure(e).err))
		}
	}
	if more > 0 {
		errs = append(errs, fmt.Errorf("and %d more", more))
	}
	return errors.Join(errs...)
}

// Status is what became of a wanted key.
type Status[K comparable, V comparable] struct {
	Key      K
	Want     V
	Source   dataplane.Source
	State    dataplane.State
	Since    time.Time // of State
	Err      error     // why it Failed, or what Pending waits for
	Attempts int       // refusals in a row
}

func (t *Tracker[K, V]) status(e *entry) Status[K, V] {
	s := Status[K, V]{Key: t.key(e), Want: t.wants(e), Source: e.src, State: e.state(), Since: t.start.Add(time.Duration(e.since) * tick)}
	if tr := t.failure(e); tr != nil && e.state() != dataplane.Done {
		s.Err, s.Attempts = tr.err, tr.attempts
	}
	return s
}

// Status returns what became of k, and whether anybody wants it.
func (t *Tracker[K, V]) Status(k K) (Status[K, V], bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.find(k); e != nil && e.wanted() {
		return t.status(e), true
	}
	return Status[K, V]{}, false
}

// Statuses returns what became of every wanted key, in no order.
func (t *Tracker[K, V]) Statuses() []Status[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Status[K, V], 0, t.table.Len())
	for _, e := range t.table.All() {
		if e.wanted() {
			out = append(out, t.status(e))
		}
	}
	return out
}
