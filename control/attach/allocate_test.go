package attach

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
)

func (w *world) allocateRequest(n int) AllocateRequest {
	req := w.request(n)
	return AllocateRequest{ID: req.ID, IPv4: true}
}

var compareAddrs = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func (w *world) allocate(a *Attacher, req AllocateRequest) Address {
	w.t.Helper()
	res, err := a.Allocate(w.t.Context(), req)
	if err != nil {
		w.t.Fatal(err)
	}
	if len(res.Addresses) != 1 {
		w.t.Fatalf("got %+v, want one address", res)
	}
	return res.Addresses[0]
}

// An allocation lives across restarts, is given back by DEL and by GC, and
// nothing of it stays.
func TestAllocate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	one, two := w.allocateRequest(1), w.allocateRequest(2)
	got := w.allocate(a, one)
	if got.Gateway.IsValid() || !got.Block.Contains(got.Addr) {
		t.Errorf("got %+v, want an address of a block and no gateway", got)
	}
	if again := w.allocate(a, one); !cmp.Equal(got, again, compareAddrs) {
		t.Errorf("again: %+v, want %+v", again, got)
	}
	w.allocate(a, two)

	a = w.start() // killed and started anew
	if again := w.allocate(a, one); !cmp.Equal(got, again, compareAddrs) {
		t.Errorf("after a restart: %+v, want %+v", again, got)
	}
	check := CheckRequest{ID: one.ID, Addresses: []netip.Addr{got.Addr}, AddressesOnly: true}
	if err := a.Check(t.Context(), check); err != nil {
		t.Errorf("check: %v", err)
	}
	check.Addresses = []netip.Addr{got.Addr.Next()}
	if err := a.Check(t.Context(), check); !errors.Is(err, workload.ErrDiffers) {
		t.Errorf("check of another address: %v, want ErrDiffers", err)
	}
	// The network plugin's verbs know that the interface is another's.
	if err := a.Check(t.Context(), CheckRequest{ID: one.ID}); !errors.Is(err, workload.ErrDiffers) {
		t.Errorf("check as the network plugin: %v, want ErrDiffers", err)
	}
	if _, err := a.Add(t.Context(), AddRequest{ID: one.ID, Netns: "/x", IPv4: true}); !errors.Is(err, ErrInvalid) {
		t.Errorf("ADD as the network plugin: %v, want ErrInvalid", err)
	}

	for range 2 {
		if err := a.Del(t.Context(), DelRequest{ID: one.ID, AddressesOnly: true}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.GC(t.Context(), "net1", nil); err != nil {
		t.Fatal(err)
	}
	if left := w.leftovers(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// With a gateway the block is a subnet: its edges are no container's, the
// gateway is one for all containers, and all of it goes with the last of them.
func TestAllocateGateway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ipam.next[dataplane.IPv4] = netip.MustParseAddr("192.168.0.0")
	a := w.start()
	one, two := w.allocateRequest(1), w.allocateRequest(2)
	one.Gateway, one.Link, two.Gateway, two.Link = true, "cni0", true, "cni0"
	block := netip.MustParsePrefix("192.168.0.0/26")
	first := w.allocate(a, one)
	if want := (Address{Addr: netip.MustParseAddr("192.168.0.1"), Gateway: netip.MustParseAddr("192.168.0.2"), Block: block}); !cmp.Equal(want, first, compareAddrs) {
		t.Errorf("first: %+v, want %+v", first, want)
	}
	second := w.allocate(a, two)
	if want := (Address{Addr: netip.MustParseAddr("192.168.0.3"), Gateway: first.Gateway, Block: block}); !cmp.Equal(want, second, compareAddrs) {
		t.Errorf("second: %+v, want %+v", second, want)
	}
	route := dataplane.Route{Prefix: netip.MustParsePrefix("192.168.0.1/32"), Table: dataplane.MainTable, Link: "cni0"}
	w.sink.mu.Lock()
	have := w.sink.want[route.Key()]
	w.sink.mu.Unlock()
	if have != dataplane.Object(route) {
		t.Errorf("wanted %v, want %v", have, route)
	}
	if err := a.Del(t.Context(), DelRequest{ID: one.ID, AddressesOnly: true}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"net1.0000000000000002", "routerd-gateway-node-a.net1"}, w.ipam.handles()); diff != "" {
		t.Errorf("handles while one is left (-want +got):\n%s", diff)
	}
	if err := a.Del(t.Context(), DelRequest{ID: two.ID, AddressesOnly: true}); err != nil {
		t.Fatal(err)
	}
	// The bridge still has the gateway, so it stays the host's, also after a
	// restart; and so do the edges.
	a = w.start()
	if diff := cmp.Diff([]string{"routerd-gateway-node-a.net1"}, w.ipam.handles()); diff != "" {
		t.Errorf("handles at the end (-want +got):\n%s", diff)
	}
	if !a.KeptForHost(first.Gateway) || !a.Uses("routerd-gateway-node-a.net1") {
		t.Errorf("%s is not kept for the host", first.Gateway)
	}
	if third := w.allocate(a, two); third.Gateway != first.Gateway {
		t.Errorf("the next container has the gateway %s, want %s", third.Gateway, first.Gateway)
	}
}

// Containers behind one bridge do not wait for each other.
func TestAllocateSharesNoLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	one, two := w.allocateRequest(1), w.allocateRequest(2)
	one.Link, two.Link = "cni0", "cni0"
	w.allocate(a, one)
	w.allocate(a, two)
	inDel, goOn := make(chan struct{}), make(chan struct{})
	var first sync.Once
	watch(a, func(point string) {
		if point == "after detach" {
			first.Do(func() { close(inDel); <-goOn })
		}
	})
	deleted := make(chan error, 1)
	go func() { deleted <- a.Del(t.Context(), DelRequest{ID: one.ID, AddressesOnly: true}) }()
	<-inDel
	if l, ok := a.locks.tryLock(two.ID); !ok {
		t.Error("one container's DEL holds a lock of the other")
	} else {
		l.unlock()
	}
	close(goOn)
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
}

// Where no device of the host has the gateway, it goes with the last container.
func TestGatewayGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.allocateRequest(1)
	req.Gateway = true
	got := w.allocate(a, req)
	if !a.KeptForHost(got.Gateway) {
		t.Errorf("%s is not kept for the host", got.Gateway)
	}
	if err := a.Del(t.Context(), DelRequest{ID: req.ID, AddressesOnly: true}); err != nil {
		t.Fatal(err)
	}
	if left := w.leftovers(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	// The plugin deletes its device after that.
	if !a.KeptForHost(got.Gateway) {
		t.Errorf("%s is another's at once, while the device may have it", got.Gateway)
	}
	if a.gateways.has(got.Gateway, time.Now().Add(freedFor)) {
		t.Errorf("%s counts as the host's for good", got.Gateway)
	}
}

func TestEdges(t *testing.T) {
	t.Parallel()
	for block, want := range map[string][]string{
		"192.168.0.64/26": {"192.168.0.64", "192.168.0.127"},
		"10.0.0.0/20":     {"10.0.0.0", "10.0.15.255"},
		"10.0.0.7/32":     {"10.0.0.7", "10.0.0.7"},
		"fd00::40/122":    {"fd00::40"},
	} {
		var got []string
		for _, e := range edges(netip.MustParsePrefix(block)) {
			got = append(got, e.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", block, diff)
		}
	}
}

// Addresses that another plugin gave are routed, and are not IPAM's affair.
func TestGivenAddresses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	req.Given = []netip.Addr{netip.MustParseAddr("10.9.0.5")}
	req.MAC = dataplane.MAC{2, 0, 0, 0, 0, 7}
	res, err := a.Add(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Addresses) != 1 || res.Addresses[0].Addr != req.Given[0] || res.MAC != req.MAC {
		t.Errorf("result %+v, want %s and %s", res, req.Given[0], req.MAC)
	}
	if h := w.ipam.handles(); len(h) > 0 {
		t.Errorf("IPAM gave addresses to %q", h)
	}
	a = w.start()
	if err := a.Check(t.Context(), CheckRequest{ID: req.ID, Netns: req.Netns, MAC: req.MAC.String(), Addresses: req.Given}); err != nil {
		t.Errorf("check after a restart: %v", err)
	}
	if err := a.Del(t.Context(), delOf(req)); err != nil {
		t.Fatal(err)
	}
	if left := w.leftovers(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A configuration for another node is refused by name.
func TestOtherNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	req.Node = "node-b"
	if _, err := a.Add(t.Context(), req); !errors.Is(err, ErrInvalid) {
		t.Errorf("ADD: %v, want ErrInvalid", err)
	}
}

// What the host knows of is in use from before its address is given until
// after it is given back.
func TestUses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if !w.create().Uses("net1.anything") {
		t.Error("before the records are restored nothing can be said to be unused")
	}
	a := w.start()
	req, alloc := w.request(1), w.allocateRequest(2)
	alloc.Gateway = true
	h, gw := handle(req.ID), "routerd-gateway-node-a.net1"
	watch(a, func(point string) {
		if used := a.Uses(h); !used && point != "before intent" && point != "after forget" {
			t.Errorf("not in use %s", point)
		}
	})
	if _, err := a.Add(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	wired, err := a.Wired(t.Context())
	if err != nil || !wired[h] {
		t.Errorf("wired: %v, %v; want %s", wired, err, h)
	}
	if err := a.Del(t.Context(), delOf(req)); err != nil {
		t.Fatal(err)
	}
	a.steps.around = nil
	if a.Uses(h) || a.Uses(gw) {
		t.Error("in use after DEL")
	}
	w.allocate(a, alloc)
	if !a.Uses(gw) || !a.Uses(handle(alloc.ID)) {
		t.Error("an allocation is not in use")
	}
}
