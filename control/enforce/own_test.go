package enforce

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/policy"
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
// does not take the place of the rules of what this host announced.
func TestLateWatch(t *testing.T) {
	t.Parallel()
	old, again, next, other := container("old", "10.0.0.1"), container("old", "10.0.0.2"), container("next", "10.0.0.2"), container("other", "10.0.0.3")
	type step func(t *testing.T, c *cluster.Cluster, watch chan<- store.Batch)
	announce := func(ep *store.WorkloadEndpoint, ended bool) step {
		return func(t *testing.T, c *cluster.Cluster, _ chan<- store.Batch) { c.Announce(eventOf(t, ep, ended)) }
	}
	watch := func(ep *store.WorkloadEndpoint, ended bool, at store.Revision) step {
		return func(t *testing.T, _ *cluster.Cluster, watch chan<- store.Batch) {
			watch <- store.Batch{Events: []store.Event{eventOf(t, ep, ended)}, Revision: at}
		}
	}
	unreadable := func(at store.Revision) step {
		return func(t *testing.T, _ *cluster.Cluster, watch chan<- store.Batch) {
			watch <- store.Batch{Events: []store.Event{{Key: mustKey(t, next), Err: store.ErrDecode}}, Revision: at}
		}
	}
	written := func(at store.Revision) step {
		return func(t *testing.T, c *cluster.Cluster, _ chan<- store.Batch) { c.Written(mustKey(t, next), at) }
	}
	resync := func(_ *testing.T, _ *cluster.Cluster, watch chan<- store.Batch) { watch <- store.Batch{Synced: true} }
	end := func(known bool) step {
		return func(t *testing.T, c *cluster.Cluster, _ chan<- store.Batch) { c.Ended(mustKey(t, next), known) }
	}
	for _, tc := range []struct {
		name  string
		steps []step
		want  string // the source of the endpoint's rules; empty: it has none
	}{
		{"the former's late write", []step{announce(next, false), watch(old, false, 5)}, "10.0.0.2/32"},
		{"the former's late deletion", []step{announce(next, false), watch(old, true, 5)}, "10.0.0.2/32"},
		{"the same container's former address", []step{announce(again, false), watch(old, false, 5)}, "10.0.0.2/32"},
		{"its own write", []step{announce(next, false), watch(next, false, 6), written(6)}, "10.0.0.2/32"},
		{"its own write, known to be written", []step{announce(next, false), written(6), watch(next, false, 6)}, "10.0.0.2/32"},
		{"its own write, not known to be", []step{announce(next, false), watch(next, false, 6)}, "10.0.0.2/32"},
		{"another's word after its own write", []step{announce(next, false), written(6), watch(next, false, 6), watch(other, false, 7)}, "10.0.0.3/32"},
		{"deleted after its own write", []step{announce(next, false), watch(next, false, 6), written(6), watch(next, true, 7)}, ""},
		{"deleted after its own write, before that is known", []step{announce(next, false), watch(next, false, 6), watch(next, true, 7), written(6)}, ""},
		{"the same container's former life", []step{announce(next, false), watch(next, false, 4), watch(next, true, 5)}, "10.0.0.2/32"},
		{"the same container's former life, then its own write", []step{announce(next, false), watch(next, false, 4), watch(next, true, 5), written(6), watch(next, false, 6)}, "10.0.0.2/32"},
		{"written, and deleted before the watch told", []step{announce(next, false), written(6), watch(next, true, 7)}, ""},
		{"deleted before it is known to be written", []step{announce(next, false), watch(next, true, 7), written(6)}, ""},
		{"written, and an older deletion", []step{announce(next, false), watch(old, true, 5), written(6)}, "10.0.0.2/32"},
		{"written, and an older deletion afterwards", []step{announce(next, false), written(6), watch(old, true, 5)}, "10.0.0.2/32"},
		{"unreadable", []step{announce(next, false), unreadable(5)}, "10.0.0.2/32"},
		{"ended, and its late write", []step{announce(next, false), announce(next, true), watch(next, false, 6)}, ""},
		{"ended, and its deletion", []step{announce(next, false), announce(next, true), watch(next, false, 6), watch(next, true, 7)}, ""},
		{"ended, and another's", []step{announce(next, false), announce(next, true), watch(other, false, 8)}, "10.0.0.3/32"},
		{"ended, the datastore never heard", []step{announce(next, false), announce(next, true), end(false)}, ""},
		{"ended, the watch never tells", []step{announce(next, false), announce(next, true), end(true), resync}, ""},
		{"ended, and a successor", []step{announce(old, true), announce(next, false), end(true), watch(old, true, 5)}, "10.0.0.2/32"},
	} {
		for _, slow := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/slow %t", tc.name, slow), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := start(t)
					w.store()
					batches := make(chan store.Batch)
					c := cluster.New(cluster.Config{Store: clustertest.Says(batches), Node: "node1", Log: slog.New(slog.DiscardHandler)})
					f := c.Follow(policy.Kinds()...)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					go func() { _ = c.Run(ctx) }()
					follow := func() {
						_ = f.Each(ctx, func(_ context.Context, s cluster.Step) error { w.e.HandleStore(s); return nil })
					}
					if !slow {
						go follow()
					}
					for _, s := range tc.steps {
						s(t, c, batches)
						synctest.Wait()
					}
					if slow {
						go follow()
					}
					synctest.Wait()
					got := ""
					if ep, ok := w.rules().Endpoints["calia"]; ok {
						got = ep.Sources[0].String()
					}
					if got != tc.want {
						t.Errorf("the rules are of %q, want %q", got, tc.want)
					}
				})
			})
		}
	}
}

func profile(name string, ingress v3.Action) *v3.Profile {
	p := v3.NewProfile()
	p.Name, p.Spec.Ingress = name, []v3.Rule{{Action: ingress}}
	return p
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
