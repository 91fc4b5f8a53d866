package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func get(t *testing.T, s store.Store, name string) *store.Node {
	t.Helper()
	obj, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, name))
	if err != nil {
		t.Fatal(err)
	}
	return obj.Value.(*store.Node)
}

// host registers addresses as a host does that follows the datastore.
func host(t *testing.T, s store.Store, name string, addrs ...netip.Prefix) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	others, synced := newPeers(), make(chan struct{})
	steps, followed := clustertest.Follow(ctx, name, s, store.KindNode)
	go func() {
		for st := range steps.Steps(ctx) {
			others.apply(name, st)
			if st.Synced {
				close(synced)
			}
		}
	}()
	defer func() {
		cancel()
		<-followed
	}()
	<-synced
	_, err := register(ctx, s, others, name, registration{addrs: addrs, complete: func(*store.Node) {}}, claim{})
	return err
}

func TestRegister(t *testing.T) {
	s := memory.New()
	defer s.Close()
	// A resource that an operator made before, with things of their own.
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{"rack": "r1"}}}
	n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: "10.1.0.99/24", RouteReflectorClusterID: "1.0.0.1"}
	n.Spec.Addresses = []store.NodeAddress{{Address: "10.1.0.99/24", Type: "CalicoNodeIP"}, {Address: "192.0.2.1", Type: "ExternalIP"}}
	if _, err := store.Create(t.Context(), s, n); err != nil {
		t.Fatal(err)
	}
	if err := host(t, s, "node1", netip.MustParsePrefix("10.1.0.11/24")); err != nil {
		t.Fatal(err)
	}
	got := get(t, s, "node1")
	if got.Spec.BGP.IPv4Address != "10.1.0.11/24" || got.Spec.BGP.RouteReflectorClusterID != "1.0.0.1" || got.Labels["rack"] != "r1" {
		t.Errorf("registered as %+v with labels %v", got.Spec.BGP, got.Labels)
	}
	want := []store.NodeAddress{
		{Address: "192.0.2.1", Type: "ExternalIP"}, {Address: "10.1.0.11/24", Type: "CalicoNodeIP"}, {Address: "10.1.0.11", Type: "InternalIP"},
	}
	if diff := cmp.Diff(want, got.Spec.Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

// What cannot be read in the place of this host's resource is replaced; what somebody
// writes at that moment is not.
func TestRegisterOverGarbage(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"", "{", "[]", `{"spec":{"bgp":7}}`, "\x00\xff", `"node1"`} {
		s := memory.New()
		key := store.ResourceKey(store.KindNode, "node1")
		s.PutRaw(key.Path(), []byte(raw))
		if _, err := s.Get(t.Context(), key); !errors.Is(err, store.ErrDecode) {
			t.Fatalf("%q is no garbage: %v", raw, err)
		}
		addr := netip.MustParsePrefix("10.1.0.11/24")
		if err := host(t, s, "node1", addr); err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		obj, err := s.Get(t.Context(), key)
		if err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		n := obj.Value.(*store.Node)
		if registered(n, dataplane.IPv4) != addr.String() || n.UID == "" || n.CreationTimestamp.IsZero() {
			t.Errorf("%q: replaced by %s", raw, obj.Raw)
		}
	}
}

func TestRegisterTaken(t *testing.T) {
	s := memory.New()
	defer s.Close()
	addr := netip.MustParsePrefix("10.1.0.11/24")
	if err := host(t, s, "node1", addr); err != nil {
		t.Fatal(err)
	}
	err := host(t, s, "node2", addr)
	var taken *AddressTakenError
	if !errors.As(err, &taken) || taken.Node != "node2" || taken.Other != "node1" {
		t.Fatalf("register = %v; want both names", err)
	}
	for _, w := range []string{"node1", "node2", "10.1.0.11", "delete node"} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("message does not name %q: %v", w, err)
		}
	}
	if _, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node2")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the refused host left a resource: %v", err)
	}
}

// raceStore lets another host register between the check and the write.
type raceStore struct {
	store.Store
	once sync.Once
	race func()
}

func (s *raceStore) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	s.once.Do(s.race)
	return s.Store.Txn(ctx, ops...)
}

func TestRegisterRace(t *testing.T) {
	s := memory.New()
	defer s.Close()
	addr := netip.MustParsePrefix("10.1.0.11/24")
	r := &raceStore{Store: s, race: func() {
		if err := host(t, s, "node2", addr); err != nil {
			t.Error(err)
		}
	}}
	err := host(t, r, "node1", addr)
	var taken *AddressTakenError
	if !errors.As(err, &taken) || taken.Other != "node2" {
		t.Errorf("the later of two hosts: %v; want it refused", err)
	}
	if _, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the later of two hosts left its claim: %v", err)
	}
	if got := get(t, s, "node2").Spec.BGP.IPv4Address; got != addr.String() {
		t.Errorf("the earlier host has address %q", got)
	}
}

func TestSetConditions(t *testing.T) {
	s := memory.New()
	defer s.Close()
	if err := SetConditions(t.Context(), s, "node1", []metav1.Condition{Condition("Ready", nil)}); err != nil {
		t.Fatalf("a host that is not registered: %v", err)
	}
	if err := host(t, s, "node1", netip.MustParsePrefix("10.1.0.11/24")); err != nil {
		t.Fatal(err)
	}
	early := metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	ready := Condition("Ready", nil)
	ready.LastTransitionTime = early
	if err := SetConditions(t.Context(), s, "node1", []metav1.Condition{ready}); err != nil {
		t.Fatal(err)
	}
	// Another component's condition stays, and so does the time of ours.
	_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindNode, "node1"), func(cur store.Object) (any, error) {
		n := store.Clone(cur.Value).(*store.Node)
		n.Status.Conditions = append(n.Status.Conditions, metav1.Condition{Type: "Theirs", Status: metav1.ConditionTrue, LastTransitionTime: early})
		return n, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := SetConditions(t.Context(), s, "node1", []metav1.Condition{Condition("Ready", nil), Condition("Pool-p", errors.New("no ipip"))}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range get(t, s, "node1").Status.Conditions {
		kept := ""
		if c.LastTransitionTime.Equal(&early) {
			kept = " since the start"
		}
		got = append(got, c.Type+" "+string(c.Status)+" "+c.Message+kept)
	}
	want := []string{"Theirs True  since the start", "routerd.io/Ready True  since the start", "routerd.io/Pool-p False no ipip"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}
}

func TestEnsureDefaultPool(t *testing.T) {
	s := memory.New()
	defer s.Close()
	cidr := netip.MustParsePrefix("192.168.0.0/16")
	for i, want := range []bool{true, false} {
		made, err := EnsureDefaultPool(t.Context(), s, DefaultPool{cidr, store.VXLANCrossSubnet, 26})
		if err != nil || made != want {
			t.Errorf("call %d: made %v, %v; want %v", i+1, made, err, want)
		}
	}
	obj, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"))
	if err != nil {
		t.Fatal(err)
	}
	p := obj.Value.(*v3.IPPool)
	if store.EncapsulationOf(p) != store.VXLANCrossSubnet || p.Spec.CIDR != cidr.String() || !p.Spec.NATOutgoing || p.Spec.NodeSelector != "all()" {
		t.Errorf("default pool: %+v", p.Spec)
	}
}

// fakeTunnels gives each tunnel one address, or the one that moved says, and
// keeps account.
type fakeTunnels struct {
	mu    sync.Mutex
	fail  error
	moved map[Tunnel]netip.Addr
	held  map[Tunnel][]netip.Addr

	leaving bool // told so since forget
}

func (f *fakeTunnels) Ensure(_ context.Context, t Tunnel, leaving bool) (netip.Addr, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leaving = f.leaving || leaving
	addr, ok := f.moved[t]
	switch {
	case ok:
	case t == TunnelIPIP:
		addr = netip.MustParseAddr("192.168.0.1")
	default:
		addr = netip.MustParseAddr("192.168.0.2")
	}
	if f.held == nil {
		f.held = map[Tunnel][]netip.Addr{}
	}
	if !slices.Contains(f.held[t], addr) {
		f.held[t] = append(f.held[t], addr)
	}
	if f.fail != nil { // the address is written, and the answer is lost
		return netip.Addr{}, false, f.fail
	}
	return addr, len(f.held[t]) > 1, nil
}

func (f *fakeTunnels) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leaving = false
}

func (f *fakeTunnels) toldLeaving() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.leaving
}

func (f *fakeTunnels) failWith(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

func (f *fakeTunnels) Release(_ context.Context, t Tunnel, keep netip.Addr) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held != nil {
		f.held[t] = slices.DeleteFunc(f.held[t], func(a netip.Addr) bool { return a != keep })
	}
	return nil
}

func (f *fakeTunnels) holds(t Tunnel) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprint(f.held[t])
}

// follow runs an agent on a store until the returned function is called.
func follow(t *testing.T, a *Agent, s store.Store) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := followUntil(ctx, t, a, s)
	return func() {
		cancel()
		ended()
	}
}

// followUntil runs an agent on a store until ctx ends, which the returned function
// waits for.
func followUntil(ctx context.Context, t *testing.T, a *Agent, s store.Store) (ended func()) {
	var wg sync.WaitGroup
	steps, followed := clustertest.Follow(ctx, a.cfg.Name, s, Kinds()...)
	wg.Go(func() {
		for st := range steps.Steps(ctx) {
			a.HandleStore(st)
		}
		<-followed
	})
	wg.Go(func() {
		if err := a.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	})
	return wg.Wait
}

// TestAgent follows a host from its first start through a change of
// encapsulation and the loss of its resource.
func TestAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		tunnels := &fakeTunnels{}
		cond := Condition("Ready", nil)
		a := New(Config{
			Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler),
			DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.VXLAN, 26}},
			Conditions:   func() []metav1.Condition { return []metav1.Condition{cond} },
		})
		defer follow(t, a, s)()

		synctest.Wait()
		if a.Status().Registered {
			t.Error("registered before the underlay is known")
		}
		a.HandleUnderlay(manyLinks())
		synctest.Wait()
		n := get(t, s, "node1")
		if n.Spec.BGP.IPv4Address != "10.1.0.11/24" || n.Spec.IPv4VXLANTunnelAddr != "192.168.0.2" || n.Spec.BGP.IPv4IPIPTunnelAddr != "" {
			t.Fatalf("registered as %+v, %+v; status %+v", n.Spec, n.Spec.BGP, a.Status())
		}
		<-time.After(2 * conditionsEvery) // virtual time
		synctest.Wait()
		if got := get(t, s, "node1").Status.Conditions; len(got) != 1 || got[0].Type != "routerd.io/Ready" {
			t.Errorf("conditions %v", got)
		}

		_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"), func(cur store.Object) (any, error) {
			p := store.Clone(cur.Value).(*v3.IPPool)
			store.SetEncapsulation(p, store.IPIPCrossSubnet)
			return p, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		n = get(t, s, "node1")
		if n.Spec.IPv4VXLANTunnelAddr != "" || n.Spec.BGP.IPv4IPIPTunnelAddr != "192.168.0.1" || tunnels.holds(TunnelVXLAN) != "[192.168.0.2]" {
			t.Errorf("after the change of encapsulation: %+v, %+v; held for VXLAN: %s", n.Spec, n.Spec.BGP, tunnels.holds(TunnelVXLAN))
		}
		<-time.After(tunnelGrace) // virtual time
		synctest.Wait()
		if got := tunnels.holds(TunnelVXLAN); got != "[]" {
			t.Errorf("the address that no pool needs is still held: %s", got)
		}

		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, "node1"), 0); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := get(t, s, "node1").Spec.BGP.IPv4Address; got != "10.1.0.11/24" {
			t.Errorf("after somebody deleted the resource: %q", got)
		}
		<-time.After(2 * conditionsEvery) // virtual time
		synctest.Wait()
		if got := get(t, s, "node1").Status.Conditions; len(got) != 1 {
			t.Errorf("conditions of the new resource: %v", got)
		}

		// The last pool is deleted to make room for another.
		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"), 0); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if pools, _, err := s.List(t.Context(), store.KindIPPool, ""); err != nil || len(pools) != 0 {
			t.Errorf("the default pool was made again: %d pools, %v", len(pools), err)
		}
	})
}

// TestAgentLeaving: IPAM is told that an address is about to be released until the tunnel has one again.
func TestAgentLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		tunnels := &fakeTunnels{}
		a := New(Config{
			Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler),
			DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.VXLAN, 26}},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(manyLinks())
		synctest.Wait()
		for i, step := range []struct {
			to      store.Encapsulation
			leaving bool
		}{{store.Direct, false}, {store.VXLAN, true}, {store.VXLANCrossSubnet, false}} {
			tunnels.forget()
			_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"), func(cur store.Object) (any, error) {
				p := store.Clone(cur.Value).(*v3.IPPool)
				store.SetEncapsulation(p, step.to)
				return p, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if got := tunnels.toldLeaving(); got != step.leaving {
				t.Errorf("step %d, %s: leaving %t, want %t", i, step.to, got, step.leaving)
			}
		}
	})
}

// TestAgentChangedMeanwhile: the pool changes while the agent waits for IPAM to know
// what it knew before.
func TestAgentChangedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		waits, goOn := make(chan struct{}), make(chan struct{})
		var slow atomic.Bool
		a := New(Config{
			Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler),
			DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.Direct, 26}},
			AwaitIPAM: func(context.Context, store.Revision) error {
				if slow.Swap(false) {
					close(waits)
					<-goOn
				}
				return nil
			},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(manyLinks())
		<-time.After(2 * tunnelGrace) // virtual time: no address waits to be given back
		modify := func(key store.Key, change func(any)) {
			t.Helper()
			_, err := store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) {
				v := store.Clone(cur.Value)
				change(v)
				return v, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait() // the agent has heard of it
		}
		slow.Store(true)
		modify(store.ResourceKey(store.KindNode, "node1"), func(v any) { v.(*store.Node).Labels = map[string]string{"a": "b"} })
		<-waits
		modify(store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"), func(v any) { store.SetEncapsulation(v.(*v3.IPPool), store.IPIPCrossSubnet) })
		close(goOn)
		synctest.Wait()
		if got := get(t, s, "node1").Spec.BGP.IPv4IPIPTunnelAddr; got != "192.168.0.1" {
			t.Errorf("the address of the tunnel that the pool now uses is %q", got)
		}
	})
}

// TestQuietEnd changes the pool, the host's labels and how long IPAM takes, at any time.
// When nothing changes any more the host has published the addresses of the tunnels
// that its pool needs, and holds no others.
func TestQuietEnd(t *testing.T) {
	t.Parallel()
	type step struct {
		Do   int
		Mode store.Encapsulation
		Wait time.Duration
	}
	modes := []store.Encapsulation{store.Direct, store.IPIP, store.VXLAN, store.VXLANCrossSubnet}
	waits := []time.Duration{0, 100 * time.Millisecond, time.Second, tunnelGrace - 100*time.Millisecond, tunnelGrace, time.Minute}
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) step {
			return step{rapid.IntRange(0, 7).Draw(t, "do"), rapid.SampledFrom(modes).Draw(t, "mode"), rapid.SampledFrom(waits).Draw(t, "wait")}
		}), 1, 15).Draw(rt, "steps")
		synctest.Test(t, func(t *testing.T) {
			s := memory.New()
			defer s.Close()
			tunnels := &fakeTunnels{}
			var slow atomic.Int64 // a time.Duration
			a := New(Config{
				Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler),
				DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.Direct, 26}},
				AwaitIPAM: func(ctx context.Context, _ store.Revision) error {
					select {
					case <-time.After(time.Duration(slow.Load())):
					case <-ctx.Done():
					}
					return ctx.Err()
				},
			})
			defer follow(t, a, s)()
			a.HandleUnderlay(manyLinks())
			synctest.Wait()
			modify := func(key store.Key, change func(any)) {
				_, err := store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) {
					if cur.Value == nil {
						return nil, store.ErrNotFound
					}
					v := store.Clone(cur.Value)
					change(v)
					return v, nil
				})
				if err != nil && !errors.Is(err, store.ErrNotFound) { // a Node that was deleted comes back in a moment
					t.Fatal(err)
				}
			}
			mode := store.Direct
			for i, st := range steps {
				switch st.Do {
				case 0, 1:
					mode = st.Mode
					modify(store.ResourceKey(store.KindIPPool, "default-ipv4-ippool"), func(v any) { store.SetEncapsulation(v.(*v3.IPPool), mode) })
				case 2:
					modify(store.ResourceKey(store.KindNode, "node1"), func(v any) { v.(*store.Node).Labels = map[string]string{"step": strconv.Itoa(i)} })
				case 3, 4:
					slow.Store(int64(st.Wait))
				case 5:
					tunnels.failWith(errors.New("no answer"))
				case 6:
					tunnels.failWith(nil)
				case 7: // whatever it has become since
					if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, "node1"), 0); err != nil && !errors.Is(err, store.ErrNotFound) {
						t.Fatal(err)
					}
				}
				<-time.After(st.Wait) // virtual time
			}
			slow.Store(0)
			tunnels.failWith(nil)
			<-time.After(10 * time.Minute) // virtual time
			synctest.Wait()
			n := get(t, s, "node1")
			got := []string{n.Spec.BGP.IPv4IPIPTunnelAddr, tunnels.holds(TunnelIPIP), n.Spec.IPv4VXLANTunnelAddr, tunnels.holds(TunnelVXLAN)}
			want := []string{"", "[]", "", "[]"}
			switch mode {
			case store.IPIP:
				want[0], want[1] = "192.168.0.1", "[192.168.0.1]"
			case store.VXLAN, store.VXLANCrossSubnet:
				want[2], want[3] = "192.168.0.2", "[192.168.0.2]"
			default:
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("after %v, with the pool in %s (-want +got):\n%s", steps, mode, d)
			}
		})
		if t.Failed() {
			rt.FailNow()
		}
	})
}

// TestAgentTriesAgain: a fault is shown and healed without help.
func TestAgentTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		tunnels := &fakeTunnels{fail: errors.New("pools exhausted")}
		a := New(Config{
			Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler),
			DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.VXLAN, 26}},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(dataplane.Underlay{})
		synctest.Wait()
		if err := a.Status().Err; err == nil || !strings.Contains(err.Error(), "no IPv4 address") {
			t.Errorf("without an address: %v", err)
		}
		a.HandleUnderlay(manyLinks())
		synctest.Wait()
		if st := a.Status(); !st.Registered || st.Err == nil || !strings.Contains(st.Err.Error(), "pools exhausted") {
			t.Errorf("without a tunnel address: %+v; want it registered, with the reason", st)
		}
		tunnels.failWith(nil)
		<-time.After(2 * retryMax) // virtual time
		synctest.Wait()
		if st := a.Status(); st.Err != nil || !st.Tunnels[TunnelVXLAN].IsValid() {
			t.Errorf("after the fault is gone: %+v", st)
		}
	})
}

// endingTunnels is IPAM that ends with the daemon, before the agent does.
type endingTunnels struct {
	*fakeTunnels
	end func()
}

func (e endingTunnels) Ensure(context.Context, Tunnel, bool) (netip.Addr, bool, error) {
	e.end()
	return netip.Addr{}, false, errors.New("ipam stopped")
}

// endingStore is a datastore that answers nobody whose time is over.
type endingStore struct{ store.Store }

func (e endingStore) Get(ctx context.Context, key store.Key) (store.Object, error) {
	if ctx.Err() != nil {
		return store.Object{}, ctx.Err()
	}
	return e.Store.Get(ctx, key)
}

// TestEndsQuietly: what an agent needs of others may end before it does; that is no
// cause for alarm.
func TestEndsQuietly(t *testing.T) {
	for _, what := range []string{"registration", "conditions"} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memory.New()
				defer s.Close()
				var log bytes.Buffer
				ctx, cancel := context.WithCancel(t.Context())
				conditions := 0
				a := New(Config{
					Name: "node1", Store: endingStore{s}, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn})),
					DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.VXLAN, 26}},
					Tunnels:      &fakeTunnels{},
					Conditions: func() []metav1.Condition {
						if conditions++; conditions > 1 {
							cancel()
						}
						return []metav1.Condition{Condition(fmt.Sprint("C", conditions), nil)}
					},
				})
				if what == "registration" {
					a.cfg.Tunnels = endingTunnels{&fakeTunnels{}, cancel}
				}
				ended := followUntil(ctx, t, a, s)
				a.HandleUnderlay(manyLinks())
				ended()
				if log.Len() > 0 {
					t.Errorf("it logged:\n%s", &log)
				}
			})
		})
	}
}
