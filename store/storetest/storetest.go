// Package storetest is the conformance suite of [store.Store]: one set of
// tests, run against every backend, so that the one in memory stays honest.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// Faults is what a backend's store may implement beside [store.Store] to be
// tested with faults.
type Faults interface {
	// Compact forgets the history of the store.
	Compact(ctx context.Context) error

	// Interrupt makes the store unreachable for watches until heal is called.
	// What else runs meanwhile may fail or not.
	Interrupt() (heal func())

	// PutRaw stores bytes that need not be decodable.
	PutRaw(ctx context.Context, path string, raw []byte) error
}

// Run runs the suite for a store that does a transaction in one step. open
// returns an empty store each time it is called and arranges for its end with
// t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) store.Store) {
	run(t, open, map[string]func(*testing.T, store.Store){
		"TransactionIsWhole":   testTransactionIsWhole,
		"ValuesOfEndpoints":    testValuesOfEndpoints,
		"WatchTransaction":     testWatchTransaction,
		"WatchOwn":             testWatchOwn,
		"WatchBeside":          testWatchBeside,
		"WatchProgress":        testWatchProgress,
		"Undecodable":          testUndecodable,
		"ConflictingTransfers": testConflictingTransfers,
	})
}

// RunSequential runs the suite for a store that writes one object at a time: all
// but what cannot hold there, and what holds instead. The store may have objects
// of its own, such as profiles. What open returns may implement [Faults].
func RunSequential(t *testing.T, open func(t *testing.T) store.Store) {
	run(t, open, map[string]func(*testing.T, store.Store){
		"TransactionInParts": testTransactionInParts,
		"WatchOrder":         testWatchOrder,
	})
}

// run runs what both promise, and some more tests.
func run(t *testing.T, open func(t *testing.T) store.Store, more map[string]func(*testing.T, store.Store)) {
	tests := map[string]func(*testing.T, store.Store){
		"Get":                 testGet,
		"Conditions":          testConditions,
		"TransactionRefusals": testTransactionRefusals,
		"Values":              testValues,
		"List":                testList,
		"BigList":             testBigList,
		"CreateUpdateDelete":  testCreateUpdateDelete,
		"Status":              testStatus,
		"ModifyRace":          testModifyRace,
		"ModifyRaceOfHosts":   testModifyRaceOfHosts,
		"Bootstrap":           testBootstrap,
		"BGPKey":              testBGPKey,
		"CanceledCall":        testCanceledCall,
		"Watch":               testWatch,
		"WatchSlowConsumer":   testWatchSlowConsumer,
		"WatchEnds":           testWatchEnds,
		"WatchFollowsStore":   testWatchFollowsStore,
		"CompactionAndResync": testCompactionAndResync,
		"OutageAndResync":     testOutageAndResync,
		"CloseEndsEverything": testClose,
	}
	maps.Copy(tests, more)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func pool(name, cidr string) *v3.IPPool {
	p := store.New(store.KindIPPool).(*v3.IPPool)
	p.Name, p.Spec.CIDR = name, cidr
	return p
}

func poolKey(name string) store.Key { return store.ResourceKey(store.KindIPPool, name) }

func put(cond store.Cond, v *v3.IPPool) store.Op {
	return store.Op{If: cond, Action: store.Put, Object: store.Object{Key: poolKey(v.Name), Value: v}}
}

// alone is an op that stands for itself among others.
func alone(op store.Op) store.Op {
	op.Role = store.Prepares
	return op
}

func must(t *testing.T, s store.Store, ops ...store.Op) []store.Object {
	t.Helper()
	objs, err := s.Txn(t.Context(), ops...)
	if err != nil {
		t.Fatal(err)
	}
	return objs
}

func testGet(t *testing.T, s store.Store) {
	if _, err := s.Get(t.Context(), poolKey("p")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get of nothing: %v", err)
	}
	wrote := must(t, s, put(store.IfAbsent(), pool("p", "10.0.0.0/16")))[0]
	got, err := s.Get(t.Context(), poolKey("p"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(wrote, got); diff != "" {
		t.Errorf("what was written differs from what is read (-wrote +read):\n%s", diff)
	}
	if cidr := got.Value.(*v3.IPPool).Spec.CIDR; cidr != "10.0.0.0/16" || got.Revision < 2 || len(got.Raw) == 0 {
		t.Errorf("got %q at %d: %s", cidr, got.Revision, got.Raw)
	}
	if _, err := s.Get(t.Context(), store.Key{Kind: "Nonsense", Name: "x"}); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("get of an unknown kind: %v", err)
	}
}

func testConditions(t *testing.T, s store.Store) {
	first := must(t, s, put(store.IfAbsent(), pool("a", "10.0.0.0/16")))[0]
	second := must(t, s, put(store.IfRevision(first.Revision), pool("a", "10.1.0.0/16")))[0]
	if second.Revision <= first.Revision {
		t.Errorf("revision went from %d to %d", first.Revision, second.Revision)
	}
	tests := []struct {
		name string
		op   store.Op
		want error
		kind error // matched too
	}{
		{"absent, but it exists", put(store.IfAbsent(), pool("a", "10.2.0.0/16")), store.ErrExists, store.ErrConflict},
		{"old revision", put(store.IfRevision(first.Revision), pool("a", "10.2.0.0/16")), store.ErrConflict, store.ErrConflict},
		{"revision of nothing", put(store.IfRevision(first.Revision), pool("b", "10.2.0.0/16")), store.ErrNotFound, store.ErrConflict},
		{"delete at old revision", store.Op{If: store.IfRevision(first.Revision), Action: store.Remove, Object: store.Object{Key: poolKey("a")}}, store.ErrConflict, store.ErrConflict},
		{"check", store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: poolKey("a")}}, store.ErrExists, store.ErrConflict},
	}
	for _, tt := range tests {
		_, err := s.Txn(t.Context(), tt.op)
		var conflict *store.ConflictError
		if !errors.Is(err, tt.want) || !errors.Is(err, tt.kind) || !errors.As(err, &conflict) {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		want := second
		if tt.op.Object.Key == poolKey("b") {
			want = store.Object{Key: poolKey("b")}
		}
		if diff := cmp.Diff([]store.Object{want}, conflict.Current); diff != "" {
			t.Errorf("%s: current state (-want +got):\n%s", tt.name, diff)
		}
	}
	must(t, s, put(store.Always(), pool("a", "10.3.0.0/16")))
	must(t, s, store.Op{Action: store.Remove, Object: store.Object{Key: poolKey("a")}})
	must(t, s, store.Op{Action: store.Remove, Object: store.Object{Key: poolKey("a")}})
	must(t, s, put(store.IfAbsent(), pool("a", "10.4.0.0/16")))
}

func testTransactionIsWhole(t *testing.T, s store.Store) {
	a := must(t, s, put(store.IfAbsent(), pool("a", "10.0.0.0/16")))[0]
	_, err := s.Txn(t.Context(),
		put(store.IfAbsent(), pool("new", "10.9.0.0/16")),
		put(store.IfRevision(a.Revision+1000), pool("a", "10.1.0.0/16")),
		store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: poolKey("c")}},
	)
	var conflict *store.ConflictError
	if !errors.As(err, &conflict) || conflict.Key != poolKey("a") || conflict.Reason != store.ErrConflict {
		t.Fatalf("got %v", err)
	}
	want := []store.Object{{Key: poolKey("new")}, a, {Key: poolKey("c")}}
	if diff := cmp.Diff(want, conflict.Current); diff != "" {
		t.Errorf("current state (-want +got):\n%s", diff)
	}
	if _, err := s.Get(t.Context(), poolKey("new")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("half of a transaction was done: %v", err)
	}

	objs := must(t, s,
		put(store.IfAbsent(), pool("new", "10.9.0.0/16")),
		store.Op{If: store.IfRevision(a.Revision), Action: store.Remove, Object: store.Object{Key: poolKey("a")}},
		store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: poolKey("c")}},
	)
	if objs[0].Revision == 0 || objs[0].Value == nil || objs[1].Value != nil || objs[1].Key != poolKey("a") || objs[2].Key != poolKey("c") {
		t.Errorf("got %+v", objs)
	}
	list, rev, err := s.List(t.Context(), store.KindIPPool, "")
	if err != nil || len(list) != 1 || list[0].Revision != rev || rev != objs[0].Revision {
		t.Errorf("got %+v at %d, %v", list, rev, err)
	}

	// A transaction that only checks changes nothing, not even the revision.
	must(t, s, store.Op{If: store.IfRevision(rev), Action: store.Check, Object: store.Object{Key: poolKey("new")}})
	if _, after, err := s.List(t.Context(), store.KindIPPool, ""); err != nil || after != rev {
		t.Errorf("revision went from %d to %d by a check, %v", rev, after, err)
	}
}

func testTransactionRefusals(t *testing.T, s store.Store) {
	many := make([]store.Op, store.MaxOps+1)
	for i := range many {
		many[i] = alone(put(store.Always(), pool(fmt.Sprint("p", i), "10.0.0.0/16")))
	}
	for name, ops := range map[string][]store.Op{
		"nothing to do":           nil,
		"too many":                many,
		"one key twice":           {put(store.Always(), pool("a", "10.0.0.0/16")), put(store.Always(), pool("a", "10.1.0.0/16"))},
		"no key":                  {{Action: store.Remove}},
		"another kind's value":    {{Action: store.Put, Object: store.Object{Key: poolKey("a"), Value: &store.Affinity{}}}},
		"no value":                {{Action: store.Put, Object: store.Object{Key: poolKey("a")}}},
		"revision that never was": {put(store.IfRevision(0), pool("a", "10.0.0.0/16"))},
	} {
		if _, err := s.Txn(t.Context(), ops...); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, s, many[:store.MaxOps]...)
	if list, _, err := s.List(t.Context(), store.KindIPPool, ""); err != nil || len(list) != store.MaxOps {
		t.Errorf("got %d objects, %v", len(list), err)
	}
}

func testValues(t *testing.T, s store.Store) {
	cidr := netip.MustParsePrefix("192.168.0.0/30")
	host := "host:n"
	testWritten(t, s, []store.Object{
		{Key: store.BlockKey(cidr), Value: &store.Block{CIDR: cidr.String(), Affinity: &host, Allocations: make([]*int, 4), Unallocated: []int{0, 1, 2, 3}, Attributes: []store.Attribute{}, SequenceNumberForAllocation: map[string]uint64{}}},
		{Key: store.AffinityKey("n", cidr), Value: &store.Affinity{State: store.AffinityPending}},
		{Key: store.HandleKey("h"), Value: &store.Handle{Block: map[string]int{cidr.String(): 1}}},
		{Key: store.IPAMConfigKey(), Value: &store.IPAMConfig{AutoAllocateBlocks: true}},
	})
}

func testValuesOfEndpoints(t *testing.T, s store.Store) {
	wep := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	wep.Name, wep.Namespace = "n-cni-c-eth0", "ns"
	wep.Spec.InterfaceName = "cali1"
	testWritten(t, s, []store.Object{{Key: store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "ns", Name: wep.Name}, Value: wep}})
}

// testWritten writes objects and reads them.
func testWritten(t *testing.T, s store.Store, objects []store.Object) {
	var ops []store.Op
	for _, o := range objects {
		ops = append(ops, store.Op{If: store.IfAbsent(), Action: store.Put, Role: store.Prepares, Object: o})
	}
	for i, wrote := range must(t, s, ops...) {
		want := objects[i]
		got, err := s.Get(t.Context(), want.Key)
		if err != nil {
			t.Error(err)
			continue
		}
		if diff := cmp.Diff(want.Value, got.Value); diff != "" {
			t.Errorf("%s (-written +read):\n%s", want.Key, diff)
		}
		if diff := cmp.Diff(wrote, got); diff != "" {
			t.Errorf("%s (-answer +read):\n%s", want.Key, diff)
		}
		if wrote.Value == want.Value {
			t.Errorf("%s: the answer is the caller's own value, who may change it", want.Key)
		}
	}
}

func testList(t *testing.T, s store.Store) {
	for _, n := range []string{"b", "a", "ab"} {
		must(t, s, put(store.IfAbsent(), pool(n, "10.0.0.0/16")))
	}
	for _, node := range []string{"n1", "n11", "n2"} {
		for _, cidr := range []string{"10.0.0.0/26", "10.0.0.64/26"} {
			key := store.AffinityKey(node, netip.MustParsePrefix(cidr))
			must(t, s, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: &store.Affinity{State: store.AffinityConfirmed}}})
		}
	}
	must(t, s, store.Op{Action: store.Put, Object: store.Object{Key: store.IPAMConfigKey(), Value: &store.IPAMConfig{}}})
	tests := []struct {
		kind      store.Kind
		namespace string
		want      []string
	}{
		{store.KindIPPool, "", []string{"IPPool(a)", "IPPool(ab)", "IPPool(b)"}},
		{store.KindIPAMAffinity, "n1", []string{"IPAMAffinity(n1/10.0.0.0/26)", "IPAMAffinity(n1/10.0.0.64/26)"}},
		{store.KindIPAMConfig, "", []string{"IPAMConfig(default)"}},
		{store.KindNode, "", nil},
	}
	for _, tt := range tests {
		objs, rev, err := s.List(t.Context(), tt.kind, tt.namespace)
		var got []string
		for _, o := range objs {
			got = append(got, o.Key.String())
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil || rev == 0 {
			t.Errorf("%s %q: %v, revision %d (-want +got):\n%s", tt.kind, tt.namespace, err, rev, diff)
		}
	}
	if objs, _, err := s.List(t.Context(), store.KindIPAMAffinity, ""); err != nil || len(objs) != 6 {
		t.Errorf("got %d affinities, %v", len(objs), err)
	}
	if _, _, err := s.List(t.Context(), "Nonsense", ""); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("list of an unknown kind: %v", err)
	}
}

// testBigList makes more objects than one page of a list holds.
func testBigList(t *testing.T, s store.Store) {
	const n = 2500
	for i := 0; i < n; i += store.MaxOps {
		var ops []store.Op
		for j := i; j < min(n, i+store.MaxOps); j++ {
			ops = append(ops, alone(put(store.IfAbsent(), pool(fmt.Sprintf("p%05d", j), "10.0.0.0/16"))))
		}
		must(t, s, ops...)
	}
	objs, rev, err := s.List(t.Context(), store.KindIPPool, "")
	if err != nil || len(objs) != n || !slices.IsSortedFunc(objs, func(a, b store.Object) int { return cmpStrings(a.Key.Name, b.Key.Name) }) {
		t.Fatalf("got %d of %d objects, %v", len(objs), n, err)
	}
	w := watch(t, s, store.KindIPPool)
	first := w.next(t)
	if !first.Synced || len(first.Events) != n || first.Revision < objs[n-1].Revision {
		t.Errorf("first batch: synced %v, %d events at %d, want %d, list at %d", first.Synced, len(first.Events), first.Revision, n, rev)
	}
}

func cmpStrings(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func testCreateUpdateDelete(t *testing.T, s store.Store) {
	p := pool("p", "10.0.0.0/16")
	created, err := store.Create(t.Context(), s, p)
	if err != nil {
		t.Fatal(err)
	}
	meta := store.Meta(created.Value)
	if len(meta.UID) != 36 || meta.CreationTimestamp.IsZero() || time.Since(meta.CreationTimestamp.Time).Abs() > time.Hour {
		t.Errorf("metadata of a new object: %+v", meta)
	}
	if p.UID != "" || !p.CreationTimestamp.IsZero() {
		t.Errorf("Create changed its argument: %+v", p.ObjectMeta)
	}
	if _, err := store.Create(t.Context(), s, p); !errors.Is(err, store.ErrExists) {
		t.Errorf("create of what exists: %v", err)
	}
	copied := pool("q", "10.0.0.0/16")
	copied.ResourceVersion = "5"
	if _, err := store.Create(t.Context(), s, copied); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("create with a resourceVersion: %v", err)
	}

	updated, err := store.Modify(t.Context(), s, poolKey("p"), func(store.Object) (any, error) {
		return pool("p", "10.5.0.0/16"), nil // as a manifest: without uid and time
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := store.Meta(updated.Value); got.UID != meta.UID || !got.CreationTimestamp.Equal(&meta.CreationTimestamp) {
		t.Errorf("an update changed the identity: %+v", got)
	}

	if err := store.Delete(t.Context(), s, poolKey("p"), created.Revision); !errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrNotFound) {
		t.Errorf("delete at an old revision: %v", err)
	}
	if err := store.Delete(t.Context(), s, poolKey("p"), updated.Revision); err != nil {
		t.Error(err)
	}
	for _, rev := range []store.Revision{0, updated.Revision} {
		if err := store.Delete(t.Context(), s, poolKey("p"), rev); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("delete of nothing at %d: %v", rev, err)
		}
	}
	must(t, s, put(store.IfAbsent(), pool("p", "10.0.0.0/16")))
	if err := store.Delete(t.Context(), s, poolKey("p"), 0); err != nil {
		t.Error(err)
	}
}

func testBootstrap(t *testing.T, s store.Store) {
	mine := store.New(store.KindBGPConfiguration).(*v3.BGPConfiguration)
	mine.Name, mine.Spec.ListenPort = "default", 1179
	kept, err := store.Create(t.Context(), s, mine)
	if err != nil {
		t.Fatal(err)
	}
	state := func() map[store.Key]store.Object {
		objs := make(map[store.Key]store.Object)
		for _, kind := range store.Kinds() {
			list, _, err := s.List(t.Context(), kind, "")
			if errors.Is(err, store.ErrInvalid) {
				continue // a kind that this datastore does not hold; what is made has to be there
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range list {
				objs[o.Key] = o
			}
		}
		return objs
	}
	before := state()
	errs := make(chan error)
	const hosts = 8
	for range hosts {
		go func() { errs <- store.Bootstrap(t.Context(), s) }()
	}
	for range hosts {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	got := state()
	if diff := cmp.Diff(kept, got[kept.Key]); diff != "" {
		t.Errorf("bootstrap touched what was there (-before +after):\n%s", diff)
	}
	if len(got) != len(before)+5 {
		t.Errorf("there are %d objects after %d: %v", len(got), len(before), got)
	}
	info, ok := got[store.ResourceKey(store.KindClusterInformation, "default")].Value.(*v3.ClusterInformation)
	if !ok || len(info.Spec.ClusterGUID) != 32 || info.Spec.DatastoreReady == nil || !*info.Spec.DatastoreReady || info.Spec.CalicoVersion != "" {
		t.Errorf("cluster information: %+v", info)
	}
	for name, want := range map[string]v3.TierSpec{
		"default":       {Order: new(1e6), DefaultAction: new(v3.Deny)},
		"kube-admin":    {Order: new(1e3), DefaultAction: new(v3.Pass)},
		"kube-baseline": {Order: new(1e7), DefaultAction: new(v3.Pass)},
	} {
		tier, ok := got[store.ResourceKey(store.KindTier, name)].Value.(*v3.Tier)
		if !ok {
			t.Errorf("tier %s is missing", name)
		} else if diff := cmp.Diff(want, tier.Spec); diff != "" {
			t.Errorf("tier %s (-want +got):\n%s", name, diff)
		}
	}
	felix := got[store.ResourceKey(store.KindFelixConfiguration, "default")]
	if spec := felix.Value.(*v3.FelixConfiguration).Spec; spec.ReportingInterval == nil || *spec.ReportingInterval != (metav1.Duration{}) || spec.LogSeverityScreen != "Info" {
		t.Errorf("Felix configuration: %s", felix.Raw)
	}
	if err := store.Bootstrap(t.Context(), s); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(got, state()); diff != "" {
		t.Errorf("a second bootstrap changed something (-before +after):\n%s", diff)
	}
}

func testCanceledCall(t *testing.T, s store.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Get(ctx, poolKey("p")); !errors.Is(err, context.Canceled) || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Get: %v", err)
	}
	if _, _, err := s.List(ctx, store.KindIPPool, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("List: %v", err)
	}
	if _, err := s.Txn(ctx, put(store.Always(), pool("p", "10.0.0.0/16"))); !errors.Is(err, context.Canceled) {
		t.Errorf("Txn: %v", err)
	}
}

func testUndecodable(t *testing.T, s store.Store) {
	f, ok := s.(Faults)
	if !ok {
		t.Fatalf("%T cannot make faults", s)
	}
	must(t, s, put(store.Always(), pool("good", "10.0.0.0/16")))
	if err := f.PutRaw(t.Context(), poolKey("bad").Path(), []byte("gibberish")); err != nil {
		t.Fatal(err)
	}
	if err := f.PutRaw(t.Context(), "/calico/resources/v3/projectcalico.org/ippools/too/deep", []byte("gibberish")); err != nil {
		t.Fatal(err)
	}
	obj, err := s.Get(t.Context(), poolKey("bad"))
	if !errors.Is(err, store.ErrDecode) || obj.Value != nil || string(obj.Raw) != "gibberish" || obj.Revision == 0 {
		t.Errorf("Get: %+v, %v", obj, err)
	}
	objs, rev, err := s.List(t.Context(), store.KindIPPool, "")
	if !errors.Is(err, store.ErrDecode) || len(objs) != 1 || rev == 0 {
		t.Errorf("List: %+v at %d, %v", objs, rev, err)
	}
	w := watch(t, s, store.KindIPPool)
	b := w.next(t)
	if len(b.Events) != 2 || !b.Synced {
		t.Fatalf("Watch: %+v", b)
	}
	if e := b.Events[0]; e.Key != poolKey("bad") || !errors.Is(e.Err, store.ErrDecode) || e.Deleted() || string(e.Object.Raw) != "gibberish" {
		t.Errorf("Watch: %+v", e)
	}
	var conflict *store.ConflictError
	if _, err := s.Txn(t.Context(), put(store.IfAbsent(), pool("bad", "10.0.0.0/16"))); !errors.As(err, &conflict) || string(conflict.Current[0].Raw) != "gibberish" {
		t.Errorf("Txn: %v", err)
	}
	if err := store.Delete(t.Context(), s, poolKey("bad"), 0); err != nil {
		t.Errorf("Delete: %v", err)
	}
	if e := w.next(t).Events; len(e) != 1 || !e[0].Deleted() {
		t.Errorf("Watch after Delete: %+v", e)
	}
}
