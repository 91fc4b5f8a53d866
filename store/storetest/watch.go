package storetest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// watcher is a consumer of a watch, and what it has learnt.
type watcher struct {
	ch    <-chan store.Batch
	state map[store.Key]store.Revision
	rev   store.Revision
}

func watch(t *testing.T, s store.Store, kinds ...store.Kind) *watcher {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &watcher{ch: s.Watch(ctx, kinds...), state: make(map[store.Key]store.Revision)}
	t.Cleanup(func() {
		cancel()
		for range w.ch { // until it is closed, as the contract says
		}
	})
	return w
}

// next takes one batch and checks what holds of all batches.
func (w *watcher) next(t *testing.T) store.Batch {
	t.Helper()
	select {
	case b, ok := <-w.ch:
		if !ok {
			t.Fatal("the watch ended")
		}
		w.learn(t, b)
		b.Places = nil // of those alone who go on from them
		return b
	case <-time.After(await.Patience):
		t.Fatal("the watch is silent")
		return store.Batch{}
	}
}

func (w *watcher) learn(t *testing.T, b store.Batch) {
	t.Helper()
	if b.Err != nil && len(b.Events) > 0 {
		t.Errorf("a notice of an outage carries %d events", len(b.Events))
	}
	if b.Revision < w.rev {
		t.Errorf("the revision went back from %d to %d", w.rev, b.Revision)
	}
	w.rev = max(w.rev, b.Revision)
	for _, e := range b.Events {
		if e.Object.Revision > b.Revision && !own(e.Key) {
			t.Errorf("%s of revision %d comes in a batch up to %d", e.Key, e.Object.Revision, b.Revision)
		}
		if e.Deleted() {
			delete(w.state, e.Key)
			continue
		}
		if have := w.state[e.Key]; e.Object.Revision <= have {
			t.Errorf("%s comes at %d after %d", e.Key, e.Object.Revision, have)
		}
		w.state[e.Key] = e.Object.Revision
	}
}

// own reports whether an object is of routerd's own kinds, which may be told before the revision is.
func own(key store.Key) bool { return strings.HasPrefix(key.Path(), store.OwnRootPath) }

// testWatchBeside: kinds of routerd's own are followed beside those of Calico's, in the order of each: what
// there is of all of them comes before Synced, and nothing is lost or invented over a cut and a compaction.
func testWatchBeside(t *testing.T, s store.Store) {
	kinds := []store.Kind{store.KindIPPool, store.KindService, store.KindEndpointSlice}
	service := func(name string, ips ...string) store.Op {
		return store.Op{Action: store.Put, Object: store.Object{Key: store.ServiceKey("ns", name), Value: &store.Service{ClusterIPs: ips}}}
	}
	gone := func(key store.Key) store.Op { return store.Op{Action: store.Remove, Object: store.Object{Key: key}} }
	slice := store.Op{Action: store.Put, Object: store.Object{Key: store.EndpointSliceKey("ns", "web-1"), Value: &store.EndpointSlice{Service: "web"}}}
	must(t, s, put(store.IfAbsent(), pool("p", "10.0.0.0/16")), service("web", "10.96.0.1"), service("stays"), service("goes"), slice)
	w := watch(t, s, kinds...)
	if b := w.next(t); !b.Synced || len(b.Events) != 5 {
		t.Errorf("the first batch: %+v", b)
	}
	follows := func(what string, last store.Revision) {
		t.Helper()
		told := map[store.Kind]store.Revision{}
		w.until(t, what, func(b store.Batch) bool {
			for _, e := range b.Events {
				if e.Key == store.ServiceKey("ns", "stays") {
					t.Errorf("%s: what did not change is told: %+v", what, e)
				}
				if !b.Synced && e.Object.Revision < told[e.Key.Kind] {
					t.Errorf("%s: %s of %d is told after %d", what, e.Key, e.Object.Revision, told[e.Key.Kind])
				}
				told[e.Key.Kind] = e.Object.Revision
			}
			return w.rev >= last && cmp.Equal(present(t, s, kinds...), w.state)
		})
	}
	must(t, s, gone(store.ServiceKey("ns", "goes")), slice)
	for i := range 20 {
		must(t, s, service("web", fmt.Sprintf("10.96.0.%d", i)))
	}
	// The revision is that of Calico's kinds: who waits for it waits for these.
	follows("changes", must(t, s, service("web", "10.96.1.1"), put(store.Always(), pool("p", "10.1.0.0/16")))[1].Revision)

	f, ok := s.(Faults)
	if !ok {
		t.Fatalf("%T cannot make faults", s)
	}
	heal := f.Interrupt()
	w.until(t, "notice of the outage", func(b store.Batch) bool { return b.Err != nil })
	heal()
	eventually(t, s, gone(store.ServiceKey("ns", "web")))
	eventually(t, s, gone(slice.Object.Key))
	if err := f.Compact(t.Context()); err != nil {
		t.Error(err)
	}
	eventually(t, s, service("new"))
	follows("what happened meanwhile", 0)
	if len(w.state) != 3 {
		t.Errorf("there is %v", w.state)
	}
	must(t, s, gone(store.ServiceKey("ns", "new")))
	follows("a change after it", 0)
}

// testWatchOwn: a kind of routerd's own, which is not among what Calico's programs know, is followed like others.
func testWatchOwn(t *testing.T, s store.Store) {
	w := watch(t, s, store.KindUnconfirmed)
	w.until(t, "the empty state", func(b store.Batch) bool { return b.Synced })
	key := store.UnconfirmedKey("x")
	for i := range 3 {
		must(t, s, put(store.Always(), pool("p", "10.0.0.0/16")), // which is not wanted
			store.Op{Action: store.Put, Object: store.Object{Key: key, Value: &store.Unconfirmed{Seconds: i + 1}}})
	}
	w.until(t, "the last value", func(b store.Batch) bool {
		return len(w.state) == 1 && slices.ContainsFunc(b.Events, func(e store.Event) bool {
			u, ok := e.Object.Value.(*store.Unconfirmed)
			return ok && e.Key == key && u.Seconds == 3
		})
	})
	must(t, s, store.Op{Action: store.Remove, Object: store.Object{Key: key}})
	w.until(t, "its end", func(store.Batch) bool { return len(w.state) == 0 })
}

// until takes batches until one satisfies done.
func (w *watcher) until(t *testing.T, what string, done func(store.Batch) bool) store.Batch {
	t.Helper()
	deadline := time.After(await.Patience)
	for {
		select {
		case b, ok := <-w.ch:
			if !ok {
				t.Fatalf("the watch ended before: %s", what)
			}
			w.learn(t, b)
			if b.Places = nil; done(b) { // as in next
				return b
			}
		case <-deadline:
			t.Fatalf("not within %v: %s", await.Patience, what)
		}
	}
}

// present reads what the store holds of some kinds, as [watcher] keeps it.
func present(t *testing.T, s store.Store, kinds ...store.Kind) map[store.Key]store.Revision {
	t.Helper()
	state := make(map[store.Key]store.Revision)
	for _, kind := range kinds {
		objs, _, err := s.List(t.Context(), kind, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objs {
			state[o.Key] = o.Revision
		}
	}
	return state
}

func testWatch(t *testing.T, s store.Store) {
	empty := watch(t, s, store.KindIPPool, store.KindIPAMAffinity).next(t)
	if !empty.Synced || len(empty.Events) != 0 || empty.Revision == 0 || empty.Err != nil {
		t.Errorf("first batch of an empty store: %+v", empty)
	}

	a := must(t, s, put(store.IfAbsent(), pool("a", "10.0.0.0/16")))[0]
	w := watch(t, s, store.KindIPPool, store.KindIPAMAffinity)
	first := w.next(t)
	// The store may have gone on by itself.
	if diff := cmp.Diff(store.Batch{Events: []store.Event{{Key: a.Key, Object: a}}, Revision: max(a.Revision, first.Revision), Synced: true}, first); diff != "" {
		t.Errorf("first batch (-want +got):\n%s", diff)
	}

	// A kind that was not asked for is not delivered.
	must(t, s, store.Op{Action: store.Put, Object: store.Object{Key: store.HandleKey("h"), Value: &store.Handle{}}})
	aff := store.AffinityKey("n", netip.MustParsePrefix("10.0.0.0/26"))
	wrote := must(t, s, store.Op{Action: store.Put, Object: store.Object{Key: aff, Value: &store.Affinity{State: store.AffinityPending}}})[0]
	b := w.until(t, "the affinity", func(b store.Batch) bool { return len(b.Events) > 0 })
	if diff := cmp.Diff(store.Batch{Events: []store.Event{{Key: aff, Object: wrote}}, Revision: max(wrote.Revision, b.Revision)}, b); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	must(t, s, store.Op{Action: store.Remove, Object: store.Object{Key: aff}})
	b = w.until(t, "the deletion", func(b store.Batch) bool { return len(b.Events) > 0 })
	if len(b.Events) != 1 || !b.Events[0].Deleted() || b.Events[0].Key != aff || b.Events[0].Object.Value != nil || b.Synced {
		t.Errorf("deletion: %+v", b)
	}
	if diff := cmp.Diff(present(t, s, store.KindIPPool, store.KindIPAMAffinity), w.state); diff != "" {
		t.Errorf("(-store +watched):\n%s", diff)
	}
}

// testWatchTransaction: what happened in one transaction comes in one batch.
func testWatchTransaction(t *testing.T, s store.Store) {
	w := watch(t, s, store.KindIPPool)
	w.next(t)
	const n, each = 50, 20
	var writer sync.WaitGroup
	defer writer.Wait() // the watch may know of a transaction before its writer does
	writer.Go(func() {
		for i := range n {
			var ops []store.Op
			for j := range each {
				ops = append(ops, put(store.IfAbsent(), pool(fmt.Sprintf("p%d-%d", i, j), "10.0.0.0/16")))
			}
			if _, err := s.Txn(t.Context(), ops...); err != nil {
				t.Error(err)
			}
		}
	})
	w.until(t, "all transactions", func(b store.Batch) bool {
		if len(b.Events)%each != 0 {
			t.Errorf("a batch has %d events: it ends within a transaction", len(b.Events))
		}
		return len(w.state) == n*each
	})
}

// testWatchProgress: the revision moves on although only foreign keys
// change.
func testWatchProgress(t *testing.T, s store.Store) {
	w := watch(t, s, store.KindIPPool)
	w.next(t)
	var last store.Revision
	for range 3 {
		last = must(t, s, store.Op{Action: store.Put, Object: store.Object{Key: store.HandleKey("h"), Value: &store.Handle{}}})[0].Revision
	}
	w.until(t, "the revision of another kind's change", func(b store.Batch) bool {
		if len(b.Events) > 0 || b.Synced || b.Err != nil {
			t.Errorf("got %+v", b)
		}
		return b.Revision >= last
	})
}

// testWatchSlowConsumer: what a slow consumer finds is one event per key.
func testWatchSlowConsumer(t *testing.T, s store.Store) {
	w := watch(t, s, store.KindIPPool)
	w.next(t)
	probe := watch(t, s, store.KindIPPool)
	probe.next(t)
	const changes = 300
	var last store.Object
	for i := range changes {
		last = must(t, s, put(store.Always(), pool("busy", fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))))[0]
	}
	gone := must(t, s, put(store.Always(), pool("gone", "10.0.0.0/16")))[0]
	must(t, s, store.Op{Action: store.Remove, Object: store.Object{Key: gone.Key}})
	end := must(t, s, put(store.Always(), pool("end", "10.0.0.0/16")))[0]
	probe.until(t, "the last change", func(store.Batch) bool { return probe.state[end.Key] == end.Revision })

	events := 0
	w.until(t, "the last change", func(b store.Batch) bool {
		events += len(b.Events)
		return w.state[end.Key] == end.Revision
	})
	if w.state[last.Key] != last.Revision {
		t.Errorf("the busy key is known at %d, it is at %d", w.state[last.Key], last.Revision)
	}
	// The first batch may hold one change that was on its way already, and the
	// next ones what came meanwhile, but never all of them.
	if events > changes/2 {
		t.Errorf("a consumer that slept got %d events of %d changes to three keys", events, changes)
	}
	if _, ok := w.state[gone.Key]; ok {
		t.Error("a deleted key is still known")
	}
}

func testWatchEnds(t *testing.T, s store.Store) {
	must(t, s, put(store.IfAbsent(), pool("a", "10.0.0.0/16")))
	ctx, cancel := context.WithCancel(t.Context())
	ch := s.Watch(ctx, store.KindIPPool) // nobody takes the first batch
	cancel()
	deadline := time.After(await.Patience)
	for {
		select {
		case _, ok := <-ch:
			if !ok {
				return
			}
		case <-deadline:
			t.Fatal("the channel is not closed")
		}
	}
}

// testWatchFollowsStore writes at random from some sides and lets watchers
// begin at any time: all end with what the store holds.
func testWatchFollowsStore(t *testing.T, s store.Store) {
	const writers, keys, writes = 4, 12, 150
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for n := range writes {
				name := fmt.Sprintf("p%d", (n*7+i*5)%keys)
				op := put(store.Always(), pool(name, "10.0.0.0/16"))
				if (n+i)%3 == 0 {
					op = store.Op{Action: store.Remove, Object: store.Object{Key: poolKey(name)}}
				}
				if _, err := s.Txn(t.Context(), op); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var watchers []*watcher
	for range 5 {
		w := watch(t, s, store.KindIPPool)
		w.next(t)
		watchers = append(watchers, w)
	}
	wg.Wait()
	end := must(t, s, put(store.Always(), pool("end", "10.0.0.0/16")))[0]
	want := present(t, s, store.KindIPPool)
	for _, w := range watchers {
		w.until(t, "the last write", func(store.Batch) bool { return w.state[end.Key] == end.Revision })
		if diff := cmp.Diff(want, w.state); diff != "" {
			t.Errorf("(-store +watched):\n%s", diff)
		}
	}
}

// testCompactionAndResync lets the history vanish that a cut-off watch would
// need.
func testCompactionAndResync(t *testing.T, s store.Store) {
	testResync(t, s, func(f Faults) {
		if err := f.Compact(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func testOutageAndResync(t *testing.T, s store.Store) {
	testResync(t, s, func(Faults) {})
}

func testResync(t *testing.T, s store.Store, after func(Faults)) {
	f, ok := s.(Faults)
	if !ok {
		t.Fatalf("%T cannot make faults", s)
	}
	for _, name := range []string{"stays", "changes", "goes"} {
		must(t, s, put(store.IfAbsent(), pool(name, "10.0.0.0/16")))
	}
	w := watch(t, s, store.KindIPPool)
	w.next(t)
	stays := w.state[poolKey("stays")]

	for round := range 2 {
		heal := f.Interrupt()
		outage := w.until(t, "notice of the outage", func(b store.Batch) bool { return b.Err != nil })
		if outage.Synced {
			t.Errorf("an outage is synced: %+v", outage)
		}
		heal()
		// From now on the store can be written, and the watch may come back at
		// any moment: before, between or after these.
		write := func(op store.Op) { eventually(t, s, op) }
		write(put(store.Always(), pool("changes", fmt.Sprintf("10.%d.0.0/16", round+1))))
		write(store.Op{Action: store.Remove, Object: store.Object{Key: poolKey("goes")}})
		write(put(store.Always(), pool(fmt.Sprint("new", round), "10.0.0.0/16")))
		after(f)
		write(put(store.Always(), pool(fmt.Sprint("end", round), "10.0.0.0/16")))
		want := present(t, s, store.KindIPPool)

		synced := false
		w.until(t, "the state after the outage", func(b store.Batch) bool {
			for _, e := range b.Events {
				if e.Key == poolKey("stays") {
					t.Errorf("what did not change is delivered: %+v", e)
				}
				if e.Deleted() && e.Key != poolKey("goes") {
					t.Errorf("what exists is reported as deleted: %v", e.Key)
				}
			}
			if b.Err != nil {
				t.Errorf("a second notice of one outage: %v", b.Err)
			}
			synced = synced || b.Synced
			return synced && cmp.Equal(want, w.state)
		})
		if w.state[poolKey("stays")] != stays {
			t.Errorf("what did not change is now known at %d", w.state[poolKey("stays")])
		}
		must(t, s, put(store.Always(), pool("goes", "10.0.0.0/16")))
		w.until(t, "a change after the resynchronisation", func(store.Batch) bool { return w.state[poolKey("goes")] != 0 })
	}
}

// eventually repeats an unconditional write until the store takes it.
func eventually(t *testing.T, s store.Store, op store.Op) {
	t.Helper()
	await.Until(t, "the store takes a write", func() error {
		_, err := s.Txn(t.Context(), op)
		return err
	})
}

func testClose(t *testing.T, s store.Store) {
	ch := s.Watch(t.Context(), store.KindIPPool)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	deadline := time.After(await.Patience)
	for open := true; open; {
		select {
		case _, open = <-ch:
		case <-deadline:
			t.Fatal("Close left a watch")
		}
	}
	if _, err := s.Get(t.Context(), poolKey("p")); err == nil {
		t.Error("a closed store answers")
	}
	if _, open := <-s.Watch(t.Context(), store.KindIPPool); open {
		t.Error("a closed store is watched")
	}
}
