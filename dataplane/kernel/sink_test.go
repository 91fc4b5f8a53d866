package kernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

func TestNextHopSwapIsOneMessage(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	objs := []dataplane.Object{via(8, "10.0.0.2", "up0")}
	for i := range 256 {
		objs = append(objs, route(fmt.Sprintf("172.16.%d.0/24", i), 8))
	}
	k.put(objs...)
	n := k.writer.writes.Load()
	k.put(via(8, "10.0.0.3", "up0"))
	if d := k.writer.writes.Load() - n; d != 1 {
		t.Errorf("%d messages", d)
	}
	if out := l.run("ip route show proto 77"); strings.Count(out, "via 10.0.0.3") != 256 {
		t.Errorf("routes did not move:\n%s", out)
	}
}

// TestUpdateRoutes hands routes over as the core does: they are in the kernel as those of
// Update are, and go by their keys.
func TestUpdateRoutes(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	l.run("ip addr add 2001:db8::1/64 dev up0 nodad")
	routes := []dataplane.Route{
		route("172.16.0.0/24", 8),
		{Prefix: pfx("172.16.1.9/24"), Table: dataplane.MainTable, NextHop: 8, MTU: 1400},
		{Prefix: pfx("2001:db8:1::/64"), Table: dataplane.MainTable, NextHop: 9},
		{Prefix: pfx("172.16.2.0/24"), Table: dataplane.MainTable, Type: dataplane.Blackhole},
		{Prefix: pfx("172.16.3.1/32"), Table: dataplane.MainTable, Link: "up0"},
	}
	put := dataplane.RouteChanges{Put: slices.Values(routes), Del: none[dataplane.RouteKey]}
	k.wait(k.UpdateRoutes(dataplane.SourceCore, put, []dataplane.Object{via(8, "10.0.0.2", "up0"), via(9, "2001:db8::2", "up0")}, nil))
	l.shows("ip route show proto 77", `172.16.0.0/24 nhid 8 via 10.0.0.2 dev up0 onlink
172.16.1.0/24 nhid 8 via 10.0.0.2 dev up0 onlink mtu 1400
blackhole 172.16.2.0/24
172.16.3.1 dev up0 scope link`)
	l.shows("ip -6 route show proto 77", "2001:db8:1::/64 nhid 9 via 2001:db8::2 dev up0 metric 1024 onlink pref medium")
	n := k.writer.writes.Load()
	k.wait(k.UpdateRoutes(dataplane.SourceCore, put, nil, nil))
	if d := k.writer.writes.Load() - n; d != 0 {
		t.Errorf("%d messages for what is there", d)
	}
	del := dataplane.RouteChanges{Put: none[dataplane.Route], Del: func(yield func(dataplane.RouteKey) bool) {
		for _, r := range routes {
			if !yield(dataplane.RouteKey{Prefix: r.Prefix, Table: r.Table}) {
				return
			}
		}
	}}
	k.wait(k.UpdateRoutes(dataplane.SourceCore, del, nil, []dataplane.Key{dataplane.NextHopKey{ID: 8}}))
	l.shows("ip route show proto 77", "")
	l.shows("ip -6 route show proto 77", "")
}

func TestNextHopInUseIsNotDeleted(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(via(8, "10.0.0.2", "up0"), route("192.168.2.0/26", 8))
	// Somebody withdraws the next hop too early: the kernel would take the
	// route with it.
	k.Update(dataplane.SourceCore, nil, []dataplane.Key{dataplane.NextHopKey{ID: 8}})
	await.Until(t, "held", func() error {
		if !strings.Contains(k.log.String(), "1 routes or groups use it") {
			return errors.New("not held")
		}
		return nil
	})
	l.shows("ip route show proto 77", "192.168.2.0/26 nhid 8 via 10.0.0.2 dev up0 onlink")
	k.put(via(9, "10.0.0.3", "up0"), route("192.168.2.0/26", 9))
	l.shows("ip nexthop", "id 9 via 10.0.0.3 dev up0 scope link proto 77 onlink")
	l.shows("ip route show proto 77", "192.168.2.0/26 nhid 9 via 10.0.0.3 dev up0 onlink")
}

func TestTwentyThousandRoutes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	var mu sync.Mutex
	batches := map[string]int{}
	k := l.start(func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.Hooks.Written = func(kind dataplane.Kind, removed bool, n int) {
			mu.Lock()
			defer mu.Unlock()
			batches[fmt.Sprint(kind, " ", removed)] += n
		}
	})
	k.synced()
	objs := []dataplane.Object{via(8, "10.0.0.2", "up0"), via(9, "10.0.0.3", "up0")}
	objs = append(objs, manyRoutes(20_000, 8)...)
	objs = append(objs, route("10.8.0.0/16", 9))
	k.wait(k.Replace(dataplane.SourceCore, objs))
	if n := strings.Count(l.run("ip route show proto 77"), "nhid 8"); n != 20_000 {
		t.Errorf("%d routes in the kernel", n)
	}
	k.stop()

	k = l.start()
	k.wait(k.Replace(dataplane.SourceCore, objs))
	k.synced()
	k.ready()
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes after a restart", n)
	}
	// All routes of a next hop go with it in one message.
	k.wait(k.Replace(dataplane.SourceCore, []dataplane.Object{objs[1], objs[len(objs)-1]}))
	l.shows("ip route show proto 77", "10.8.0.0/16 nhid 9 via 10.0.0.3 dev up0 onlink")
	l.shows("ip nexthop", "id 9 via 10.0.0.3 dev up0 scope link proto 77 onlink")
	if n := k.writer.writes.Load(); n != 1 {
		t.Errorf("%d writes to remove a next hop and all its routes", n)
	}
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff(map[string]int{"nexthop false": 2, "route false": 20_001}, batches); diff != "" {
		t.Errorf("written by the first (-want +got):\n%s", diff)
	}
}

// TestRoutesGoOneByOneWhereTheirNextHopStays removes half of the routes of a
// next hop, in batches.
func TestRoutesGoOneByOneWhereTheirNextHopStays(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	many := manyRoutes(2*turnSize+100, 8)
	k.put(append(many, via(8, "10.0.0.2", "up0"))...)
	k.del(many[100:]...)
	if n := strings.Count(l.run("ip route show proto 77"), "nhid 8"); n != 100 {
		t.Errorf("%d routes are left", n)
	}
}

func manyRoutes(n int, id dataplane.NextHopID) []dataplane.Object {
	objs := make([]dataplane.Object, n)
	for i := range objs {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{20 + byte(i>>16), byte(i >> 8), byte(i), 0}), 24)
		objs[i] = dataplane.Route{Prefix: p, Table: dataplane.MainTable, NextHop: id}
	}
	return objs
}

// TestManyCallersAtOnce lets sources change their wishes from many goroutines
// while somebody else meddles.
func TestManyCallersAtOnce(t *testing.T) {
	t.Parallel()
	l, k := newHost(t, everyCheck(20*time.Millisecond))
	k.put(via(8, "10.0.0.2", "up0"))
	ctx := await.Context(t)
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for g := range 8 {
		wg.Go(func() {
			src := dataplane.Source(1 + g%2)
			for i := range 40 {
				r := route(fmt.Sprintf("172.%d.%d.0/24", 16+g, i), 8)
				if err := k.Wait(ctx, k.Update(src, []dataplane.Object{r}, nil)); err != nil {
					errs <- err
					return
				}
				if i%2 == 0 {
					if err := k.Wait(ctx, k.Update(src, nil, []dataplane.Key{r.Key()})); err != nil {
						errs <- err
						return
					}
				}
			}
		})
	}
	for i := range 20 {
		l.try(fmt.Sprintf("ip route del 172.16.%d.0/24", i))
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	k.settled()
	await.Until(t, "half of the routes", func() error {
		if n := strings.Count(l.run("ip route show proto 77"), "nhid 8"); n != 8*20 {
			return fmt.Errorf("%d routes", n)
		}
		return nil
	})
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "")
	l.run("ip addr add fd00::1/64 dev up0 nodad")
	k := l.start()
	k.synced()
	r := dataplane.Route{Prefix: pfx("fd00:1::/64"), Table: dataplane.MainTable, NextHop: 6}
	objs := []dataplane.Object{
		via(6, "fd00::2", "up0"), r,
		dataplane.Route{Prefix: pfx("fd00:2::/64"), Table: dataplane.MainTable, Type: dataplane.Blackhole},
		dataplane.Route{Prefix: pfx("fd00:3::5/128"), Table: dataplane.MainTable, Link: "up0"},
	}
	want := `blackhole fd00:2::/64 dev lo metric 1024 pref medium
fd00:1::/64 nhid 6 via fd00::2 dev up0 metric 1024 onlink pref medium
fd00:3::5 dev up0 metric 1024 pref medium`
	show := func() {
		t.Helper()
		await.Until(t, "routes", func() error {
			out := squeeze(l.run("ip -6 route show proto 77"))
			for line := range strings.Lines(want) {
				if !strings.Contains(out, strings.TrimSpace(line)) {
					return fmt.Errorf("no %q in\n%s", line, out)
				}
			}
			return nil
		})
	}
	k.put(objs...)
	show()
	if s, ok := k.Status(r.Key()); !ok || s.State != dataplane.Done {
		t.Errorf("status %v, %+v by the key as given", ok, s)
	}
	l.run("ip -6 route del fd00:1::/64")
	show()
	k.stop()
	k = l.start()
	k.wait(k.Replace(dataplane.SourceCore, objs))
	k.synced()
	k.ready()
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes after a restart", n)
	}
	k.del(objs...)
	l.shows("ip -6 route show proto 77", "")
}

// TestDroppingRoutes: what drops is told apart from what leads somewhere, and
// so is which of two routes of one key the kernel asks first.
func TestDroppingRoutes(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(host()...)
	k.ready()
	l.run("ip route add blackhole 192.168.2.0/27 proto bird", "ip route add unreachable 192.168.2.32/28", "ip route add prohibit 10.5.0.0/16 metric 9",
		"ip route add throw 10.6.0.0/16", "ip route prepend blackhole 192.168.2.0/26 proto bird", "ip route append 192.168.2.0/26 via 10.0.0.9",
		"ip -6 route add blackhole fd20::/122 metric 7")
	want := dataplane.Underlay{
		Routes: []dataplane.UnderlayRoute{
			{Prefix: pfx("10.0.0.0/24"), Link: "up0", Source: addr("10.0.0.1"), Protocol: 2},
			{Prefix: pfx("192.168.2.0/26"), Link: "up0", Gateway: addr("10.0.0.9"), Protocol: 3, Behind: true},
		},
		Dropping: []dataplane.UnderlayRoute{
			{Type: "throw", Prefix: pfx("10.6.0.0/16"), Protocol: 3},
			{Type: "prohibit", Prefix: pfx("10.5.0.0/16"), Metric: 9, Protocol: 3},
			{Type: "blackhole", Prefix: pfx("192.168.2.0/26"), Protocol: 12},
			{Type: "blackhole", Prefix: pfx("192.168.2.0/27"), Protocol: 12},
			{Type: "unreachable", Prefix: pfx("192.168.2.32/28"), Protocol: 3},
			{Type: "blackhole", Prefix: pfx("fd20::/122"), Metric: 7, Protocol: 3},
		},
	}
	slices.SortFunc(want.Dropping, compareUnderlayRoutes)
	as := func(what string, k *running) {
		t.Helper()
		u := until(t, k.Underlay(t.Context()), what, func(u dataplane.Underlay) bool { return len(u.Dropping) == len(want.Dropping) })
		u.Links, u.Addresses = nil, nil
		u.Routes = slices.DeleteFunc(u.Routes, func(r dataplane.UnderlayRoute) bool { return !r.Prefix.Addr().Is4() })
		if diff := cmp.Diff(want, u, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("underlay %s (-want +got):\n%s", what, diff)
		}
	}
	as("as told", k)
	k.stop()
	as("as listed", l.start())
}

// theUnderlay is what TestUnderlay makes, without IPv6.
func theUnderlay() dataplane.Underlay {
	return dataplane.Underlay{
		Links: []dataplane.UnderlayLink{
			{Index: 1, Name: "lo", MTU: 65536, Up: true, Loopback: true},
			{Index: 2, Name: "up1", Type: "veth", MTU: 1500, Up: true},
			{Index: 3, Name: "up0", Type: "veth", MTU: 1500, Up: true, MAC: mac("66:00:00:00:00:01")},
			{Index: 4, Name: "vxlan.calico", Type: "vxlan", MTU: 1450, Up: true, MAC: mac("66:07:02:c1:cc:60"), VNI: 4096, Port: 4789},
		},
		Addresses: []dataplane.UnderlayAddress{
			{Link: "lo", Prefix: pfx("127.0.0.1/8"), LinkScope: true},
			{Link: "up0", Prefix: pfx("10.0.0.1/24")},
			{Link: "up0", Prefix: pfx("10.0.0.5/24"), Secondary: true},
			{Link: "vxlan.calico", Prefix: pfx("192.168.0.1/32")},
		},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: pfx("0.0.0.0/0"), Gateway: addr("10.0.0.254"), Link: "up0", Protocol: 4},
			{Prefix: pfx("10.0.0.0/24"), Link: "up0", Source: addr("10.0.0.1"), Protocol: 2},
			{Prefix: pfx("172.16.0.0/12"), Gateway: addr("10.0.0.7"), Link: "up0", Metric: 5, Protocol: 3},
			{Prefix: pfx("172.16.0.0/12"), Gateway: addr("10.0.0.8"), Link: "up0", Metric: 5, Protocol: 3},
		},
	}
}

// compareIPv4 compares underlays without what IPv6 and chance put in.
func compareIPv4(want, got dataplane.Underlay) string {
	return cmp.Diff(want, got,
		// The modules of tunnels, where they are loaded, put their devices anywhere.
		cmpopts.IgnoreSliceElements(func(l dataplane.UnderlayLink) bool { return l.Type == "ipip" || l.Type == "ip6tnl" }),
		cmpopts.IgnoreFields(dataplane.UnderlayLink{}, "Index", "RPFilter", "AcceptRA"),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmpopts.IgnoreSliceElements(func(a dataplane.UnderlayAddress) bool { return !a.Prefix.Addr().Is4() }),
		cmpopts.IgnoreSliceElements(func(r dataplane.UnderlayRoute) bool { return !r.Prefix.Addr().Is4() }),
		cmp.Transformer("mac", func(l dataplane.UnderlayLink) dataplane.UnderlayLink {
			if l.Name == "up1" {
				l.MAC = dataplane.MAC{}
			}
			return l
		}))
}

// routed reports whether an underlay has a route for the prefix.
func routed(u dataplane.Underlay, p string) bool {
	return slices.ContainsFunc(u.Routes, func(r dataplane.UnderlayRoute) bool { return r.Prefix == pfx(p) })
}

// until reads snapshots until one fits.
func until(t *testing.T, ch <-chan dataplane.Underlay, what string, fits func(dataplane.Underlay) bool) dataplane.Underlay {
	t.Helper()
	late := time.After(await.Patience)
	for {
		select {
		case u := <-ch:
			if fits(u) {
				return u
			}
		case <-late:
			t.Fatalf("no snapshot with %s", what)
		}
	}
}

func TestUnderlay(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("ip addr add 10.0.0.5/24 dev up0", "ip route add default via 10.0.0.254 proto static", "ip link set up0 address 66:00:00:00:00:01",
		"ip route add 172.16.0.0/12 metric 5 nexthop via 10.0.0.7 nexthop via 10.0.0.8")
	k := l.start()
	k.put(host()...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, ch := k.Underlay(ctx), k.Underlay(ctx)
	u := until(t, ch, "the tunnel", func(u dataplane.Underlay) bool {
		return slices.ContainsFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool {
			return a.Prefix == pfx("192.168.0.1/32")
		})
	})
	if diff := compareIPv4(theUnderlay(), u); diff != "" {
		t.Errorf("underlay (-want +got):\n%s", diff)
	}
	l.run("ip route add 172.31.0.0/16 via 10.0.0.9")
	until(t, ch, "a new route", func(u dataplane.Underlay) bool { return routed(u, "172.31.0.0/16") })
	// The kernel says nothing of IPv4 routes that go with a device.
	l.run("ip link set up0 down")
	until(t, ch, "no routes", func(u dataplane.Underlay) bool {
		return !routed(u, "172.31.0.0/16") && !routed(u, "0.0.0.0/0") && !routed(u, "10.0.0.0/24")
	})
	l.run("ip link set up0 up", "ip route add default via 10.0.0.254")
	until(t, ch, "the default route", func(u dataplane.Underlay) bool { return routed(u, "0.0.0.0/0") })
	l.run("ip addr flush dev up0")
	until(t, ch, "no address", func(u dataplane.Underlay) bool { return !routed(u, "0.0.0.0/0") })
	// The slow reader gets only the newest.
	until(t, slow, "the newest", func(u dataplane.Underlay) bool {
		if routed(u, "172.31.0.0/16") {
			t.Error("an old snapshot")
		}
		return !routed(u, "0.0.0.0/0")
	})
	cancel()
	await.Until(t, "closed", func() error {
		select {
		case _, open := <-ch:
			if !open {
				return nil
			}
		default:
		}
		return errors.New("open")
	})
	k.stop()
	if _, open := <-k.Underlay(t.Context()); open {
		t.Error("a stopped kernel hands out snapshots")
	}
}

func TestReadyAndAlive(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	k := l.start()
	await.Until(t, "not ready for the sources", func() error {
		if ok, why := k.Ready(); ok || why != "source workload has not said yet what it wants" {
			return fmt.Errorf("%v %q", ok, why)
		}
		return nil
	})
	k.Synced(dataplane.SourceWorkload)
	if ok, why := k.Ready(); ok || why != "source core has not said yet what it wants" {
		t.Errorf("%v %q", ok, why)
	}
	// The core waits for its peers before it is synced; readiness does not.
	rev := k.Replace(dataplane.SourceCore, []dataplane.Object{
		dataplane.Route{Prefix: netip.MustParsePrefix("192.168.1.0/26"), Table: dataplane.MainTable, Type: dataplane.Blackhole},
	})
	k.ready()
	// Ready means done: nothing is left to wait for.
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Wait(ended, rev); err != nil {
		t.Errorf("ready before the first wish is in the kernel: %v", err)
	}
	if diff := cmp.Diff([]dataplane.Source{dataplane.SourceCore}, k.want.Unsynced()); diff != "" {
		t.Errorf("unsynced (-want +got):\n%s", diff)
	}
	first := k.Alive()
	await.Until(t, "an idle loop turns", func() error {
		if !k.Alive().After(first) {
			return errors.New("it stands")
		}
		return nil
	})
	if err := k.Run(t.Context()); err == nil || err.Error() != "run: called twice" {
		t.Errorf("second run: %v", err)
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	for want, cfg := range map[string]Config{
		"log: a logger is required": {},
		"protocol static (4) cannot mark our routes: choose a number from 5 to 255 that no other daemon here uses": {Protocol: 4, Log: log},
	} {
		if _, err := New(cfg); err == nil || err.Error() != want {
			t.Errorf("error %v; want %s", err, want)
		}
	}
	// A thread without the capability; it ends with its goroutine.
	var err error
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread()
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		if err = unix.Capset(&head, &caps[0]); err == nil {
			_, err = New(Config{Log: log})
		}
	})
	wg.Wait()
	const want = "write the kernel's routing tables: operation not permitted: run as root or give the process CAP_NET_ADMIN"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v; want %s", err, want)
	}
	k, err := New(Config{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(k.Close(), k.Close()); err != nil {
		t.Errorf("close: %v", err)
	}
}
