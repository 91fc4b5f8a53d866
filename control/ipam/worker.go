package ipam

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

const (
	maxOps   = store.MaxOps
	maxBytes = 1 << 20 // of one transaction, estimated; etcd's limit is 1.5 MiB
	maxCalls = 100     // that one transaction serves: most add one operation, their handle
	maxTries = 100     // of a transaction that keeps meeting conflicts, as Calico
	maxReads = 8       // at once
)

// call is a step that waits to be carried out.
type call struct {
	step step
	done chan struct{} // closed when err is set; nil: no caller waits
	err  error

	// settled is won by whoever comes first: the caller who gives up or the
	// worker who answers.
	settled atomic.Bool
}

// abandon is called when the caller waits no more. It reports false when the
// answer is there.
func (c *call) abandon() bool { return c.settled.CompareAndSwap(false, true) }

func (c *call) abandoned() bool { return c.settled.Load() }

// finish answers the caller. It reports false when the caller has gone.
func (c *call) finish(err error) bool {
	if !c.settled.CompareAndSwap(false, true) {
		return false
	}
	c.err = err
	if c.done != nil {
		close(c.done)
	}
	return true
}

// queue holds the calls that no transaction has taken yet.
type queue struct {
	mu     sync.Mutex
	calls  []*call
	closed bool
	wake   async.Signal
}

// push appends a call. It reports false when the queue is closed.
func (q *queue) push(c *call) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.calls = append(q.calls, c)
	q.wake.Set()
	return true
}

// putBack makes calls the next ones.
func (q *queue) putBack(calls []*call) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.calls = slices.Insert(q.calls, 0, calls...)
	q.wake.Set()
}

// take removes up to n calls from the front.
func (q *queue) take(n int) []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	n = min(n, len(q.calls))
	out := slices.Clone(q.calls[:n])
	q.calls = slices.Delete(q.calls, 0, n)
	return out
}

// close refuses further calls and returns those that are left.
func (q *queue) close() []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.calls
	q.calls, q.closed = nil, true
	return left
}

// work serves the queue until ctx ends.
func (a *Allocator) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.queue.wake:
		}
		for ctx.Err() == nil {
			calls := a.queue.take(maxCalls)
			if len(calls) == 0 {
				break
			}
			a.serve(ctx, calls)
		}
	}
}

// serve carries calls out in one transaction, or several if they are too many
// for one.
func (a *Allocator) serve(ctx context.Context, calls []*call) {
	known := map[store.Key]loaded{}
	now := a.cfg.Clock()
	for try := 1; ; {
		calls = slices.DeleteFunc(calls, (*call).abandoned)
		if len(calls) == 0 {
			return
		}
		d, errs := a.plan(calls, known, now)
		if len(d.needs) > 0 {
			a.read(ctx, d.needs, known)
			continue
		}
		if left := calls[len(errs):]; len(left) > 0 {
			a.queue.putBack(left)
			calls = calls[:len(errs)]
		}
		err := a.write(ctx, d.ops(), known)
		switch {
		case err == nil:
			a.answer(calls, errs)
			return
		case ctx.Err() != nil:
			err = ErrStopped
		case errors.Is(err, store.ErrConflict) && try < maxTries:
			a.stay(d)
			try++
			pause(ctx, try)
			continue
		case errors.Is(err, store.ErrConflict):
			a.stay(d)
			err = fmt.Errorf("%d tries: %w", try, err)
		case len(calls) > 1 && !errors.Is(err, store.ErrUnavailable):
			// One of them is refused. It must not spoil the others.
			for _, c := range calls {
				a.serve(ctx, []*call{c})
			}
			return
		}
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
		a.answer(calls, errs)
		return
	}
}

// stay notes that a transaction was refused: what was to leave the reserve is its
// own still.
func (a *Allocator) stay(d *draft) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state.reserve.stay(d.leaving)
}

// plan drafts a transaction for the first of calls, as many as fit: one error
// or nil for each of these.
func (a *Allocator) plan(calls []*call, known map[store.Key]loaded, now time.Time) (*draft, []error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		d := newDraft(a.state, known, now)
		errs := make([]error, 0, len(calls))
		fits := true
		for i, c := range calls {
			err := c.step.plan(d)
			if ops, bytes := d.size(); i > 0 && (ops > maxOps || bytes > maxBytes) {
				calls, fits = calls[:i], false
				break
			}
			d.gives = d.gives || gives(c.step)
			errs = append(errs, err)
		}
		if fits {
			// Under the lock under which it was decided, so that no caller is given
			// what is on its way back.
			if len(d.needs) == 0 && len(d.leaving) > 0 {
				a.state.reserve.leave(d.leaving)
				a.remember()
			}
			return d, errs
		}
	}
}

// pause waits before a transaction is tried again: not at all at first, later
// a random time, so that hosts that fight for one block do not stay in step.
func pause(ctx context.Context, try int) {
	if try < 4 {
		return
	}
	_ = async.Sleep(ctx, rand.N(time.Duration(min(try, 20))*time.Millisecond)) // the caller looks at ctx
}

// read reads what a draft needs. What cannot be read is noted with its error,
// which meets only those calls that need it.
func (a *Allocator) read(ctx context.Context, keys []store.Key, known map[store.Key]loaded) {
	before := make([]store.Revision, len(keys))
	a.mu.Lock()
	for i, key := range keys {
		before[i] = a.state.revision(key)
	}
	a.mu.Unlock()
	results := make([]loaded, len(keys))
	var g errgroup.Group
	g.SetLimit(maxReads)
	for i, key := range keys {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
			defer cancel()
			obj, err := a.cfg.Store.Get(ctx, key)
			switch {
			case errors.Is(err, store.ErrNotFound):
			case err != nil:
				results[i].err = fmt.Errorf("read %s: %w", key, unavailable(err))
			default:
				obj.Key = key
				results[i].obj = obj
			}
			return nil
		})
	}
	_ = g.Wait() // never an error: each key has its own
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, key := range keys {
		known[key] = results[i]
		switch {
		case results[i].err != nil:
		case results[i].obj.Revision == 0:
			// The watch does not report the end of a key that it has not shown
			// of: what own writes taught may have to be unlearnt here.
			a.state.forget(key, before[i])
		default:
			a.state.learn(results[i].obj)
		}
	}
}

// write carries a transaction out and applies to the state what its result says,
// be it done or in conflict.
func (a *Allocator) write(ctx context.Context, ops []store.Op, known map[store.Key]loaded) error {
	if len(ops) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	written, err := a.cfg.Store.Txn(ctx, ops...)
	a.mu.Lock()
	defer a.mu.Unlock()
	var conflict *store.ConflictError
	switch {
	case errors.As(err, &conflict):
		for i, op := range ops {
			if i < len(conflict.Current) {
				a.state.met(op, conflict.Current[i], known)
			}
		}
		return fmt.Errorf("write: %w", err)
	case err != nil:
		return fmt.Errorf("write: %w", unavailable(err))
	}
	for i, op := range ops {
		switch op.Action {
		case store.Put:
			written[i].Key = op.Object.Key
			if written[i].Revision == 0 {
				// It was to follow the decision, and was changed by another writer.
				rev, _ := op.If.Revision()
				a.state.forget(op.Object.Key, rev)
				continue
			}
			if op.Object.Key.Kind == store.KindIPAMBlock {
				a.state.reserve.written[op.Object.Key.CIDR()] = true
			}
			if plain(op, written[i]) {
				written[i].Raw = nil // nothing to be kept by the next write, which so is cheaper
			}
			a.state.learn(written[i])
		case store.Remove:
			if op.Object.Key.Kind == store.KindIPAMBlock {
				delete(a.state.reserve.written, op.Object.Key.CIDR())
			}
			rev, _ := op.If.Revision()
			a.state.forget(op.Object.Key, rev)
		case store.Check:
		}
	}
	a.state.trimHandles()
	a.remember()
	return nil
}

// plain reports whether what was written has no members but those that its
// type knows. A datastore adds to handles who made them ([store.AnnotationHandleNode]).
func plain(op store.Op, written store.Object) bool {
	if op.Object.Raw == nil && op.Object.Key.Kind != store.KindIPAMHandle {
		return true
	}
	known, err := store.Encode(written.Key, written.Value, nil)
	return err == nil && bytes.Equal(known, written.Raw)
}

// met applies to the state what a conflict says of the key of an operation.
func (s *state) met(op store.Op, current store.Object, known map[store.Key]loaded) {
	key := op.Object.Key
	current.Key = key
	switch {
	case current.Revision == 0:
		rev, _ := op.If.Revision()
		s.forget(key, rev)
		known[key] = loaded{}
	case current.Value == nil:
		s.learn(current)
		known[key] = loaded{err: fmt.Errorf("%s: %w", key, store.ErrDecode)}
	default:
		s.learn(current)
		known[key] = loaded{obj: current}
	}
}

// unavailable makes a deadline say what it means here.
func unavailable(err error) error {
	if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, store.ErrUnavailable) {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return err
}

// answer returns their results to the callers. What was given to one who has gone is released,
// before any later call is served.
func (a *Allocator) answer(calls []*call, errs []error) {
	for i, c := range calls {
		a.report(c, errs[i])
		if c.finish(errs[i]) || errs[i] != nil {
			continue
		}
		back := &claimsStep{}
		for _, g := range given(c.step) {
			back.claims = append(back.claims, Claim{Addr: g.Addr, Handle: g.Handle, Sequence: g.Sequence})
		}
		if len(back.claims) > 0 {
			a.queue.putBack([]*call{{step: back}})
		}
	}
}

// report logs what no caller waits for.
func (a *Allocator) report(c *call, err error) {
	if c.done != nil {
		return
	}
	switch st := c.step.(type) {
	case *tidyStep:
		if err != nil {
			a.cfg.Log.Warn("blocks left half claimed or empty", "blocks", st.blocks, "error", err)
		} else if len(st.released) > 0 {
			a.cfg.Log.Info("gave up blocks", "blocks", st.released)
		}
	case *claimsStep:
		if err != nil {
			a.cfg.Log.Warn("addresses of a caller that gave up stay assigned until their handle is released", "handle", st.claims[0].Handle, "error", err)
		}
	}
}
