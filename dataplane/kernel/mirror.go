package kernel

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// mirror is what the kernel shows that is not, or not only, ours: every device
// and address, and what is foreign where we might want to be.
type mirror struct {
	links    map[int]*ifLink
	names    map[string]int
	addrs    map[int][]ifAddr
	routes   map[dataplane.RouteKey][]fibRoute  // of other protocols
	nextHops map[dataplane.NextHopID]fibNextHop // of other protocols
}

func newMirror() *mirror {
	return &mirror{
		links:    make(map[int]*ifLink),
		names:    make(map[string]int),
		addrs:    make(map[int][]ifAddr),
		routes:   make(map[dataplane.RouteKey][]fibRoute),
		nextHops: make(map[dataplane.NextHopID]fibNextHop),
	}
}

func (m *mirror) link(name string) *ifLink {
	if i, ok := m.names[name]; ok {
		return m.links[i]
	}
	return nil
}

// linkName is the name of a device, or a stand-in that no device has.
func (m *mirror) linkName(index int) string {
	if l := m.links[index]; l != nil {
		return l.name
	}
	return fmt.Sprintf("if%d?", index)
}

func (m *mirror) setLink(l ifLink) {
	if old := m.links[l.index]; old != nil && old.name != l.name && m.names[old.name] == l.index {
		delete(m.names, old.name)
	}
	m.links[l.index] = &l
	m.names[l.name] = l.index
}

func (m *mirror) deleteLink(index int) {
	l := m.links[index]
	if l == nil {
		return
	}
	delete(m.links, index)
	delete(m.addrs, index)
	if m.names[l.name] == index {
		delete(m.names, l.name)
	}
}

// setAddr adds or changes an address. Primary addresses stay before secondary
// ones, as in the kernel.
func (m *mirror) setAddr(a ifAddr) {
	list := m.addrs[a.link]
	i := slices.IndexFunc(list, func(x ifAddr) bool { return x.prefix == a.prefix })
	if i >= 0 {
		list[i] = a
	} else {
		list = append(list, a)
	}
	slices.SortStableFunc(list, func(x, y ifAddr) int {
		return cmp.Compare(x.flags&unix.IFA_F_SECONDARY, y.flags&unix.IFA_F_SECONDARY)
	})
	m.addrs[a.link] = list
}

func (m *mirror) deleteAddr(a ifAddr) {
	m.addrs[a.link] = slices.DeleteFunc(m.addrs[a.link], func(x ifAddr) bool { return x.prefix == a.prefix })
}

// lastIPv4 reports whether no IPv4 address is left on the device: the kernel
// then removes its IPv4 routes without saying so.
func (m *mirror) lastIPv4(link int) bool {
	return !slices.ContainsFunc(m.addrs[link], func(a ifAddr) bool { return a.prefix.Addr().Is4() })
}

// tracked reports whether a foreign route matters: those of the local table
// are the kernel's, one for each address.
func tracked(r *fibRoute) bool { return r.key.Table != unix.RT_TABLE_LOCAL }

// setRoute notes a foreign route. With replaced, it took the place of what
// had its key.
func (m *mirror) setRoute(r fibRoute, replaced bool) {
	list := m.routes[r.key]
	if replaced {
		list = nil
	}
	list = slices.DeleteFunc(list, func(x fibRoute) bool { return sameRoute(&x, &r) })
	m.routes[r.key] = append(list, r)
}

func sameRoute(a, b *fibRoute) bool {
	return a.protocol == b.protocol && a.tos == b.tos && a.typ == b.typ && a.nh == b.nh && slices.Equal(a.legs, b.legs)
}

// deleteRoute forgets a foreign route and reports whether none with its key
// is left.
func (m *mirror) deleteRoute(r fibRoute) bool {
	list := slices.DeleteFunc(m.routes[r.key], func(x fibRoute) bool { return sameRoute(&x, &r) })
	if len(list) == 0 {
		delete(m.routes, r.key)
		return true
	}
	m.routes[r.key] = list
	return false
}

// dropRoutes forgets foreign routes for which gone returns true and returns
// the keys that are free then.
func (m *mirror) dropRoutes(gone func(*fibRoute) bool) []dataplane.Key {
	var freed []dataplane.Key
	for k, list := range m.routes {
		left := slices.DeleteFunc(list, func(r fibRoute) bool { return gone(&r) })
		if len(left) == 0 {
			delete(m.routes, k)
			freed = append(freed, k)
		} else {
			m.routes[k] = left
		}
	}
	return freed
}

// foreignRoute returns a route of another protocol that has the key k, nil: there is
// none, and whether it is the only one.
func (m *mirror) foreignRoute(k dataplane.RouteKey) (r *fibRoute, alone bool) {
	for i := range m.routes[k] {
		if have := &m.routes[k][i]; have.tos == 0 {
			if r != nil {
				return r, false
			}
			r = have
		}
	}
	return r, true
}

// underlay renders the mirror for the core.
func (m *mirror) underlay() dataplane.Underlay {
	var u dataplane.Underlay
	for _, l := range m.links {
		u.Links = append(u.Links, dataplane.UnderlayLink{
			Index: l.index, Name: l.name, Type: l.kind, MTU: l.mtu, MAC: l.mac,
			Up: l.carrier(), Loopback: l.flags&unix.IFF_LOOPBACK != 0, VNI: l.vni, Port: l.port,
		})
	}
	slices.SortFunc(u.Links, func(a, b dataplane.UnderlayLink) int { return cmp.Compare(a.Index, b.Index) })
	for _, l := range u.Links {
		for _, a := range m.addrs[l.Index] {
			u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{
				Link: l.Name, Prefix: a.prefix,
				Secondary: a.flags&unix.IFA_F_SECONDARY != 0, Deprecated: a.flags&unix.IFA_F_DEPRECATED != 0,
				Tentative: a.flags&unix.IFA_F_TENTATIVE != 0, LinkScope: a.scope >= unix.RT_SCOPE_LINK,
			})
		}
	}
	for _, list := range m.routes {
		for i := range list {
			m.addUnderlayRoute(&u, &list[i])
		}
	}
	slices.SortFunc(u.Routes, compareUnderlayRoutes)
	slices.SortFunc(u.Dropping, compareUnderlayRoutes)
	return u
}

func compareUnderlayRoutes(a, b dataplane.UnderlayRoute) int {
	return cmp.Or(comparePrefixes(a.Prefix, b.Prefix), cmp.Compare(a.Metric, b.Metric), cmp.Compare(a.Link, b.Link),
		a.Gateway.Compare(b.Gateway), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Type, b.Type))
}

// addUnderlayRoute renders a foreign route, one for each way out.
func (m *mirror) addUnderlayRoute(u *dataplane.Underlay, r *fibRoute) {
	if r.key.Table != dataplane.MainTable || r.tos != 0 {
		return
	}
	x := dataplane.UnderlayRoute{
		Type: droppingType(r.typ), Prefix: r.key.Prefix, Source: r.prefSrc, Metric: r.key.Metric, Protocol: r.protocol, Behind: r.behind,
	}
	switch {
	case x.Type != "":
		u.Dropping = append(u.Dropping, x) // of IPv6 it has a device, which says nothing
	case r.typ == unix.RTN_UNICAST:
		for _, l := range r.legs {
			x.Gateway, x.Link = l.gateway, m.linkName(l.link)
			u.Routes = append(u.Routes, x)
		}
	}
}

// droppingType names the type of a route that leads nowhere.
func droppingType(typ uint8) string {
	switch typ {
	case unix.RTN_BLACKHOLE:
		return "blackhole"
	case unix.RTN_UNREACHABLE:
		return "unreachable"
	case unix.RTN_PROHIBIT:
		return "prohibit"
	case unix.RTN_THROW:
		return "throw"
	}
	return ""
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
