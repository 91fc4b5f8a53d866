package collect

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// world is a datastore with a clock.
type world struct {
	t     testing.TB
	store store.Store
	now   time.Time
}

func newWorld(t *testing.T) (*world, *memory.Store) {
	m := memory.New()
	t.Cleanup(func() { _ = m.Close() })
	return &world{t: t, store: m, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}, m
}

func (w *world) collector(host Host) *Collector {
	return New(Config{Store: w.store, Node: "node-a", Host: host, Grace: 15 * time.Minute, Clock: func() time.Time { return w.now }})
}

func (w *world) put(key store.Key, value any) {
	w.t.Helper()
	if _, err := w.store.Txn(w.t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: value}}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) node(name string) {
	w.t.Helper()
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	store.SetDefaults(n)
	if _, err := store.Create(w.t.Context(), w.store, n); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) endpoint(node, container string, addrs ...string) {
	w.t.Helper()
	e := &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{
		Orchestrator: "cni", Node: node, ContainerID: container, Endpoint: "eth0", Profiles: []string{"net1"}, InterfaceName: "cali0", IPNetworks: addrs,
	}}
	e.Namespace = "default"
	name, err := store.WorkloadEndpointName(&e.Spec)
	if err != nil {
		w.t.Fatal(err)
	}
	e.Name = name
	store.SetDefaults(e)
	if _, err := store.Create(w.t.Context(), w.store, e); err != nil {
		w.t.Fatal(err)
	}
}

// blockOf makes a block of a node that gives its first addresses to handles,
// each in use on a node: HANDLE@NODE.
func blockOf(cidr, owner string, given ...string) (store.Key, *store.Block) {
	p := netip.MustParsePrefix(cidr)
	n := 1 << (p.Addr().BitLen() - p.Bits())
	b := &store.Block{CIDR: cidr, Allocations: make([]*int, n), SequenceNumber: 100, SequenceNumberForAllocation: map[string]uint64{}}
	if owner != "" {
		affinity := "host:" + owner
		b.Affinity = &affinity
	}
	for i := range n {
		if i >= len(given) {
			b.Unallocated = append(b.Unallocated, i)
			continue
		}
		var handle, node string
		for j, r := range given[i] {
			if r == '@' {
				handle, node = given[i][:j], given[i][j+1:]
			}
		}
		index := i
		b.Allocations[i] = &index
		b.Attributes = append(b.Attributes, store.Attribute{HandleID: &handle, Secondary: map[string]string{"node": node}})
		b.SequenceNumberForAllocation[fmt.Sprint(i)] = uint64(i + 1)
	}
	return store.BlockKey(p), b
}

// block stores a block with its affinity and the handles that it needs.
func (w *world) block(cidr, owner string, given ...string) {
	w.t.Helper()
	key, b := blockOf(cidr, owner, given...)
	w.put(key, b)
	if owner != "" {
		w.put(store.AffinityKey(owner, key.CIDR()), &store.Affinity{State: store.AffinityConfirmed})
	}
	for _, a := range b.Attributes {
		w.put(store.HandleKey(*a.HandleID), &store.Handle{Block: map[string]int{cidr: 1}})
	}
}

// state lists what IPAM's records say: blocks with their owners and holders,
// affinities, handles, endpoints.
func (w *world) state() []string {
	w.t.Helper()
	var out []string
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle, store.KindWorkloadEndpoint} {
		err := store.Pages(w.t.Context(), w.store, kind, "", func(objs []store.Object) error {
			for _, o := range objs {
				line := o.Key.String()
				if b, ok := o.Value.(*store.Block); ok {
					owner := b.Holder()
					line += " of " + owner
					all, err := ipam.Allocations(o.Key.CIDR(), b)
					if err != nil {
						return err
					}
					for _, a := range all {
						line += fmt.Sprintf(" %s=%s", a.Addr, a.Handle)
					}
				}
				out = append(out, line)
			}
			return nil
		})
		if err != nil {
			w.t.Fatal(err)
		}
	}
	return out
}

// fakeHost is a host that knows what the test says.
type fakeHost struct {
	mu       sync.Mutex
	given    []ipam.Allocation
	used     map[string]bool
	wired    map[string]bool
	released []netip.Addr
	before   func() // called before a release looks a last time
}

func (h *fakeHost) Allocations() []ipam.Allocation { return h.given }

func (h *fakeHost) Uses(handle string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used[handle]
}

func (h *fakeHost) Wired(context.Context) (map[string]bool, error) { return maps.Clone(h.wired), nil }

func (h *fakeHost) Release(_ context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	if h.before != nil {
		h.before()
	}
	var out []netip.Addr
	for _, c := range claims {
		if !used(c) {
			out = append(out, c.Addr)
		}
	}
	h.released = append(h.released, out...)
	slices.SortFunc(h.released, netip.Addr.Compare)
	return out, nil
}
