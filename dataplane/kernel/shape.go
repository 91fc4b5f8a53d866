package kernel

import (
	"encoding/binary"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// There may be a million routes, most of them with one of a few next hops. So the
// tracker keeps their keys as bytes, and of the routes what their keys do not say.

// packKey returns the key of a route as bytes: address, length, family, table, metric.
func packKey(k dataplane.Key) (p reconcile.Packed, ok bool) {
	r, ok := k.(dataplane.RouteKey)
	if !ok || !r.Prefix.IsValid() {
		return p, false
	}
	a := r.Prefix.Addr()
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
	return p, true
}

// unpackKey takes back packKey.
func unpackKey(p reconcile.Packed) dataplane.Key {
	a := netip.AddrFrom16([16]byte(p[:16]))
	if p[17] == byte(dataplane.IPv4) {
		a = netip.AddrFrom4([4]byte(p[:4]))
	}
	return dataplane.RouteKey{
		Prefix: netip.PrefixFrom(a, int(p[16])), Table: binary.LittleEndian.Uint32(p[18:]), Metric: binary.LittleEndian.Uint32(p[22:]),
	}
}

// shape is an object without what its key says, if it is a route.
type shape struct {
	isRoute bool
	typ     dataplane.RouteType
	nextHop dataplane.NextHopID
	mtu     uint32
	link    string

	other dataplane.Object // what is no route, whole
}

func shapeOf(o dataplane.Object) shape {
	if r, ok := o.(dataplane.Route); ok {
		return shape{isRoute: true, typ: r.Type, nextHop: r.NextHop, mtu: r.MTU, link: r.Link}
	}
	return shape{other: o}
}

// whole takes back shapeOf.
func whole(k dataplane.Key, s shape) dataplane.Object {
	if !s.isRoute {
		return s.other
	}
	r, _ := k.(dataplane.RouteKey) // that of a route
	return dataplane.Route{Prefix: r.Prefix, Table: r.Table, Metric: r.Metric, Type: s.typ, NextHop: s.nextHop, MTU: s.mtu, Link: s.link}
}
