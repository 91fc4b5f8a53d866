package node

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// hostWith is a host with one device and these addresses.
func hostWith(addrs ...string) dataplane.Underlay {
	u := dataplane.Underlay{Links: []dataplane.UnderlayLink{{Index: 2, Name: "eth0", MTU: 1500, Up: true}}}
	for _, a := range addrs {
		u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: "eth0", Prefix: netip.MustParsePrefix(a)})
	}
	return u
}

func methods(v4, v6 string) map[dataplane.Family]string {
	return map[dataplane.Family]string{dataplane.IPv4: v4, dataplane.IPv6: v6}
}

// TestInternal: a host has the addresses that its kubelet says.
func TestInternal(t *testing.T) {
	t.Parallel()
	self := func(addrs ...string) *store.Node {
		n := &store.Node{Spec: store.NodeSpec{Addresses: []store.NodeAddress{{Address: "192.0.2.9", Type: "ExternalIP"}}}}
		for _, a := range addrs {
			n.Spec.Addresses = append(n.Spec.Addresses, store.NodeAddress{Address: a, Type: "InternalIP"})
		}
		return n
	}
	both := methods(MethodInternal, MethodInternal)
	for _, tt := range []struct {
		name string
		self *store.Node
		in   map[dataplane.Family]string
		want map[dataplane.Family]string
	}{
		{"no Node yet", nil, both, both},
		{"not said yet", self(), both, both},
		{"one family", self("10.1.0.11"), both, methods("10.1.0.11", MethodNone)},
		{"both", self("10.1.0.11", "fd00:1::11", "10.9.0.1"), both, methods("10.1.0.11", "fd00:1::11")},
		{"another method of IPv6", self("10.1.0.11", "fd00:1::11"), methods(MethodInternal, MethodAuto), methods("10.1.0.11", MethodAuto)},
	} {
		if diff := cmp.Diff(tt.want, withInternal(tt.in, internalIPs(tt.self))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	if err := CheckMethods(both); err != nil {
		t.Error(err)
	}
	if _, err := Detect(hostWith("10.1.0.11/24"), MethodInternal, dataplane.IPv4); err == nil || !strings.Contains(err.Error(), "InternalIP") {
		t.Errorf("without an address of the kubelet's: %v", err)
	}
}

// TestInternalApart: where the datastore's Node is not the kubelet's, a host is registered with what
// it is told, moves with it, and after a restart keeps what it is registered with until it is told.
func TestInternalApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		u := hostWith("10.1.0.11/24", "10.1.0.12/24", "fd00:1::11/64")
		start := func() (*Agent, func()) {
			a := New(Config{
				Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler),
				Methods: methods(MethodInternal, MethodInternal),
			})
			stop := follow(t, a, s)
			a.HandleUnderlay(u)
			return a, stop
		}
		addrs := func(list ...string) (out []netip.Addr) {
			for _, a := range list {
				out = append(out, netip.MustParseAddr(a))
			}
			return out
		}
		is := func(when string, a *Agent, four, six string) {
			t.Helper()
			synctest.Wait()
			if st := a.Status(); !st.Registered || st.Err != nil || st.AddressErr != nil {
				t.Errorf("%s: %+v", when, st)
			}
			if got := get(t, s, "node1").Spec.BGP; got.IPv4Address != four || got.IPv6Address != six {
				t.Errorf("%s: registered as %+v", when, got)
			}
		}
		a, stop := start()
		synctest.Wait()
		if st := a.Status(); st.Registered || st.Err == nil || !strings.Contains(st.Err.Error(), "InternalIP") {
			t.Errorf("before it is told: %+v", st)
		}
		a.SetInternalIPs(addrs("10.1.0.12"))
		is("told", a, "10.1.0.12/24", "")
		stop()
		a, stop = start()
		is("started again", a, "10.1.0.12/24", "")
		a.SetInternalIPs(addrs("10.1.0.11", "fd00:1::11"))
		is("told another", a, "10.1.0.11/24", "fd00:1::11/64")
		stop()
	})
}

func TestRegisterBothFamilies(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	four, six := netip.MustParsePrefix("10.1.0.11/24"), netip.MustParsePrefix("fd00:1::11/64")
	if err := host(t, s, "node1", four, six); err != nil {
		t.Fatal(err)
	}
	n := get(t, s, "node1")
	if n.Spec.BGP.IPv4Address != four.String() || n.Spec.BGP.IPv6Address != six.String() {
		t.Errorf("registered as %+v", n.Spec.BGP)
	}
	want := []store.NodeAddress{
		{Address: "10.1.0.11/24", Type: "CalicoNodeIP"},
		{Address: "10.1.0.11", Type: "InternalIP"},
		{Address: "fd00:1::11/64", Type: "CalicoNodeIP"},
		{Address: "fd00:1::11", Type: "InternalIP"},
	}
	if diff := cmp.Diff(want, n.Spec.Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}

	// Another IPv6 address takes the place of the first, and of nothing else.
	if err := host(t, s, "node1", netip.MustParsePrefix("fd00:1::12/64")); err != nil {
		t.Fatal(err)
	}
	want[2].Address, want[3].Address = "fd00:1::12/64", "fd00:1::12"
	if diff := cmp.Diff(want, get(t, s, "node1").Spec.Addresses); diff != "" {
		t.Errorf("addresses after the change (-want +got):\n%s", diff)
	}

	// One address of two is another node's: neither is registered.
	err := host(t, s, "node2", netip.MustParsePrefix("10.1.0.12/24"), netip.MustParsePrefix("fd00:1::12/64"))
	if err == nil || !strings.Contains(err.Error(), "fd00:1::12") || !strings.Contains(err.Error(), "address.ipv6") {
		t.Errorf("an address of another node: %v", err)
	}
	if _, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node2")); err == nil {
		t.Error("the refused host left a resource")
	}
}

// TestAgentFamilies: which families a host registers with, by what it has and
// what it is told.
func TestAgentFamilies(t *testing.T) {
	for _, tt := range []struct {
		name     string
		methods  map[dataplane.Family]string
		addrs    []string
		before   string // IPv6 address that the resource has already
		four     string
		six      string
		problems string
	}{
		{"both, default", nil, []string{"10.1.0.11/24", "fd00:1::11/64"}, "", "10.1.0.11/24", "", ""},
		{"both, an operator's IPv6 address stays", nil, []string{"10.1.0.11/24"}, "fd00:9::9/64", "10.1.0.11/24", "fd00:9::9/64", ""},
		{"both, asked for", methods("", "first-found"), []string{"10.1.0.11/24", "fd00:1::11/64"}, "", "10.1.0.11/24", "fd00:1::11/64", ""},
		{"IPv6 alone, default", nil, []string{"fd00:1::11/64", "fe80::1/64"}, "", "", "fd00:1::11/64", ""},
		{"IPv6 alone, asked for", methods("none", "interface=eth0"), []string{"10.1.0.11/24", "fd00:1::11/64"}, "", "", "fd00:1::11/64", ""},
		{"IPv6 not wanted", methods("first-found", "none"), []string{"10.1.0.11/24", "fd00:1::11/64"}, "fd00:1::11/64", "10.1.0.11/24", "", ""},
		{"IPv6 asked for and not there", methods("first-found", "cidr=fd00:2::/64"), []string{"10.1.0.11/24"}, "", "10.1.0.11/24", "", "IPv6"},
		{"nothing", nil, []string{"fe80::1/64"}, "", "", "", "no IPv4 address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memory.New()
				defer s.Close()
				if tt.before != "" {
					n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
					n.Spec.BGP = &store.NodeBGPSpec{IPv6Address: tt.before}
					if _, err := store.Create(t.Context(), s, n); err != nil {
						t.Fatal(err)
					}
				}
				a := New(Config{Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler), Methods: tt.methods})
				defer follow(t, a, s)()
				a.HandleUnderlay(hostWith(tt.addrs...))
				synctest.Wait()
				st := a.Status()
				if got := st.Err; (got == nil) != (tt.problems == "") || got != nil && !strings.Contains(got.Error(), tt.problems) {
					t.Errorf("error %v, want %q", got, tt.problems)
				}
				if tt.four == "" && tt.six == "" {
					if st.Registered {
						t.Error("registered without an address")
					}
					return
				}
				got := get(t, s, "node1").Spec.BGP
				if got.IPv4Address != tt.four || got.IPv6Address != tt.six {
					t.Errorf("registered as %+v; want %q and %q", got, tt.four, tt.six)
				}
			})
		})
	}
}

// A host that began with IPv6 alone gets its IPv4 address later, and both are
// registered.
func TestAgentSecondFamilyLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		a := New(Config{Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler), Methods: methods("first-found", "first-found")})
		defer follow(t, a, s)()
		a.HandleUnderlay(hostWith("fd00:1::11/64"))
		synctest.Wait()
		a.HandleUnderlay(hostWith("fd00:1::11/64", "10.1.0.11/24"))
		synctest.Wait()
		if got := get(t, s, "node1").Spec.BGP; got.IPv4Address != "10.1.0.11/24" || got.IPv6Address != "fd00:1::11/64" {
			t.Errorf("registered as %+v", got)
		}
	})
}

// Each pool's encapsulation and family asks for its own tunnel's address, and
// the default pools of both families are made.
func TestAgentIPv6Tunnels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		want := map[Tunnel]netip.Addr{}
		for i, tun := range AllTunnels() {
			want[tun] = netip.MustParseAddr([]string{"10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2"}[i])
		}
		a := New(Config{
			Name: "node1", Store: s, Tunnels: &fakeTunnels{moved: want}, Log: slog.New(slog.DiscardHandler), Methods: methods("", "first-found"),
			DefaultPools: []DefaultPool{
				{netip.MustParsePrefix("192.168.0.0/16"), store.IPIP, 26}, {netip.MustParsePrefix("fd00:10::/48"), store.VXLANCrossSubnet, 122},
			},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(hostWith("10.1.0.11/24", "fd00:1::11/64"))
		synctest.Wait()
		obj, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "default-ipv6-ippool"))
		if err != nil {
			t.Fatal(err)
		}
		p := obj.Value.(*v3.IPPool)
		if store.EncapsulationOf(p) != store.VXLANCrossSubnet || p.Spec.BlockSize != 122 || p.Spec.NATOutgoing {
			t.Errorf("default IPv6 pool: %+v", p.Spec)
		}
		n := get(t, s, "node1")
		if n.Spec.BGP.IPv4IPIPTunnelAddr != "10.9.0.1" || n.Spec.IPv6VXLANTunnelAddr != "fd00:9::2" || n.Spec.IPv4VXLANTunnelAddr != "" {
			t.Errorf("tunnel addresses: %+v, %+v", n.Spec, n.Spec.BGP)
		}

		other := DefaultPool{netip.MustParsePrefix("fd00:20::/48"), store.IPIPCrossSubnet, 122}.resource()
		other.Name = "other"
		if _, err := store.Create(t.Context(), s, other); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := get(t, s, "node1").Annotations[store.AnnotationIPv6IPIPTunnelAddr]; got != "fd00:9::1" {
			t.Errorf("address of the IPv6 IPIP tunnel: %q", got)
		}
	})
}

// TestTunnelKeepsAddress: a tunnel keeps its address while packets may travel through it,
// also where the pool that wants it has none to give, as one that is disabled; then it is
// given back.
func TestTunnelKeepsAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		tunnels := &fakeTunnels{}
		a := New(Config{
			Name: "node1", Store: s, Tunnels: tunnels, Log: slog.New(slog.DiscardHandler), Methods: methods("", "first-found"),
			DefaultPools: []DefaultPool{{netip.MustParsePrefix("192.168.0.0/16"), store.VXLAN, 26}},
		})
		defer follow(t, a, s)()
		a.HandleUnderlay(hostWith("10.1.0.11/24"))
		synctest.Wait()
		publishes := func(encaps ...string) {
			t.Helper()
			e := store.NodeEncaps{Published: true, Accepts: encaps, Uses: encaps}
			if _, err := a.PublishEncaps(t.Context(), e); err != nil {
				t.Fatal(err)
			}
		}
		has := func(when, want string) {
			t.Helper()
			synctest.Wait()
			if got := get(t, s, "node1").Spec.IPv4VXLANTunnelAddr; got != want {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		}
		publishes("vxlan/4096/4789")
		has("at first", "192.168.0.2")
		tunnels.mu.Lock()
		tunnels.moved = map[Tunnel]netip.Addr{TunnelVXLAN: {}} // no pool has one
		tunnels.mu.Unlock()
		publishes("direct", "vxlan/4096/4789")
		has("while it may carry packets", "192.168.0.2")
		<-time.After(2 * tunnelGrace) // virtual time
		if got := tunnels.holds(TunnelVXLAN); !strings.Contains(got, "192.168.0.2") {
			t.Errorf("given back while it may carry packets: held %s", got)
		}
		publishes("direct")
		has("when it carries none", "")
	})
}
