package vrouter

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// statusSink is a fakeSink whose devices are done when the test says so.
type statusSink struct {
	fakeSink
	held bool
}

func (s *statusSink) Status(k dataplane.Key) (dataplane.Status, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.wish[k]
	if s.held {
		return dataplane.Status{Object: o}, ok
	}
	return dataplane.Status{Object: o, State: dataplane.Done}, ok
}

func (s *statusSink) hold(held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = held
}

// TestPublications follows a change through what a host publishes: nothing
// before its kernel is ready, one thing at a time, in the order that loses
// nothing.
func TestPublications(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &statusSink{held: true}
		c := New(Config{Node: "node1", Sink: sink, Status: sink.Status, Publish: true, WithoutBGP: true, Log: slog.New(slog.DiscardHandler)})
		startCore(t, c)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		offers := c.Publications(ctx)
		check(t, c.Underlay(t.Context(), rack()))
		check(t, feed(t, c, store.Batch{Events: testCluster(store.VXLAN), Synced: true}))
		check(t, c.Unsupported(t.Context(), []encap.Unsupported{{Driver: dataplane.DriverIPIP, Outer: dataplane.IPv4, Err: fmt.Errorf("no module")}}))
		<-c.Started()
		synctest.Wait()
		if len(offers) != 0 {
			t.Fatalf("published before the kernel has the device: %+v", <-offers)
		}
		sink.hold(false)
		rev := store.Revision(10)
		publish := func(want store.NodeEncaps) {
			t.Helper()
			got := <-offers // also after a second: the core looks again by itself
			want.Published, want.Refuses = true, map[string]string{"ipip": "no module"}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("published (-want +got):\n%s", diff)
			}
			synctest.Wait()
			if len(offers) != 0 {
				t.Fatalf("a second publication while one is under way: %+v", <-offers)
			}
			rev++
			check(t, c.Published(t.Context(), rev))
			synctest.Wait()
			if len(offers) != 0 {
				t.Fatalf("a second publication before the watch has shown the one before: %+v", <-offers)
			}
			ev := saying(testCluster(store.VXLAN)[1], got)
			ev.Object.Revision = rev
			check(t, feed(t, c, store.Batch{Events: []store.Event{ev}}))
		}
		vx := []string{"vxlan/4096/4789"}
		both := []string{"vxlan/4096/4789", "vxlan/5000/4789"}
		vx5 := []string{"vxlan/5000/4789"}
		publish(store.NodeEncaps{Accepts: vx, Uses: vx, Sends: map[string]string{"pool": "VXLAN/4096/4789"}})
		synctest.Wait()
		if len(offers) != 0 {
			t.Fatalf("settled, and yet: %+v", <-offers)
		}
		// The VNI changes; the peers, which publish nothing, follow at once.
		check(t, feed(t, c, store.Batch{Events: []store.Event{felixEvent(5000, 4789)}}))
		publish(store.NodeEncaps{Accepts: both, Uses: both, Sends: map[string]string{"pool": "VXLAN/4096/4789"}})
		publish(store.NodeEncaps{Accepts: both, Uses: vx5, Sends: map[string]string{"pool": "VXLAN/5000/4789"}})
		publish(store.NodeEncaps{Accepts: vx5, Uses: vx5, Sends: map[string]string{"pool": "VXLAN/5000/4789"}})
		synctest.Wait()
		if len(offers) != 0 {
			t.Fatalf("settled, and yet: %+v", <-offers)
		}
		if sink.has(dataplane.LinkKey{Name: "vxlan.calico"}) || !sink.has(dataplane.LinkKey{Name: "vxlan.calico-2"}) {
			t.Error("the old device is left, or the new one is missing")
		}
		pools, err := c.Pools(t.Context())
		check(t, err)
		if len(pools) != 1 || pools[0].Mode.String() != "VXLAN/5000/4789" || pools[0].BehindTotal != 0 || len(pools[0].Behind) != 0 {
			t.Errorf("pools: %+v", pools)
		}
	})
}

// TestBehindIsTold: a peer to which packets do not travel as the pool asks for
// is named, with the reason, by pool and by route.
func TestBehindIsTold(t *testing.T) {
	tab := newTestTable(testCluster(store.IPIP)...)
	tab.take(saying(nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"), store.NodeEncaps{
		Accepts: []string{"direct"}, Refuses: map[string]string{"ipip": "no module"},
	}))
	tab.take(poolEvent("other", "10.50.0.0/16", store.Direct))
	tab.settle()
	st := tab.encap.Status()
	i := slices.IndexFunc(st, func(p encap.PoolStatus) bool { return p.Name == "pool" })
	want := []encap.Delay{{Node: "node2", Encap: dataplane.Encap{Driver: "direct"}, Reason: "node node2 does not accept ipip: no module"}}
	if diff := cmp.Diff(want, st[i].Behind); diff != "" || st[i].BehindTotal != 1 {
		t.Errorf("behind, of %d (-want +got):\n%s", st[i].BehindTotal, diff)
	}
	for _, c := range tab.rib.Explain(blockEvent("192.168.2.0/26", "", nil).Key.CIDR()) {
		if c.Best && c.Peer == "node2" && c.Reason != "block of node node2 in pool pool; it goes in direct because node node2 does not accept ipip: no module" {
			t.Errorf("reason of the route: %q", c.Reason)
		}
	}
}

// TestWorkloadsFirst: a tunnel that takes less than workloads send waits for
// them, and they are told what to come down to at once.
func TestWorkloadsFirst(t *testing.T) {
	events := testCluster(store.Direct)
	events[1] = saying(events[1], store.NodeEncaps{Accepts: []string{"direct"}, Uses: []string{"direct"}, Sends: map[string]string{"pool": "Direct"}})
	tab := newTestTable(events...)
	tab.encap.SetWorkloadMTU(dataplane.IPv4, 1500)
	tab.take(poolEvent("pool", "192.168.0.0/16", store.VXLAN))
	tab.settle()
	near := encap.Key{Pool: "pool", Node: "node2", Family: dataplane.IPv4}
	tab.encap.SetKernel(map[dataplane.Encap]encap.State{encapOf(t, "vxlan/4096/4789"): {Done: true}, encapOf(t, "direct"): {Done: true}}, false)
	tab.settle()
	if w := tab.encap.PathTo(near); w.Target != encapOf(t, "direct") || tab.encap.MTU(dataplane.IPv4) != 1450 {
		t.Errorf("way %+v with an MTU of %d for workloads; want direct as yet, and 1450", w, tab.encap.MTU(dataplane.IPv4))
	}
	tab.encap.SetWorkloadMTU(dataplane.IPv4, 1450)
	tab.settle()
	if w := tab.encap.PathTo(near); w.Target != encapOf(t, "vxlan/4096/4789") {
		t.Errorf("way %+v; want VXLAN once the workloads are lowered", w)
	}
}

// TestTargets: what is to be probed has both ends, and what is wanted is there
// before it is in use.
func TestTargets(t *testing.T) {
	events := testCluster(store.VXLAN)
	n := events[2].Object.Value.(*store.Node)
	n.Annotations = map[string]string{store.AnnotationTunnelAddress: "203.0.113.2"}
	tab := newTestTable(events...)
	list, changed := tab.encap.Targets()
	if !changed || len(list) != 4 {
		t.Fatalf("targets %+v, changed %v", list, changed)
	}
	want := dataplane.ProbeTarget{
		Node: "node2", Registered: netip.MustParseAddr("10.1.0.12"), Public: netip.MustParseAddr("203.0.113.2"), ProbePath: &dataplane.ProbePath{
			Family: dataplane.IPv4, Uplink: "eth0", Local: tab.encap.Host(dataplane.IPv4).Addr, Encap: dataplane.Encap{Driver: "vxlan", Outer: dataplane.IPv4, Port: 4789},
		},
	}
	check := func(what string, got dataplane.ProbeTarget) {
		t.Helper()
		if !got.Equal(want) {
			t.Errorf("%s %+v %+v, want %+v %+v", what, got, *got.ProbePath, want, *want.ProbePath)
		}
	}
	check("underlay", list[0])
	want.Encap = encapOf(t, "vxlan/4096/4789")
	want.Tunnel = dataplane.ProbeTunnel{
		Inner: dataplane.IPv4, Link: "vxlan.calico", MTU: 1450, InUse: true, Local: netip.MustParseAddr("192.168.1.1"),
	}
	want.Peer = netip.MustParseAddr("192.168.2.1")
	check("tunnel", list[1])
	// What is the same for all peers is there once.
	if a, b := list[0].ProbePath, list[2].ProbePath; a != b {
		t.Errorf("the underlay of two peers is there twice: %p, %p", a, b)
	}
	if _, changed := tab.encap.Targets(); changed {
		t.Error("nothing changed, and yet it is told")
	}
	tab.take(gone(events[2]))
	tab.settle()
	if list, changed := tab.encap.Targets(); !changed || len(list) != 2 {
		t.Errorf("after a node has gone: %+v, changed %v", list, changed)
	}

	// What is sent plainly is probed in the encapsulation that some pool uses
	// towards others; without such a pool the neighbour table alone is asked.
	tab.take(poolEvent("pool", "192.168.0.0/16", store.IPIPCrossSubnet))
	tab.settle()
	list, _ = tab.encap.Targets()
	if i := slices.IndexFunc(list, func(tg dataplane.ProbeTarget) bool { return tg.Tunnel == (dataplane.ProbeTunnel{}) }); i < 0 || list[i].Encap != encapOf(t, "ipip") {
		t.Errorf("targets of a cross-subnet pool: %+v", list)
	}
	tab.take(poolEvent("pool", "192.168.0.0/16", store.Direct))
	tab.settle()
	list, changed = tab.encap.Targets()
	for _, tg := range list {
		if tg.Encap != (dataplane.Encap{}) || tg.Tunnel != (dataplane.ProbeTunnel{}) {
			t.Errorf("target without tunnels: %+v", tg)
		}
	}
	if !changed || len(list) == 0 {
		t.Errorf("targets without tunnels: %+v, changed %v", list, changed)
	}
}
