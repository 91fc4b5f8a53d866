package vrouter

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// fakeSink keeps the wish and the order of calls.
type fakeSink struct {
	mu    sync.Mutex
	wish  map[dataplane.Key]dataplane.Object
	calls []string
}

func (s *fakeSink) has(k dataplane.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wish[k] != nil
}

func (s *fakeSink) called() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

func (s *fakeSink) Replace(_ dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "replace")
	s.wish = map[dataplane.Key]dataplane.Object{}
	for _, o := range objs {
		s.wish[o.Key()] = o
	}
	return 0
}

func (s *fakeSink) Update(_ dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "update")
	for _, k := range del {
		delete(s.wish, k)
	}
	for _, o := range put {
		s.wish[o.Key()] = o
	}
	return 0
}

func (s *fakeSink) UpdateRoutes(src dataplane.Source, routes dataplane.RouteChanges, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	put, del = withRoutes(routes, put, del)
	return s.Update(src, put, del)
}

func (s *fakeSink) Flush(_ dataplane.Source, hops []dataplane.Key) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "cut")
	for _, k := range hops {
		delete(s.wish, k)
	}
	return 0
}

func (s *fakeSink) Synced(dataplane.Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "synced")
}

func (s *fakeSink) Wait(context.Context, dataplane.Revision) error { return nil }

// withRoutes adds changes of routes to those of other objects.
func withRoutes(routes dataplane.RouteChanges, put []dataplane.Object, del []dataplane.Key) ([]dataplane.Object, []dataplane.Key) {
	for r := range routes.Put {
		put = append(put, r)
	}
	for k := range routes.Del {
		del = append(del, k)
	}
	return put, del
}

func start(t *testing.T) (*Core, *fakeSink) {
	t.Helper()
	sink := &fakeSink{}
	c := New(Config{Node: "node1", Sink: sink, Log: slog.New(slog.DiscardHandler)})
	startCore(t, c)
	return c, sink
}

func startCore(t *testing.T, c *Core) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestNothingBeforeSync: a partial view is not handed over, and nothing may be
// swept before the store and BGP have told all.
func TestNothingBeforeSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, sink := start(t)
		waiting := func() string {
			t.Helper()
			w, err := c.Waiting(t.Context())
			check(t, err)
			return w
		}
		events := testCluster(store.VXLAN)
		check(t, feed(t, c, store.Batch{Events: events[:4]}))
		synctest.Wait()
		if sink.called() != nil || !strings.Contains(waiting(), "datastore") {
			t.Fatalf("before the store is in sync: calls %v, waiting for %q", sink.called(), waiting())
		}
		check(t, feed(t, c, store.Batch{Events: events[4:], Synced: true}))
		synctest.Wait()
		if sink.called() != nil || !strings.Contains(waiting(), "links") {
			t.Fatalf("before the underlay is known: calls %v, waiting for %q", sink.called(), waiting())
		}
		check(t, c.Underlay(t.Context(), rack()))
		synctest.Wait()
		if !slices.Equal(sink.called(), []string{"replace"}) || waiting() != "" {
			t.Fatalf("before BGP is in sync: calls %v, waiting for %q", sink.called(), waiting())
		}
		check(t, c.Paths(t.Context(), rib.Update{Synced: true}))
		synctest.Wait()
		if !slices.Equal(sink.called(), []string{"replace", "synced"}) || waiting() != "" {
			t.Fatalf("in sync: calls %v, waiting for %q", sink.called(), waiting())
		}
		// A resync of the store hands over the difference, which is none.
		check(t, feed(t, c, store.Batch{Events: events, Synced: true}))
		check(t, feed(t, c, store.Batch{Err: store.ErrUnavailable}))
		synctest.Wait()
		if len(sink.called()) != 2 {
			t.Errorf("a resync without a difference: calls %v", sink.called())
		}
		if got := c.MTU(dataplane.IPv4); got != 1450 {
			t.Errorf("MTU = %d, want 1450", got)
		}
		// The uplink's MTU changes: the reader is told once, and finds the new one.
		<-c.MTUChanged()
		u := rack()
		for i := range u.Links {
			u.Links[i].MTU = 9000
		}
		check(t, c.Underlay(t.Context(), u))
		check(t, c.Underlay(t.Context(), u))
		synctest.Wait()
		<-c.MTUChanged()
		if got := c.MTU(dataplane.IPv4); got != 8950 || len(c.MTUChanged()) != 0 {
			t.Errorf("MTU = %d with jumbo frames, want 8950 and to be told once", got)
		}
	})
}

// TestFromDisk: what the disk says is handed over, and nothing is swept by it.
func TestFromDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, sink := start(t)
		events := testCluster(store.VXLAN)
		s := clustertest.Step(c.cfg.Node, store.Batch{Events: events, Synced: true})
		s.Source = cluster.Disk
		check(t, c.Store(t.Context(), s))
		check(t, c.Underlay(t.Context(), rack()))
		check(t, c.Paths(t.Context(), rib.Update{Synced: true}))
		synctest.Wait()
		if !slices.Equal(sink.called(), []string{"replace"}) {
			t.Fatalf("by the disk: calls %v", sink.called())
		}
		check(t, feed(t, c, store.Batch{Synced: true}))
		synctest.Wait()
		if !slices.Equal(sink.called(), []string{"replace", "synced"}) {
			t.Errorf("by the datastore: calls %v", sink.called())
		}
	})
}

// TestOldBlocks: a block of another node that the disk has is where a route goes, until BGP
// says of the prefix where it is, or the datastore does.
func TestOldBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := start(t)
		check(t, c.Underlay(t.Context(), rack()))
		block := netip.MustParsePrefix("192.168.2.0/26") // of node2
		best := func(want string) {
			t.Helper()
			cs, err := c.Explain(t.Context(), block)
			check(t, err)
			for _, cand := range cs {
				if got := cand.Source + " by " + cand.Peer; cand.Prefix == block && cand.Best && got != want {
					t.Errorf("the route is %s, want %s", got, want)
				}
			}
		}
		s := clustertest.Step(c.cfg.Node, store.Batch{Events: testCluster(store.VXLAN), Synced: true})
		s.Source = cluster.Disk
		check(t, c.Store(t.Context(), s))
		best("store by node2")
		moved := rib.Path{Prefix: block, Announced: nexthop.Announce(0, "node3", netip.MustParseAddr("10.2.0.11"))}
		check(t, c.Paths(t.Context(), rib.Update{Put: []rib.Path{moved}, Synced: true}))
		synctest.Wait()
		best("bgp by node3")
		routed, err := ask(t.Context(), c, func(l *loop) []string { return render(l.table) })
		check(t, err)
		if want := "192.168.2.0/26 via 192.168.3.1 dev vxlan.calico"; !slices.Contains(routed, want) {
			t.Errorf("no %q in %q", want, routed)
		}
		check(t, feed(t, c, store.Batch{Synced: true}))
		synctest.Wait()
		best("store by node2")
		if routed, err = ask(t.Context(), c, func(l *loop) []string { return render(l.table) }); slices.Contains(routed, "192.168.2.0/26 via 192.168.3.1 dev vxlan.calico") || err != nil {
			t.Errorf("the route stays where BGP says: %q, %v", routed, err)
		}
	})
}

// TestUpdatesLeadToTheWish holds that what was handed over step by step is
// what the table wants.
func TestUpdatesLeadToTheWish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, sink := start(t)
		check(t, c.Underlay(t.Context(), rack()))
		check(t, feed(t, c, store.Batch{Events: testCluster(store.IPIP), Synced: true}))
		check(t, feed(t, c, store.Batch{Events: []store.Event{poolEvent("pool", "192.168.0.0/16", store.VXLANCrossSubnet)}}))
		check(t, feed(t, c, store.Batch{Events: []store.Event{gone(nodeEvent("node2", "", "", ""))}}))
		check(t, c.Paths(t.Context(), rib.Update{Put: []rib.Path{{Prefix: netip.MustParsePrefix("172.16.0.0/12"), Announced: nexthop.Announce(0, "tor", netip.MustParseAddr("10.1.0.1"))}}}))
		want, err := ask(t.Context(), c, func(l *loop) []dataplane.Object { return desiredOf(l.table) })
		check(t, err)
		synctest.Wait()
		if len(want) != len(sink.wish) {
			t.Errorf("sink has %d objects, the table wants %d", len(sink.wish), len(want))
		}
		for _, o := range want {
			if sink.wish[o.Key()] != o {
				t.Errorf("sink has %v for %s, want %v", sink.wish[o.Key()], o.Key(), o)
			}
		}
	})
}

// TestDeferBGP: after a restart the routes of before do not move to a path
// that comes first and back to the better one that follows; peers that died
// meanwhile do not hold the others up for ever.
func TestDeferBGP(t *testing.T) {
	far := netip.MustParsePrefix("192.168.3.0/26")
	path := func(nextHop string) rib.Update {
		return rib.Update{Put: []rib.Path{{Prefix: far, Announced: nexthop.Announce(0, "peer", netip.MustParseAddr(nextHop))}}}
	}
	route := dataplane.Route{Prefix: far, Table: dataplane.MainTable}.Key()
	prepare := func(t *testing.T) (*Core, *fakeSink) {
		sink := &fakeSink{}
		c := New(Config{Node: "node1", Sink: sink, Log: slog.New(slog.DiscardHandler), DeferBGP: 30 * time.Second})
		startCore(t, c)
		check(t, c.Underlay(t.Context(), rack()))
		check(t, feed(t, c, store.Batch{Events: testCluster(store.Direct), Synced: true}))
		check(t, c.Paths(t.Context(), path("10.1.0.1")))
		synctest.Wait()
		if sink.has(route) {
			t.Error("the first path went in before the peers had told all")
		}
		return c, sink
	}
	synctest.Test(t, func(t *testing.T) {
		c, sink := prepare(t)
		better := path("10.2.0.11")
		better.Synced = true
		check(t, c.Paths(t.Context(), better))
		synctest.Wait()
		if !sink.has(route) || !slices.Equal(sink.called(), []string{"replace", "update", "synced"}) {
			t.Errorf("in sync: route there %v after %v; want one change", sink.has(route), sink.called())
		}
		// From now on paths go in as they come.
		check(t, c.Paths(t.Context(), rib.Update{Del: []netip.Prefix{far}}))
		synctest.Wait()
		if sink.has(route) {
			t.Error("a withdrawal after the sync is held back")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		_, sink := prepare(t)
		<-time.After(31 * time.Second) // virtual time
		synctest.Wait()
		if !sink.has(route) {
			t.Error("a path is held back longer than the bound")
		}
		if slices.Contains(sink.called(), "synced") {
			t.Error("the sweep did not wait for BGP")
		}
	})
}

func TestCallersDoNotHang(t *testing.T) {
	c := New(Config{Node: "node1", Sink: &fakeSink{}, Log: slog.New(slog.DiscardHandler)}) // not running
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	for range cap(c.events) + 1 {
		if err := c.Underlay(ctx, rack()); err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Underlay = %v", err)
			}
			return
		}
	}
	t.Error("a core that does not run took more events than it has room for")
}

// TestRestartInChange: a daemon that was killed while its host moved from VXLAN
// to Direct does not say that it left VXLAN before BGP has told the way to the
// other racks: until then the kernel sends there as the earlier life wished,
// and who takes that in must go on doing so.
func TestRestartInChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &fakeSink{}
		c := New(Config{Node: "node1", Sink: sink, Publish: true, Log: slog.New(slog.DiscardHandler), DeferBGP: 30 * time.Second})
		startCore(t, c)
		var published store.NodeEncaps
		go func() {
			for f := range c.Publications(t.Context()) {
				published = f
			}
		}()
		old := store.NodeEncaps{
			Published: true, Accepts: []string{"direct", "vxlan/4096/4789"}, Uses: []string{"direct", "vxlan/4096/4789"},
			Sends: map[string]string{"pool": "VXLAN/4096/4789"},
		}
		events := testCluster(store.Direct)
		for _, ev := range events {
			if n, ok := ev.Object.Value.(*store.Node); ok {
				store.SetNodeEncaps(n, old)
			}
		}
		check(t, c.Underlay(t.Context(), rack()))
		check(t, feed(t, c, store.Batch{Events: events, Synced: true}))
		synctest.Wait()
		if slices.Contains(published.Accepts, "direct") && !slices.Contains(published.Uses, "vxlan/4096/4789") {
			t.Errorf("before BGP is in sync: %+v; want VXLAN still in use", published)
		}
		if got := published.Sends["pool"]; got == "Direct" {
			t.Error("before BGP is in sync the host says that it has moved")
		}
		check(t, c.Paths(t.Context(), rib.Update{
			Put:    []rib.Path{{Prefix: netip.MustParsePrefix("192.168.3.0/26"), Announced: nexthop.Announce(0, "tor", netip.MustParseAddr("10.1.0.1"))}},
			Synced: true,
		}))
		synctest.Wait()
		if !slices.Equal(published.Uses, []string{"direct"}) || published.Sends["pool"] != "Direct" {
			t.Errorf("in sync: %+v; want only direct in use", published)
		}
	})
}

// TestOnlyWayLost: what leads to the only next hop of many prefixes goes at once,
// before these are looked at; one of two is a group replaced, and nothing is cut.
func TestOnlyWayLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, sink := start(t)
		check(t, c.Underlay(t.Context(), rack()))
		check(t, feed(t, c, store.Batch{Events: testCluster(store.Direct), Synced: true}))
		two := learnedPath("172.16.0.0/12", "10.1.0.2", "10.1.0.3")
		check(t, c.Paths(t.Context(), rib.Update{Put: []rib.Path{two}, Synced: true}))
		synctest.Wait()
		calls := func(u rib.Update) []string {
			t.Helper()
			n := len(sink.called())
			check(t, c.Paths(t.Context(), u))
			synctest.Wait()
			return sink.called()[n:]
		}
		route := dataplane.RouteKey{Prefix: two.Prefix, Table: dataplane.MainTable}
		if got := calls(rib.Update{Down: addrs("10.1.0.2")}); !slices.Equal(got, []string{"update"}) {
			t.Errorf("one of two lost: %q", got)
		}
		if got := calls(rib.Update{Down: addrs("10.1.0.3")}); !slices.Equal(got, []string{"cut", "update"}) || sink.wish[route] != nil {
			t.Errorf("the other lost: %q, and the route is %v", got, sink.wish[route])
		}
		if got := calls(rib.Update{Up: addrs("10.1.0.3")}); !slices.Equal(got, []string{"update"}) || sink.wish[route] == nil {
			t.Errorf("back: %q, and the route is %v", got, sink.wish[route])
		}
		// Lost and found in one: what was cut is wanted again.
		if got := calls(rib.Update{Down: addrs("10.1.0.3"), Up: addrs("10.1.0.3")}); got[0] != "cut" || sink.wish[route] == nil {
			t.Errorf("lost and found: %q, and the route is %v", got, sink.wish[route])
		}
		if r, _ := sink.wish[route].(dataplane.Route); sink.wish[dataplane.NextHopGroupKey{ID: r.NextHop}] == nil {
			t.Errorf("%v leads to nothing", r)
		}
	})
}
