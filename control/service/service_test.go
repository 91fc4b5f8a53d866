package service

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, t := range texts {
		out = append(out, netip.MustParsePrefix(t))
	}
	return out
}

var (
	ready   = store.EndpointsHere{Ready: true}
	leaving = store.EndpointsHere{Leaving: true}
	both    = store.EndpointsHere{Ready: true, Leaving: true}
)

// on makes a slice of the Service "web".
func on(six bool, nodes map[string]store.EndpointsHere) *store.EndpointSlice {
	return &store.EndpointSlice{Service: "web", IPv6: six, Nodes: nodes}
}

// TestAnnounced holds what a node announces for one Service.
func TestAnnounced(t *testing.T) {
	t.Parallel()
	ranges := Ranges{
		Cluster: prefixes("10.96.0.0/16", "fd00:96::/112"), External: prefixes("172.16.0.0/24", "172.16.1.1/32"), LoadBalancer: prefixes("172.17.0.0/24", "172.17.1.1/32"),
	}
	single, need := ranges, ranges
	single.Single, need.NeedEndpoint = true, true
	all := store.Service{ClusterIPs: []string{"10.96.0.1", "fd00:96::1"}, ExternalIPs: []string{"172.16.0.1", "198.51.100.1"}, LoadBalancerIPs: []string{"172.17.0.1"}}
	local, internal := all, all
	local.ExternalLocal, internal.InternalLocal = true, true
	alone := store.Service{ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{"172.16.1.1"}, LoadBalancerIPs: []string{"172.17.1.1"}}
	here := func(e store.EndpointsHere) []*store.EndpointSlice {
		return []*store.EndpointSlice{on(false, map[string]store.EndpointsHere{"a": e})}
	}
	there := []*store.EndpointSlice{on(false, map[string]store.EndpointsHere{"b": ready})}
	for _, tt := range []struct {
		name   string
		ranges Ranges
		svc    store.Service
		slices []*store.EndpointSlice
		want   map[string]State
		others bool // another node serves it too
	}{
		{"in ranges that every node announces", ranges, all, here(ready), nil, false},
		{"local, here", ranges, local, here(ready), map[string]State{"10.96.0.1": Serving, "172.16.0.1": Serving, "172.17.0.1": Serving}, false},
		{"local, elsewhere", ranges, local, there, nil, false},
		{"local, both", ranges, local, append(here(ready), there...), map[string]State{"10.96.0.1": Serving, "172.16.0.1": Serving, "172.17.0.1": Serving}, true},
		{"local, of the other family", ranges, local, []*store.EndpointSlice{on(true, map[string]store.EndpointsHere{"a": ready})}, map[string]State{"fd00:96::1": Serving}, false},
		{"local, its node is not said", ranges, local, []*store.EndpointSlice{on(false, map[string]store.EndpointsHere{"": ready})}, nil, false},
		{"local, terminating", ranges, local, here(leaving), map[string]State{"10.96.0.1": Leaving, "172.16.0.1": Leaving, "172.17.0.1": Leaving}, false},
		{"local, one terminating and one ready", ranges, local, here(both), map[string]State{"10.96.0.1": Serving, "172.16.0.1": Serving, "172.17.0.1": Serving}, false},
		{"local, two slices", ranges, local, append(here(leaving), here(ready)...), map[string]State{"10.96.0.1": Serving, "172.16.0.1": Serving, "172.17.0.1": Serving}, false},
		{"local, none", ranges, local, nil, nil, false},
		{"internal local, here", ranges, internal, here(ready), map[string]State{"10.96.0.1": Serving}, false},
		{"internal local, elsewhere", ranges, internal, there, nil, false},
		{"one by one, elsewhere", single, all, there, map[string]State{"172.17.0.1": Serving}, true},
		{"one by one, terminating elsewhere", single, all, []*store.EndpointSlice{on(false, map[string]store.EndpointsHere{"b": leaving})}, map[string]State{"172.17.0.1": Serving}, false},
		{"one by one, none", single, all, nil, nil, false},
		{"one by one, local elsewhere", single, local, there, nil, false},
		{"ranges of one address", ranges, alone, nil, map[string]State{"172.16.1.1": Serving, "172.17.1.1": Serving}, false},
		{"ranges of one address, endpoints are needed", need, alone, nil, nil, false},
		{"ranges of one address, endpoints are needed and there", need, alone, there, map[string]State{"172.16.1.1": Serving, "172.17.1.1": Serving}, true},
		{"outside all ranges", Ranges{Single: true}, local, here(ready), nil, false},
		{"addresses that are none", ranges, store.Service{ClusterIPs: []string{"None", ""}, ExternalIPs: []string{"172.16.0.1%eth0", "x"}, ExternalLocal: true}, here(ready), nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			table := NewTable("a")
			table.SetRanges(tt.ranges)
			key := store.ServiceKey("default", "web")
			changed := table.SetService(key, &tt.svc)
			for i, s := range tt.slices {
				changed = table.SetSlice(store.EndpointSliceKey("default", fmt.Sprint("web-", i)), s) || changed
			}
			want := map[netip.Addr]Announcement{}
			for a, s := range tt.want {
				want[netip.MustParseAddr(a)] = Announcement{State: s, Elsewhere: tt.others, Service: key}
			}
			if diff := cmp.Diff(want, table.Announced("a"), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Errorf("announced (-want +got):\n%s", diff)
			}
			if changed != (len(want) > 0) {
				t.Errorf("changed: %v", changed)
			}
		})
	}
}

// TestManyEndpoints: of a Service with 10,000 endpoints in 100 slices, one of which is here, the
// address is announced until that one ends, and whoever else comes and goes changes nothing.
func TestManyEndpoints(t *testing.T) {
	t.Parallel()
	table := NewTable("a")
	table.SetRanges(Ranges{LoadBalancer: prefixes("172.16.0.0/24")})
	table.SetService(store.ServiceKey("default", "web"), &store.Service{ClusterIPs: []string{"10.96.0.1"}, LoadBalancerIPs: []string{"172.16.0.1"}, ExternalLocal: true})
	slice := func(i int) (store.Key, *store.EndpointSlice) {
		nodes := map[string]store.EndpointsHere{}
		for n := range 100 {
			nodes[fmt.Sprintf("n%d", (i*100+n)%5000)] = ready
		}
		return store.EndpointSliceKey("default", fmt.Sprint("web-", i)), on(false, nodes)
	}
	for i := range 100 {
		if table.SetSlice(slice(i)) {
			t.Fatalf("slice %d changes what is announced", i)
		}
	}
	announced := func(what string, want bool) {
		t.Helper()
		if _, is := table.Announced("a")[netip.MustParseAddr("172.16.0.1")]; is != want {
			t.Errorf("%s: announced is %v", what, is)
		}
	}
	announced("none is here", false)
	key, s := slice(50)
	s.Nodes["a"] = ready
	if !table.SetSlice(key, s) {
		t.Error("the first one here changes nothing")
	}
	announced("one is here", true)
	for i := range 50 {
		other, _ := slice(i)
		table.SetSlice(other, nil)
	}
	announced("half are gone", true)
	table.SetSlice(slice(50))
	announced("the one here is gone", false)
}

// TestSharedAddress: of two Services with one address the one that serves counts, and
// when it is gone the other.
func TestSharedAddress(t *testing.T) {
	t.Parallel()
	table := NewTable("a")
	table.SetRanges(Ranges{External: prefixes("172.16.0.0/24")})
	svc := &store.Service{ExternalIPs: []string{"172.16.0.1"}, ExternalLocal: true}
	addr := netip.MustParseAddr("172.16.0.1")
	for name, e := range map[string]store.EndpointsHere{"x": leaving, "y": ready, "z": ready} {
		table.SetService(store.ServiceKey("ns", name), svc)
		table.SetSlice(store.EndpointSliceKey("ns", name), &store.EndpointSlice{Service: name, Nodes: map[string]store.EndpointsHere{"a": e}})
	}
	for _, want := range []struct {
		name  string
		state State
	}{{"y", Serving}, {"z", Serving}, {"x", Leaving}} {
		got := table.Announced("a")[addr]
		if got.Service.Name != want.name || got.State != want.state {
			t.Errorf("%+v, want %+v", got, want)
		}
		if !table.SetSlice(store.EndpointSliceKey("ns", want.name), nil) {
			t.Errorf("that the endpoint of %s is gone is not reported", want.name)
		}
	}
	if got := table.Announced("a"); len(got) > 0 {
		t.Errorf("without endpoints: %v", got)
	}
}

// TestWide: what every node announces.
func TestWide(t *testing.T) {
	t.Parallel()
	r := Ranges{Cluster: prefixes("10.96.0.0/16"), External: prefixes("172.16.0.1/32"), LoadBalancer: prefixes("172.17.0.0/24", "fd00::1/128")}
	if diff := cmp.Diff(prefixes("10.96.0.0/16", "172.17.0.0/24"), r.Wide(), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("aggregated (-want +got):\n%s", diff)
	}
	r.Single = true
	if diff := cmp.Diff(prefixes("10.96.0.0/16"), r.Wide(), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("one by one (-want +got):\n%s", diff)
	}
}

// drawService makes a Service.
func drawService(t *rapid.T) *store.Service {
	ips := func(label string, of ...string) []string {
		return rapid.SliceOfNDistinct(rapid.SampledFrom(of), 0, 2, rapid.ID[string]).Draw(t, label)
	}
	return &store.Service{
		ClusterIPs:      ips("cluster", "10.96.0.1", "10.96.0.2", "fd00:96::1"),
		ExternalIPs:     ips("external", "172.16.0.1", "172.16.1.1", "198.51.100.1"),
		LoadBalancerIPs: ips("balancer", "172.16.0.1", "172.17.0.1", "172.17.1.1"),
		ExternalLocal:   rapid.Bool().Draw(t, "external local"), InternalLocal: rapid.Bool().Draw(t, "internal local"),
	}
}

// drawSlice makes an EndpointSlice.
func drawSlice(t *rapid.T) *store.EndpointSlice {
	return &store.EndpointSlice{
		Service: rapid.SampledFrom([]string{"x", "y"}).Draw(t, "of"), IPv6: rapid.Bool().Draw(t, "six"),
		Nodes: rapid.MapOfN(rapid.SampledFrom([]string{"a", "b", ""}), rapid.SampledFrom([]store.EndpointsHere{ready, leaving, both}), 0, 2).Draw(t, "nodes"),
	}
}

// drawRanges makes ranges.
func drawRanges(t *rapid.T) Ranges {
	some := func(label string, of ...string) []netip.Prefix {
		return prefixes(rapid.SliceOfNDistinct(rapid.SampledFrom(of), 0, 2, rapid.ID[string]).Draw(t, label)...)
	}
	return Ranges{
		Cluster: some("cluster", "10.96.0.0/16", "10.96.0.1/32", "fd00:96::/112"), External: some("external", "172.16.0.0/16", "172.16.1.1/32"),
		LoadBalancer: some("balancer", "172.17.0.0/16", "172.17.1.1/32", "172.16.0.0/24"),
		Single:       rapid.Bool().Draw(t, "single"), NeedEndpoint: rapid.Bool().Draw(t, "need endpoint"),
	}
}

// union is a set of the keys of two maps.
func union[K comparable, V any](a, b map[K]V) map[K]struct{} {
	out := map[K]struct{}{}
	for _, m := range []map[K]V{a, b} {
		for k := range m {
			out[k] = struct{}{}
		}
	}
	return out
}

// TestTableIndependentOfPath: what a table announces is what a new one does that was
// told the last of all, for its own node and for others; each change of it was reported,
// and is among the changes with what was before; a clone stays as it is.
func TestTableIndependentOfPath(t *testing.T) {
	t.Parallel()
	equal := func(a, b map[netip.Addr]Announcement) bool { // but for who was first
		return cmp.Equal(a, b, cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty(), cmpopts.IgnoreFields(Announcement{}, "Joined"))
	}
	rapid.Check(t, func(t *rapid.T) {
		table := NewTable("a")
		services, slices, ranges := map[store.Key]*store.Service{}, map[store.Key]*store.EndpointSlice{}, Ranges{}
		taken, reset := map[netip.Addr]Announcement{}, false // what was announced when changes were taken, and whether the ranges were set since
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			before, copied := table.Announced("a"), table.Clone()
			changed, ranged := false, false
			name := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "name")
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0:
				services[store.ServiceKey("ns", name)] = drawService(t)
				changed = table.SetService(store.ServiceKey("ns", name), services[store.ServiceKey("ns", name)])
			case 1:
				delete(services, store.ServiceKey("ns", name))
				changed = table.SetService(store.ServiceKey("ns", name), nil)
			case 2:
				slices[store.EndpointSliceKey("ns", name)] = drawSlice(t)
				changed = table.SetSlice(store.EndpointSliceKey("ns", name), slices[store.EndpointSliceKey("ns", name)])
			case 3:
				delete(slices, store.EndpointSliceKey("ns", name))
				changed = table.SetSlice(store.EndpointSliceKey("ns", name), nil)
			case 4:
				ranges = drawRanges(t)
				changed = table.SetRanges(ranges)
				ranged = changed
			}
			if !equal(before, copied.Announced("a")) {
				t.Fatal("a clone changed with its origin")
			}
			after := table.Announced("a")
			if !changed && !equal(before, after) {
				t.Fatalf("not reported: %v, then %v", before, after)
			}
			if reset = reset || ranged; rapid.Bool().Draw(t, "take changes") {
				changes := table.Changes()
				for a := range union(taken, after) {
					_, had := taken[a]
					if was, noted := changes[a]; !reset && (!noted && taken[a] != after[a] || noted && was != had) {
						t.Fatalf("%s: %v, then %v; noted %v, announced before %v", a, taken[a], after[a], noted, was)
					}
				}
				taken, reset = after, false
			}
		}
		for _, node := range []string{"a", "b"} {
			fresh := NewTable(node)
			for key, s := range slices {
				fresh.SetSlice(key, s)
			}
			for key, s := range services {
				fresh.SetService(key, s)
			}
			fresh.SetRanges(ranges)
			if want, got := fresh.Announced(node), table.Announced(node); !equal(want, got) {
				t.Fatalf("node %s: %v, want %v", node, got, want)
			}
		}
	})
}

// snapshots is a [Damper] that is told all that is to be announced, and not what has changed.
type snapshots struct {
	Damper
	last map[netip.Addr]Announcement
}

func (d *snapshots) damp(now time.Time, want map[netip.Addr]Announcement) (map[netip.Addr]bool, time.Duration) {
	changed := Changes{}
	for a, w := range want {
		if was, had := d.last[a]; !had || was != w {
			changed[a] = had
		}
	}
	for a := range d.last {
		if _, wanted := want[a]; !wanted {
			changed[a] = true
		}
	}
	d.last = want
	return d.Damp(now, func(a netip.Addr) (Announcement, bool) { w, ok := want[a]; return w, ok }, changed)
}

// TestDamp goes through the life of an address that comes and goes.
func TestDamp(t *testing.T) {
	t.Parallel()
	a := netip.MustParseAddr("172.16.0.1")
	up, alone, gone := map[netip.Addr]Announcement{a: {State: Serving, Elsewhere: true}}, map[netip.Addr]Announcement{a: {State: Serving}}, map[netip.Addr]Announcement{}
	var d snapshots
	now := time.Unix(1e9, 0)
	for i, s := range []struct {
		after time.Duration
		want  map[netip.Addr]Announcement
		held  bool
	}{
		{0, up, false}, // the first announcement is not delayed
		{time.Second, gone, false},
		{time.Second, up, false}, // one loss is no flapping
		{time.Second, gone, false},
		{time.Second, up, false},
		{time.Second, gone, false},
		{time.Second, up, true},     // the third within seconds is
		{time.Second, alone, false}, // but nobody else serves it
		{time.Second, up, false},    // what is announced is not taken back for it
		{time.Second, gone, false},
		{time.Second, up, true},
		{20 * time.Second, up, true},
		{40 * time.Second, up, false}, // it was quiet
		{time.Hour, gone, false},
		{time.Second, up, false}, // long forgotten
	} {
		now = now.Add(s.after)
		held, again := d.damp(now, s.want)
		if held[a] != s.held {
			t.Fatalf("step %d: held is %v", i, held[a])
		}
		if !s.held {
			if again != 0 {
				t.Errorf("step %d: nothing is held back, and yet it is to be looked at in %v", i, again)
			}
			continue
		}
		if again <= 0 || again > 2*halfLife+time.Second {
			t.Errorf("step %d: held back for %v", i, again)
		}
	}
}

// TestSettle: where other nodes serve an address already, one that begins to is left out until its proxy has had time to
// follow; where none does, where it terminated here and is ready again, and at a start nothing waits.
func TestSettle(t *testing.T) {
	t.Parallel()
	key, slice, addr := store.ServiceKey("default", "web"), store.EndpointSliceKey("default", "web-1"), netip.MustParseAddr("172.16.0.1")
	table := NewTable("a")
	table.SetRanges(Ranges{LoadBalancer: prefixes("172.16.0.0/24")})
	table.SetService(key, &store.Service{LoadBalancerIPs: []string{addr.String()}, ExternalLocal: true})
	var d Damper
	now := time.Unix(1e9, 0)
	for i, s := range []struct {
		after    time.Duration
		at       map[string]store.EndpointsHere
		is, held bool // announced but for the damper; held back
	}{
		{at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true}, // at a start
		{at: map[string]store.EndpointsHere{"b": ready}},
		{at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true, held: true},
		{after: settle / 2, at: map[string]store.EndpointsHere{"a": ready, "b": ready, "c": ready}, is: true, held: true},
		{after: settle / 2, at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true},
		{at: map[string]store.EndpointsHere{"a": {}, "b": ready}, is: true}, // it terminates
		{at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true},
		{after: 10 * time.Minute, at: nil},
		{at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true}, // nobody did before
		{after: 10 * time.Minute, at: map[string]store.EndpointsHere{"b": ready}},
		{at: map[string]store.EndpointsHere{"a": ready, "b": ready}, is: true, held: true},
		{at: map[string]store.EndpointsHere{"a": ready}, is: true}, // the others are gone
	} {
		now = now.Add(s.after)
		table.SetSlice(slice, &store.EndpointSlice{Service: "web", Nodes: s.at})
		held, again := d.Damp(now, table.Announcement, table.Changes())
		if _, is := table.Announcement(addr); is != s.is || held[addr] != s.held || (again > 0) != s.held || again > settle+time.Second {
			t.Errorf("step %d: announced %v, held %v, to be looked at in %v", i, is, held, again)
		}
	}
}

// TestDampBounds: nothing is held back without an announcement of it before, nor for
// longer than two half-lives after its last loss; what is not asked for is never held;
// and when the time that was said is over something is let go.
func TestDampBounds(t *testing.T) {
	t.Parallel()
	addrs := []netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("172.16.0.2")}
	rapid.Check(t, func(t *rapid.T) {
		var d snapshots
		now := time.Unix(1e9, 0)
		lost, had := map[netip.Addr]time.Time{}, map[netip.Addr]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 40_000).Draw(t, "ms")) * time.Millisecond)
			want := map[netip.Addr]Announcement{}
			for _, a := range addrs {
				if rapid.Bool().Draw(t, "wanted") {
					want[a] = Announcement{State: Serving, Elsewhere: rapid.Bool().Draw(t, "elsewhere")}
				}
				if _, ok := want[a]; !ok && had[a] {
					lost[a] = now
				}
			}
			held, again := d.damp(now, want)
			for a := range held {
				w, ok := want[a]
				switch {
				case !ok || !w.Elsewhere:
					t.Fatalf("%s is held back: %+v", a, w)
				case lost[a].IsZero():
					t.Fatalf("%s was never lost", a)
				case now.Sub(lost[a]) > 2*halfLife+time.Second:
					t.Fatalf("%s is held back %v after its loss", a, now.Sub(lost[a]))
				}
			}
			if len(held) > 0 {
				if later, _ := d.damp(now.Add(again), want); len(later) >= len(held) {
					t.Fatalf("after %v as much is held back", again)
				}
				now = now.Add(again)
			}
			had = map[netip.Addr]bool{}
			for a := range want {
				had[a] = true
			}
		}
	})
}

// BenchmarkDecide is what one change of an endpoint costs among 10,000 Services with
// externalTrafficPolicy Local, up to what the node announces.
func BenchmarkDecide(b *testing.B) {
	table := NewTable("a")
	table.SetRanges(Ranges{LoadBalancer: prefixes("172.16.0.0/12")})
	addr := netip.MustParseAddr("172.16.0.0")
	for i := range 10_000 {
		addr = addr.Next()
		table.SetService(store.ServiceKey("default", fmt.Sprint("s", i)), &store.Service{ClusterIPs: []string{"10.96.0.1"}, LoadBalancerIPs: []string{addr.String()}, ExternalLocal: true})
		table.SetSlice(store.EndpointSliceKey("default", fmt.Sprint("s", i)), &store.EndpointSlice{Service: fmt.Sprint("s", i), Nodes: map[string]store.EndpointsHere{"a": ready, "b": ready}})
	}
	states := []*store.EndpointSlice{{Service: "s1", Nodes: map[string]store.EndpointsHere{"a": ready, "b": ready}}, {Service: "s1", Nodes: map[string]store.EndpointsHere{"b": ready}}}
	var d Damper
	i := 0
	for b.Loop() {
		if i++; !table.SetSlice(store.EndpointSliceKey("default", "s1"), states[i%2]) {
			b.Fatal("nothing changed")
		}
		changes := table.Changes()
		d.Damp(time.Unix(int64(i)*3600, 0), table.Announcement, changes)
		if len(changes) != 1 {
			b.Fatal(changes)
		}
	}
}

// TestTableMemory: what is held of ten thousand Services, each with an EndpointSlice and an
// address that is announced, is bounded.
func TestTableMemory(t *testing.T) {
	const n, most = 10_000, 700
	inUse := func() uint64 {
		runtime.GC()
		runtime.GC() // what the first one made collectable
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := inUse()
	table := NewTable("node1")
	table.SetRanges(Ranges{External: prefixes("172.16.0.0/12")})
	addr := netip.MustParseAddr("172.16.0.0")
	for i := range n {
		addr = addr.Next()
		name := fmt.Sprint("service-", i)
		table.SetService(store.ServiceKey("default", name), &store.Service{ClusterIPs: []string{"10.96.0.1"}, ExternalIPs: []string{addr.String()}, ExternalLocal: true})
		table.SetSlice(store.EndpointSliceKey("default", name+"-abcde"), &store.EndpointSlice{Service: name, Nodes: map[string]store.EndpointsHere{fmt.Sprint("node", 1): ready, fmt.Sprint("node", i%1000): ready}})
	}
	if got := len(table.Announced("node1")); got != n {
		t.Fatalf("%d addresses are announced", got)
	}
	table.Changes() // a daemon takes them
	each := (inUse() - before) / n
	t.Logf("%d bytes a Service", each)
	if each > most {
		t.Errorf("%d bytes a Service, want at most %d", each, most)
	}
	runtime.KeepAlive(table)
}
