package rollback

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/history"
	"github.com/routerd/routerd/store/memory"
)

// change makes a tier that is to be confirmed, and returns the change's name. Some host must be there to promise.
func change(t *testing.T, s store.Store, tier string, made time.Time, within time.Duration) (name string) {
	t.Helper()
	r := history.Record(s, history.Author{User: "ann", Confirm: within}, func() time.Time { return made }, func(n string) { name = n })
	if _, err := store.Create(t.Context(), r, &v3.Tier{ObjectMeta: metav1.ObjectMeta{Name: tier}}); err != nil {
		t.Fatal(err)
	}
	return name
}

func state(t *testing.T, s store.Store, name string) store.ChangeState {
	t.Helper()
	o, err := s.Get(t.Context(), store.ChangeKey(name))
	if err != nil {
		t.Fatal(err)
	}
	return o.Value.(*store.Change).State
}

func exists(t *testing.T, s store.Store, tier string) bool {
	t.Helper()
	_, err := s.Get(t.Context(), store.ResourceKey(store.KindTier, tier))
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

// keepers runs so many hosts, until the test ends or stop is called.
func keepers(t *testing.T, s store.Store, hosts int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range hosts {
		k := Keeper{Node: "n", Store: s, Log: slog.New(slog.DiscardHandler), Chance: func() float64 { return 0 }}
		wg.Go(func() {
			if err := k.Run(ctx); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

func newStore(t *testing.T) *memory.Store {
	t.Helper()
	s := memory.New()
	t.Cleanup(func() { s.Close() }) //nolint:errcheck // it is in memory
	return s
}

// nothingWaits checks that no change waits to be confirmed.
func nothingWaits(t *testing.T, s store.Store) {
	t.Helper()
	await.True(t, "nothing waits to be confirmed", func() bool {
		list, _, err := s.List(t.Context(), store.KindUnconfirmed, "")
		return err == nil && len(list) == 0
	})
}

// TestExpire: what nobody confirmed is undone once, by whichever host; what was confirmed stays.
func TestExpire(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	keepers(t, s, 3)
	kept := change(t, s, "kept", time.Now(), time.Hour)
	if err := history.Confirm(t.Context(), s, kept, history.Author{User: "ann"}, time.Now()); err != nil {
		t.Fatal(err)
	}
	gone := change(t, s, "gone", time.Now(), time.Second)
	await.True(t, "the change is undone", func() bool { return state(t, s, gone) == store.ChangeUndone })
	if exists(t, s, "gone") || !exists(t, s, "kept") || state(t, s, kept) != store.ChangeConfirmed {
		t.Error("what was confirmed is gone, or what was not is there")
	}
	nothingWaits(t, s)
}

// TestAway: a change whose time is over while the datastore cannot be reached is undone when it is back.
func TestAway(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	stop := keepers(t, s, 1)
	name := change(t, s, "gone", time.Now().Add(-2*time.Hour), time.Hour)
	stop()
	s.Fail(errors.New("etcd is away"))
	keepers(t, s, 2)
	s.Fail(nil)
	await.True(t, "the change is undone", func() bool { return state(t, s, name) == store.ChangeUndone })
	nothingWaits(t, s)
}

// TestRestarted: a daemon that comes when changes are overdue undoes them, the newest first, for it may rest on the older;
// one that somebody else has changed since stays, and its record says why.
func TestRestarted(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	stop := keepers(t, s, 1)
	before := time.Now().Add(-2 * time.Hour)
	late := change(t, s, "late", before, time.Hour)
	var policy string
	r := history.Record(s, history.Author{Confirm: time.Hour}, func() time.Time { return before }, func(n string) { policy = n })
	if _, err := store.Create(t.Context(), r, &v3.GlobalNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "late.x"}, Spec: v3.GlobalNetworkPolicySpec{Tier: "late", Selector: "all()"}}); err != nil {
		t.Fatal(err)
	}
	stuck := change(t, s, "stuck", before, time.Hour)
	if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindTier, "stuck"), func(cur store.Object) (any, error) {
		tier := store.Clone(cur.Value).(*v3.Tier)
		tier.Labels = map[string]string{"a": "b"}
		return tier, nil
	}); err != nil {
		t.Fatal(err)
	}
	stop()
	if state(t, s, late) != store.ChangeUnconfirmed {
		t.Fatalf("the change is %q before its time", state(t, s, late))
	}
	keepers(t, s, 1)
	await.True(t, "the changes are settled", func() bool {
		return state(t, s, late) == store.ChangeUndone && state(t, s, policy) == store.ChangeUndone && state(t, s, stuck) == store.ChangeStuck
	})
	o, err := s.Get(t.Context(), store.ChangeKey(stuck))
	if c, ok := o.Value.(*store.Change); err != nil || !ok || !strings.Contains(c.Reason, "Tier(stuck): cannot be undone") {
		t.Errorf("the record says %+v, %v", o.Value, err)
	}
	nothingWaits(t, s)
}

// TestTasks: what a daemon does about what it is told of, and when.
func TestTasks(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	k := Keeper{Node: "n", Log: slog.New(slog.DiscardHandler), Chance: func() float64 { return 0.5 }}
	for _, tt := range []struct {
		u    store.Unconfirmed
		want time.Duration
	}{
		{store.Unconfirmed{Seconds: 60}, 100 * time.Millisecond},
		{store.Unconfirmed{Seconds: 60, By: "m"}, time.Minute},
		{store.Unconfirmed{Seconds: 300, By: "m", Time: now}, 301 * time.Second},
	} {
		if got := k.taskFor(store.Object{}, &tt.u, now, false).at.Sub(now); got != tt.want {
			t.Errorf("%+v: after %s; want %s", tt.u, got, tt.want)
		}
	}
	// What was asked for and not made is forgotten.
	s := newStore(t)
	obj, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.UnconfirmedKey("x"), Value: &store.Unconfirmed{Seconds: 60, By: "m"}}})
	if err != nil {
		t.Fatal(err)
	}
	k.Store = s
	tasks := map[string]task{"x": k.taskFor(obj[0], obj[0].Value.(*store.Unconfirmed), now, false)}
	k.work(t.Context(), tasks)
	if len(tasks) > 0 {
		t.Errorf("left to be done: %v", tasks)
	}
	nothingWaits(t, s)
	// And what the datastore does not let be done is tried again.
	s.Fail(errors.New("etcd is away"))
	tasks["x"] = k.taskFor(obj[0], &store.Unconfirmed{Seconds: 60, Time: now}, now, true)
	k.work(t.Context(), tasks)
	if left := time.Until(tasks["x"].at); left <= 0 || left > again {
		t.Errorf("tried again in %s", left)
	}
}

func TestLeft(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, tt := range []struct {
		age    time.Duration
		before bool
		want   time.Duration
	}{
		{0, false, time.Minute},
		{time.Hour, false, time.Minute}, // the clocks differ
		{20 * time.Second, true, 40 * time.Second},
		{time.Hour, true, 0},
		{-time.Hour, true, time.Minute}, // the clocks differ
	} {
		if got := left(&store.Unconfirmed{Time: now.Add(-tt.age), Seconds: 60}, now, tt.before); got != tt.want {
			t.Errorf("%v old, %v: %v; want %v", tt.age, tt.before, got, tt.want)
		}
	}
}
