package kubesync

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"go.uber.org/goleak"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func profile(name string, labels map[string]string) *v3.Profile {
	p := store.New(store.KindProfile).(*v3.Profile)
	p.Name, p.Spec.LabelsToApply = name, labels
	return p
}

func netpol(name, selector string) *v3.NetworkPolicy {
	p := store.New(store.KindNetworkPolicy).(*v3.NetworkPolicy)
	p.Namespace, p.Name, p.Labels = "default", name, map[string]string{store.LabelTier: store.DefaultName}
	order := 1000.0
	p.Spec = v3.NetworkPolicySpec{Tier: store.DefaultName, Order: &order, Selector: selector, Types: []v3.PolicyType{v3.PolicyTypeIngress}}
	return p
}

func endpoint(pod string, labels map[string]string, profiles ...string) *store.WorkloadEndpoint {
	w := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	w.Namespace, w.Labels = "default", labels
	w.Spec = store.WorkloadEndpointSpec{
		Orchestrator: "k8s", Node: "node1", Pod: pod, Endpoint: "eth0", InterfaceName: "cali12345678901", Profiles: profiles,
		ContainerID: "c1", IPNetworks: []string{"192.168.0.1/32"},
	}
	w.Name, _ = store.WorkloadEndpointName(&w.Spec) // its parts are right
	return w
}

func node(name string, labels map[string]string, kube string, refs ...string) *store.Node {
	n := store.New(store.KindNode).(*store.Node)
	n.Name, n.Labels = name, labels
	if kube != "" {
		n.Annotations = map[string]string{store.AnnotationKubeLabels: kube}
	}
	for _, r := range refs {
		n.Spec.OrchRefs = append(n.Spec.OrchRefs, store.OrchRef{NodeName: r, Orchestrator: "k8s"})
	}
	return n
}

func keyOf(t *testing.T, v any) store.Key {
	t.Helper()
	key, err := store.KeyOf(v)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// TestDecide: what is Kubernetes' alone follows it, of endpoints and Nodes their part, and
// nothing else is touched.
func TestDecide(t *testing.T) {
	t.Parallel()
	type labels = map[string]string
	for name, tt := range map[string]struct {
		want, cur, next any
		remove          bool
	}{
		"a new namespace":                     {want: profile("kns.a", labels{"pcns.x": "y"}), next: profile("kns.a", labels{"pcns.x": "y"})},
		"a namespace is gone":                 {cur: profile("kns.a", nil), remove: true},
		"a network's profile":                 {cur: profile("routerd", nil)},
		"a service account is gone":           {cur: profile("ksa.a.b", nil), remove: true},
		"a policy that somebody changed":      {want: netpol("knp.default.a", "all()"), cur: netpol("knp.default.a", "app == 'x'"), next: netpol("knp.default.a", "all()")},
		"a policy is gone":                    {cur: netpol("knp.default.a", "all()"), remove: true},
		"a policy of Calico's":                {cur: netpol("a", "all()")},
		"an endpoint that is there":           {want: endpoint("web", labels{"app": "b"}, "kns.default"), cur: endpoint("web", labels{"app": "a"}, "routerd"), next: endpoint("web", labels{"app": "b"}, "kns.default")},
		"an endpoint that is not there":       {want: endpoint("web", labels{"app": "b"}, "kns.default")},
		"an endpoint whose pod is gone":       {cur: endpoint("web", labels{"app": "a"}, "kns.default")},
		"a Node's labels":                     {want: node("node1", nil, `{"b":"2"}`), cur: node("node1", labels{"a": "1", "own": "x"}, `{"a":"1"}`, "node1"), next: node("node1", labels{"b": "2", "own": "x"}, `{"b":"2"}`, "node1")},
		"a Node that does not say its Node":   {want: node("node1", nil, `{"b":"2"}`), cur: node("node1", nil, ""), next: node("node1", labels{"b": "2"}, `{"b":"2"}`, "node1")},
		"a Node that Kubernetes has not":      {cur: node("node1", nil, "", "node1"), remove: true},
		"a host without Kubernetes":           {cur: node("gateway", nil, "")},
		"a Node of Kubernetes without a host": {want: node("node1", nil, `{"b":"2"}`)},
		"an annotation that makes no sense":   {want: node("node1", nil, `{"b":"2"}`), cur: node("node1", labels{"own": "x"}, `{"a":`, "node1"), next: node("node1", labels{"b": "2", "own": "x"}, `{"b":"2"}`, "node1")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cur := store.Object{Value: tt.cur}
			if tt.cur != nil {
				cur.Key, cur.Revision = keyOf(t, tt.cur), 7
			} else {
				cur.Key = keyOf(t, tt.want)
			}
			got := decide(cur.Key, tt.want, cur)
			if diff := cmp.Diff(decision{tt.next, tt.remove}, got, cmp.AllowUnexported(decision{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// api is Kubernetes' side. Of what it withholds nothing is known.
type api struct {
	*memory.Store
	withheld map[store.Kind]store.Withheld
}

func (a api) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	in, out := a.Store.Watch(ctx, kinds...), make(chan store.Batch)
	go func() {
		defer close(out)
		for b := range in {
			if a.withheld != nil {
				b.Withheld = a.withheld
				b.Events = slices.DeleteFunc(b.Events, func(e store.Event) bool { _, ok := a.withheld[e.Key.Kind]; return ok })
			}
			select {
			case out <- b:
			case <-ctx.Done():
			}
		}
	}()
	return out
}

// sides are both of them, and a Controller that runs between.
type sides struct {
	t    *testing.T
	api  api
	etcd *memory.Store
}

func newSides(t *testing.T) *sides {
	t.Helper()
	s := &sides{t: t, api: api{Store: memory.New()}, etcd: memory.New()}
	t.Cleanup(func() {
		for _, m := range []*memory.Store{s.api.Store, s.etcd} {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// run runs a Controller until stop is called.
func (s *sides) run() (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var running sync.WaitGroup
	running.Go(func() { New(s.api, s.etcd, slog.New(slog.DiscardHandler)).Run(ctx) })
	stop = func() { cancel(); running.Wait() }
	s.t.Cleanup(stop)
	return stop
}

func create(t *testing.T, to store.Store, values ...any) {
	t.Helper()
	for _, v := range values {
		if _, err := store.Create(t.Context(), to, v); err != nil {
			t.Fatal(err)
		}
	}
}

func remove(t *testing.T, from store.Store, v any) {
	t.Helper()
	o, err := from.Get(t.Context(), keyOf(t, v))
	if err == nil {
		err = store.Delete(t.Context(), from, o.Key, o.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// has waits until etcd has an object of which check says nothing.
func (s *sides) has(what string, v any, check func(any) error) {
	s.t.Helper()
	key := keyOf(s.t, v)
	await.Until(s.t, what, func() error {
		o, err := s.etcd.Get(s.t.Context(), key)
		if err != nil {
			return err
		}
		return check(o.Value)
	})
}

// hasNot waits until etcd has no such object.
func (s *sides) hasNot(what string, v any) {
	s.t.Helper()
	key := keyOf(s.t, v)
	await.Until(s.t, what, func() error {
		if _, err := s.etcd.Get(s.t.Context(), key); !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("get %s: %w", key, cmpErr(err))
		}
		return nil
	})
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("it is there")
	}
	return err
}

func anything(any) error { return nil }

func selects(selector string) func(any) error {
	return func(v any) error {
		if p, ok := v.(*v3.NetworkPolicy); !ok || p.Spec.Selector != selector {
			return fmt.Errorf("it is %+v", v)
		}
		return nil
	}
}

// TestRun: what an earlier controller left is taken over, each change of either side is made
// good, and what is of others stays.
func TestRun(t *testing.T) {
	t.Parallel()
	s := newSides(t)
	ns, np, gone := profile("kns.default", map[string]string{"pcns.projectcalico.org/name": "default"}), netpol("knp.default.web", "all()"), netpol("knp.default.old", "all()")
	others := netpol("mine", "all()")
	create(t, s.api, ns, np, endpoint("web", map[string]string{"app": "web"}, "kns.default", "ksa.default.default"), node("node1", nil, `{"rack":"r1"}`))
	create(t, s.etcd, gone, others, endpoint("web", map[string]string{"app": "old"}, "routerd"), node("node1", map[string]string{"own": "x"}, ""), node("node2", nil, "", "node2"), node("gateway", nil, ""))
	for i := range 2 * maxBatch {
		create(t, s.api, profile(fmt.Sprintf("kns.ns%d", i), nil))
	}
	create(t, s.etcd, profile("kns.ns7", map[string]string{"stale": "yes"})) // one of a batch is there
	stop := s.run()
	s.has("the namespace", ns, anything)
	s.has("the last of many namespaces", profile(fmt.Sprintf("kns.ns%d", 2*maxBatch-1), nil), anything)
	s.has("a profile of before", profile("kns.ns7", nil), func(v any) error {
		if p := v.(*v3.Profile); len(p.Spec.LabelsToApply) > 0 {
			return fmt.Errorf("labels %v", p.Spec.LabelsToApply)
		}
		return nil
	})
	s.has("the policy", np, selects("all()"))
	s.hasNot("a policy that Kubernetes has no more", gone)
	s.has("the endpoint's labels and profiles", endpoint("web", nil), func(v any) error {
		w := v.(*store.WorkloadEndpoint)
		if w.Labels["app"] != "web" || !slices.Equal(w.Spec.Profiles, []string{"kns.default", "ksa.default.default"}) || w.Spec.ContainerID != "c1" {
			return fmt.Errorf("it is %+v", w)
		}
		return nil
	})
	s.has("the Node's labels", node("node1", nil, ""), func(v any) error {
		n := v.(*store.Node)
		if diff := cmp.Diff(map[string]string{"own": "x", "rack": "r1"}, n.Labels); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	s.hasNot("a Node that Kubernetes has no more", node("node2", nil, ""))

	remove(t, s.etcd, np)
	s.has("a policy that somebody deleted", np, anything)
	if _, err := store.Modify(t.Context(), s.etcd, keyOf(t, np), func(store.Object) (any, error) { return netpol("knp.default.web", "app == 'x'"), nil }); err != nil {
		t.Fatal(err)
	}
	s.has("a policy that somebody changed", np, selects("all()"))
	if _, err := store.Modify(t.Context(), s.api, keyOf(t, np), func(store.Object) (any, error) { return netpol("knp.default.web", "app == 'b'"), nil }); err != nil {
		t.Fatal(err)
	}
	s.has("a policy that Kubernetes changed", np, selects("app == 'b'"))
	remove(t, s.api, np)
	s.hasNot("a policy that Kubernetes deleted", np)
	s.has("a policy of others", others, anything)
	s.has("a host without Kubernetes", node("gateway", nil, ""), anything)

	// Another term goes on where this one ended.
	stop()
	remove(t, s.api, ns)
	s.run()
	s.hasNot("a namespace that was deleted between two terms", ns)
}

// TestLabelsKept: while the KubeControllersConfiguration says so, Nodes keep the labels that they have, and learn of which Node they are all
// the same; when it says so no more, they get what came meanwhile.
func TestLabelsKept(t *testing.T) {
	t.Parallel()
	s := newSides(t)
	k := v3.NewKubeControllersConfiguration()
	k.Name, k.Spec.Controllers.Node = store.DefaultName, &v3.NodeControllerConfig{SyncLabels: v3.Disabled}
	one, two := node("node1", nil, `{"rack":"r2"}`), node("node2", nil, `{"rack":"r2"}`)
	create(t, s.api, one, two)
	create(t, s.etcd, k, node("node1", map[string]string{"own": "x", "rack": "r1"}, `{"rack":"r1"}`, "node1"), node("node2", nil, ""))
	s.run()
	labels := func(kept string, want map[string]string) func(any) error {
		return func(v any) error {
			n := v.(*store.Node)
			if diff := cmp.Diff(want, n.Labels, cmpopts.EquateEmpty()); diff != "" || n.Annotations[store.AnnotationKubeLabels] != kept || len(n.Spec.OrchRefs) != 1 {
				return fmt.Errorf("it is %+v: %s", n, diff)
			}
			return nil
		}
	}
	s.has("the Node that it is", two, labels("", nil))
	s.has("the labels of before", one, labels(`{"rack":"r1"}`, map[string]string{"own": "x", "rack": "r1"}))
	remove(t, s.etcd, k)
	s.has("the labels of now", one, labels(`{"rack":"r2"}`, map[string]string{"own": "x", "rack": "r2"}))
	s.has("the first labels", two, labels(`{"rack":"r2"}`, map[string]string{"rack": "r2"}))
}

// TestFaults: a datastore that takes nothing for a time gets all of it afterwards; what cannot be
// decoded there is replaced; what the API does not tell for want of a right is left as it is.
func TestFaults(t *testing.T) {
	t.Parallel()
	s := newSides(t)
	np, broken, kept := netpol("knp.default.web", "all()"), netpol("knp.default.broken", "all()"), profile("kns.kept", nil)
	s.api.withheld = map[store.Kind]store.Withheld{store.KindProfile: {Err: errors.New("forbidden")}}
	create(t, s.etcd, kept)
	create(t, s.api, np, broken, profile("kns.unknown", nil))
	s.etcd.PutRaw(keyOf(t, broken).Path(), []byte(`{"kind":`))
	s.etcd.Fail(errors.New("it is away"))
	s.run()
	create(t, s.api, netpol("knp.default.second", "all()"))
	s.etcd.Fail(nil)
	s.has("the policy", np, anything)
	s.has("the second policy", netpol("knp.default.second", ""), anything)
	s.has("the one that could not be decoded", broken, selects("all()"))
	s.has("a profile of which the API tells nothing", kept, anything)
	if _, err := s.etcd.Get(t.Context(), keyOf(t, profile("kns.unknown", nil))); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a profile of which the API tells nothing: %v", err)
	}
}

// guarded is a datastore whose user lacks rights.
type guarded struct {
	*memory.Store
	mu     sync.Mutex
	denied map[store.Kind]bool
	asked  int // for what was denied
}

func (g *guarded) deny(kinds ...store.Kind) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.denied = make(map[store.Kind]bool)
	for _, k := range kinds {
		g.denied[k] = true
	}
}

func (g *guarded) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, op := range ops {
		if g.denied[op.Object.Key.Kind] {
			g.asked++
			return nil, fmt.Errorf("%w: %w", store.ErrUnavailable, store.ErrDenied)
		}
	}
	return g.Store.Txn(ctx, ops...)
}

// TestMissingRight: a kind that this host may not write in etcd keeps no other from being written, nor asks for each of
// its objects; it is written when it may be.
func TestMissingRight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSides(t)
		g := &guarded{Store: s.etcd}
		g.deny(store.KindProfile)
		for i := range 3 * maxBatch {
			create(t, s.api, profile(fmt.Sprintf("kns.ns%d", i), nil))
		}
		create(t, s.api, netpol("knp.default.web", "all()"))
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { New(s.api, g, slog.New(slog.DiscardHandler)).Run(ctx) })
		defer func() { cancel(); running.Wait() }()
		s.has("a kind that it may write", netpol("knp.default.web", ""), anything)
		create(t, s.api, netpol("knp.default.later", "all()"))
		s.has("and what comes of it later", netpol("knp.default.later", ""), anything)
		synctest.Wait()
		g.mu.Lock()
		if g.asked > 3 {
			t.Errorf("it was asked %d times for what is denied", g.asked)
		}
		g.mu.Unlock()
		g.deny()
		s.has("it may write all", profile(fmt.Sprintf("kns.ns%d", 3*maxBatch-1), nil), anything)
	})
}

// TestUnreadable: what this host may not read in etcd it does not write there, until it may.
func TestUnreadable(t *testing.T) {
	t.Parallel()
	c := New(nil, nil, slog.New(slog.DiscardHandler))
	ns := profile("kns.a", nil)
	key := keyOf(t, ns)
	c.kubernetesSays(store.Batch{Synced: true, Events: []store.Event{{Key: key, Object: store.Object{Key: key, Revision: 1, Value: ns}}}})
	withheld := map[store.Kind]store.Withheld{store.KindProfile: {Err: errors.New("denied")}}
	for _, step := range []struct {
		withheld map[store.Kind]store.Withheld
		due      bool
	}{{withheld, false}, {nil, true}} {
		c.datastoreSays(store.Batch{Synced: true, Withheld: step.withheld})
		_, due, err := c.op(key)
		if err != nil || due != step.due || step.due && !c.due[key] {
			t.Errorf("withheld %v: due %v, %v", step.withheld, due, err)
		}
		delete(c.due, key)
	}
}
