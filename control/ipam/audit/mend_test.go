package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// mendWorld is a store with a pool, and nodes that give addresses.
type mendWorld struct {
	t  *testing.T
	st *memory.Store
}

func newMendWorld(t *testing.T) *mendWorld {
	t.Helper()
	w := &mendWorld{t, memory.New()}
	t.Cleanup(func() { _ = w.st.Close() })
	p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v3.IPPoolSpec{CIDR: "10.0.0.0/24", BlockSize: 28}}
	w.put(p)
	return w
}

func (w *mendWorld) put(v any) {
	w.t.Helper()
	store.SetDefaults(v)
	if _, err := store.Create(w.t.Context(), w.st, v); err != nil {
		w.t.Fatal(err)
	}
}

func (w *mendWorld) register(node string) {
	w.t.Helper()
	w.put(&store.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
}

func (w *mendWorld) unregister(node string) {
	w.t.Helper()
	key := store.ResourceKey(store.KindNode, node)
	if _, err := w.st.Txn(w.t.Context(), store.Op{Action: store.Remove, Object: store.Object{Key: key}}); err != nil {
		w.t.Fatal(err)
	}
}

// allocator runs a node's allocator until the test ends.
func (w *mendWorld) allocator(node string) *ipam.Allocator {
	w.t.Helper()
	a := ipam.New(ipam.Config{Store: w.st, Node: node, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	steps, followed := clustertest.Follow(ctx, node, w.st, ipam.Kinds()...)
	go func() {
		defer close(done)
		if err := a.Run(ctx, steps); err != nil {
			w.t.Errorf("run: %v", err)
		}
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
		<-followed
	})
	return a
}

// assign gives an address, as soon as the node is known to be there.
func (w *mendWorld) assign(a *ipam.Allocator, handle string) netip.Addr {
	w.t.Helper()
	var addr netip.Addr
	await.Until(w.t, "an address for "+handle, func() error {
		got, err := a.Assign(await.Context(w.t), ipam.Request{Family: dataplane.IPv4, Handle: handle})
		switch {
		case err == nil:
			addr = got[0].Addr
		case !errors.Is(err, ipam.ErrNodeMissing):
			w.t.Fatalf("assign to %s: %v", handle, err)
		}
		return err
	})
	return addr
}

// held returns what blocks give, by address, and verifies that handles agree.
func (w *mendWorld) held() map[netip.Addr]string {
	w.t.Helper()
	r, err := Read(w.t.Context(), w.st)
	if err != nil {
		w.t.Fatal(err)
	}
	out, counts := map[netip.Addr]string{}, map[string]int{}
	for cidr, b := range r.Blocks {
		list, err := ipam.Allocations(cidr, b)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, a := range list {
			out[a.Addr] = a.Handle
			counts[a.Handle]++
		}
	}
	for _, o := range r.Handles {
		n := 0
		for _, c := range o.Value.(*store.Handle).Block {
			n += c
		}
		if n != counts[o.Key.Name] {
			w.t.Errorf("handle %s says %d, blocks %d", o.Key.Name, n, counts[o.Key.Name])
		}
		delete(counts, o.Key.Name)
	}
	if len(counts) > 0 {
		w.t.Errorf("handles are missing: %v", counts)
	}
	return out
}

func (w *mendWorld) audit() []Finding {
	w.t.Helper()
	r, err := Read(w.t.Context(), w.st)
	if err != nil {
		w.t.Fatal(err)
	}
	_, found := r.Check()
	return found
}

// TestMendLeavesTheLiving: what was found is not so any more when it is mended,
// be it before the records are read again or after. Then nothing is done.
func TestMendLeavesTheLiving(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(w *mendWorld, addr netip.Addr)
	}{
		{"the node is back", func(w *mendWorld, _ netip.Addr) { w.register("gone") }},
		{"the node is back and gives the address anew", func(w *mendWorld, _ netip.Addr) {
			w.register("gone")
			a := w.allocator("gone")
			if _, err := a.ReleaseHandle(w.t.Context(), "net.old"); err != nil {
				w.t.Error(err)
			}
			w.assign(a, "net.new")
		}},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/late %v", tc.name, late), func(t *testing.T) {
				t.Parallel()
				w := newMendWorld(t)
				w.register("gone")
				addr := w.assign(w.allocator("gone"), "net.old")
				w.unregister("gone")
				found := w.audit()
				if len(found) != 3 { // the address, the claim and the block
					t.Fatalf("found %+v", found)
				}
				var before map[netip.Addr]string
				once := sync.OnceFunc(func() { tc.change(w, addr); before = w.held() })
				m := &Mender{Store: w.st}
				if late {
					m.hook = once
				} else {
					once()
				}
				if n, err := m.Mend(t.Context(), found); n != 0 || err != nil {
					t.Errorf("mended %d, error %v", n, err)
				}
				if got := w.held(); fmt.Sprint(got) != fmt.Sprint(before) {
					t.Errorf("held %v, before %v", got, before)
				}
			})
		}
	}
}

// An address that no node uses, and of which an endpoint came since.
func TestMendLeavesEndpoints(t *testing.T) {
	t.Parallel()
	w := newMendWorld(t)
	w.register("a")
	a := w.allocator("a")
	addr := w.assign(a, "net.x")
	w.unregister("a")
	found := w.audit()
	spec := store.WorkloadEndpointSpec{Orchestrator: "cni", Node: "b", ContainerID: "c", Endpoint: "eth0", InterfaceName: "cali1", IPNetworks: []string{addr.String() + "/32"}}
	name, err := store.WorkloadEndpointName(&spec)
	if err != nil {
		t.Fatal(err)
	}
	w.put(&store.WorkloadEndpoint{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, Spec: spec})
	if _, err := (&Mender{Store: w.st}).Mend(t.Context(), found); err != nil {
		t.Error(err)
	}
	if got := w.held(); got[addr] != "net.x" {
		t.Errorf("held: %v", got)
	}
}

// A handle that was empty when it was found is not deleted when a block has an
// address of it by then, be it that the handle itself did not change.
func TestMendLeavesHandles(t *testing.T) {
	t.Parallel()
	w := newMendWorld(t)
	w.register("a")
	a := w.allocator("a")
	w.assign(a, "net.x")
	found := []Finding{}
	handle, err := w.st.Get(t.Context(), store.HandleKey("net.x"))
	if err != nil {
		t.Fatal(err)
	}
	handle.Key = store.HandleKey("net.x")
	// The reader saw the block before the address was given, and the handle after.
	found = append(found, Finding{Problem: "empty handle", What: "handle net.x", fix: &fix{remove: handle}})
	if n, err := (&Mender{Store: w.st}).Mend(t.Context(), found); n != 0 || err != nil {
		t.Errorf("mended %d, error %v", n, err)
	}
	w.held()
}

// TestFixWhileAddressesAreGiven: what is found is mended again and again while a
// node gives and releases addresses and another one dies and comes back. No
// address that a living node gave is freed, and no handle is wrong.
func TestFixWhileAddressesAreGiven(t *testing.T) {
	t.Parallel()
	w := newMendWorld(t)
	w.register("a")
	w.register("b")
	a, b := w.allocator("a"), w.allocator("b")
	w.assign(a, "net.a")
	w.assign(b, "net.b")
	ctx, cancel := context.WithCancel(t.Context())
	var fixer sync.WaitGroup
	fixes, running := 0, make(chan struct{})
	fixer.Go(func() {
		for ctx.Err() == nil {
			r, err := Read(t.Context(), w.st)
			if err != nil {
				t.Errorf("read: %v", err)
				return
			}
			_, found := r.Check()
			// A node that comes or goes meanwhile is a conflict, which Mend reports.
			if _, err := (&Mender{Store: w.st}).Mend(t.Context(), found); err != nil && !errors.Is(err, store.ErrConflict) {
				t.Errorf("mend: %v", err)
			}
			if fixes++; fixes == 1 {
				close(running)
			}
		}
	})
	want := map[netip.Addr]string{}
	<-running // on a busy machine the goroutine starts late
	for i := range 40 {
		kept, freed := fmt.Sprint("net.kept", i), fmt.Sprint("net.freed", i)
		want[w.assign(a, kept)] = kept
		w.assign(a, freed)
		if i%8 == 0 {
			w.unregister("b")
		}
		if _, err := a.ReleaseHandle(t.Context(), freed); err != nil {
			t.Error(err)
		}
		if i%8 == 4 {
			w.register("b")
			w.assign(b, fmt.Sprint("net.b", i)) // the node may go again before it is of use
		}
	}
	cancel()
	fixer.Wait()
	held := w.held()
	for addr, handle := range want {
		if held[addr] != handle {
			t.Errorf("%s was given to %s, and %q has it", addr, handle, held[addr])
		}
	}
	if fixes < 2 {
		t.Errorf("%d checks while addresses were given", fixes)
	}
}
