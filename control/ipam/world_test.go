package ipam

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// fataler is what helpers need of *testing.T, *testing.B and *rapid.T.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

// clock is a clock that tests turn.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2026, 11, 21, 17, 31, 36, 903635737, time.UTC)} }

func (c *clock) time() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) turn(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func newPool(name, cidr string, change ...func(*v3.IPPoolSpec)) *v3.IPPool {
	p := v3.NewIPPool()
	p.Name = name
	p.Spec.CIDR = cidr
	for _, c := range change {
		c(&p.Spec)
	}
	return p
}

func blockSize(n int) func(*v3.IPPoolSpec) { return func(s *v3.IPPoolSpec) { s.BlockSize = n } }

func newNode(name string, labels map[string]string) *store.Node {
	return &store.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: store.APIVersion}, ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
}

func newReservation(name string, cidrs ...string) *v3.IPReservation {
	r := v3.NewIPReservation()
	r.Name = name
	r.Spec.ReservedCIDRs = cidrs
	return r
}

// put writes v3 resources and IPAM's settings, whatever is there.
func put(t fataler, st store.Store, values ...any) {
	t.Helper()
	for _, v := range values {
		key := store.IPAMConfigKey()
		if _, ok := v.(*store.IPAMConfig); !ok {
			var err error
			if key, err = store.KeyOf(v); err != nil {
				t.Fatalf("%v", err)
			}
		}
		putAt(t, st, key, v)
	}
}

func putAt(t fataler, st store.Store, key store.Key, value any) {
	t.Helper()
	if _, err := st.Txn(context.Background(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: value}}); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

func remove(t fataler, st store.Store, key store.Key) {
	t.Helper()
	if _, err := st.Txn(context.Background(), store.Op{Action: store.Remove, Object: store.Object{Key: key}}); err != nil {
		t.Fatalf("remove %s: %v", key, err)
	}
}

// host is an allocator that runs.
type host struct {
	*Allocator
	stop func()
}

// start runs an allocator for a node. It must be stopped.
func start(t fataler, st store.Store, node string, now func() time.Time) *host {
	t.Helper()
	return run(t, New(Config{Store: st, Node: node, Log: slog.New(slog.DiscardHandler), Clock: now, Timeout: 20 * time.Second}), st)
}

// run runs an allocator. It must be stopped.
func run(t fataler, a *Allocator, st store.Store) *host {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	file := ""
	if d, ok := a.cfg.Reserve.Journal.(*disk); ok {
		file = d.file
	}
	steps, followed := clustertest.FollowOn(ctx, file, a.cfg.Node, st, Kinds()...)
	go func() {
		defer close(done)
		if err := a.Run(ctx, steps); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	if file != "" {
		if err := steps.CatchUp(ctx); err != nil {
			t.Fatalf("begin with what is on disk: %v", err)
		}
	}
	return &host{a, sync.OnceFunc(func() {
		cancel()
		<-done
		<-followed
	})}
}

// world is a store with hosts.
type world struct {
	t     *testing.T
	st    *memory.Store
	clock *clock
}

func newWorld(t *testing.T, values ...any) *world {
	t.Helper()
	w := &world{t: t, st: memory.New(), clock: newClock()}
	t.Cleanup(func() { _ = w.st.Close() })
	put(t, w.st, values...)
	return w
}

// host registers a node and starts its allocator.
func (w *world) host(name string, labels map[string]string) *host {
	w.t.Helper()
	put(w.t, w.st, newNode(name, labels))
	h := start(w.t, w.st, name, w.clock.time)
	w.t.Cleanup(h.stop)
	return h
}

// settle waits until a host's view of the store satisfies a condition.
func settle(t fataler, h *host, what string, ok func(*state) bool) {
	t.Helper()
	await.True(t, h.cfg.Node+" sees "+what, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return ok(h.state)
	})
}

// catchUp waits until a host knows what is stored, which it may be changing itself.
func catchUp(t fataler, h *host, st store.Store) {
	t.Helper()
	await.True(t, h.cfg.Node+" sees the present blocks", func() bool {
		objs, _, err := st.List(context.Background(), store.KindIPAMBlock, "")
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		affs, _, err := st.List(context.Background(), store.KindIPAMAffinity, h.cfg.Node)
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		s := h.state
		if len(s.blocks) != len(objs) || len(s.affinities) != len(affs) {
			return false
		}
		for _, o := range objs {
			if b := s.blocks[o.Key.CIDR()]; b == nil || b.Revision != o.Revision {
				return false
			}
		}
		for _, o := range affs {
			if s.affinities[o.Key.CIDR()].rev != o.Revision {
				return false
			}
		}
		return true
	})
}

func v4(handle string) Request { return Request{Family: dataplane.IPv4, Handle: handle} }

func addrs(as []Assignment) []string {
	var out []string
	for _, a := range as {
		out = append(out, a.Addr.String())
	}
	return out
}

// mustAssign assigns and returns the addresses.
func mustAssign(t *testing.T, h *host, r Request) []string {
	t.Helper()
	got, err := h.Assign(await.Context(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return addrs(got)
}

func mustDiff(t fataler, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// raw returns what is stored below IPAM's root, path by path.
func raw(t fataler, st store.Store) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle} {
		objs, _, err := st.List(context.Background(), kind, "")
		if err != nil {
			t.Fatalf("list %s: %v", kind, err)
		}
		for _, o := range objs {
			out[strings.TrimPrefix(o.Key.Path(), "/calico/ipam/v2/")] = string(o.Raw)
		}
	}
	return out
}

// atOneRevision reads all of IPAM's records as they were together: a host may be filling
// its reserve meanwhile.
func atOneRevision(t fataler, st store.Store) map[store.Kind][]store.Object {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	for ctx.Err() == nil {
		out, revs := map[store.Kind][]store.Object{}, map[store.Revision]bool{}
		for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle} {
			objs, rev, err := st.List(ctx, kind, "")
			if err != nil {
				t.Fatalf("list %s: %v", kind, err)
			}
			out[kind], revs[rev] = objs, true
		}
		if len(revs) == 1 {
			return out
		}
	}
	t.Fatalf("the datastore does not come to rest: %v", ctx.Err())
	return nil
}

// audit reads all of IPAM's records and checks them against each other:
// blocks are sound, affinities and blocks agree, handles and blocks agree. It
// returns the handle of each assigned address.
func audit(t fataler, st store.Store) map[netip.Addr]string {
	t.Helper()
	records := atOneRevision(t, st)
	out := map[netip.Addr]string{}
	counts := map[string]map[string]int{}
	owners := map[string]string{}
	for _, o := range records[store.KindIPAMBlock] {
		b, cidr := o.Value.(*store.Block), o.Key.CIDR()
		if err := checkBlock(b, cidr); err != nil {
			t.Errorf("block %s: %v\n%s", cidr, err, o.Raw)
		}
		node := b.Holder()
		owners[cidr.String()] = node
		if node == "" && b.Allocated() == 0 {
			t.Errorf("block %s has neither holder nor allocation", cidr)
		}
		for i := range b.Allocations {
			a := b.Attribute(i)
			if a == nil || a.ReleasedAt != nil {
				continue
			}
			addr := addrAt(cidr, i)
			if _, twice := out[addr]; twice {
				t.Errorf("%s is assigned twice", addr)
			}
			out[addr] = *a.HandleID
			if counts[*a.HandleID] == nil {
				counts[*a.HandleID] = map[string]int{}
			}
			counts[*a.HandleID][cidr.String()]++
		}
	}
	for _, o := range records[store.KindIPAMAffinity] {
		if owners[o.Key.Name] != o.Key.Namespace {
			t.Errorf("affinity of %s to %s, which %q holds", o.Key.Namespace, o.Key.Name, owners[o.Key.Name])
		}
		if a := o.Value.(*store.Affinity); !a.Confirmed() {
			t.Errorf("affinity of %s to %s is %s", o.Key.Namespace, o.Key.Name, a.State)
		}
		delete(owners, o.Key.Name)
	}
	for cidr, node := range owners {
		if node != "" {
			t.Errorf("block %s says that %s holds it; there is no affinity", cidr, node)
		}
	}
	stored := map[string]map[string]int{}
	for _, o := range records[store.KindIPAMHandle] {
		stored[o.Key.Name] = o.Value.(*store.Handle).Block
	}
	mustDiff(t, "handles and what blocks say of them", counts, stored)
	return out
}

// checkBlock holds a stored block to its invariants.
func checkBlock(b *store.Block, cidr netip.Prefix) error {
	if len(b.Allocations) != blockLen(cidr) {
		return fmt.Errorf("%d allocations", len(b.Allocations))
	}
	used := map[int]bool{}
	for o, a := range b.Allocations {
		_, numbered := b.SequenceNumberForAllocation[fmt.Sprint(o)]
		if (a != nil) == slices.Contains(b.Unallocated, o) || (a != nil) != numbered {
			return fmt.Errorf("ordinal %d: allocation %v, queue %v, numbered %v", o, a != nil, b.Unallocated, numbered)
		}
		if a != nil {
			used[*a] = true
			if seq := b.SequenceNumberForAllocation[fmt.Sprint(o)]; seq >= b.SequenceNumber {
				return fmt.Errorf("ordinal %d was given at %d, the block is at %d", o, seq, b.SequenceNumber)
			}
		}
	}
	if len(b.Unallocated)+b.Allocated() != len(b.Allocations) {
		return fmt.Errorf("queue %v has repeats", b.Unallocated)
	}
	if len(used) != len(b.Attributes) {
		return fmt.Errorf("%d attributes, %d in use", len(b.Attributes), len(used))
	}
	for i := range b.Attributes {
		for j := range i {
			if equalAttributes(b.Attributes[i], b.Attributes[j]) {
				return fmt.Errorf("attributes %d and %d are equal", j, i)
			}
		}
	}
	return nil
}
