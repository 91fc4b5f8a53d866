package dataplane

import (
	"errors"
	"net/netip"
)

// Host is what a driver may know about this host, for one family of the
// underlay and one of the workloads' packets.
type Host struct {
	Name      string
	Family    Family       // of the workloads' packets; 0: that of Addr
	Addr      netip.Prefix // the host's own address with its subnet's length
	Uplink    string       // device that holds Addr
	UplinkMTU int          // bytes

	IPIPAddr    netip.Addr // address of the IPIP device; invalid: none
	VXLANDevice string     // name of the VXLAN device; empty: the usual one of Addr's family
	VXLANAddr   netip.Addr // address of the VXLAN device; invalid: none yet
	VXLANMAC    MAC        // MAC of the VXLAN device
	VXLANVNI    uint32
	VXLANPort   uint16

	// MTU of the tunnel devices where the operator set one; 0: computed.
	IPIPMTU  int
	VXLANMTU int
}

// Outer is the family of the underlay.
func (h Host) Outer() Family { return FamilyOf(h.Addr.Addr()) }

// Inner is the family of the workloads' packets.
func (h Host) Inner() Family {
	if h.Family == 0 {
		return h.Outer()
	}
	return h.Family
}

// Peer is what a driver may know about another host, or about a gateway that
// BGP named, for the families of a [Host].
type Peer struct {
	Name    string
	NextHop NextHopID  // number that the core chose for this peer's next hop
	Addr    netip.Addr // the peer's registered address on the underlay
	Near    Answer     // whether the peer answers on this host's own subnet

	// Where tunnels send to, if that is not Addr; see [Reach].
	TunnelAddr netip.Addr
	TunnelPort uint16

	// Where the underlay sends packets for Addr when Addr is not on a subnet of
	// ours: the gateway and the device towards it. Invalid when the caller did
	// not resolve Addr.
	Gateway netip.Addr
	Link    string

	VXLANAddr netip.Addr // address of the peer's VXLAN device; invalid: not known
	VXLANMAC  MAC
}

// Dst is the outer destination of tunnels to the peer.
func (p Peer) Dst() netip.Addr {
	if p.TunnelAddr.IsValid() {
		return p.TunnelAddr
	}
	return p.Addr
}

// IsNear reports whether the peer is a neighbour of h: whether it answers on
// h's own subnet, or, where that was not measured, whether its address lies
// there. A host whose address is recorded with its full length has only those
// neighbours that answer.
func (p Peer) IsNear(h Host) bool {
	switch p.Near {
	case Yes:
		return true
	case No:
		return false
	case Unknown:
	}
	return h.Addr.IsValid() && h.Addr.Contains(p.Addr)
}

// Requirement is something that the kernel must offer for a driver to work.
type Requirement struct {
	Link   LinkType // device kind
	Module string   // kernel module that brings it
}

// ErrNoPath is returned by [Driver.Peer] when the driver cannot reach this
// peer by itself: the direct driver and a peer in another subnet, say. It is
// not a fault; another source of routes may know a way.
var ErrNoPath = errors.New("no path to the peer with this driver")

// ErrIncomplete is returned by [Driver.Host] and [Driver.Peer] when something
// the driver needs is not known yet, such as a tunnel address. It resolves
// itself when the store delivers the missing part.
var ErrIncomplete = errors.New("not known yet")

// Driver says how one way of carrying packets reaches a peer. It is pure: no
// I/O, no clock, deterministic order, so golden files can hold what it does.
// Routes are not its business: a route only names the next hop that a driver
// made.
type Driver interface {
	// Name is the name that users see: direct, ipip, vxlan.
	Name() string
	// Overhead is what the driver takes from the underlay's MTU, in bytes, by
	// the family of the underlay.
	Overhead(outer Family) int
	// Requires lists what the kernel must offer.
	Requires(outer Family) []Requirement
	// Encaps lists what hosts that use the driver may send to this one.
	Encaps(Host) []Encap
	// Encap is what travels to the peer. [Driver.Peer] may still know no path.
	Encap(Host, Peer) (Encap, error)
	// Host returns what exists once on this host: the device, its address, its
	// settings. The host takes the driver's encapsulations in once all is in the kernel.
	Host(Host) ([]Object, error)
	// Peer returns what reaches one peer: a next-hop object numbered
	// Peer.NextHop and, for some drivers, a neighbour and an FDB entry.
	// Objects come in creation order.
	Peer(Host, Peer) ([]Object, error)
}

// LooseSource is the setting that lets packets in by a device although the
// answer leaves by another, as they do while two hosts change one after the
// other. The kernel uses the larger of a device's own value and that of all
// devices, so 2 always means loose (RFC 3704, section 2.4).
func LooseSource(device string) Sysctl {
	return Sysctl{Name: "net/ipv4/conf/" + device + "/rp_filter", Value: "2"}
}

// Forwarding is the setting without which the kernel drops IPv4 packets that
// come in by a device and are for somebody else. It alone decides: ip_forward
// sets those of all devices, but only when it changes itself, and a new device
// begins with what conf/default says.
func Forwarding(device string) Sysctl {
	return Sysctl{Name: "net/ipv4/conf/" + device + "/forwarding", Value: "1"}
}
