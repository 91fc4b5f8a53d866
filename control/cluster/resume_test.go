package cluster

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// resumer is a datastore of which only the watch is asked.
type resumer struct {
	store.Store
	from chan store.Known
}

func (r resumer) WatchFrom(_ context.Context, k store.Known, _ ...store.Kind) <-chan store.Batch {
	r.from <- k
	ch := make(chan store.Batch)
	close(ch)
	return ch
}

func (r resumer) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	return r.WatchFrom(ctx, store.Known{}, kinds...)
}

// TestGoesOn: a start has the watch go on from what the disk has: whole kinds with
// their revisions, and how far the watch was. Another version of the program reads
// anew.
func TestGoesOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func(version string) (*Cluster, resumer) {
		r := resumer{from: make(chan store.Known, 1)}
		return New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: r, Version: version}), r
	}
	hears := func(c *Cluster, rev store.Revision, events ...store.Event) {
		c.apply(store.Batch{Events: events, Synced: true, Revision: rev, Places: map[string]store.Revision{"pools": rev, "cluster": 1}})
	}
	resumes := func(version string) store.Known {
		c, r := open(version)
		defer c.Close() //nolint:errcheck // it only read
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = c.Run(ctx)
		return <-r.from
	}
	c, _ := open("1")
	a, b := pool("a", 5), pool("b", 6)
	a.Object.Revision, b.Object.Revision = 5, 6
	hears(c, 6, a, b)
	if err := c.Save(); err != nil {
		t.Fatal(err)
	}
	hears(c, 9) // nothing but that it went on
	c.apply(store.Batch{Err: errors.New("away")})
	if _, err := c.cache.saveAll(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	k := resumes("1")
	if diff := cmp.Diff(map[string]store.Revision{"pools": 9, "cluster": 1}, k.Places); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
	have := map[string]store.Revision{}
	for _, o := range k.Objects {
		have[o.Key.Name] = o.Revision
		if _, err := store.Decode(o.Key, o.Raw); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff(map[string]store.Revision{"a": 5, "b": 6}, have); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity} {
		if slices.Contains(k.Kinds, kind) {
			t.Errorf("%s is not whole on disk", kind)
		}
	}
	if k := resumes("2"); k.Places != nil {
		t.Errorf("another version goes on from %+v", k)
	}
	same(t, "a start without the datastore", starts(t, dir, store.KindIPPool), map[string]string{"a": "10.5.0.0/16", "b": "10.6.0.0/16"})
}
