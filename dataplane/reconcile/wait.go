package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// phase says how a key counts towards the revision that named it last.
type phase uint8

const (
	phaseNone    phase = iota // nothing to do
	phaseUntried              // not tried since it was named
	phaseWaiting              // waits for something else
	phaseFailed
	phases
)

// group counts, by phase, the keys that a revision named and that are not
// done.
type group [phases]int

type waiter struct {
	rev   dataplane.Revision
	ready chan struct{}
}

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

// recount moves e from its place in the count of the revision that named it before to
// where it belongs in that of rev.
func (t *Tracker[K, V]) recount(e *entry, rev dataplane.Revision, now phase) {
	if rev == e.rev && now == e.counted() {
		return
	}
	if e.counted() != phaseNone {
		if g := t.groups[e.rev]; g != nil {
			if g[e.counted()]--; *g == (group{}) {
				delete(t.groups, e.rev)
			}
		}
	}
	e.rev = rev
	e.count(now)
	if now != phaseNone && rev != 0 {
		g := t.groups[rev]
		if g == nil {
			g = new(group)
			t.groups[rev] = g
		}
		g[now]++
		if now == phaseUntried {
			t.opened(rev)
		}
	}
}

// opened notes that rev has untried keys.
func (t *Tracker[K, V]) opened(rev dataplane.Revision) {
	src := sourceOf(rev)
	list := t.open[src]
	if n := len(list); n == 0 || list[n-1] < rev {
		t.open[src] = append(list, rev)
	}
}

// resolved reports whether a wait for rev is over: everything that its source
// named up to rev was tried, and what rev itself named does not wait.
func (t *Tracker[K, V]) resolved(rev dataplane.Revision) bool {
	src := sourceOf(rev)
	list := t.open[src]
	for len(list) > 0 {
		if g := t.groups[list[0]]; g != nil && g[phaseUntried] > 0 {
			break
		}
		list = list[1:]
	}
	t.open[src] = list
	if len(list) > 0 && list[0] <= rev {
		return false
	}
	g := t.groups[rev]
	return g == nil || g[phaseUntried] == 0 && (g[phaseWaiting] == 0 || g[phaseFailed] > 0)
}

// notify wakes the waits that are over.
func (t *Tracker[K, V]) notify() {
	for w := range t.waiters {
		if t.resolved(w.rev) {
			delete(t.waiters, w)
			close(w.ready)
		}
	}
}

// Wait blocks until all that the call which returned rev named is done, and
// all that its source named before was tried. It returns the errors of those
// keys of rev that were refused; keys of earlier calls answer for themselves,
// so that one bad key does not fail every later wait. When ctx ends first, the
// error says what is missing. Keys that a later call named again no longer
// count.
func (t *Tracker[K, V]) Wait(ctx context.Context, rev dataplane.Revision) error {
	t.mu.Lock()
	if t.resolved(rev) {
		defer t.mu.Unlock()
		return t.errorsOf(rev)
	}
	w := &waiter{rev, make(chan struct{})}
	t.waiters[w] = struct{}{}
	t.mu.Unlock()

	select {
	case <-w.ready:
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.errorsOf(rev)
	case <-ctx.Done():
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.waiters, w)
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
	if t.groups[rev] == nil {
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
