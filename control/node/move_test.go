package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// newFollower runs an agent of node1 on a host with these addresses.
func newFollower(t *testing.T, s store.Store, tunnels Tunnels, method string, addrs ...string) (a *Agent, stop func()) {
	t.Helper()
	a = New(Config{
		Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler),
		Methods: map[dataplane.Family]string{dataplane.IPv4: method},
	})
	stop = follow(t, a, s)
	a.HandleUnderlay(on(t, addrs, nil))
	synctest.Wait()
	return a, stop
}

func expectAddress(t *testing.T, s store.Store, when, want string) {
	t.Helper()
	synctest.Wait()
	if got := get(t, s, "node1").Spec.BGP.IPv4Address; got != want {
		t.Errorf("%s: registered with %s, want %s", when, got, want)
	}
}

func expectTrouble(t *testing.T, a *Agent, when, want string) {
	t.Helper()
	synctest.Wait()
	st := a.Status()
	if err := st.AddressErr; want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: the agent says %v, want %q", when, err, want)
	}
	if st.Err != nil {
		t.Errorf("%s: the host does not count as registered: %v", when, st.Err)
	}
}

// TestAgentMoves: the Node resource follows the host's address, and does not
// follow a flap.
func TestAgentMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		a, stop := newFollower(t, s, &fakeTunnels{}, "first-found", "eth0 10.1.0.11/24")
		defer func() { stop() }()
		expectAddress(t, s, "at first", "10.1.0.11/24")

		a.HandleUnderlay(on(t, []string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"}, []string{"0.0.0.0/0 via 10.9.0.1 dev eth1"}))
		expectAddress(t, s, "beside a better one", "10.1.0.11/24")

		// The address comes back within seconds, as after a DHCP renewal.
		a.HandleUnderlay(on(t, []string{"eth1 10.9.0.5/24"}, nil))
		<-time.After(missingFor - time.Second) // virtual time
		expectAddress(t, s, "while the address is gone for a moment", "10.1.0.11/24")
		expectTrouble(t, a, "while the address is gone for a moment", "takes its place if")
		a.HandleUnderlay(on(t, []string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"}, nil))
		expectTrouble(t, a, "when it is back", "")
		<-time.After(2 * missingFor) // virtual time
		expectAddress(t, s, "long after it came back", "10.1.0.11/24")

		a.HandleUnderlay(on(t, []string{"eth1 10.9.0.5/24"}, nil))
		synctest.Wait()
		<-time.After(missingFor) // virtual time
		expectAddress(t, s, "when it is gone for good", "10.9.0.5/24")
		expectTrouble(t, a, "when it is gone for good", "")

		// The operator's way: the new one beside the old, the old one
		// deprecated, then taken away.
		a.HandleUnderlay(on(t, []string{"eth1 10.9.0.5/24,deprecated", "eth1 10.9.0.6/24,secondary"}, nil))
		expectAddress(t, s, "before the others know that it may send from the new one", "10.9.0.5/24")
		if got := fmt.Sprint(store.TunnelSources(get(t, s, "node1"))); got != "[10.9.0.5 10.9.0.6]" {
			t.Errorf("it publishes that it sends from %s", got)
		}
		<-time.After(announceFor) // virtual time
		expectAddress(t, s, "when it is deprecated", "10.9.0.6/24")
		a.HandleUnderlay(on(t, []string{"eth1 10.9.0.6/25"}, nil))
		expectAddress(t, s, "when the length changed", "10.9.0.6/25")

		a.HandleUnderlay(on(t, nil, nil))
		<-time.After(time.Hour) // virtual time
		expectAddress(t, s, "when nothing is left", "10.9.0.6/25")
		expectTrouble(t, a, "when nothing is left", "does not have any more")

		// A restart keeps what is registered, and moves when it must not.
		stop()
		_, stop = newFollower(t, s, &fakeTunnels{}, "first-found", "eth0 10.1.0.11/24", "eth1 10.9.0.6/25")
		expectAddress(t, s, "after a restart", "10.9.0.6/25")
		stop()
		a, stop = newFollower(t, s, &fakeTunnels{}, "interface=eth0", "eth0 10.1.0.11/24", "eth1 10.9.0.6/25")
		expectAddress(t, s, "after a restart with another method", "10.1.0.11/24")
		if d := a.Status().Addresses[dataplane.IPv4]; d.Link != "eth0" || d.Method != "interface=eth0" {
			t.Errorf("status %+v", d)
		}
	})
}

// TestAgentWaitsAtStart: a host that boots takes the address that it had, even
// if another interface is up sooner.
func TestAgentWaitsAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		if err := host(t, s, "node1", netip.MustParsePrefix("10.1.0.11/24")); err != nil {
			t.Fatal(err)
		}
		a, stop := newFollower(t, s, &fakeTunnels{}, "first-found", "eth1 10.9.0.5/24")
		defer stop()
		if st := a.Status(); st.Registered || st.Err == nil || !strings.Contains(st.Err.Error(), "10.9.0.5/24 on eth1 takes its place if") {
			t.Errorf("status %+v, want it to wait", st)
		}
		<-time.After(3 * time.Second) // virtual time
		a.HandleUnderlay(on(t, []string{"eth1 10.9.0.5/24", "eth0 10.1.0.11/24"}, nil))
		expectAddress(t, s, "when the address is there", "10.1.0.11/24")
		expectTrouble(t, a, "when the address is there", "")
		if !a.Status().Registered {
			t.Error("not registered")
		}
	})
}

// TestAgentMoveRefused: an address that another node is registered with is
// refused at run time as at the start, and taken once that node is gone.
func TestAgentMoveRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		if err := host(t, s, "node2", netip.MustParsePrefix("10.1.0.99/24")); err != nil {
			t.Fatal(err)
		}
		a, stop := newFollower(t, s, &fakeTunnels{}, "first-found", "eth0 10.1.0.11/24")
		defer stop()
		a.HandleUnderlay(on(t, []string{"eth0 10.1.0.11/24,deprecated", "eth0 10.1.0.99/24,secondary"}, nil))
		expectAddress(t, s, "with an address that is taken", "10.1.0.11/24")
		<-time.After(announceFor) // virtual time
		expectTrouble(t, a, "with an address that is taken", "node node2 is registered with it")
		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, "node2"), 0); err != nil {
			t.Fatal(err)
		}
		expectAddress(t, s, "when the other node is gone", "10.1.0.99/24")
		expectTrouble(t, a, "when the other node is gone", "")
	})
}

// TestAgentTunnelMoves: the new address of a tunnel is published before the
// old one is given back, also when the daemon is started anew in between.
func TestAgentTunnelMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		pool := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v3.IPPoolSpec{CIDR: "192.168.0.0/16", VXLANMode: v3.VXLANModeAlways}}
		if _, err := store.Create(t.Context(), s, pool); err != nil {
			t.Fatal(err)
		}
		tunnels := &fakeTunnels{}
		_, stop := newFollower(t, s, tunnels, "first-found", "eth0 10.1.0.11/24")
		tunnels.mu.Lock()
		tunnels.moved = map[Tunnel]netip.Addr{TunnelVXLAN: netip.MustParseAddr("10.66.0.1")}
		tunnels.mu.Unlock()
		if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindIPPool, "p"), func(cur store.Object) (any, error) {
			p, ok := store.Clone(cur.Value).(*v3.IPPool)
			if !ok {
				return nil, errors.New("no pool")
			}
			p.Spec.Disabled = true
			return p, nil
		}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		expect := func(when, held string) {
			t.Helper()
			synctest.Wait()
			if got := get(t, s, "node1").Spec.IPv4VXLANTunnelAddr; got != "10.66.0.1" || tunnels.holds(TunnelVXLAN) != held {
				t.Errorf("%s: published %s, held %s; want 10.66.0.1 published, %s held", when, got, tunnels.holds(TunnelVXLAN), held)
			}
		}
		expect("at once", "[192.168.0.2 10.66.0.1]")
		<-time.After(tunnelGrace / 2) // virtual time
		expect("before its time", "[192.168.0.2 10.66.0.1]")
		stop()
		_, stop = newFollower(t, s, tunnels, "first-found", "eth0 10.1.0.11/24")
		defer stop()
		expect("after a restart", "[192.168.0.2 10.66.0.1]")
		<-time.After(tunnelGrace) // virtual time
		expect("in the end", "[10.66.0.1]")
	})
}

// TestDefaultPoolOverlap: no pool is made over the host's own network.
func TestDefaultPoolOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		a := New(Config{
			Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler),
			DefaultPools: []DefaultPool{{CIDR: netip.MustParsePrefix("192.168.0.0/16"), Encapsulation: store.VXLAN, BlockSize: 26}},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(on(t, []string{"eth0 192.168.1.20/24"}, nil))
		expectAddress(t, s, "beside the refusal", "192.168.1.20/24")
		want := "the default pool default-ipv4-ippool with 192.168.0.0/16 is not made: it overlaps address 192.168.1.20/24 of device eth0 of this host; set defaultPool.cidr"
		if err := a.Status().Err; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the agent says %v, want %s", err, want)
		}
		if pools, _, err := s.List(t.Context(), store.KindIPPool, ""); err != nil || len(pools) != 0 {
			t.Errorf("%d pools, %v", len(pools), err)
		}
	})
}

// crowded is a datastore where somebody else writes to the Node as soon as this host
// has claimed an address in it, where the watch is late, and which fails that many
// of the writes that follow.
type crowded struct {
	*deaf
	claim string
	fail  int
	hit   bool
}

func (s *crowded) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	mine := func() (*store.Node, bool) {
		if len(ops) != 1 || ops[0].Object.Key != store.ResourceKey(store.KindNode, "node1") {
			return nil, false
		}
		n, ok := ops[0].Object.Value.(*store.Node)
		return n, ok
	}
	n, ok := mine()
	if ok && s.hit && s.fail > 0 && registered(n, dataplane.IPv4) != s.claim {
		s.fail--
		return nil, errors.New("the datastore is away")
	}
	out, err := s.deaf.Txn(ctx, ops...)
	if err == nil && ok && !s.hit && registered(n, dataplane.IPv4) == s.claim {
		s.hit = true
		if _, err := store.Modify(ctx, s.Store, ops[0].Object.Key, func(cur store.Object) (any, error) {
			n := store.Clone(cur.Value).(*store.Node)
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, "example.com/probed", "yes")
			return n, nil
		}); err != nil {
			return nil, err
		}
	}
	return out, err
}

// TestAgentTakesBack: of a race for an address a host takes its claim back, also
// where somebody else wrote to its Node meanwhile, whose word stays, and where the
// datastore is away for a while; and it says that it could not have the address.
func TestAgentTakesBack(t *testing.T) {
	for _, fail := range []int{0, 3} {
		t.Run(fmt.Sprint(fail, " failures"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := memory.New()
				defer m.Close()
				s := &crowded{deaf: &deaf{Store: m, t: t, gate: make(chan struct{}, 1)}, claim: "10.1.0.99/24", fail: fail}
				a, stop := newFollower(t, s, &fakeTunnels{}, "first-found", "eth0 10.1.0.11/24")
				defer stop()
				expectAddress(t, m, "at first", "10.1.0.11/24")

				s.gate <- struct{}{} // the watch is late
				if err := host(t, m, "node2", netip.MustParsePrefix("10.1.0.99/24")); err != nil {
					t.Fatal(err)
				}
				a.HandleUnderlay(on(t, []string{"eth0 10.1.0.11/24,deprecated", "eth0 10.1.0.99/24,secondary"}, nil))
				<-time.After(announceFor) // virtual time
				expectAddress(t, m, "before the other's claim is seen", "10.1.0.99/24")
				<-s.gate
				<-time.After(retryMax) // virtual time
				expectAddress(t, m, "in the end", "10.1.0.11/24")
				expectTrouble(t, a, "in the end", "node node2 is registered with it")
				if got := get(t, m, "node1").Annotations["example.com/probed"]; got != "yes" {
					t.Error("what somebody else wrote is lost")
				}
				if s.fail != 0 {
					t.Errorf("%d failures were not met", s.fail)
				}
			})
		})
	}
}
