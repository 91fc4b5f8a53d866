package kernel

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// ifLink is a device as the kernel shows it.
type ifLink struct {
	index    int
	name     string
	kind     string
	alias    string
	mtu      int
	mac      dataplane.MAC
	flags    uint32
	vni      uint32
	port     uint16
	local    netip.Addr
	parent   int // index, of a tunnel device
	learning bool
	shape    string // what a tunnel has that a desired link cannot say; empty: as ours
	metadata bool   // takes the other end of an ip6tnl device from the route
	inet6    bool   // IPv6 is enabled there
	genMode  uint8  // how it makes link-local addresses, if inet6

	master    int  // of which device it is a port; 0: of none
	protoDown bool // held down by a program (IFLA_PROTO_DOWN)
}

// obstructed says what keeps a tunnel from handing its packets to this host or from
// sending them; empty: nothing.
func (l *ifLink) obstructed() string {
	var list []string
	if l.master != 0 {
		list = append(list, fmt.Sprintf("port of device %d", l.master))
	}
	if l.protoDown {
		list = append(list, "protodown")
	}
	if l.kind == string(dataplane.LinkVXLAN) && l.flags&unix.IFF_NOARP != 0 {
		list = append(list, "noarp") // the neighbours' addresses are not used
	}
	return strings.Join(list, " ")
}

// up reports whether the device is administratively up.
func (l *ifLink) up() bool { return l.flags&unix.IFF_UP != 0 }

// portOrZero is the UDP port of a VXLAN device; 0 if l is nil or of another
// kind.
func (l *ifLink) portOrZero() uint16 {
	if l == nil {
		return 0
	}
	return l.port
}

// carrier reports whether it is up and could carry packets. Without it the
// kernel removes the device's next hops.
func (l *ifLink) carrier() bool { return l.up() && l.flags&unix.IFF_LOWER_UP != 0 }

// autoLinkLocal reports whether it is a tunnel that makes IPv6 link-local addresses
// by itself. On a tunnel no host asks for them, and each would send router
// solicitations and reports of multicast groups into it.
func (l *ifLink) autoLinkLocal() bool {
	k := dataplane.LinkType(l.kind)
	return (k == dataplane.LinkVXLAN || k == dataplane.LinkIP6TNL) && l.inet6 && l.genMode != genModeNone
}

// parseLink reads RTM_NEWLINK and RTM_DELLINK. It refuses messages that say
// only a part: those of a bridge about its port, and of wireless events.
func parseLink(b []byte) (l ifLink, ok bool) {
	if len(b) < unix.SizeofIfInfomsg || b[0] != unix.AF_UNSPEC {
		return l, false
	}
	l.index, l.flags = int(nl.Value(b[4:]).Uint32()), nl.Value(b[8:]).Uint32()
	for t, v := range nl.Attributes(b[unix.SizeofIfInfomsg:]) {
		switch t {
		case unix.IFLA_IFNAME:
			l.name = v.Text()
		case unix.IFLA_MTU:
			l.mtu = int(v.Uint32())
		case unix.IFLA_IFALIAS:
			l.alias = v.Text()
		case unix.IFLA_ADDRESS:
			if len(v) == len(l.mac) {
				copy(l.mac[:], v)
			}
		case unix.IFLA_MASTER:
			l.master = int(v.Uint32())
		case unix.IFLA_PROTO_DOWN:
			l.protoDown = v.Uint8() != 0
		case unix.IFLA_LINKINFO:
			parseLinkInfo(&l, v)
		case unix.IFLA_AF_SPEC:
			parseFamilies(&l, v)
		case unix.IFLA_WIRELESS:
			return l, false
		}
	}
	return l, l.name != "" && l.index > 0
}

func parseLinkInfo(l *ifLink, b []byte) {
	var data []byte
	for t, v := range nl.Attributes(b) {
		switch t {
		case unix.IFLA_INFO_KIND:
			l.kind = v.Text()
		case unix.IFLA_INFO_DATA:
			data = v
		}
	}
	switch dataplane.LinkType(l.kind) {
	case dataplane.LinkVXLAN:
		parseVXLAN(l, data)
	case dataplane.LinkIP6TNL:
		parseIP6TNL(l, data)
	case dataplane.LinkIPIP:
	}
}

// parseFamilies reads IFLA_AF_SPEC, of which only IPv6's part is of interest.
func parseFamilies(l *ifLink, b []byte) {
	for family, spec := range nl.Attributes(b) {
		if family != unix.AF_INET6 {
			continue
		}
		for t, v := range nl.Attributes(spec) {
			if t == unix.IFLA_INET6_ADDR_GEN_MODE {
				l.inet6, l.genMode = true, v.Uint8()
			}
		}
	}
}

// parseIP6TNL reads the settings of a tunnel over IPv6 (linux/if_tunnel.h).
func parseIP6TNL(l *ifLink, data []byte) {
	var remote netip.Addr
	var flags uint32
	var ttl, proto uint8
	for t, v := range nl.Attributes(data) {
		switch t {
		case tunLink:
			l.parent = int(v.Uint32())
		case tunLocal:
			l.local = v.Addr()
		case tunRemote:
			remote = v.Addr()
		case tunTTL:
			ttl = v.Uint8()
		case tunFlags:
			flags = v.Uint32() & 0xffff // above are those that the kernel computes
		case tunProto:
			proto = v.Uint8()
		case tunMetadata:
			l.metadata = true
		}
	}
	if remote.IsValid() && !remote.IsUnspecified() || flags != tunNoLimit || ttl != hopLimit || proto != 0 {
		l.shape = fmt.Sprintf("remote %s ttl %d flags %#x proto %d", remote, ttl, flags, proto)
	}
}

func parseVXLAN(l *ifLink, data []byte) {
	var ttl, tos, df uint8
	ageing := uint32(vxlanAgeing)
	for t, v := range nl.Attributes(data) {
		switch t {
		case unix.IFLA_VXLAN_TTL:
			ttl = v.Uint8()
		case unix.IFLA_VXLAN_TOS:
			tos = v.Uint8()
		case unix.IFLA_VXLAN_DF:
			df = v.Uint8()
		case unix.IFLA_VXLAN_AGEING:
			ageing = v.Uint32()
		case unix.IFLA_VXLAN_ID:
			l.vni = v.Uint32()
		case unix.IFLA_VXLAN_LINK:
			l.parent = int(v.Uint32())
		case unix.IFLA_VXLAN_LOCAL, unix.IFLA_VXLAN_LOCAL6:
			l.local = v.Addr()
		case unix.IFLA_VXLAN_PORT:
			l.port = v.Net16()
		case unix.IFLA_VXLAN_LEARNING:
			l.learning = v.Uint8() != 0
		}
	}
	if ttl != 0 || tos != 0 || df != 0 || ageing != vxlanAgeing {
		l.shape = fmt.Sprintf("ttl %d tos %#x df %d ageing %d", ttl, tos, df, ageing)
	}
}

// ifAddr is an address on a device as the kernel shows it.
type ifAddr struct {
	link   int
	prefix netip.Prefix
	flags  uint32
	scope  uint8
}

// parseAddr reads RTM_NEWADDR and RTM_DELADDR.
func parseAddr(b []byte) (a ifAddr, ok bool) {
	if len(b) < unix.SizeofIfAddrmsg {
		return a, false
	}
	bits := int(b[1])
	a.flags, a.scope, a.link = uint32(b[2]), b[3], int(nl.Value(b[4:]).Uint32())
	var local, addr netip.Addr
	for t, v := range nl.Attributes(b[unix.SizeofIfAddrmsg:]) {
		switch t {
		case unix.IFA_LOCAL:
			local = v.Addr()
		case unix.IFA_ADDRESS:
			addr = v.Addr()
		case unix.IFA_FLAGS:
			a.flags = v.Uint32()
		}
	}
	if !local.IsValid() {
		local = addr // IPv6 has IFA_LOCAL only on point-to-point devices
	}
	a.prefix = netip.PrefixFrom(local, bits)
	return a, a.prefix.IsValid()
}

// leg is one way out of a route.
type leg struct {
	link    int
	gateway netip.Addr
}

// fibRoute is a route as the kernel shows it.
type fibRoute struct {
	key      dataplane.RouteKey
	protocol uint8
	typ      uint8
	tos      uint8
	scope    uint8
	nh       dataplane.NextHopID
	legs     []leg
	prefSrc  netip.Addr
	mtu      uint32 // RTAX_MTU, not locked
	extra    bool   // something that we never set, such as other metrics
	behind   bool   // of a foreign one: one of ours with its key is before it
}

// parseRoute reads RTM_NEWROUTE and RTM_DELROUTE. Clones, which IPv6 makes of
// a route per destination, are not routes.
func parseRoute(b []byte) (r fibRoute, ok bool) {
	if len(b) < unix.SizeofRtMsg || nl.Value(b[8:]).Uint32()&unix.RTM_F_CLONED != 0 {
		return r, false
	}
	var dst netip.Addr
	switch b[0] {
	case unix.AF_INET:
		dst = netip.IPv4Unspecified()
	case unix.AF_INET6:
		dst = netip.IPv6Unspecified()
	default:
		return r, false
	}
	r.key.Table = uint32(b[4])
	r.tos, r.protocol, r.scope, r.typ = b[3], b[5], b[6], b[7]
	r.extra = b[2] != 0
	var one leg
	encapsulated := false
	for t, v := range nl.Attributes(b[unix.SizeofRtMsg:]) {
		switch t {
		case unix.RTA_DST:
			dst = v.Addr()
		case unix.RTA_TABLE:
			r.key.Table = v.Uint32()
		case unix.RTA_PRIORITY:
			r.key.Metric = v.Uint32()
		case rtaNHID:
			r.nh = dataplane.NextHopID(v.Uint32())
		case unix.RTA_OIF:
			one.link = int(v.Uint32())
		case unix.RTA_GATEWAY:
			one.gateway = v.Addr()
		case rtaVia:
			if len(v) > 2 {
				one.gateway = v[2:].Addr()
			}
		case unix.RTA_MULTIPATH:
			r.legs = parseLegs(v)
		case unix.RTA_PREFSRC:
			r.prefSrc = v.Addr()
		case unix.RTA_METRICS:
			for metric, x := range nl.Attributes(v) {
				if metric == unix.RTAX_MTU {
					r.mtu = x.Uint32()
				} else {
					r.extra = true
				}
			}
		case unix.RTA_ENCAP:
			encapsulated = true
		case unix.RTA_MARK, unix.RTA_FLOW:
			r.extra = true
		}
	}
	r.extra = r.extra || encapsulated && r.nh == 0 // that of a next hop is its own
	if r.legs == nil && one.link != 0 {
		r.legs = []leg{one}
	}
	r.key.Prefix = netip.PrefixFrom(dst, int(b[1]))
	return r, r.key.Prefix.IsValid()
}

// parseLegs reads RTA_MULTIPATH: struct rtnexthop, then attributes, repeated.
func parseLegs(b []byte) []leg {
	var out []leg
	for len(b) >= unix.SizeofRtNexthop {
		n := int(nl.Value(b).Uint16())
		if n < unix.SizeofRtNexthop || n > len(b) {
			break
		}
		l := leg{link: int(nl.Value(b[4:]).Uint32())}
		for t, v := range nl.Attributes(b[unix.SizeofRtNexthop:n]) {
			switch {
			case t == unix.RTA_GATEWAY:
				l.gateway = v.Addr()
			case t == rtaVia && len(v) > 2:
				l.gateway = v[2:].Addr()
			}
		}
		out = append(out, l)
		b = b[min(len(b), (n+3)&^3):]
	}
	return out
}

// fibNextHop is a next-hop object as the kernel shows it.
type fibNextHop struct {
	id       dataplane.NextHopID
	protocol uint8
	link     int
	gateway  netip.Addr
	flags    uint32
	encap    encap
	group    []dataplane.GroupMember // of a group
	extra    bool                    // a blackhole, an FDB next hop, a resilient group, another encapsulation
}

// encap is the outer header that a next hop asks an ip6tnl device for.
type encap struct {
	dst, src netip.Addr
	ttl      uint8
}

// parseEncap reads NHA_ENCAP of the type LWTUNNEL_ENCAP_IP6.
func parseEncap(b []byte) (e encap) {
	for t, v := range nl.Attributes(b) {
		switch t {
		case encapDst:
			e.dst = v.Addr()
		case encapSrc:
			e.src = v.Addr()
		case encapTTL:
			e.ttl = v.Uint8()
		}
	}
	return e
}

// parseNextHop reads RTM_NEWNEXTHOP and RTM_DELNEXTHOP (linux/nexthop.h).
func parseNextHop(b []byte) (n fibNextHop, ok bool) {
	if len(b) < unix.SizeofNhmsg {
		return n, false
	}
	n.protocol, n.flags = b[2], nl.Value(b[4:]).Uint32()
	var kind uint16
	var inner []byte
	for t, v := range nl.Attributes(b[unix.SizeofNhmsg:]) {
		switch t {
		case unix.NHA_ID:
			n.id = dataplane.NextHopID(v.Uint32())
		case unix.NHA_OIF:
			n.link = int(v.Uint32())
		case unix.NHA_GATEWAY:
			n.gateway = v.Addr()
		case unix.NHA_ENCAP_TYPE:
			kind = v.Uint16()
		case unix.NHA_ENCAP:
			inner = v
		case unix.NHA_GROUP:
			n.group = parseGroup(v)
		case unix.NHA_GROUP_TYPE:
			n.extra = n.extra || v.Uint16() != 0
		case unix.NHA_BLACKHOLE, nhaFDB, nhaResGroup:
			n.extra = true
		}
	}
	switch {
	case kind == encapIP6:
		n.encap = parseEncap(inner)
	case kind != 0 || inner != nil:
		n.extra = true
	}
	return n, n.id != 0
}

// parseGroup reads NHA_GROUP: struct nexthop_grp, repeated.
func parseGroup(b []byte) []dataplane.GroupMember {
	var out []dataplane.GroupMember
	for ; len(b) >= 8; b = b[8:] {
		out = append(out, dataplane.GroupMember{ID: dataplane.NextHopID(nl.Value(b).Uint32()), Weight: int(b[4]) + 1})
	}
	return out
}

// neighbour is a neighbour or FDB entry as the kernel shows it.
type neighbour struct {
	bridge bool // an FDB entry
	link   int
	addr   netip.Addr
	mac    dataplane.MAC
	port   uint16 // of an FDB entry; 0: the device's
	state  uint16
	flags  uint8
}

// permanent reports whether a program set it, and the kernel did not learn it.
func (n *neighbour) permanent() bool { return n.state&unix.NUD_PERMANENT != 0 }

// parseNeighbour reads RTM_NEWNEIGH and RTM_DELNEIGH.
func parseNeighbour(b []byte) (n neighbour, ok bool) {
	if len(b) < unix.SizeofNdMsg {
		return n, false
	}
	n.bridge = b[0] == unix.AF_BRIDGE
	n.link, n.state, n.flags = int(nl.Value(b[4:]).Uint32()), nl.Value(b[8:]).Uint16(), b[10]
	for t, v := range nl.Attributes(b[unix.SizeofNdMsg:]) {
		switch t {
		case unix.NDA_DST:
			n.addr = v.Addr()
		case unix.NDA_PORT:
			n.port = v.Net16()
		case unix.NDA_LLADDR:
			if len(v) == len(n.mac) {
				copy(n.mac[:], v)
			}
		}
	}
	return n, n.addr.IsValid() || n.bridge
}
