package attach

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// now has everything tried, whatever failed before.
func now(ID) bool { return false }

func TestRetries(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)
	x, y := ID{ContainerID: "x"}, ID{ContainerID: "y"}
	r := newSchedule(time.Second)
	if _, ok := r.next(); ok {
		t.Error("a try is due of nothing")
	}
	at := start
	for _, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		r.failedAt(at, x)
		r.failedAt(at.Add(pause*time.Second/2), x) // while it waits: puts nothing off
		if !r.waitsAt(at.Add(pause*time.Second-1), x) || r.waitsAt(at.Add(pause*time.Second), x) {
			t.Errorf("the try is not after %d s", pause)
		}
		at = at.Add(pause * time.Second)
	}
	if r.waitsAt(start, y) {
		t.Error("one that is new waits for another")
	}
	r.failedAt(at, y)
	if next, ok := r.next(); !ok || !next.Equal(at) {
		t.Errorf("next try at %s, want %s", next, at)
	}
	r.tried(at) // x was, and is not there any more
	if next, _ := r.next(); !next.Equal(at.Add(time.Second)) || len(r.by) != 1 {
		t.Errorf("left: %v", r.by)
	}
	r.done(y)
	if len(r.by) != 0 {
		t.Errorf("left: %v", r.by)
	}
}

// TestOneThatFails: an attachment whose release fails again and again delays
// neither the release of another nor that another is told of.
func TestOneThatFails(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	cfg := w.cfg
	w.cfg = func(c *Config) { cfg(c); c.Retry = time.Hour }
	a := w.start()
	bad, good := w.numbered(1), w.numbered(2)
	w.add(a, bad)
	w.add(a, good)
	settle(t, a)
	broken := errors.New("the block cannot be decoded")
	w.ipam.refuse(handle(bad.ID), broken)
	w.run(a)
	w.del(a, bad)
	await.True(w.t, "the bad one failed", func() bool { return a.ledger.state(bad.ID).leaving() && a.schedule.waits(bad.ID) })
	w.del(a, good)
	await.True(w.t, "the good one released", func() bool { _, known := a.ledger.get(good.ID); return !known })
	next := w.numbered(3)
	w.add(a, next)
	await.True(w.t, "the next one told", func() bool { return w.endpoints() == 1 })
	if _, known := a.ledger.get(bad.ID); !known {
		t.Error("what could not be released is forgotten")
	}
	// When the datastore was away and is back, everything is tried.
	w.ipam.refuse(handle(bad.ID), nil)
	a.HandleStore(clustertest.Step("node-a", store.Batch{Err: errors.New("away")}))
	a.HandleStore(clustertest.Step("node-a", store.Batch{}))
	await.True(w.t, "the bad one released", func() bool { _, known := a.ledger.get(bad.ID); return !known })
}

// What failed is tried again by itself, and only that.
func TestRetryByItself(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	a := w.start()
	bad := w.numbered(1)
	w.add(a, bad)
	settle(t, a)
	w.ipam.refuse(handle(bad.ID), fmt.Errorf("once: %w", store.ErrConflict))
	w.run(a)
	w.del(a, bad)
	await.True(w.t, "tried again", func() bool { return w.ipam.refusals() >= 3 })
	w.ipam.refuse(handle(bad.ID), nil)
	await.Until(w.t, "clean", w.clean)
}

// Batches of the watch do not put off that what was forgotten is taken up again,
// be the try to come or due, and it does not wait for releases.
func TestReclaimIsNotPutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req, gone := w.numbered(1), w.numbered(2)
	w.add(a, req)
	w.add(a, gone)
	w.ipam.refuse(handle(gone.ID), store.ErrUnavailable)
	if err := a.Del(t.Context(), delOf(gone)); err == nil {
		t.Fatal("released without IPAM")
	}
	w.ipam.refuse(handle(gone.ID), nil)
	w.forget()
	a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", true, true)))
	a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", false, false)))
	due := func() time.Time {
		a.schedule.mu.Lock()
		defer a.schedule.mu.Unlock()
		return a.schedule.by[ID{}].at
	}
	first := due()
	await.True(w.t, "due", func() bool {
		a.HandleStore(clustertest.Step("node-a", store.Batch{}))
		return time.Now().After(first)
	})
	a.HandleStore(clustertest.Step("node-a", store.Batch{}))
	a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", false, false)))
	if at := due(); !at.Equal(first) {
		t.Errorf("put off from %s to %s", first, at)
	}
	a.schedule.clear() // the release is due, too
	before := true
	watch(a, func(point string) {
		if point == "after release address" {
			before = slices.Contains(w.ipam.handles(), handle(req.ID))
		}
	})
	a.workThrough(t.Context())
	if _, known := a.ledger.get(gone.ID); known {
		t.Error("not released")
	}
	if !before {
		t.Error("a release came before what was forgotten was taken up again")
	}
	if !slices.Contains(w.ipam.handles(), handle(req.ID)) {
		t.Error("not taken up again")
	}
}

// Who asks for a container does not wait for background work that waits for its device.
func TestCompleteHoldsNothingWhileItWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	id := w.numbered(1).ID
	shared := a.locks.shared(recordOf(id, Workload{}))
	device, err := a.locks.keys.lock(t.Context(), shared)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- a.releaser.completeOne(t.Context(), id, a.schedule.waits) }()
	await.True(w.t, "it waits for the device", func() bool { return users(&a.locks.keys, shared) > 1 })
	unlock, err := a.locks.keys.lock(await.Context(t), attachmentLock(id))
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	device()
	if err := <-done; err != nil {
		t.Errorf("background work: %v", err)
	}
}

// users counts who has a key locked or waits for it.
func users(k *keyedMutex, key string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l := k.locks[key]; l != nil {
		return l.users
	}
	return 0
}
