package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// claimed is a node that registers with an address, at a revision.
func claimed(name, addr string, rev store.Revision) store.Event {
	n := &store.Node{}
	n.Name = name
	setAddress(n, netip.MustParsePrefix(addr))
	key := store.ResourceKey(store.KindNode, name)
	return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev, Value: n}}
}

// Of two that raced the later one gives way, also where the earlier one has
// written something else since.
func TestHolder(t *testing.T) {
	t.Parallel()
	p := newPeers()
	see := func(rev store.Revision, evs ...store.Event) {
		p.apply("node1", clustertest.Step("node1", store.Batch{Revision: rev, Events: evs}))
	}
	expect := func(when string, before store.Revision, want string) {
		t.Helper()
		if name, addr := p.holder([]netip.Prefix{netip.MustParsePrefix("fd00::1/64"), netip.MustParsePrefix("10.1.0.11/16")}, before); name != want || (want != "") != (addr == netip.MustParseAddr("10.1.0.11")) {
			t.Errorf("%s: %q has %s, want %q to have it", when, name, addr, want)
		}
	}
	see(5, claimed("node1", "10.1.0.11/24", 5))
	expect("this host's own", 0, "")
	see(6, claimed("node2", "10.1.0.12/24", 6))
	expect("another address", 0, "")
	see(8, claimed("node2", "10.1.0.11/24", 8))
	expect("another's", 0, "node2")
	expect("another's, earlier", 9, "node2")
	expect("another's, later", 7, "")
	see(12, claimed("node2", "10.1.0.11/24", 12))
	expect("after it wrote something else", 9, "node2")
	see(13, claimed("node0", "10.1.0.11/24", 13))
	expect("two others", 0, "node0")
	expect("two others, one of them later", 12, "node2")
	broken := claimed("node2", "10.1.0.99/24", 14)
	broken.Err = store.ErrDecode
	see(14, broken)
	expect("one that cannot be read", 12, "node2")
	gone := claimed("node2", "10.1.0.11/24", 15)
	gone.Object.Value = nil
	see(15, gone, claimed("node0", "10.1.0.10/24", 15))
	expect("when both are gone", 0, "")
}

// TestAwait: that the watch is further with another kind, or with another's Node, does not say
// that it has shown the Nodes up to one's own.
func TestAwait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPeers()
		done := make(chan error, 1)
		go func() { done <- p.await(t.Context(), 7) }()
		for _, b := range []store.Batch{
			{Revision: 9, Synced: true},
			{Revision: 9, Events: []store.Event{claimed("node1", "10.1.0.11/24", 5)}},
			{Revision: 9, Events: []store.Event{claimed("node2", "10.1.0.11/24", 8)}},
		} {
			p.apply("node1", clustertest.Step("node1", b))
			synctest.Wait()
			if len(done) > 0 {
				t.Fatalf("it does not wait any more after %+v", b)
			}
		}
		p.apply("node1", clustertest.Step("node1", store.Batch{Revision: 9, Events: []store.Event{claimed("node1", "10.1.0.11/24", 7)}}))
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// deaf is a datastore whose watch shows nothing new while it is held, and which
// nobody is to ask for all Nodes.
type deaf struct {
	store.Store
	t    *testing.T
	gate chan struct{} // who has its one place holds the watch
}

func (s *deaf) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	if kind == store.KindNode {
		s.t.Error("all Nodes are listed")
	}
	return s.Store.List(ctx, kind, namespace)
}

func (s *deaf) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	go func() {
		defer close(out)
		for b := range s.Store.Watch(ctx, kinds...) {
			s.gate <- struct{}{}
			<-s.gate
			select {
			case out <- b:
			case <-ctx.Done():
			}
		}
	}()
	return out
}

// A host is not registered before the watch has shown what was written before its
// claim, however long that takes and however many attempts end meanwhile; if that is
// another's claim, its own is taken back.
func TestRegisteredWhenSeen(t *testing.T) {
	t.Parallel()
	for _, raced := range []bool{false, true} {
		t.Run(fmt.Sprint("raced ", raced), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m := memory.New()
				defer m.Close()
				s := &deaf{Store: m, t: t, gate: make(chan struct{}, 1)}
				a := New(Config{Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler)})
				defer follow(t, a, s)()
				synctest.Wait()
				s.gate <- struct{}{}
				if raced {
					if err := host(t, m, "node2", netip.MustParsePrefix("10.1.0.11/24")); err != nil {
						t.Fatal(err)
					}
				}
				a.HandleUnderlay(on(t, []string{"eth0 10.1.0.11/24"}, nil))
				synctest.Wait()
				if got := get(t, m, "node1").Spec.BGP.IPv4Address; got != "10.1.0.11/24" {
					t.Errorf("claims %q", got)
				}
				<-time.After(3 * attemptTimeout) // virtual time
				synctest.Wait()
				if st := a.Status(); st.Registered || !errors.Is(st.Err, context.DeadlineExceeded) {
					t.Errorf("before the watch has shown its claim: %+v", st)
				}
				<-s.gate
				<-time.After(2 * retryMax) // virtual time
				synctest.Wait()
				st := a.Status()
				_, err := m.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
				if !raced {
					if !st.Registered || st.Err != nil || err != nil {
						t.Errorf("status %+v, the resource: %v", st, err)
					}
					return
				}
				var taken *AddressTakenError
				if st.Registered || !errors.As(st.Err, &taken) || taken.Other != "node2" {
					t.Errorf("status %+v", st)
				}
				if !errors.Is(err, store.ErrNotFound) {
					t.Errorf("the later of two hosts left its claim: %v", err)
				}
				if got := get(t, m, "node2").Spec.BGP.IPv4Address; got != "10.1.0.11/24" {
					t.Errorf("the earlier host has address %q", got)
				}
			})
		})
	}
}

// Of many hosts that register one address at once exactly one keeps it.
func TestManyRegisterOneAddress(t *testing.T) {
	t.Parallel()
	for range 20 {
		s := memory.New()
		const hosts = 8
		errs := make([]error, hosts)
		var wg sync.WaitGroup
		for i := range hosts {
			wg.Go(func() { errs[i] = host(t, s, fmt.Sprint("node", i), netip.MustParsePrefix("10.1.0.11/24")) })
		}
		wg.Wait()
		nodes, _, err := s.List(t.Context(), store.KindNode, "")
		if err != nil || len(nodes) != 1 {
			t.Fatalf("%d nodes have the address, %v: %v", len(nodes), err, errs)
		}
		for i, err := range errs {
			var taken *AddressTakenError
			if won := nodes[0].Key.Name == fmt.Sprint("node", i); won && err != nil || !won && !errors.As(err, &taken) {
				t.Errorf("node%d of a cluster where %s has the address: %v", i, nodes[0].Key.Name, err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// What all registrations of a large cluster cost: the check beside the write.
func BenchmarkRegister(b *testing.B) {
	s := memory.New()
	defer s.Close()
	others := newPeers()
	batch := store.Batch{Synced: true}
	for i := range 5000 {
		addr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), 16)
		ev := claimed(fmt.Sprint("peer", i), addr.String(), 1)
		obj, err := store.Create(b.Context(), s, ev.Object.Value)
		if err != nil {
			b.Fatal(err)
		}
		ev.Object, batch.Revision = obj, obj.Revision
		batch.Events = append(batch.Events, ev)
	}
	others.apply("node1", clustertest.Step("node1", batch))
	others.own = 1 << 60 // there is no watch
	want := registration{addrs: []netip.Prefix{netip.MustParsePrefix("10.1.0.11/16")}, complete: func(*store.Node) {}, gone: []dataplane.Family{dataplane.IPv6}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := register(b.Context(), s, others, "node1", want, claim{}); err != nil {
			b.Fatal(err)
		}
	}
}
