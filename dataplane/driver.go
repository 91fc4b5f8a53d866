package dataplane

import (
	"errors"
	"net/netip"
)

// Host is what a driver may know about this host, for one family.
type Host struct {
	Name      string
	Addr      netip.Prefix // the host's own address with its subnet's length
	Uplink    string       // device that holds Addr
	UplinkMTU int          // bytes

	IPIPAddr  netip.Addr // address of tunl0; invalid: none yet
	VXLANAddr netip.Addr // address of vxlan.calico; invalid: none yet
	VXLANMAC  MAC        // MAC of vxlan.calico
	VXLANVNI  uint32
	VXLANPort uint16

	// MTU of the tunnel devices where the operator set one; 0: computed.
	IPIPMTU  int
	VXLANMTU int
}

// Peer is what a driver may know about another host, or about a gateway that
// BGP named, for one family.
type Peer struct {
	Name    string
	NextHop NextHopID  // number that the core chose for this peer's next hop
	Addr    netip.Addr // the peer's address on the underlay

	// Where the underlay sends packets for Addr when Addr is not on a subnet of
	// ours: the gateway and the device towards it. Invalid when the caller did
	// not resolve Addr.
	Gateway netip.Addr
	Link    string

	VXLANAddr netip.Addr // address of the peer's vxlan.calico; invalid: not known
	VXLANMAC  MAC
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
	// Overhead is what the driver takes from the underlay's MTU, in bytes.
	Overhead(Family) int
	// Requires lists what the kernel must offer.
	Requires() []Requirement
	// Host returns what exists once on this host: the device, its address.
	Host(Host) ([]Object, error)
	// Peer returns what reaches one peer: a next-hop object numbered
	// Peer.NextHop and, for some drivers, a neighbour and an FDB entry.
	// Objects come in creation order.
	Peer(Host, Peer) ([]Object, error)
}
