package cluster

import (
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// withServices is onDisk where the datastore has Services.
func withServices(dir string) *Cluster {
	return New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Services: true})
}

func service(name string, rev store.Revision) store.Event {
	key := store.ServiceKey("ns", name)
	return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev, Value: &store.Service{ClusterIPs: []string{"10.96.0.1"}}}}
}

// TestWaived: a reader that can do without some kinds begins with the disk's state though
// it has none of them, as after an upgrade, and with the datastore's though that does
// not tell them; the disk has them from when they are told.
func TestWaived(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before := onDisk(dir)
	before.hears(true, 7, pool("a", 1))
	saves(t, before)
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	names := func(s Step) map[string]bool {
		out := map[string]bool{}
		for _, ch := range s.Changes {
			out[ch.Key.Name] = !ch.Deleted()
		}
		return out
	}
	kinds := []store.Kind{store.KindIPPool, store.KindService}
	start := func(want map[string]bool) (c *Cluster, waives *Follower) {
		t.Helper()
		c = withServices(dir)
		needs, waives := c.Follow(kinds...), c.Follow(kinds...).Waive(store.KindService)
		c.Load(needs, waives)
		step, _ := waives.take()
		if _, has := want["web"]; slices.Contains(step.Lacks, store.KindService) == has {
			t.Errorf("of what the disk has nothing is said: %v", step.Lacks)
		}
		if diff := cmp.Diff(want, names(step)); diff != "" || !step.Synced || step.Source != Disk {
			t.Errorf("from disk: synced %v, %v (-want +got):\n%s", step.Synced, step.Source, diff)
		}
		if step, ok := needs.take(); ok != want["web"] {
			t.Errorf("who needs the kind has from disk: %+v", step)
		}
		return c, waives
	}
	c, waives := start(map[string]bool{"a": true})
	unknown := map[store.Kind]store.Withheld{store.KindService: {Err: errors.New("the role lacks the right")}}
	c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 9, Synced: true, Withheld: unknown})
	if step, _ := waives.take(); !step.Synced || step.Source != Live || !slices.Contains(step.Lacks, store.KindService) {
		t.Errorf("without the right: %+v", step)
	}
	saves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	c, waives = start(map[string]bool{"a": true})
	c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 9, Synced: true, Withheld: unknown})
	saves(t, c)
	waives.take()
	c.apply(store.Batch{Revision: 10, Synced: true})
	if step, _ := waives.take(); len(step.Lacks) > 0 {
		t.Errorf("when it is told: lacks %v", step.Lacks)
	}
	saves(t, c) // there are none, which is to be known too
	if got, _ := c.cache.complete(); !slices.Contains(got, store.KindService) {
		t.Errorf("the disk has %v", got)
	}
	c.apply(store.Batch{Events: []store.Event{service("web", 11)}, Revision: 11})
	saves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c, _ = start(map[string]bool{"a": true, "web": true})
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}
