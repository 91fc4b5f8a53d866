package enforce

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// run is a world whose Enforcer follows a cluster's copy that is kept on disk.
type run struct {
	*world
	c     *cluster.Cluster
	watch chan store.Batch
	heard []int // steps before Heard was called
	end   func()
}

// runOn runs one until its end is called, after a boot without rules if it loads
// what is on disk.
func runOn(t *testing.T, dir string, loads bool) *run {
	t.Helper()
	r := &run{world: &world{t: t, table: &table{have: filter.NewRuleset()}, conns: &connections{}}, watch: make(chan store.Batch)}
	log := slog.New(slog.DiscardHandler)
	r.c = cluster.New(cluster.Config{Store: clustertest.Says(r.watch), Node: "node1", Log: log, File: filepath.Join(dir, "cluster.journal")})
	f := r.c.Follow(policy.Kinds()...)
	if loads {
		r.c.Load(f)
	}
	r.e = New(Config{Node: "node1", Table: r.table, Connections: r.conns, Log: log, Heard: func() {
		r.table.mu.Lock()
		defer r.table.mu.Unlock()
		r.heard = append(r.heard, r.table.applied)
	}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 3)
	go func() { done <- r.c.Run(ctx) }()
	go func() {
		done <- f.Each(ctx, func(_ context.Context, s cluster.Step) error { r.e.HandleStore(s); return nil })
	}()
	synctest.Wait()
	go func() { done <- r.e.Run(ctx) }()
	r.e.HandleUnderlay(dataplane.Underlay{})
	synctest.Wait()
	r.end = func() {
		t.Helper()
		cancel()
		for range cap(done) {
			<-done
		}
		if err := r.c.Close(); err != nil {
			t.Error(err)
		}
		if len(r.table.errs) > 0 {
			t.Errorf("steps that do not fit: %v", r.table.errs)
		}
	}
	return r
}

// says has the datastore say something.
func (r *run) says(synced bool, events ...store.Event) {
	r.t.Helper()
	r.watch <- store.Batch{Events: events, Synced: synced, Revision: 7}
	synctest.Wait()
}

func (r *run) announces(ev store.Event) {
	r.c.Announce(ev)
	synctest.Wait()
}

// stored returns an object as the datastore says it.
func stored(t *testing.T, v any) store.Event {
	t.Helper()
	store.SetDefaults(v)
	key := mustKey(t, v)
	return store.Event{Key: key, Object: store.Object{Key: key, Value: v}}
}

// TestFromDisk: after a boot without the datastore the rules are those of what
// was known, also for an endpoint that is new; when the datastore has said all,
// in one step those that follow from it.
func TestFromDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := runOn(t, dir, true)
		web, bad, fine := map[string]string{"app": "web"}, map[string]string{"app": "bad"}, map[string]string{"app": "fine"}
		gone := stored(t, pod("gone", "10.0.0.8", web))
		r.says(true, stored(t, pod("b", "10.0.0.9", bad)), stored(t, denyFrom("app == 'bad'")), gone)
		r.says(false, stored(t, pod("c", "10.0.0.7", fine)), store.Event{Key: gone.Key})
		before := r.rules()
		r.end()

		r = runOn(t, dir, true)
		defer r.end()
		if s := r.e.Status(); !s.InForce || !s.FromDisk {
			t.Fatalf("status %+v", s)
		}
		diff := cmp.Diff(before, r.rules(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
		if diff != "" {
			t.Errorf("rules from disk (-before +after):\n%s", diff)
		}
		r.announces(eventOf(t, pod("a", "10.0.0.1", web), false))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.e.Wait(ctx, "calia", []netip.Addr{netip.MustParseAddr("10.0.0.1")}); err != nil {
			t.Fatalf("an ADD without the datastore: %v", err)
		}
		if len(r.rules().Endpoints["calia"].Ingress.Tiers) == 0 {
			t.Error("the new endpoint has no policy: it is open")
		}
		// The datastore begins to answer, and has not said all.
		steps := r.table.applied
		r.says(false, stored(t, pod("c", "10.0.0.7", nil)))
		if r.table.applied != steps || !r.e.Status().FromDisk {
			t.Error("rules follow a state that is not complete")
		}
		r.says(true)
		if r.table.applied != steps+1 || r.e.Status().FromDisk {
			t.Errorf("%d steps when the datastore has said all, want 1", r.table.applied-steps)
		}
		if _, ok := r.rules().Endpoints["calia"]; !ok {
			t.Error("what was announced is gone")
		}
		if _, ok := r.rules().Endpoints["calib"]; ok || len(r.rules().Endpoints["calia"].Ingress.Tiers) > 0 {
			t.Errorf("what the datastore does not have is in force: %v", r.rules().Policies)
		}
	})
}

// Where the kernel may have newer rules than the disk they hold until the datastore
// has said all.
func TestKernelBeforeDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := runOn(t, dir, true)
		r.says(true, stored(t, pod("a", "10.0.0.1", nil)))
		r.end()

		r = runOn(t, dir, false)
		defer r.end()
		r.announces(eventOf(t, pod("b", "10.0.0.2", nil), false))
		time.Sleep(time.Minute) //nolint:forbidigo // virtual time
		synctest.Wait()
		if s := r.e.Status(); s.InForce || s.FromDisk || r.table.applied != 0 || len(r.heard) != 0 {
			t.Errorf("status %+v, %d steps, heard %v", s, r.table.applied, r.heard)
		}
		r.says(true, stored(t, pod("a", "10.0.0.1", nil)), stored(t, denyFrom("app == 'bad'")))
		if s := r.e.Status(); !s.InForce || s.FromDisk || len(r.heard) != 1 {
			t.Errorf("status %+v, heard %v", s, r.heard)
		}
	})
}

// Of rules from disk nobody is notified; of those that follow the datastore before
// the kernel has them.
func TestHeardAfterDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := runOn(t, dir, true)
		r.says(true, stored(t, pod("a", "10.0.0.1", nil)))
		r.end()

		r = runOn(t, dir, true)
		defer r.end()
		r.announces(eventOf(t, pod("b", "10.0.0.2", nil), false))
		r.says(true, stored(t, denyFrom("app == 'bad'")))
		r.says(true, stored(t, pod("c", "10.0.0.3", nil)))
		if diff := cmp.Diff([]int{2}, r.heard); diff != "" {
			t.Errorf("steps before it was heard (-want +got):\n%s", diff)
		}
	})
}

// A policy that could not be read when it was saved is a problem, and not left out.
func TestUnreadableFromDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := runOn(t, dir, true)
		r.says(true, store.Event{Key: mustKey(t, denyFrom("app == 'bad'")), Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode})
		r.end()
		r = runOn(t, dir, true)
		defer r.end()
		if s := r.e.Status(); !s.InForce || len(s.Problems) != 1 {
			t.Errorf("status %+v, want one problem", s)
		}
	})
}

// TestOwnFromDisk: while the rules follow the disk, an endpoint of this host counts
// at once, and also when the datastore has said all; a profile counts unless one is
// on disk. The disk has what the datastore said.
func TestOwnFromDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		old, denies := stored(t, container("old", "10.0.0.1")), stored(t, profile("net1", v3.Deny))
		r := runOn(t, dir, true)
		r.says(true, old, denies)
		r.end()

		r = runOn(t, dir, true)
		next := container("next", "10.0.0.2")
		source := func(want string) {
			t.Helper()
			synctest.Wait()
			if ep, ok := r.rules().Endpoints["calia"]; !ok || "["+ep.Sources[0].String()+"]" != want {
				t.Errorf("the rules are of %v, want %s", ep, want)
			}
		}
		source("[10.0.0.1/32]")
		r.says(false, old)
		r.announces(eventOf(t, next, false))
		source("[10.0.0.2/32]")
		steps := r.table.applied
		r.announces(stored(t, profile("net1", v3.Allow)))
		if r.table.applied != steps {
			t.Error("a profile takes the place of the one on disk")
		}
		r.says(true, denies)
		source("[10.0.0.2/32]")
		r.end()

		r = runOn(t, dir, true)
		source("[10.0.0.1/32]") // as the datastore said
		// It has nothing of the endpoint any more.
		r.announces(eventOf(t, next, false))
		r.says(true)
		source("[10.0.0.2/32]")
		r.end()

		r = runOn(t, dir, true)
		defer r.end()
		if n := len(r.rules().Endpoints); n != 0 {
			t.Errorf("%d endpoints on disk", n)
		}
	})
}
