package kernel

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
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
		pa, ok := packing().Pack(keyOf(a.Key()))
		pb, _ := packing().Pack(keyOf(b.Key()))
		k := packing().Unpack(pa)
		if !ok || pa[len(pa)-1] != 0 || k.whole() != a.Key() || k.kind() != dataplane.KindRoute || (pa == pb) != (a.Key() == b.Key()) {
			t.Fatalf("%v is packed as %x (%t) and is %v again; %v is %x", a.Key(), pa, ok, k, b.Key(), pb)
		}
		if got := shapeOf(a).whole(k); got != a || shapeOf(a) == (shape{}) {
			t.Fatalf("%v is %v again", a, got)
		}
		if got, want := compareKeys(k, keyOf(b.Key())), dataplane.CompareKeys(a.Key(), b.Key()); got != want {
			t.Fatalf("%v and %v compare as %d; want %d", a, b, got, want)
		}
	})
	for _, o := range []dataplane.Object{
		dataplane.NextHop{ID: 1, Link: "eth0"},
		dataplane.Sysctl{Name: "a", Value: "1"},
		noncanonicalRoute{Route: dataplane.Route{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Table: dataplane.MainTable}, tos: 4},
	} {
		k := keyOf(o.Key())
		if _, ok := packing().Pack(k); ok || k.whole() != o.Key() || k.kind() != o.Key().Kind() || shapeOf(o).whole(k) != o {
			t.Errorf("%v is packed: %t, and is %v again", o, ok, shapeOf(o).whole(k))
		}
	}
	none := dataplane.Route{NextHop: 1}
	if k := keyOf(none.Key()); k.other == nil || k.whole() != none.Key() || shapeOf(none).whole(k) != none {
		t.Errorf("what is no route is %v again", shapeOf(none).whole(k))
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
	tracker := newTracker(nil, dataplane.SourceCore)
	bytes, objects := heap()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	tracker.Update(dataplane.SourceCore, func(yield func(key, shape) bool) {
		for i := range n {
			var a [4]byte
			binary.BigEndian.PutUint32(a[:], 20<<24+uint32(i)<<8)
			r := dataplane.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4(a), 24), Table: dataplane.MainTable, NextHop: 1 << 24}
			if !yield(keyOfRoute(dataplane.RouteKey{Prefix: r.Prefix, Table: r.Table}), shapeOfRoute(r)) {
				return
			}
		}
	}, func(func(key) bool) {})
	for {
		ops := tracker.Due(class(dataplane.KindRoute), false, 4096)
		if len(ops) == 0 {
			break
		}
		results := make([]result, len(ops))
		for i := range ops {
			results[i].Op = ops[i]
		}
		tracker.Report(results)
	}
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if made := float64(after.Mallocs-before.Mallocs) / n; made > 0.01 {
		t.Errorf("%.3f objects are made for a route", made)
	}
	nowBytes, nowObjects := heap()
	each := float64(nowBytes-bytes) / n
	t.Logf("%.1f bytes and %d objects for %d routes", each, nowObjects-objects, n)
	if each > 75 || nowObjects-objects > n/100 {
		t.Errorf("%.1f bytes a route in %d objects; want at most 75, and chunks", each, nowObjects-objects)
	}
	runtime.KeepAlive(tracker)
}
