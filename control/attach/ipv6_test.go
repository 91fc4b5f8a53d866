package attach

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// dual asks for an address of both families.
func dual(req AddRequest) AddRequest {
	req.IPv6 = true
	return req
}

// newWorld6 is a world whose daemon knows the MTU of both families.
func newWorld6(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.mtu.IPv6 = w.mtu.IPv4
	return w
}

func TestDualStack(t *testing.T) {
	t.Parallel()
	w := newWorld6(t)
	a := w.start()
	req := dual(w.request(1))
	res := w.add(a, req)
	diff(t, "addresses", []Address{
		{Addr: netip.MustParseAddr("192.168.0.1"), Gateway: netip.MustParseAddr("169.254.1.1"), Block: netip.MustParsePrefix("192.168.0.0/26")},
		{Addr: netip.MustParseAddr("fd00:1::1"), Gateway: netip.MustParseAddr("fe80::ecee:eeff:feee:eeee"), Block: netip.MustParsePrefix("fd00:1::/122")},
	}, res.Addresses)
	const dev = "cali00000000000"
	diff(t, "wanted", []string{
		"route 192.168.0.1/32 dev " + dev + " scope link",
		"route fd00:1::1/128 dev " + dev + " scope link",
		"sysctl net/ipv4/conf/" + dev + "/forwarding=1",
		"sysctl net/ipv4/conf/" + dev + "/proxy_arp=1",
		"sysctl net/ipv4/conf/" + dev + "/route_localnet=1",
		"sysctl net/ipv4/conf/" + dev + "/rp_filter=" + w.sysctl("net/ipv4/conf/default/rp_filter"),
		"sysctl net/ipv4/neigh/" + dev + "/proxy_delay=0",
		"sysctl net/ipv6/conf/" + dev + "/accept_ra=0",
		"sysctl net/ipv6/conf/" + dev + "/disable_ipv6=0",
		"sysctl net/ipv6/conf/" + dev + "/forwarding=1",
		"sysctl net/ipv6/conf/" + dev + "/proxy_ndp=1",
	}, w.sink.wanted())
	e := w.endpoint("default", "node--a-cni-0000000000000001-eth0")
	diff(t, "networks of the endpoint", []string{"192.168.0.1/32", "fd00:1::1/128"}, e.Spec.IPNetworks)

	// As the runtime remembers it, in either order.
	both := CheckRequest{ID: req.ID, Netns: req.Netns, Addresses: []netip.Addr{res.Addresses[1].Addr, res.Addresses[0].Addr}}
	if err := a.Check(t.Context(), both); err != nil {
		t.Errorf("check: %v", err)
	}
	both.Addresses = both.Addresses[:1]
	if err := a.Check(t.Context(), both); !errors.Is(err, workload.ErrDiffers) {
		t.Errorf("check with one address of two: %v; want ErrDiffers", err)
	}
	diff(t, "repeated ADD", res, w.add(a, req))

	b := w.start() // the daemon's next life
	diff(t, "ADD after a restart", res, w.add(b, req))
	w.check(b, req)
	if done, err := b.GC(t.Context(), "net1", nil); err != nil || len(done.Removed) != 1 {
		t.Errorf("GC: %v, %v", done, err)
	}
	w.expectClean()
}

func TestIPv6Alone(t *testing.T) {
	t.Parallel()
	w := newWorld6(t)
	a := w.start()
	req := dual(w.request(1))
	req.IPv4 = false
	res := w.add(a, req)
	if len(res.Addresses) != 1 || dataplane.FamilyOf(res.Addresses[0].Addr) != dataplane.IPv6 {
		t.Errorf("addresses: %+v", res.Addresses)
	}
	w.check(a, req)
	w.del(a, req)
	w.expectClean()
}

// Whatever fails in the middle of a dual-stack ADD, nothing of either family is
// left, and the next try succeeds.
func TestDualStackFailsWhole(t *testing.T) {
	t.Parallel()
	for _, step := range points("intent", "address", "vacant", "record", "wire", "route", "endpoint", "rules") {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newWorld6(t)
			a := w.start()
			req := dual(w.request(1))
			failAt(a, step)
			if _, err := a.Add(t.Context(), req); !errors.Is(err, errInjected) {
				t.Fatalf("got %v", err)
			}
			w.expectClean()
			a.steps.around = nil
			w.add(a, req)
			w.check(a, req)
			w.del(a, req)
			w.expectClean()
		})
	}
}

// A host on which IPv6 is switched off says which setting it is.
func TestIPv6OffOnTheHost(t *testing.T) {
	t.Parallel()
	w := newWorld6(t)
	a := w.start()
	if err := w.host.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	_, err := a.Add(t.Context(), dual(w.request(1)))
	if !errors.Is(err, workload.ErrNoIPv6) {
		t.Errorf("got %v, want ErrNoIPv6", err)
	}
	w.expectClean()
	w.add(a, w.request(2)) // IPv4 is served all the same
}

// The addresses that a datastore forgot are taken again, of both families.
func TestReclaimDualStack(t *testing.T) {
	t.Parallel()
	w := newWorld6(t)
	a := w.start()
	req := dual(w.request(1))
	w.add(a, req)
	w.ipam.mu.Lock()
	clear(w.ipam.held)
	w.ipam.mu.Unlock()
	if _, err := a.reclaimer.one(t.Context(), req.ID); err != nil {
		t.Fatal(err)
	}
	w.ipam.mu.Lock()
	defer w.ipam.mu.Unlock()
	if got := w.ipam.held[handle(req.ID)]; len(got) != 2 {
		t.Errorf("taken again: %v", got)
	}
}

// The kernel's owner programs what a dual-stack workload wants, and both
// families' packets pass when ADD returns.
func TestKernelDualStack(t *testing.T) {
	t.Parallel()
	w := newWorld6(t)
	w.realKernel()
	a := w.start()
	req := dual(w.request(1))
	res := w.add(a, req)
	w.programmed(res)
	for name, want := range map[string]string{"proxy_ndp": "1", "forwarding": "1", "accept_ra": "0", "disable_ipv6": "0"} {
		if got := w.sysctl(fmt.Sprintf("net/ipv6/conf/%s/%s", res.Device, name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	for _, addr := range res.Addresses {
		if err := w.wire.VerifyRoute(t.Context(), res.Device, addr.Addr); err != nil {
			t.Error(err)
		}
	}
	w.del(a, req)
	await.True(w.t, "no route", func() bool {
		routes, err := w.sink.netlink.RouteList(nil, unix.AF_INET6)
		return err == nil && len(routes) == 0
	})
	if _, err := w.store.Get(t.Context(), store.ResourceKey(store.KindProfile, "net1")); err != nil {
		t.Errorf("the network's profile: %v", err)
	}
}
