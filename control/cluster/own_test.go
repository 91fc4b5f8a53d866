package cluster

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/store"
)

func container(id, addr string) *store.WorkloadEndpoint {
	return &store.WorkloadEndpoint{
		ObjectMeta: metav1.ObjectMeta{Name: "node1-k8s-a-eth0", Namespace: "default"},
		Spec:       store.WorkloadEndpointSpec{Orchestrator: "k8s", Node: "node1", Pod: "a", Endpoint: "eth0", ContainerID: id, IPNetworks: []string{addr + "/32"}},
	}
}

func eventOf(t *testing.T, v any, ended bool) store.Event {
	t.Helper()
	key, err := store.KeyOf(v)
	if err != nil {
		t.Fatal(err)
	}
	ev := store.Event{Key: key, Object: store.Object{Key: key}}
	if !ended {
		ev.Object.Value = v
	}
	return ev
}

// ownReader is a follower's view of endpoints.
type ownReader struct {
	*Follower
	have map[store.Key]string
}

func newOwnReader(c *Cluster) *ownReader {
	return &ownReader{c.Follow(store.KindWorkloadEndpoint), map[store.Key]string{}}
}

func (r *ownReader) read() {
	s, _ := r.take()
	for _, ch := range s.Changes {
		note(r.have, ch.Event)
	}
}

// note takes account of an event of an endpoint.
func note(m map[store.Key]string, ev store.Event) {
	switch {
	case ev.Err != nil:
	case ev.Deleted():
		delete(m, ev.Key)
	default:
		m[ev.Key] = ev.Object.Value.(*store.WorkloadEndpoint).Spec.IPNetworks[0]
	}
}

// TestLateWatch: what the watch shows late of an earlier container of the pod does
// not take the place of what this host announced, however slow the reader is; to the
// disk goes what the datastore said.
func TestLateWatch(t *testing.T) {
	t.Parallel()
	old, again, next, other := container("old", "10.0.0.1"), container("old", "10.0.0.2"), container("next", "10.0.0.2"), container("other", "10.0.0.3")
	type step func(t *testing.T, c *Cluster, said map[store.Key]string)
	announce := func(ep *store.WorkloadEndpoint, ended bool) step {
		return func(t *testing.T, c *Cluster, _ map[store.Key]string) { c.Announce(eventOf(t, ep, ended)) }
	}
	watch := func(ep *store.WorkloadEndpoint, ended bool, at store.Revision) step {
		return func(t *testing.T, c *Cluster, said map[store.Key]string) {
			ev := eventOf(t, ep, ended)
			c.apply(store.Batch{Events: []store.Event{ev}, Revision: at})
			if said[ev.Key] = ep.Spec.IPNetworks[0]; ended {
				delete(said, ev.Key)
			}
		}
	}
	// behind shows an object as it was at a revision when the watch is further with other kinds.
	behind := func(ep *store.WorkloadEndpoint, ended bool, of, at store.Revision) step {
		return func(t *testing.T, c *Cluster, said map[store.Key]string) {
			ev := eventOf(t, ep, ended)
			ev.Object.Revision = of
			c.apply(store.Batch{Events: []store.Event{ev}, Revision: at})
			if said[ev.Key] = ep.Spec.IPNetworks[0]; ended {
				delete(said, ev.Key)
			}
		}
	}
	unreadable := func(at store.Revision) step {
		return func(t *testing.T, c *Cluster, _ map[store.Key]string) {
			c.apply(store.Batch{Events: []store.Event{{Key: eventOf(t, next, true).Key, Err: store.ErrDecode}}, Revision: at})
		}
	}
	written := func(at store.Revision) step {
		return func(t *testing.T, c *Cluster, _ map[store.Key]string) { c.Written(eventOf(t, next, true).Key, at) }
	}
	resync := func(_ *testing.T, c *Cluster, _ map[store.Key]string) { c.apply(store.Batch{Synced: true}) }
	end := func(known bool) step {
		return func(t *testing.T, c *Cluster, _ map[store.Key]string) { c.Ended(eventOf(t, next, true).Key, known) }
	}
	for _, tc := range []struct {
		name  string
		steps []step
		want  string // the address of the endpoint; empty: there is none
		left  int    // own writes that are kept
	}{
		{"the former's late write", []step{announce(next, false), watch(old, false, 5)}, "10.0.0.2/32", 1},
		{"the former's late deletion", []step{announce(next, false), watch(old, true, 5)}, "10.0.0.2/32", 1},
		{"the same container's former address", []step{announce(again, false), watch(old, false, 5)}, "10.0.0.2/32", 1},
		{"its own write", []step{announce(next, false), watch(next, false, 6), written(6)}, "10.0.0.2/32", 0},
		{"its own write, known to be written", []step{announce(next, false), written(6), watch(next, false, 6)}, "10.0.0.2/32", 0},
		{"its own write, not known to be", []step{announce(next, false), watch(next, false, 6)}, "10.0.0.2/32", 1},
		{"another's word after its own write", []step{announce(next, false), written(6), watch(next, false, 6), watch(other, false, 7)}, "10.0.0.3/32", 0},
		{"deleted after its own write", []step{announce(next, false), watch(next, false, 6), written(6), watch(next, true, 7)}, "", 0},
		{"deleted after its own write, before that is known", []step{announce(next, false), watch(next, false, 6), watch(next, true, 7), written(6)}, "", 0},
		{"the same container's former life", []step{announce(next, false), watch(next, false, 4), watch(next, true, 5)}, "10.0.0.2/32", 1},
		{"the same container's former life, then its own write", []step{announce(next, false), watch(next, false, 4), watch(next, true, 5), written(6), watch(next, false, 6)}, "10.0.0.2/32", 0},
		{"written, and deleted before the watch told", []step{announce(next, false), written(6), watch(next, true, 7)}, "", 0},
		{"deleted before it is known to be written", []step{announce(next, false), watch(next, true, 7), written(6)}, "", 0},
		{"written, and an older deletion", []step{announce(next, false), watch(old, true, 5), written(6)}, "10.0.0.2/32", 1},
		{"written, and an older deletion afterwards", []step{announce(next, false), written(6), watch(old, true, 5)}, "10.0.0.2/32", 1},
		{"written, and an older write when others are further", []step{announce(next, false), written(6), behind(old, false, 5, 9)}, "10.0.0.2/32", 1},
		{"written, and an older deletion when others are further", []step{announce(next, false), written(6), behind(old, true, 5, 9)}, "10.0.0.2/32", 1},
		{"an older write when others are further, then it is written", []step{announce(next, false), behind(old, false, 5, 9), written(6)}, "10.0.0.2/32", 1},
		{"unreadable", []step{announce(next, false), unreadable(5)}, "10.0.0.2/32", 1},
		{"ended, and its late write", []step{announce(next, false), announce(next, true), watch(next, false, 6)}, "", 1},
		{"ended, and its deletion", []step{announce(next, false), announce(next, true), watch(next, false, 6), watch(next, true, 7)}, "", 0},
		{"ended, and another's", []step{announce(next, false), announce(next, true), watch(other, false, 8)}, "10.0.0.3/32", 0},
		{"ended, the datastore never heard", []step{announce(next, false), announce(next, true), end(false)}, "", 0},
		{"ended, the watch never tells", []step{announce(next, false), announce(next, true), end(true), resync}, "", 0},
		{"ended, and a successor", []step{announce(old, true), announce(next, false), end(true), watch(old, true, 5)}, "10.0.0.2/32", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster()
			c.cache = openCache(Config{Node: "node1", File: filepath.Join(t.TempDir(), "cluster.journal"), Log: slog.New(slog.DiscardHandler)})
			quick, slow := newOwnReader(c), newOwnReader(c)
			said := map[store.Key]string{}
			for _, s := range tc.steps {
				s(t, c, said)
				quick.read()
			}
			slow.read()
			for name, r := range map[string]*ownReader{"quick": quick, "slow": slow} {
				if got := r.have[eventOf(t, next, true).Key]; got != tc.want {
					t.Errorf("the %s reader has %q, want %q", name, got, tc.want)
				}
			}
			saved := map[store.Key]string{}
			for _, u := range c.cache.pending {
				note(saved, u.event)
			}
			if fmt.Sprint(saved) != fmt.Sprint(said) {
				t.Errorf("for the disk the datastore said %v, it said %v", saved, said)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if len(c.own.writes) != tc.left {
				t.Errorf("%d own writes are kept, want %d", len(c.own.writes), tc.left)
			}
		})
	}
}

// TestOwnPod: what the API of Kubernetes says of a pod counts while this host's
// addresses of it cannot be written, and these count all the same. Another pod of its
// name lends it nothing.
func TestOwnPod(t *testing.T) {
	t.Parallel()
	pod := func(uid types.UID, id, addr, label string) *store.WorkloadEndpoint {
		ep := container(id, addr)
		ep.UID, ep.Labels = uid, map[string]string{"app": label}
		if addr == "" {
			ep.Spec.IPNetworks = nil
		}
		return ep
	}
	c := newCluster()
	f := c.Follow(store.KindWorkloadEndpoint)
	expect := func(label, addr string, own bool) {
		t.Helper()
		s, _ := f.take()
		if len(s.Changes) != 1 {
			t.Fatalf("the step is %+v", s)
		}
		ep := s.Changes[0].Value.(*store.WorkloadEndpoint)
		if ep.Labels["app"] != label || fmt.Sprint(ep.Spec.IPNetworks) != "["+addr+"/32]" || s.Changes[0].Own != own {
			t.Errorf("label %q, addresses %v, own %t", ep.Labels["app"], ep.Spec.IPNetworks, s.Changes[0].Own)
		}
	}
	mine := eventOf(t, pod("u1", "id", "10.0.0.1", "old"), false)
	c.Announce(mine)
	expect("old", "10.0.0.1", true)
	c.apply(store.Batch{Events: []store.Event{eventOf(t, pod("u1", "", "", "new"), false)}, Revision: 5})
	expect("new", "10.0.0.1", true)
	c.apply(store.Batch{Events: []store.Event{eventOf(t, pod("u0", "", "", "of another"), false)}, Revision: 6})
	expect("new", "10.0.0.1", true)
	c.Written(mine.Key, 8)
	c.apply(store.Batch{Events: []store.Event{eventOf(t, pod("u1", "", "", "newer"), false)}, Revision: 7})
	expect("newer", "10.0.0.1", true)
	c.apply(store.Batch{Events: []store.Event{eventOf(t, pod("u1", "id", "10.0.0.1", "newest"), false)}, Revision: 8})
	expect("newest", "10.0.0.1", false)
	if len(c.own.writes) != 0 {
		t.Error("the own write is kept")
	}
}

// TestOwnProfile: a profile is shown unless the datastore has one, and what the
// datastore says of it counts.
func TestOwnProfile(t *testing.T) {
	t.Parallel()
	c := newCluster()
	f := c.Follow(store.KindProfile)
	p := v3.NewProfile()
	p.Name = "net1"
	mine, theirs := eventOf(t, p, false), eventOf(t, p.DeepCopy(), false)
	expect := func(n int, own bool) {
		t.Helper()
		s, _ := f.take()
		if len(s.Changes) != n || n > 0 && s.Changes[0].Own != own {
			t.Errorf("the step is %+v", s)
		}
	}
	c.Announce(mine)
	expect(1, true)
	c.apply(store.Batch{Events: []store.Event{theirs}, Revision: 1})
	c.Announce(mine)
	expect(1, false)
	c.apply(store.Batch{Events: []store.Event{gone(theirs)}, Revision: 2})
	c.Announce(mine)
	expect(1, true)
	c.apply(store.Batch{Events: []store.Event{theirs}, Revision: 3})
	expect(1, false)
	c.Announce(mine)
	expect(0, false)
}

// TestOwnBound: of those that the watch never shows not all are kept.
func TestOwnBound(t *testing.T) {
	t.Parallel()
	c := newCluster()
	for i := range 2 * maxOwn {
		ep := container("a", "10.0.0.1")
		ep.Name = fmt.Sprintf("node1-k8s-%d-eth0", i)
		ev := eventOf(t, ep, false)
		c.Announce(ev)
		c.Announce(gone(ev))
		c.Ended(ev.Key, true)
	}
	if n := len(c.own.writes); n > maxOwn {
		t.Errorf("%d are kept", n)
	}
}

// TestCatchUp: the reader has what was announced, though no revision says so.
func TestCatchUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		r := newOwnReader(c)
		c.Announce(eventOf(t, container("a", "10.0.0.1"), false))
		through := make(chan error, 1)
		go func() { through <- r.CatchUp(t.Context()) }()
		for range 2 { // it has not asked yet, and it works on the step
			synctest.Wait()
			select {
			case <-through:
				t.Fatal("the reader is said to be through")
			default:
			}
			r.read()
		}
		if err := <-through; err != nil {
			t.Error(err)
		}
	})
}

// TestHidden: what the watch, or the disk, says of a pod reaches a reader also where what this host
// announced of it takes the place of that before the reader has it.
func TestHidden(t *testing.T) {
	t.Parallel()
	pod, mine, next := container("", "10.0.0.9"), container("id", "10.0.0.1"), container("next", "10.0.0.2")
	watch := func(c *Cluster) { c.apply(store.Batch{Events: []store.Event{eventOf(t, pod, false)}, Revision: 5}) }
	announce := func(ep *store.WorkloadEndpoint, ended bool) func(*Cluster) {
		return func(c *Cluster) { c.Announce(eventOf(t, ep, ended)) }
	}
	for name, tc := range map[string]struct {
		disk  bool
		steps []func(*Cluster)
		none  bool
	}{
		"from the watch":             {steps: []func(*Cluster){watch, announce(mine, false)}},
		"later":                      {steps: []func(*Cluster){announce(mine, false), watch}},
		"announced twice":            {steps: []func(*Cluster){watch, announce(mine, false), announce(next, false)}},
		"it ended":                   {steps: []func(*Cluster){announce(mine, false), watch, announce(mine, true)}},
		"from the disk":              {disk: true, steps: []func(*Cluster){announce(mine, false)}},
		"from the watch, after that": {disk: true, steps: []func(*Cluster){watch, announce(mine, false)}},
		"nothing":                    {steps: []func(*Cluster){announce(mine, false)}, none: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster()
			if tc.disk {
				dir := t.TempDir()
				before := onDisk(dir)
				before.hears(true, 3, eventOf(t, pod, false))
				saves(t, before)
				if err := before.Close(); err != nil {
					t.Fatal(err)
				}
				c = onDisk(dir)
			}
			f := c.Follow(store.KindWorkloadEndpoint)
			c.Load(f)
			for _, step := range tc.steps {
				step(c)
			}
			s, _ := f.take()
			if len(s.Changes) != 1 || !s.Changes[0].Own {
				t.Fatalf("the step is %+v", s)
			}
			got := s.Changes[0].Hidden
			if tc.none && got != nil || !tc.none && (got == nil || got.Spec.ContainerID != "" || got.Spec.IPNetworks[0] != "10.0.0.9/32") {
				t.Errorf("hidden is %+v", got)
			}
		})
	}
}
