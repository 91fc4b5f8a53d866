package kernel

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// There may be a million routes, most of them with one of a few next hops. So the
// tracker has their keys as bytes, and of the routes what their keys do not say. Both
// are plain values: on the way from the core to the kernel no object is made for a route.

// key is the key of an object.
type key struct {
	route reconcile.Packed // of a route: address, length, family, table, metric
	other dataplane.Key    // of anything else; nil: it is a route's
}

func keyOf(k dataplane.Key) key {
	if r, ok := k.(dataplane.RouteKey); ok && r.Prefix.IsValid() {
		return keyOfRoute(r)
	}
	return key{other: k}
}

// keyOfRoute is keyOf for the key of a route with a valid prefix.
func keyOfRoute(r dataplane.RouteKey) (k key) {
	a, p := r.Prefix.Addr(), &k.route
	if a.Is4() {
		four := a.As4()
		copy(p[:], four[:])
	} else {
		sixteen := a.As16()
		copy(p[:], sixteen[:])
	}
	p[16], p[17] = byte(r.Prefix.Bits()), byte(dataplane.FamilyOf(a))
	if a.Is4In6() {
		p[17] = byte(dataplane.IPv6)
	}
	binary.LittleEndian.PutUint32(p[18:], r.Table)
	binary.LittleEndian.PutUint32(p[22:], r.Metric)
	return k
}

// routeKey is whole, of a route.
func (k key) routeKey() dataplane.RouteKey {
	if r, ok := k.other.(dataplane.RouteKey); ok {
		return r
	}
	p := &k.route
	a := netip.AddrFrom16([16]byte(p[:16]))
	if p[17] == byte(dataplane.IPv4) {
		a = netip.AddrFrom4([4]byte(p[:4]))
	}
	return dataplane.RouteKey{
		Prefix: netip.PrefixFrom(a, int(p[16])), Table: binary.LittleEndian.Uint32(p[18:]), Metric: binary.LittleEndian.Uint32(p[22:]),
	}
}

// whole takes back keyOf.
func (k key) whole() dataplane.Key {
	if k.other == nil {
		return k.routeKey()
	}
	return k.other
}

func (k key) kind() dataplane.Kind {
	if k.other == nil {
		return dataplane.KindRoute
	}
	return k.other.Kind()
}

// compareKeys is [dataplane.CompareKeys].
func compareKeys(a, b key) int {
	if a.other == nil && b.other == nil {
		return a.routeKey().Compare(b.routeKey())
	}
	return dataplane.CompareKeys(a.whole(), b.whole())
}

func (k key) String() string { return k.whole().String() }

// packing is how the tracker keeps keys.
func packing() reconcile.Packing[key] {
	return reconcile.Packing[key]{
		Pack:   func(k key) (reconcile.Packed, bool) { return k.route, k.other == nil },
		Unpack: func(p reconcile.Packed) key { return key{route: p} },
	}
}

// shape is an object without what its key says, if it is a route that leads to no device.
type shape struct {
	isRoute bool
	typ     dataplane.RouteType
	nextHop dataplane.NextHopID
	mtu     uint32

	other dataplane.Object // anything else, whole
}

func shapeOf(o dataplane.Object) shape {
	if r, ok := o.(dataplane.Route); ok && r.Link == "" {
		return shapeOfRoute(r)
	}
	return shape{other: o}
}

// pairOf returns a route as the tracker has it.
func pairOf(r dataplane.Route) (key, shape) {
	if !r.Prefix.IsValid() || r.Link != "" {
		return keyOf(r.Key()), shapeOf(r)
	}
	return keyOfRoute(dataplane.RouteKey{Prefix: r.Prefix, Table: r.Table, Metric: r.Metric}), shapeOfRoute(r)
}

// shapeOfRoute is shapeOf for a route that leads to no device.
func shapeOfRoute(r dataplane.Route) shape {
	return shape{isRoute: true, typ: r.Type, nextHop: r.NextHop, mtu: r.MTU}
}

// whole takes back shapeOf.
func (s shape) whole(k key) dataplane.Object {
	if r, ok := s.route(k); ok {
		return r
	}
	return s.other
}

// route is whole, of a route.
func (s shape) route(k key) (dataplane.Route, bool) {
	if !s.isRoute {
		r, ok := s.other.(dataplane.Route)
		return r, ok
	}
	r := k.routeKey()
	return dataplane.Route{Prefix: r.Prefix, Table: r.Table, Metric: r.Metric, Type: s.typ, NextHop: s.nextHop, MTU: s.mtu}, true
}

// hop is the next hop that what has this shape uses; 0: none.
func (s shape) hop() dataplane.NextHopID {
	if s.isRoute {
		return s.nextHop
	}
	return nextHopOf(s.other)
}

// satisfied reports whether what there is satisfies what is wanted.
func satisfied(want, have shape) bool {
	return want == have || !want.isRoute && !have.isRoute && equal(want.other, have.other)
}

// tracker is what is wanted and what there is, in terms of objects.
type tracker struct {
	*reconcile.Tracker[key, shape]
}

func newTracker(onHave func(k key, old shape, had bool, now shape, has bool), sources ...dataplane.Source) tracker {
	return tracker{reconcile.New(reconcile.Config[key, shape]{
		Sources: sources,
		Classes: len(dataplane.Kinds()),
		Class:   func(k key) int { return class(k.kind()) },
		Equal:   satisfied,
		OnHave:  onHave,
		Packing: packing(),
	})}
}

// object returns a value of the tracker as an object.
func object(k key, s shape, ok bool) (dataplane.Object, bool) {
	if !ok {
		return nil, false
	}
	return s.whole(k), true
}

// Have returns what there is of a key.
func (t tracker) Have(k dataplane.Key) (dataplane.Object, bool) {
	s, ok := t.Tracker.Have(keyOf(k))
	return object(keyOf(k), s, ok)
}

// Want returns what is wanted of a key.
func (t tracker) Want(k dataplane.Key) (dataplane.Object, bool) {
	s, ok := t.Tracker.Want(keyOf(k))
	return object(keyOf(k), s, ok)
}

func (t tracker) Settled(k dataplane.Key) bool            { return t.Tracker.Settled(keyOf(k)) }
func (t tracker) Failure(k dataplane.Key) error           { return t.Tracker.Failure(keyOf(k)) }
func (t tracker) LoseHave(k dataplane.Key) bool           { return t.Tracker.LoseHave(keyOf(k)) }
func (t tracker) LoseDependent(k dataplane.Key) bool      { return t.Tracker.LoseDependent(keyOf(k)) }
func (t tracker) Drifts(k dataplane.Key) (int, time.Time) { return t.Tracker.Drifts(keyOf(k)) }

func (t tracker) SetHave(k dataplane.Key, o dataplane.Object) bool {
	return t.Tracker.SetHave(keyOf(k), shapeOf(o))
}

func (t tracker) SetDependent(k dataplane.Key, o dataplane.Object) bool {
	return t.Tracker.SetDependent(keyOf(k), shapeOf(o))
}

// Retry makes keys due at once that wait or are delayed.
func (t tracker) Retry(keys ...dataplane.Key) {
	for _, k := range keys {
		t.Tracker.Retry(keyOf(k))
	}
}
