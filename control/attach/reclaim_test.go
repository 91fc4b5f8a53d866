package attach

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// forget does to the datastore what the deletion of this host's Node does.
func (w *world) forget() {
	w.t.Helper()
	for _, h := range w.ipam.handles() {
		if _, err := w.ipam.ReleaseHandleHere(w.t.Context(), h); err != nil {
			w.t.Fatal(err)
		}
	}
	endpoints, _, err := w.store.List(w.t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, o := range endpoints {
		if err := store.Delete(w.t.Context(), w.store, o.Key, o.Revision); err != nil {
			w.t.Fatal(err)
		}
	}
}

// stored lists addresses by handle, and endpoints with theirs.
func (w *world) stored() []string {
	w.t.Helper()
	var out []string
	w.ipam.mu.Lock()
	for h, a := range w.ipam.held {
		out = append(out, fmt.Sprintf("%s has %s", h, a))
	}
	w.ipam.mu.Unlock()
	endpoints, _, err := w.store.List(w.t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, o := range endpoints {
		e := o.Value.(*store.WorkloadEndpoint)
		out = append(out, fmt.Sprintf("%s: %s %s", o.Key.Name, e.Spec.IPNetworks, e.Spec.MAC))
	}
	slices.Sort(out)
	return out
}

func nodeBatch(name string, exists, synced bool) store.Batch {
	o := store.Object{Key: store.ResourceKey(store.KindNode, name)}
	if exists {
		o.Value = store.New(store.KindNode)
	}
	return store.Batch{Events: []store.Event{{Key: o.Key, Object: o}}, Synced: synced}
}

// Workloads whose Node somebody deleted live on: their addresses are taken
// again and their endpoints written anew, also when the daemon did not run
// then. A workload that does not live any more gets nothing back.
func TestReclaim(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		batches []store.Batch // after the deletion
		restart bool
		want    bool
	}{
		{"deleted", []store.Batch{nodeBatch("node-a", true, true), nodeBatch("node-a", false, false)}, false, true},
		{"deleted and back", []store.Batch{nodeBatch("node-a", true, true), nodeBatch("node-a", false, false), nodeBatch("node-a", true, false)}, false, true},
		{"deleted while the daemon was away", []store.Batch{{Synced: true}, nodeBatch("node-a", true, false)}, true, true},
		{"another node deleted", []store.Batch{nodeBatch("node-a", true, true), nodeBatch("node-b", false, false)}, false, false},
		{"not in sync yet", []store.Batch{{}}, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			req := w.request(1 << 40)
			w.add(a, req)
			w.add(a, podRequest(w.request(2<<40), "ns1", "web-0"))
			want := w.stored()
			dead := w.request(3 << 40)
			if err := w.wire.Detach(t.Context(), w.add(a, dead).Device, dead.ID); err != nil {
				t.Fatal(err)
			}
			w.forget()
			if tt.restart {
				a = w.start()
			}
			for _, b := range tt.batches {
				a.HandleStore(clustertest.Step("node-a", b))
			}
			if !tt.want {
				if !a.reclaimer.all(t.Context()) || len(w.stored()) != 0 {
					t.Errorf("written: %v", w.stored())
				}
				return
			}
			// The datastore may not be ready for it at once.
			w.ipam.set(errors.New("no such node"), false)
			if a.reclaimer.all(t.Context()) {
				t.Error("reclaimed without IPAM")
			}
			w.ipam.set(nil, false)
			w.run(a)
			await.True(w.t, "all is stored again", func() bool { return cmp.Equal(want, w.stored()) })
			w.check(a, req)
			w.del(a, req)
		})
	}
}

// Until what was forgotten is taken up again, nobody else gets its address.
func TestAddressInUseIsNotGivenTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	first := w.add(a, w.request(1<<40))
	w.forget()
	w.ipam.mu.Lock()
	w.ipam.next[dataplane.IPv4] = first.Addresses[0].Addr
	w.ipam.mu.Unlock()

	second := w.request(2 << 40)
	if _, err := a.Add(t.Context(), second); !errors.Is(err, ErrNotReady) {
		t.Fatalf("got %v, want ErrNotReady", err)
	}
	w.run(a)
	await.True(w.t, "the first has its address again", func() bool {
		return slices.Equal(w.ipam.handles(), []string{handle(w.request(1 << 40).ID)})
	})
	if got := w.add(a, second); got.Addresses[0].Addr == first.Addresses[0].Addr {
		t.Errorf("both have %s", first.Addresses[0].Addr)
	}
}

// TestProfileIsNotAskedFor: an ADD writes the network's profile where the
// watch does not say that it is there, and asks for it no more where it does.
func TestProfileIsNotAskedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	key := store.ResourceKey(store.KindProfile, "net1")
	there := func() bool {
		_, err := w.store.Get(t.Context(), key)
		return err == nil
	}
	w.add(a, w.request(1<<40))
	if !there() {
		t.Fatal("the first ADD made no profile")
	}
	a.HandleStore(clustertest.Step("node-a", store.Batch{Events: []store.Event{{Key: key, Object: store.Object{Key: key, Value: profileOf("net1")}}}}))
	if err := store.Delete(t.Context(), w.store, key, 0); err != nil {
		t.Fatal(err)
	}
	w.add(a, w.request(2<<40))
	if there() {
		t.Error("an ADD wrote a profile that the watch says is there")
	}
	a.HandleStore(clustertest.Step("node-a", store.Batch{Events: []store.Event{{Key: key, Object: store.Object{Key: key}}}}))
	w.add(a, w.request(3<<40))
	if !there() {
		t.Error("an ADD did not write the profile that the watch says is gone")
	}
}
