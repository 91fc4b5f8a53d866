package enforce

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

func container(id, addr string) *store.WorkloadEndpoint {
	w := pod("a", addr, nil)
	w.Spec.ContainerID = id
	return w
}

func eventOf(t *testing.T, w *store.WorkloadEndpoint, ended bool) store.Event {
	t.Helper()
	key, err := store.KeyOf(w)
	if err != nil {
		t.Fatal(err)
	}
	ev := store.Event{Key: key, Object: store.Object{Key: key}}
	if !ended {
		ev.Object.Value = w
	}
	return ev
}

// TestLateWatch: what the watch tells late of an earlier container of the pod
// does not take the place of what this host announced.
func TestLateWatch(t *testing.T) {
	t.Parallel()
	old, again, next, other := container("old", "10.0.0.1"), container("old", "10.0.0.2"), container("next", "10.0.0.2"), container("other", "10.0.0.3")
	type step func(t *testing.T, w *world)
	announce := func(ep *store.WorkloadEndpoint, ended bool) step {
		return func(t *testing.T, w *world) { w.e.Announce(eventOf(t, ep, ended)) }
	}
	watch := func(ep *store.WorkloadEndpoint, ended bool, at store.Revision) step {
		return func(t *testing.T, w *world) {
			w.e.HandleStore(store.Batch{Events: []store.Event{eventOf(t, ep, ended)}, Revision: at})
		}
	}
	written := func(at store.Revision) step {
		return func(t *testing.T, w *world) { w.e.Written(eventOf(t, next, true).Key, at) }
	}
	resync := func(_ *testing.T, w *world) { w.e.HandleStore(store.Batch{Synced: true}) }
	end := func(told bool) step {
		return func(t *testing.T, w *world) { w.e.Ended(eventOf(t, next, true).Key, told) }
	}
	for _, tc := range []struct {
		name  string
		steps []step
		want  string // the source of the endpoint's rules; empty: it has none
		left  int    // announcements that are kept
	}{
		{"the former's late write", []step{announce(next, false), watch(old, false, 5)}, "10.0.0.2/32", 1},
		{"the former's late deletion", []step{announce(next, false), watch(old, true, 5)}, "10.0.0.2/32", 1},
		{"the same container's former address", []step{announce(again, false), watch(old, false, 5)}, "10.0.0.2/32", 1},
		{"its own write", []step{announce(next, false), watch(next, false, 6)}, "10.0.0.2/32", 0},
		{"deleted after its own write", []step{announce(next, false), watch(next, false, 6), watch(next, true, 7)}, "", 0},
		{"written, and deleted before the watch told", []step{announce(next, false), written(6), watch(next, true, 7)}, "", 0},
		{"deleted before it is known to be written", []step{announce(next, false), watch(next, true, 7), written(6)}, "", 0},
		{"written, and an older deletion", []step{announce(next, false), watch(old, true, 5), written(6)}, "10.0.0.2/32", 1},
		{"written, and an older deletion afterwards", []step{announce(next, false), written(6), watch(old, true, 5)}, "10.0.0.2/32", 1},
		{"ended, and its late write", []step{announce(next, false), announce(next, true), watch(next, false, 6)}, "", 1},
		{"ended, and its deletion", []step{announce(next, false), announce(next, true), watch(next, false, 6), watch(next, true, 7)}, "", 0},
		{"ended, and another's", []step{announce(next, false), announce(next, true), watch(other, false, 8)}, "10.0.0.3/32", 0},
		{"ended, the datastore never heard", []step{announce(next, false), announce(next, true), end(false)}, "", 0},
		{"ended, the watch never tells", []step{announce(next, false), announce(next, true), end(true), resync}, "", 0},
		{"ended, and a successor", []step{announce(old, true), announce(next, false), end(true), watch(old, true, 5)}, "10.0.0.2/32", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := start(t)
				w.store()
				for _, s := range tc.steps {
					s(t, w)
					synctest.Wait()
				}
				got := ""
				w.table.mu.Lock()
				if ep, ok := w.table.have.Endpoints["calia"]; ok {
					got = ep.Sources[0].String()
				}
				w.table.mu.Unlock()
				if got != tc.want {
					t.Errorf("the rules are of %q, want %q", got, tc.want)
				}
				w.e.mu.Lock()
				defer w.e.mu.Unlock()
				if len(w.e.announced) != tc.left {
					t.Errorf("%d announcements are kept, want %d", len(w.e.announced), tc.left)
				}
			})
		})
	}
}

// disk is a [Memory].
type disk struct {
	mu      sync.Mutex
	entries map[string]json.RawMessage
	syncs   int
	fail    error
}

func (d *disk) Put(key string, value any) error {
	b, err := json.Marshal(value)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil {
		d.entries = map[string]json.RawMessage{}
	}
	d.entries[key] = b
	return errors.Join(err, d.fail)
}

func (d *disk) Delete(key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.entries, key)
	return d.fail
}

func (d *disk) Sync() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.syncs++
	return d.fail
}

func (d *disk) Entries() map[string]json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.entries)
}

// live runs an Enforcer with a memory, until the function that is returned is
// called.
func live(t *testing.T, d *disk) (*world, func()) {
	t.Helper()
	w := &world{t: t, table: &table{have: filter.NewRuleset()}, conns: &connections{}}
	w.e = New(Config{Node: "node1", Table: w.table, Connections: w.conns, Memory: d, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.e.Run(ctx) }()
	w.e.HandleUnderlay(dataplane.Underlay{})
	synctest.Wait()
	return w, func() {
		cancel()
		<-done
		if len(w.table.errs) > 0 {
			t.Errorf("steps that do not fit: %v", w.table.errs)
		}
	}
}

func (w *world) rules() *filter.Ruleset {
	w.table.mu.Lock()
	defer w.table.mu.Unlock()
	return w.table.have
}

// TestRecalled: after a boot without the datastore the rules are those of what
// was known, also for an endpoint that is new; when the datastore has told all,
// in one step those that follow from it.
func TestRecalled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		web, bad, fine := map[string]string{"app": "web"}, map[string]string{"app": "bad"}, map[string]string{"app": "fine"}
		w.store(pod("b", "10.0.0.9", bad), denyFrom("app == 'bad'"), pod("gone", "10.0.0.8", web))
		w.store(pod("c", "10.0.0.7", fine))
		gone := pod("gone", "10.0.0.8", web)
		w.remove(eventOf(t, gone, true).Key)
		before := w.rules()
		end()

		w, end = live(t, d)
		if s := w.e.Status(); !s.InForce || !s.Recalled {
			t.Fatalf("status %+v", s)
		}
		diff := cmp.Diff(before, w.rules(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
		if diff != "" {
			t.Errorf("rules from memory (-before +after):\n%s", diff)
		}
		fresh := pod("a", "10.0.0.1", web)
		w.e.Announce(eventOf(t, fresh, false))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.e.Wait(ctx, "calia", []netip.Addr{netip.MustParseAddr("10.0.0.1")}); err != nil {
			t.Fatalf("an ADD without the datastore: %v", err)
		}
		if len(w.rules().Endpoints["calia"].Ingress.Tiers) == 0 {
			t.Error("the new endpoint has no policy: it is open")
		}
		// The datastore begins to tell, and has not told all.
		steps := w.table.applied
		nothing := store.Batch{Events: []store.Event{eventOf(t, pod("c", "10.0.0.7", nil), false)}, Revision: 7}
		w.e.HandleStore(nothing)
		synctest.Wait()
		if w.table.applied != steps || !w.e.Status().Recalled {
			t.Error("rules follow a state that is not complete")
		}
		w.e.HandleStore(store.Batch{Synced: true, Revision: 8})
		synctest.Wait()
		if w.table.applied != steps+1 || w.e.Status().Recalled {
			t.Errorf("%d steps when the datastore has told all, want 1", w.table.applied-steps)
		}
		if _, ok := w.rules().Endpoints["calia"]; !ok {
			t.Error("what was announced is gone")
		}
		if _, ok := w.rules().Endpoints["calib"]; ok || len(w.rules().Endpoints["calia"].Ingress.Tiers) > 0 {
			t.Errorf("what the datastore does not have is in force: %v", w.rules().Policies)
		}
		end()
		if got := len(d.Entries()); got != 2 { // c, and that it is complete
			t.Errorf("remembered: %v", d.Entries())
		}
	})
}

// A change that the disk refuses is written later.
func TestRemembersLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{fail: errors.New("no space left")}
		w, end := live(t, d)
		defer end()
		w.store(denyFrom("app == 'bad'"))
		w.store(pod("a", "10.0.0.1", nil))
		d.mu.Lock()
		clear(d.entries)
		d.fail = nil
		d.mu.Unlock()
		time.Sleep(time.Minute) //nolint:forbidigo // virtual time
		synctest.Wait()
		if got := len(d.Entries()); got != 3 {
			t.Errorf("remembered: %v", d.Entries())
		}
	})
}

// A memory that was never complete, or makes no sense, is not used.
func TestNotRecalled(t *testing.T) {
	t.Parallel()
	for name, entries := range map[string]map[string]json.RawMessage{
		"empty":       {},
		"not whole":   {"/calico/resources/v3/projectcalico.org/tiers/x": json.RawMessage(`{}`)},
		"unknown key": {"/elsewhere": json.RawMessage(`{}`), completeKey: json.RawMessage(`true`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, end := live(t, &disk{entries: entries})
				defer end()
				if s := w.e.Status(); s.InForce || s.Recalled {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// What cannot be read keeps what was remembered of it; where nothing was, it is
// remembered as unreadable, and not left out.
func TestRemembersUnreadable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		w, end := live(t, d)
		p, q := denyFrom("app == 'bad'"), denyFrom("app == 'bad'")
		q.Name = "never"
		w.store(p)
		known, never := mustKey(t, p), mustKey(t, q)
		before := string(d.Entries()[known.Path()])
		w.e.HandleStore(store.Batch{Events: []store.Event{
			{Key: known, Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode},
			{Key: never, Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode},
		}})
		synctest.Wait()
		end()
		if got := string(d.Entries()[known.Path()]); got != before {
			t.Errorf("remembered %q, before %q", got, before)
		}
		w, end = live(t, d)
		defer end()
		if s := w.e.Status(); !s.InForce || len(s.Problems) != 1 {
			t.Errorf("status %+v, want one problem", s)
		}
	})
}

func mustKey(t *testing.T, v any) store.Key {
	t.Helper()
	key, err := store.KeyOf(v)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
