package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// faulty is a store whose transactions meet what a test arranges.
type faulty struct {
	store.Store

	mu   sync.Mutex
	txns [][]store.Op
	txn  func(n int, ctx context.Context, do func() ([]store.Object, error)) ([]store.Object, error)
}

func (f *faulty) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	f.mu.Lock()
	f.txns = append(f.txns, ops)
	n, meet := len(f.txns), f.txn
	f.mu.Unlock()
	// What was sent takes place though nobody waits for it any more.
	do := func() ([]store.Object, error) { return f.Store.Txn(context.WithoutCancel(ctx), ops...) }
	if meet == nil {
		return do()
	}
	return meet(n, ctx, do)
}

func (f *faulty) arrange(txn func(n int, ctx context.Context, do func() ([]store.Object, error)) ([]store.Object, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.txns, f.txn = nil, txn
}

func (f *faulty) seen() [][]store.Op {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.txns)
}

// faultyHost starts a host on a store with faults.
func (w *world) faultyHost(name string, timeout time.Duration) (*host, *faulty) {
	w.t.Helper()
	put(w.t, w.st, newNode(name, nil))
	f := &faulty{Store: w.st}
	h := start(w.t, f, name, w.clock.time)
	h.cfg.Timeout = timeout
	w.t.Cleanup(h.stop)
	settle(w.t, h, "the node", func(s *state) bool { return s.registered })
	return h, f
}

// TestOneTransaction counts what the normal cases cost.
func TestOneTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h, f := w.faultyHost("a", time.Second)
	for i, step := range []func(){
		func() { mustAssign(t, h, v4("first")) },
		func() { mustAssign(t, h, v4("second")) },
		func() { _, _ = h.ReleaseHandle(await.Context(t), "first") },
	} {
		f.arrange(nil)
		step()
		if got := f.seen(); len(got) != 1 || i > 0 && len(got[0]) != 2 {
			t.Errorf("step %d: %d transactions, the first with %d operations", i, len(got), len(got[0]))
		}
	}
	f.arrange(nil)
	for range 3 {
		if _, err := h.ReleaseHandle(await.Context(t), "first"); err != nil {
			t.Fatal(err)
		}
	}
	mustDiff(t, "transactions with nothing to do", 0, len(f.seen()))
	r := v4("second")
	r.Idempotent = true
	mustAssign(t, h, r)
	if got := f.seen(); len(got) != 1 || slices.ContainsFunc(got[0], func(o store.Op) bool { return o.Action != store.Check }) {
		t.Errorf("a repeated request writes: %v", got)
	}
}

// waiting waits until so many calls wait for a transaction to end.
func (h *host) waiting(t *testing.T, calls int) {
	t.Helper()
	await.True(t, fmt.Sprintf("%d calls wait", calls), func() bool {
		h.queue.mu.Lock()
		defer h.queue.mu.Unlock()
		return len(h.queue.calls) >= calls
	})
}

// TestCombine: who asks while a transaction is under way is served by the next
// one together with the others, within etcd's limits.
func TestCombine(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/22", blockSize(28)))
	h, f := w.faultyHost("a", 20*time.Second)
	mustAssign(t, h, v4("warm"))
	gate, entered := make(chan struct{}), make(chan struct{}, 1000)
	f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		entered <- struct{}{}
		<-gate
		return do()
	})
	const n = 250
	var wg sync.WaitGroup
	assign := func(i int) {
		wg.Go(func() {
			if _, err := h.Assign(await.Context(t), v4(fmt.Sprint("h", i))); err != nil {
				t.Error(err)
			}
		})
	}
	// The first is on its way alone, so that it is known how many must wait: where
	// some come after the gate is open, a busy machine serves them one by one.
	assign(0)
	<-entered
	for i := range n - 1 {
		assign(i + 1)
	}
	h.waiting(t, n-1)
	close(gate)
	wg.Wait()
	most := 0
	for _, ops := range f.seen() {
		most = max(most, len(ops))
		if len(ops) > maxOps {
			t.Errorf("a transaction of %d operations", len(ops))
		}
	}
	if got := len(f.seen()); got > 6 || most < 50 {
		t.Errorf("%d assignments took %d transactions, the largest of %d operations", n, got, most)
	}
	mustDiff(t, "assigned", n+1, len(audit(t, w.st)))
}

// TestAmbiguous: the transaction takes place or not, and the caller hears only
// an error. It repeats, and nothing is lost or doubled.
func TestAmbiguous(t *testing.T) {
	t.Parallel()
	lost := fmt.Errorf("%w: connection reset", store.ErrUnavailable)
	outcomes := map[string]func(do func() ([]store.Object, error)) ([]store.Object, error){
		"before": func(func() ([]store.Object, error)) ([]store.Object, error) { return nil, lost },
		"after":  func(do func() ([]store.Object, error)) ([]store.Object, error) { _, _ = do(); return nil, lost },
	}
	for name, outcome := range outcomes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(30)))
			h, f := w.faultyHost("a", time.Second)
			repeat := func(what string, try func() error) {
				t.Helper()
				f.arrange(func(n int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
					if n == 1 {
						return outcome(do)
					}
					return do()
				})
				if err := try(); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "connection reset") {
					t.Errorf("%s: got %v", what, err)
				}
				if err := try(); err != nil {
					t.Errorf("%s again: %v", what, err)
				}
			}
			r := v4("h")
			r.Count, r.Idempotent = 3, true
			repeat("assign", func() error { return second(h.Assign(await.Context(t), r)) })
			mustDiff(t, "assigned", 3, len(audit(t, w.st)))
			r.Count = 6
			repeat("assign more", func() error { return second(h.Assign(await.Context(t), r)) })
			mustDiff(t, "assigned", 6, len(audit(t, w.st)))
			repeat("assign an address", func() error {
				return second(h.AssignAddr(await.Context(t), netip.MustParseAddr("10.0.0.9"), Request{Handle: "i", Idempotent: true}))
			})
			held := audit(t, w.st)
			mustDiff(t, "assigned", 7, len(held))
			repeat("release an address", func() error {
				return second(h.Release(await.Context(t), Claim{Addr: netip.MustParseAddr("10.0.0.9"), Handle: "i"}))
			})
			mustDiff(t, "assigned", 6, len(audit(t, w.st)))
			repeat("release", func() error { return second(h.ReleaseHandle(await.Context(t), "h")) })
			mustDiff(t, "assigned", 0, len(audit(t, w.st)))
		})
	}
}

// TestConflictStorm: another writer is always faster, for a while or for ever.
func TestConflictStorm(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(28)))
	h, f := w.faultyHost("a", 20*time.Second)
	mustAssign(t, h, v4("first"))
	key := store.BlockKey(netip.MustParsePrefix("10.0.0.0/28"))
	storm := func(strikes int) {
		f.arrange(func(n int, ctx context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
			if n <= strikes {
				obj, err := w.st.Get(ctx, key)
				if err != nil {
					return nil, err
				}
				w.st.PutRaw(key.Path(), obj.Raw)
			}
			return do()
		})
	}
	storm(40)
	mustAssign(t, h, v4("second"))
	mustDiff(t, "tries", 41, len(f.seen()))
	storm(1 << 30)
	_, err := h.Assign(await.Context(t), v4("third"))
	if !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), "100 tries") {
		t.Errorf("got %v", err)
	}
	f.arrange(nil)
	mustAssign(t, h, v4("third"))
	mustDiff(t, "assigned", 3, len(audit(t, w.st)))
}

// TestAbandoned: what is given to a caller that has gone is released again.
func TestAbandoned(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h, f := w.faultyHost("a", 20*time.Second)
	gate, entered := make(chan struct{}), make(chan struct{}, 10)
	f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		entered <- struct{}{}
		<-gate
		return do()
	})
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error)
	for _, handle := range []string{"h", "i"} {
		go func() { gone <- second(h.Assign(ctx, v4(handle))) }()
	}
	<-entered
	cancel()
	for range 2 {
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	timed, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if _, err := h.Assign(timed, v4("j")); !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(gate)
	mustAssign(t, h, v4("k")) // served after those
	await.Until(t, "nothing else is held", func() error {
		if handles := slices.Sorted(maps.Values(audit(t, w.st))); !slices.Equal(handles, []string{"k"}) {
			return fmt.Errorf("held: %v", handles)
		}
		return nil
	})
}

// TestHang: a datastore that does not answer holds nobody up for longer than
// the timeout.
func TestHang(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h, f := w.faultyHost("a", 20*time.Millisecond)
	f.arrange(func(_ int, ctx context.Context, _ func() ([]store.Object, error)) ([]store.Object, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	if _, err := h.Assign(await.Context(t), v4("h")); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "datastore unavailable") {
		t.Errorf("got %v", err)
	}
	f.arrange(nil)
	mustAssign(t, h, v4("h"))
}

// TestOutage: with the store gone, errors are quick and say so; afterwards all
// is as before.
func TestOutage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h := w.host("a", nil)
	mustAssign(t, h, v4("h"))
	w.st.Fail(errors.New("connection refused"))
	for _, err := range []error{
		second(h.Assign(await.Context(t), v4("i"))),
		second(h.ReleaseHandle(await.Context(t), "h")),
		second(h.ReleaseHandle(await.Context(t), "unknown")),
		second(h.ByHandle(await.Context(t), "h")),
		third(h.EnsureTunnel(await.Context(t), IPIPTunnel, false)),
	} {
		if !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, ErrNoPool) {
			t.Errorf("got %v", err)
		}
	}
	w.st.Fail(nil)
	mustAssign(t, h, v4("i"))
	mustDiff(t, "assigned", 2, len(audit(t, w.st)))
}

// TestRefusedAlone: a request that the store refuses does not spoil those that
// share its transaction.
func TestRefusedAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h, f := w.faultyHost("a", 20*time.Second)
	gate, entered := make(chan struct{}), make(chan struct{}, 100)
	poison := func(ops []store.Op) bool {
		return slices.ContainsFunc(ops, func(o store.Op) bool { return o.Object.Key == store.HandleKey("poison") })
	}
	f.arrange(func(n int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		entered <- struct{}{}
		<-gate
		if poison(f.seen()[n-1]) {
			return nil, fmt.Errorf("%w: request is too large", store.ErrInvalid)
		}
		return do()
	})
	errs := make(chan error)
	ask := func(handle string) {
		_, err := h.Assign(await.Context(t), v4(handle))
		if handle == "poison" && errors.Is(err, store.ErrInvalid) {
			err = nil
		}
		errs <- err
	}
	go ask("first")
	<-entered
	for _, handle := range []string{"x", "poison", "y"} {
		go ask(handle)
	}
	h.waiting(t, 3)
	close(gate)
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	mustDiff(t, "assigned", 3, len(audit(t, w.st)))
}

func third[A, B any](_ A, _ B, err error) error { return err }
