package kernel

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Numbers of linux/rtnetlink.h, linux/nexthop.h and linux/netlink.h that
// package unix does not have.
const (
	rtmDelNextHop = 105
	rtmGetNextHop = 106
	rtaNHID       = 30
	rtaVia        = 18
	nhaFDB        = 11
	nhaResGroup   = 12

	// linux/if_tunnel.h, and the flag of linux/ip6_tunnel.h that says "no
	// encapsulation limit option".
	tunLink     = 1
	tunLocal    = 2
	tunRemote   = 3
	tunTTL      = 4
	tunFlags    = 8
	tunProto    = 9
	tunMetadata = 19
	tunNoLimit  = 1

	// linux/lwtunnel.h.
	encapIP6 = 4
	encapDst = 2
	encapSrc = 3
	encapTTL = 4

	// enum in6_addr_gen_mode: the device makes no link-local address.
	genModeNone = 1
)

// builder appends the messages that the kernel writer sends.
type builder struct{ nl.Batch }

// hopLimit is the outer hop limit of tunnels over IPv6, as of ip(8).
const hopLimit = 64

// vxlanAgeing is the kernel's own lifetime of learned entries of the FDB, in
// seconds (drivers/net/vxlan: FDB_AGE_DEFAULT). Ours do not age.
const vxlanAgeing = 300

// ours is the alias that marks a device which routerd made or took.
const ours = "routerd"

func native16(v uint16) []byte { return binary.NativeEndian.AppendUint16(nil, v) }
func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// create and replace are the flags of a message that makes something new and
// refuses to touch what is there, and of one that changes what is there.
const (
	create        = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	replace       = unix.NLM_F_REPLACE
	createReplace = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
)

// putRoute appends the message for r. A new route must not touch one that is
// there (create); a known one, or one that is taken over, is replaced in place,
// without a gap.
//
// A message without metrics lets IPv4 share the metrics of any route that uses
// the same next hop (fib_find_info_nh in the kernel's source). With bare it
// says that it has none; that costs a tenth of the speed.
func (b *builder) putRoute(r dataplane.Route, flags uint16, protocol uint8, link int, bare bool) {
	scope, typ := byte(unix.RT_SCOPE_UNIVERSE), byte(unix.RTN_UNICAST)
	switch {
	case r.Type == dataplane.Blackhole:
		typ = unix.RTN_BLACKHOLE
	case r.Link != "":
		scope = unix.RT_SCOPE_LINK
	}
	b.route(unix.RTM_NEWROUTE, flags, r.Prefix, r.Table, r.Metric, 0, protocol, scope, typ)
	if r.NextHop != 0 {
		b.Uint32(rtaNHID, uint32(r.NextHop))
	}
	if r.Link != "" {
		b.Uint32(unix.RTA_OIF, uint32(link))
	}
	if r.MTU != 0 || bare {
		b.Nest(unix.RTA_METRICS, func() {
			if r.MTU != 0 {
				b.Uint32(unix.RTAX_MTU, r.MTU)
			}
		})
	}
}

// deleteRoute appends the message that removes the route of our protocol with
// that key, and no other's.
func (b *builder) deleteRoute(k dataplane.RouteKey, tos, protocol uint8) {
	b.route(unix.RTM_DELROUTE, 0, k.Prefix, k.Table, k.Metric, tos, protocol, unix.RT_SCOPE_NOWHERE, 0)
}

func (b *builder) route(typ, flags uint16, p netip.Prefix, table, metric uint32, tos, protocol, scope, kind byte) {
	short := byte(unix.RT_TABLE_UNSPEC)
	if table < 256 {
		short = byte(table)
	}
	b.Begin(typ, flags, nl.Family(p.Addr()), byte(p.Bits()), 0, tos, short, protocol, scope, kind, 0, 0, 0, 0)
	b.Addr(unix.RTA_DST, p.Addr())
	if table >= 256 {
		b.Uint32(unix.RTA_TABLE, table)
	}
	if metric != 0 {
		b.Uint32(unix.RTA_PRIORITY, metric)
	}
}

func (b *builder) putNextHop(n dataplane.NextHop, known bool, protocol uint8, l *ifLink) {
	flags := uint16(create)
	if known {
		flags = replace
	}
	if l.kind == string(dataplane.LinkIP6TNL) {
		// The gateway is the other end of the tunnel. IPv6 refuses a gateway
		// to which a route leads through another device, as it does to every
		// other end; so it goes as the outer destination that it is.
		b.Begin(unix.RTM_NEWNEXTHOP, flags, unix.AF_INET6, 0, protocol, 0, 0, 0, 0, 0)
		b.Uint32(unix.NHA_ID, uint32(n.ID))
		b.Uint32(unix.NHA_OIF, uint32(l.index))
		b.Bytes(unix.NHA_ENCAP_TYPE, native16(encapIP6)...)
		b.Nest(unix.NHA_ENCAP, func() {
			b.Addr(encapDst, n.Gateway)
			b.Addr(encapSrc, l.local)
			b.Uint8(encapTTL, hopLimit)
		})
		return
	}
	var nf uint32
	if n.OnLink {
		nf = unix.RTNH_F_ONLINK
	}
	b.Begin(unix.RTM_NEWNEXTHOP, flags, append([]byte{nl.Family(n.Gateway), 0, protocol, 0}, native32(nf)...)...)
	b.Uint32(unix.NHA_ID, uint32(n.ID))
	b.Uint32(unix.NHA_OIF, uint32(l.index))
	b.Addr(unix.NHA_GATEWAY, n.Gateway)
}

// putGroup appends the message for a group of next hops that all exist.
func (b *builder) putGroup(id dataplane.NextHopID, members []dataplane.GroupMember, known bool, protocol uint8) {
	flags := uint16(create)
	if known {
		flags = replace
	}
	b.Begin(unix.RTM_NEWNEXTHOP, flags, unix.AF_UNSPEC, 0, protocol, 0, 0, 0, 0, 0)
	b.Uint32(unix.NHA_ID, uint32(id))
	var list []byte
	for _, m := range members { // struct nexthop_grp: the weight is kept less one
		list = append(append(list, native32(uint32(m.ID))...), byte(max(1, m.Weight)-1), 0, 0, 0)
	}
	b.Bytes(unix.NHA_GROUP, list...)
}

func (b *builder) deleteNextHop(id dataplane.NextHopID) {
	b.Begin(rtmDelNextHop, 0, make([]byte, unix.SizeofNhmsg)...)
	if id != 0 {
		b.Uint32(unix.NHA_ID, uint32(id))
	}
}

// address appends a message about an address. One of IPv6 is used at once,
// without duplicate address detection (RFC 4862, section 5.4): no other host is
// on our devices, and nothing answers on a tunnel.
func (b *builder) address(typ, flags uint16, p netip.Prefix, link int) {
	var af byte
	if p.Addr().Is6() {
		af = unix.IFA_F_NODAD
	}
	head := append([]byte{nl.Family(p.Addr()), byte(p.Bits()), af, unix.RT_SCOPE_UNIVERSE}, native32(uint32(link))...)
	b.Begin(typ, flags, head...)
	b.Addr(unix.IFA_LOCAL, p.Addr())
	b.Addr(unix.IFA_ADDRESS, p.Addr())
}

// neighbour appends a message about a neighbour or, for AF_BRIDGE, an FDB
// entry; port 0 is not sent.
func (b *builder) neighbour(typ, flags uint16, fam byte, link int, nudState uint16, ntf byte, addr netip.Addr, mac dataplane.MAC, port uint16) {
	head := append([]byte{fam, 0, 0, 0}, native32(uint32(link))...)
	head = append(head, native16(nudState)...)
	b.Begin(typ, flags, append(head, ntf, 0)...)
	if addr.IsValid() {
		b.Addr(unix.NDA_DST, addr)
	}
	if !mac.IsZero() || fam == unix.AF_BRIDGE {
		b.Bytes(unix.NDA_LLADDR, mac[:]...)
	}
	if port != 0 {
		b.Net16(unix.NDA_PORT, port)
	}
}

func (b *builder) putNeighbour(n dataplane.Neighbour, link int) {
	b.neighbour(unix.RTM_NEWNEIGH, createReplace, nl.Family(n.Addr), link, unix.NUD_PERMANENT, 0, n.Addr, n.MAC, 0)
}

func (b *builder) deleteNeighbour(k dataplane.NeighbourKey, link int) {
	b.neighbour(unix.RTM_DELNEIGH, 0, nl.Family(k.Addr), link, 0, 0, k.Addr, dataplane.MAC{}, 0)
}

func (b *builder) putFDB(e dataplane.FDBEntry, link int) {
	b.neighbour(unix.RTM_NEWNEIGH, createReplace, unix.AF_BRIDGE, link, unix.NUD_PERMANENT, unix.NTF_SELF, e.Dst, e.MAC, e.Port)
}

func (b *builder) deleteFDB(k dataplane.FDBKey, link int) {
	b.neighbour(unix.RTM_DELNEIGH, 0, unix.AF_BRIDGE, link, 0, unix.NTF_SELF, netip.Addr{}, k.MAC, 0)
}

// beginLink starts a message about a device; flags are interface flags among
// those of mask that are to be set.
func (b *builder) beginLink(typ, nlFlags uint16, index int, flags, mask uint32) {
	head := append([]byte{unix.AF_UNSPEC, 0, 0, 0}, native32(uint32(index))...)
	head = append(head, native32(flags)...)
	b.Begin(typ, nlFlags, append(head, native32(mask)...)...)
}

// createLink appends the message that makes l and leaves it down: what must be
// so before it goes up, changeLink says.
func (b *builder) createLink(l dataplane.Link, parent int) {
	b.beginLink(unix.RTM_NEWLINK, create, 0, 0, 0)
	b.Text(unix.IFLA_IFNAME, l.Name)
	b.linkSettings(l)
	b.Nest(unix.IFLA_LINKINFO, func() {
		b.Chars(unix.IFLA_INFO_KIND, string(l.Type))
		switch l.Type {
		case dataplane.LinkVXLAN:
			b.Nest(unix.IFLA_INFO_DATA, func() {
				b.Uint32(unix.IFLA_VXLAN_ID, l.VNI)
				b.Net16(unix.IFLA_VXLAN_PORT, l.Port)
				b.Uint8(unix.IFLA_VXLAN_LEARNING, 0)
				b.vxlanEnds(l, parent)
			})
		case dataplane.LinkIP6TNL:
			b.Nest(unix.IFLA_INFO_DATA, func() { b.ip6tnl(l, parent, true) })
		case dataplane.LinkIPIP:
		}
	})
}

// vxlanEnds appends the local end of a VXLAN device.
func (b *builder) vxlanEnds(l dataplane.Link, parent int) {
	if parent != 0 {
		b.Uint32(unix.IFLA_VXLAN_LINK, uint32(parent))
	}
	if l.Local.Is4() {
		b.Addr(unix.IFLA_VXLAN_LOCAL, l.Local)
	} else if l.Local.Is6() {
		b.Addr(unix.IFLA_VXLAN_LOCAL6, l.Local)
	}
}

// ip6tnl appends the settings of a tunnel over IPv6, of which a change must
// name all: the kernel takes each that is missing as zero. That the other end
// comes from the route can be said at creation only, and stays.
func (b *builder) ip6tnl(l dataplane.Link, parent int, creation bool) {
	if creation {
		b.Bytes(tunMetadata)
	}
	if parent != 0 {
		b.Uint32(tunLink, uint32(parent))
	}
	if l.Local.Is6() {
		b.Addr(tunLocal, l.Local)
	}
	b.Uint8(tunTTL, hopLimit)
	b.Uint8(tunProto, 0) // IPv4 and IPv6 inside
	b.Uint32(tunFlags, tunNoLimit)
}

// changeLink appends the message that gives the device the settings of l that
// every kind of device has, with our mark, and sets it up.
func (b *builder) changeLink(l dataplane.Link, index int) {
	b.beginLink(unix.RTM_NEWLINK, 0, index, unix.IFF_UP, unix.IFF_UP)
	b.linkSettings(l)
	b.Chars(unix.IFLA_IFALIAS, ours)
}

// markLink appends the message that marks the device of that name as ours.
func (b *builder) markLink(name string) {
	b.beginLink(unix.RTM_NEWLINK, 0, 0, 0, 0)
	b.Text(unix.IFLA_IFNAME, name)
	b.Chars(unix.IFLA_IFALIAS, ours)
}

// silenceLink appends the message that keeps a device from making link-local
// addresses by itself. It must be there before the device goes up, which in
// one message the kernel does first.
func (b *builder) silenceLink(index int) {
	b.beginLink(unix.RTM_NEWLINK, 0, index, 0, 0)
	b.Nest(unix.IFLA_AF_SPEC, func() {
		b.Nest(unix.AF_INET6, func() { b.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, genModeNone) })
	})
}

// moveLink appends the message that changes a tunnel's own settings in place:
// its local end and, of a VXLAN device, that it does not learn, and how the outer
// packets look. The kernel refuses these together with the MTU.
func (b *builder) moveLink(l dataplane.Link, index, parent int) {
	b.beginLink(unix.RTM_NEWLINK, 0, index, 0, 0)
	b.Nest(unix.IFLA_LINKINFO, func() {
		b.Chars(unix.IFLA_INFO_KIND, string(l.Type))
		b.Nest(unix.IFLA_INFO_DATA, func() {
			if l.Type == dataplane.LinkIP6TNL {
				b.ip6tnl(l, parent, false)
				return
			}
			b.Uint8(unix.IFLA_VXLAN_LEARNING, 0)
			b.Uint8(unix.IFLA_VXLAN_TTL, 0) // the host's (net.ipv4.ip_default_ttl)
			b.Uint8(unix.IFLA_VXLAN_TOS, 0)
			b.Uint8(unix.IFLA_VXLAN_DF, 0)
			b.Uint32(unix.IFLA_VXLAN_AGEING, vxlanAgeing)
			b.vxlanEnds(l, parent)
		})
	})
}

// freeLink appends the message that undoes what [ifLink.obstructed] names.
func (b *builder) freeLink(l *ifLink) {
	mask := uint32(0)
	if l.kind == string(dataplane.LinkVXLAN) {
		mask = unix.IFF_NOARP
	}
	b.beginLink(unix.RTM_NEWLINK, 0, l.index, 0, mask)
	if l.master != 0 {
		b.Uint32(unix.IFLA_MASTER, 0)
	}
	if l.protoDown { // a device that cannot be held down refuses this
		b.Uint8(unix.IFLA_PROTO_DOWN, 0)
	}
}

func (b *builder) linkSettings(l dataplane.Link) {
	if l.MTU != 0 {
		b.Uint32(unix.IFLA_MTU, uint32(l.MTU))
	}
	if l.Type == dataplane.LinkVXLAN && !l.MAC.IsZero() { // the others' hardware address is the outer source, not a MAC
		b.Bytes(unix.IFLA_ADDRESS, l.MAC[:]...)
	}
}

func (b *builder) deleteLink(index int) {
	b.beginLink(unix.RTM_DELLINK, 0, index, 0, 0)
}

// releaseLink appends the message that sets a device down and takes our mark
// off.
func (b *builder) releaseLink(index int) {
	b.beginLink(unix.RTM_NEWLINK, 0, index, 0, unix.IFF_UP)
	b.Bytes(unix.IFLA_IFALIAS)
}
