package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

// TestDemand: who asks is heard at once, and when the last one leaves what was asked for is kept for
// a while: so no one who comes back within it finds it gone.
func TestDemand(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var d demand
		now := time.Unix(1000, 0)
		asking, left := map[string]bool{}, time.Time{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			now = now.Add(rapid.SampledFrom([]time.Duration{0, time.Second, othersKept / 2, othersKept, 2 * othersKept}).Draw(t, "later"))
			who, asks := rapid.SampledFrom([]string{"policy", "page"}).Draw(t, "who"), rapid.Bool().Draw(t, "asks")
			was := len(asking)
			if delete(asking, who); asks {
				asking[who] = true
			}
			if was > 0 && len(asking) == 0 {
				left = now
			}
			d = d.set(who, asks, now)
			is, holds := d.wanted(now)
			if want := len(asking) > 0 || !left.IsZero() && now.Sub(left) < othersKept; is != want {
				t.Fatalf("at %v, asked for by %v, since %v by none: %v", now, asking, left, is)
			}
			if holds > 0 {
				if still, _ := d.wanted(now.Add(holds - 1)); still != is {
					t.Fatalf("it says that %v holds for %v", is, holds)
				}
				if still, _ := d.wanted(now.Add(holds)); still {
					t.Fatalf("it holds longer than %v", holds)
				}
			} else if still, _ := d.wanted(now.Add(time.Hour)); still != is {
				t.Fatalf("it says that %v holds", is)
			}
		}
	})
}

// nodeWatcher is a datastore of which only the watch of a node is asked.
type nodeWatcher struct {
	store.Store
	batches chan store.Batch
	from    chan store.Known
	passed  chan *store.Demand
}

func newNodeWatcher() nodeWatcher {
	return nodeWatcher{batches: make(chan store.Batch), from: make(chan store.Known, 1), passed: make(chan *store.Demand, 1)}
}

func (w nodeWatcher) WatchFrom(context.Context, store.Known, ...store.Kind) <-chan store.Batch {
	panic("all are watched")
}

func (w nodeWatcher) WatchNode(ctx context.Context, node string, others *store.Demand, k store.Known, _ ...store.Kind) <-chan store.Batch {
	w.from <- k
	w.passed <- others
	return relay(ctx, w.batches)
}

func podOf(node, name string, rev store.Revision) store.Event {
	full := node + "-k8s-" + name + "-eth0"
	key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "n", Name: full}
	return store.Event{Key: key, Object: store.Object{
		Key: key, Revision: rev,
		Value: &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{Node: node, Pod: name}},
		Raw:   fmt.Appendf(nil, `{"kind":"WorkloadEndpoint","apiVersion":"projectcalico.org/v3","metadata":{"name":%q,"namespace":"n"},"spec":{"node":%q}}`, full, node),
	}}
}

// TestOthersFollowed: the datastore's watch follows the endpoints of others while one asks and for a
// while after, steps say whether these are all known, and a restart goes on with what the run before
// followed: with the others' only where they were followed to its end.
func TestOthersFollowed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		type daemon struct {
			*Cluster
			nodeWatcher
			f     *Follower
			other *store.Demand
			known store.Known
			end   func()
		}
		start := func() *daemon {
			d := &daemon{nodeWatcher: newNodeWatcher()}
			d.Cluster = New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: d.nodeWatcher, Version: "1"})
			d.f = d.Follow(store.KindWorkloadEndpoint)
			d.end = d.runs(t)
			synctest.Wait()
			d.known, d.other = <-d.from, <-d.passed
			return d
		}
		followed := func(d *daemon, what string, want bool) {
			t.Helper()
			synctest.Wait()
			if is, _ := d.other.Is(); is != want {
				t.Errorf("%s: followed is %v", what, is)
			}
			if o := d.Others(); o.Followed != want || !o.Optional {
				t.Errorf("%s: %+v", what, o)
			}
		}
		says := func(d *daemon, what string, b store.Batch) {
			t.Helper()
			d.batches <- b
			synctest.Wait()
			s, ok := d.f.take()
			if !ok || s.OwnOnly != b.OwnOnly {
				t.Errorf("%s: step %+v, %v", what, s, ok)
			}
		}
		resumes := func(d *daemon, what, want string) {
			t.Helper()
			var have []string
			for _, o := range d.known.Objects {
				have = append(have, strings.TrimSuffix(o.Key.Name, "-eth0"))
			}
			slices.Sort(have)
			if got := strings.Join(have, " "); got != want {
				t.Errorf("%s: goes on from %q, want %q", what, got, want)
			}
		}
		places := func(names ...string) map[string]store.Revision {
			m := map[string]store.Revision{"cluster": 1}
			for _, n := range names {
				m[n] = 7
			}
			return m
		}
		own, all := places("own"), places("own", "others")

		d := start()
		followed(d, "the first start", false)
		says(d, "the first start", store.Batch{Events: []store.Event{podOf("node1", "a", 2)}, Revision: 2, Synced: true, OwnOnly: true, Places: own})
		d.AskOthers("policy", true)
		followed(d, "policy asks", true)
		says(d, "policy asks", store.Batch{Events: []store.Event{podOf("node2", "b", 3)}, Revision: 3, OwnOnly: true, Places: own})
		says(d, "all are known", store.Batch{Revision: 3, Places: all})
		d.AskOthers("policy", false)
		<-time.After(othersKept - time.Second)
		followed(d, "no one asks since a moment", true)
		d.AskOthers("policy", true)
		<-time.After(othersKept)
		followed(d, "it asks again", true)
		d.end()

		d = start()
		resumes(d, "a start with all", "node1-k8s-a node2-k8s-b")
		followed(d, "a start with all", true)
		says(d, "a start with all", store.Batch{Events: []store.Event{podOf("node1", "a", 2), podOf("node2", "b", 3)}, Revision: 3, Synced: true, Places: all})
		<-time.After(othersKept)
		followed(d, "no one asked since the start", false)
		says(d, "no one asked since the start", store.Batch{Revision: 4, OwnOnly: true, Places: own})
		<-time.After(2 * time.Second)
		if kinds, ownOnly := d.cache.complete(); !ownOnly || !slices.Contains(kinds, store.KindWorkloadEndpoint) {
			t.Errorf("the disk has %v, of this host only: %v", kinds, ownOnly)
		}
		// What an earlier version reads there is that it has not all endpoints.
		if mark, err := readMark(d.cache.file); err != nil || slices.Contains(mark.Kinds, store.KindWorkloadEndpoint) {
			t.Errorf("the mark on disk: %+v, %v", mark, err)
		}
		d.end()

		d = start()
		resumes(d, "a start with this host's", "node1-k8s-a")
		followed(d, "a start with this host's", false)
		d.end()

		// What the disk says of others it does not say as if it were all.
		c := New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: newNodeWatcher(), Version: "1"})
		f := c.Follow(store.KindWorkloadEndpoint)
		c.Load(f)
		if s, ok := f.take(); !ok || s.Source != Disk || !s.Synced || !s.OwnOnly {
			t.Errorf("from the disk: %+v, %v", s, ok)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}
