package kernel

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// TestShapes: the tracker gets back what it is given, and different keys are different
// bytes.
func TestShapes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		route := func() dataplane.Route {
			a := netip.AddrFrom4([4]byte{rapid.Byte().Draw(t, "first"), 0, 0, 1})
			bits := rapid.IntRange(0, 32).Draw(t, "bits")
			switch rapid.IntRange(0, 2).Draw(t, "family") {
			case 1:
				a = netip.AddrFrom16([16]byte{0: a.As4()[0], 15: 1})
			case 2:
				a = netip.AddrFrom16(a.As16()) // mapped
			}
			return dataplane.Route{
				Prefix: netip.PrefixFrom(a, bits), Table: rapid.Uint32Range(0, 300).Draw(t, "table"), Metric: rapid.Uint32().Draw(t, "metric"),
				Type: dataplane.RouteType(rapid.IntRange(0, 1).Draw(t, "type")), NextHop: dataplane.NextHopID(rapid.Uint32Range(0, 3).Draw(t, "hop")),
				Link: rapid.SampledFrom([]string{"", "cali1"}).Draw(t, "link"), MTU: rapid.SampledFrom([]uint32{0, 1400}).Draw(t, "mtu"),
			}
		}
		a, b := route(), route()
		pa, ok := packKey(a.Key())
		pb, _ := packKey(b.Key())
		if !ok || pa[len(pa)-1] != 0 || unpackKey(pa) != a.Key() || (pa == pb) != (a.Key() == b.Key()) {
			t.Fatalf("%v is packed as %x (%t) and is %v again; %v is %x", a.Key(), pa, ok, unpackKey(pa), b.Key(), pb)
		}
		if got := whole(a.Key(), shapeOf(a)); got != a || shapeOf(a) == (shape{}) {
			t.Fatalf("%v is %v again", a, got)
		}
	})
	for _, o := range []dataplane.Object{
		dataplane.NextHop{ID: 1, Link: "eth0"},
		dataplane.Sysctl{Name: "a", Value: "1"},
		noncanonicalRoute{Route: dataplane.Route{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Table: dataplane.MainTable}, tos: 4},
	} {
		if _, ok := packKey(o.Key()); ok || whole(o.Key(), shapeOf(o)) != o {
			t.Errorf("%v is packed: %t, and is %v again", o, ok, whole(o.Key(), shapeOf(o)))
		}
	}
	if _, ok := packKey(dataplane.RouteKey{}); ok {
		t.Error("the key of no route is packed")
	}
}

// TestBytesPerRoute: what is kept of a route that is wanted and there has no pointer, and
// few objects are made for one on the way.
func TestBytesPerRoute(t *testing.T) {
	const n = 100_000
	heap := func() (bytes, objects uint64) {
		runtime.GC()
		runtime.GC() // what the first one made collectable
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, m.HeapObjects
	}
	tracker := reconcile.New(reconcile.Config[dataplane.Key, dataplane.Object]{
		Sources: []dataplane.Source{dataplane.SourceCore},
		Packing: reconcile.Packing[dataplane.Key]{Pack: packKey, Unpack: unpackKey}, Values: reconcile.Split(shapeOf, whole),
	})
	bytes, objects := heap()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	tracker.Update(dataplane.SourceCore, func(yield func(dataplane.Key, dataplane.Object) bool) {
		for i := range n {
			var a [4]byte
			binary.BigEndian.PutUint32(a[:], 20<<24+uint32(i)<<8)
			r := dataplane.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4(a), 24), Table: dataplane.MainTable, NextHop: 1 << 24}
			if !yield(r.Key(), r) {
				return
			}
		}
	}, func(func(dataplane.Key) bool) {})
	for {
		ops := tracker.Due(0, false, 4096)
		if len(ops) == 0 {
			break
		}
		results := make([]reconcile.Result[dataplane.Key, dataplane.Object], len(ops))
		for i := range ops {
			results[i].Op = ops[i]
		}
		tracker.Report(results)
	}
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if made := float64(after.Mallocs-before.Mallocs) / n; made > 6 { // the route and its key, for the caller and for the work
		t.Errorf("%.1f objects are made for a route", made)
	}
	nowBytes, nowObjects := heap()
	each := float64(nowBytes-bytes) / n
	t.Logf("%.1f bytes and %d objects for %d routes", each, nowObjects-objects, n)
	if each > 80 || nowObjects-objects > n/100 {
		t.Errorf("%.1f bytes a route in %d objects; want at most 80, and chunks", each, nowObjects-objects)
	}
	runtime.KeepAlive(tracker)
}
