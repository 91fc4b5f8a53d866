package enforce

import (
	"testing"
	"testing/synctest"

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

func (w *world) rules() *filter.Ruleset {
	w.table.mu.Lock()
	defer w.table.mu.Unlock()
	return w.table.have
}

func mustKey(t *testing.T, v any) store.Key {
	t.Helper()
	key, err := store.KeyOf(v)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
