package cluster

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
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

// TestGoesOn: a start has the watch go on from what the disk has: whole kinds, blocks of
// other hosts included, with their revisions, and how far the watch was. Another conversion reads
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
		c.Load(c.Follow(store.KindIPPool)) // reads them first
		_ = c.Run(ctx)
		if c.cache.read != nil {
			t.Errorf("%d objects are kept that were read for the start", len(c.cache.read))
		}
		return <-r.from
	}
	c, _ := open("1")
	a, b := pool("a", 5), pool("b", 6)
	a.Object.Revision, b.Object.Revision = 5, 6
	cidr := netip.MustParsePrefix("10.0.0.0/26")
	block := store.Object{Key: store.BlockKey(cidr), Revision: 4, Value: &store.Block{CIDR: cidr.String(), Unallocated: []int{}, Affinity: new("host:node2"), Allocations: make([]*int, 64)}}
	affinity := store.Object{Key: store.AffinityKey("node2", cidr), Revision: 3, Value: &store.Affinity{State: "confirmed"}}
	hears(c, 6, a, b, store.Event{Key: block.Key, Object: block}, store.Event{Key: affinity.Key, Object: affinity})
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
		have[strings.TrimPrefix(string(o.Key.Kind), "IPAM")+" "+o.Key.Name] = o.Revision
		if _, err := store.Decode(o.Key, o.Raw); err != nil {
			t.Error(err)
		}
	}
	want := map[string]store.Revision{"IPPool a": 5, "IPPool b": 6, "Block 10.0.0.0/26": 4, "Affinity 10.0.0.0/26": 3}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	for _, kind := range Saved() {
		if !slices.Contains(k.Kinds, kind) {
			t.Errorf("%s is not gone on with", kind)
		}
	}
	if k := resumes("2"); k.Places != nil {
		t.Errorf("another version goes on from %+v", k)
	}
	same(t, "a start without the datastore", starts(t, dir, store.KindIPPool), map[string]string{"a": "10.5.0.0/16", "b": "10.6.0.0/16"})
}
