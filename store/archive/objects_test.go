package archive

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func pool(name, cidr string) *v3.IPPool {
	p := store.New(store.KindIPPool).(*v3.IPPool)
	p.Name, p.Spec.CIDR = name, cidr
	store.SetDefaults(p)
	return p
}

func nodeOf(name, addr string) *store.Node {
	n := store.New(store.KindNode).(*store.Node)
	n.Name, n.Spec.BGP = name, &store.NodeBGPSpec{IPv4Address: addr}
	return n
}

func endpointOf(pod, container string, addrs ...string) *store.WorkloadEndpoint {
	w := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	w.Namespace = "default"
	w.Spec = store.WorkloadEndpointSpec{
		Orchestrator: "k8s", Node: "node1", Pod: pod, Endpoint: "eth0", InterfaceName: "cali12345678901", ContainerID: container, IPNetworks: addrs, Profiles: []string{"kns.default"},
	}
	w.Name, _ = store.WorkloadEndpointName(&w.Spec) // its parts are right
	return w
}

func profile(name string) *v3.Profile {
	p := store.New(store.KindProfile).(*v3.Profile)
	p.Name = name
	return p
}

func filled(t *testing.T, values ...any) *memory.Store {
	t.Helper()
	s := memory.New()
	t.Cleanup(func() { _ = s.Close() })
	for _, v := range values {
		if _, err := store.Create(t.Context(), s, v); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// holds lists what a store has.
func holds(t *testing.T, s store.Store) (out []string) {
	t.Helper()
	for _, kind := range store.AllKinds() {
		objects, _, err := s.List(context.Background(), kind, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			out = append(out, o.Key.String())
		}
	}
	slices.Sort(out)
	return out
}

// TestObjects: what one datastore has goes into another as far as it has a place there, of Nodes
// and pods only into those that are there; again nothing is to be done; what stands in the way
// is named, and removed only where that is asked for.
func TestObjects(t *testing.T) {
	t.Parallel()
	from := filled(t, pool("a", "10.0.0.0/16"), pool("b", "10.1.0.0/16"), nodeOf("node1", "10.9.0.1/24"), nodeOf("gateway", "10.9.0.2/24"),
		endpointOf("web", "c1", "10.0.0.1/32"), endpointOf("gone", "c2", "10.0.0.2/32"), endpointOf("bare", "c3"), profile("kns.default"))
	if _, err := from.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.SecretKey(store.ProbeSecret), Value: &store.Secret{Key: make([]byte, 32)}}}); err != nil {
		t.Fatal(err)
	}
	entries, err := Objects(t.Context(), from)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(entries); n != 8 {
		t.Errorf("%d entries, want all but the endpoint without an address", n)
	}
	to := filled(t, nodeOf("node1", ""), endpointOf("web", ""), endpointOf("other", ""))
	load := func(l Loading, want Loaded) {
		t.Helper()
		done, err := l.Into(t.Context(), to, entries)
		if err != nil {
			t.Fatal(err)
		}
		for why := range done.Left {
			t.Log(why, done.Left[why])
		}
		if n := len(slices.Concat(slices.Collect(maps.Values(done.Left))...)); n != 3 {
			t.Errorf("%d keys are left out, want the gateway, the pod that is gone, and the profile", n)
		}
		if done.Left = nil; !cmp.Equal(done, want) {
			t.Errorf("%+v: %+v, want %+v", l, done, want)
		}
	}
	before := holds(t, to)
	load(Loading{DryRun: true}, Loaded{Written: 5})
	if diff := cmp.Diff(before, holds(t, to)); diff != "" {
		t.Errorf("a dry run changed (-before +after):\n%s", diff)
	}
	load(Loading{}, Loaded{Written: 5})
	load(Loading{}, Loaded{Same: 5})
	o, err := to.Get(t.Context(), store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node1-k8s-web-eth0"})
	if err != nil {
		t.Fatal(err)
	}
	if w := o.Value.(*store.WorkloadEndpoint); !slices.Equal(w.Spec.IPNetworks, []string{"10.0.0.1/32"}) || w.Spec.ContainerID != "c1" {
		t.Errorf("the pod has %v of %q", w.Spec.IPNetworks, w.Spec.ContainerID)
	}

	if _, err := store.Create(t.Context(), to, pool("c", "10.2.0.0/16")); err != nil {
		t.Fatal(err)
	}
	before = holds(t, to)
	if _, err := (Loading{}).Into(t.Context(), to, entries); !errors.Is(err, store.ErrExists) {
		t.Errorf("beside a pool that is not in the file: %v", err)
	}
	if diff := cmp.Diff(before, holds(t, to)); diff != "" {
		t.Errorf("refused, it changed (-before +after):\n%s", diff)
	}
	load(Loading{Replace: true}, Loaded{Same: 5, Removed: 1})
}
