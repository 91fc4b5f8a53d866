package dataplane

import "net/netip"

// Encap names what travels between two hosts of the cluster: the plain packet
// or the packet in a tunnel, and for VXLAN the network and the port. A host
// accepts an encapsulation when everything that takes such packets in is in its kernel.
// Encaps are comparable.
type Encap struct {
	Driver string // direct, ipip or vxlan
	Outer  Family // of the underlay; 0 for direct
	VNI    uint32 // for vxlan
	Port   uint16 // for vxlan
}

// Answer is what a question to the network found.
type Answer uint8

// The answers.
const (
	Unknown Answer = iota // not asked, or asked a peer that cannot answer
	Yes
	No
)

func (a Answer) String() string {
	switch a {
	case Unknown:
		return "unknown"
	case Yes:
		return "yes"
	case No:
		return "no"
	}
	return "invalid"
}

// Reach is what this host measured of the underlay towards a peer, in one
// family. The zero value says that nothing was measured.
type Reach struct {
	// Near says whether the peer itself answers on this host's own subnet
	// (ARP or NDP), so that packets for its workloads may go without a tunnel.
	Near Answer

	// Addr is where tunnels send to when that is not the peer's registered
	// address: its public address, where the private one does not answer.
	Addr netip.Addr
	// Port is the UDP port of VXLAN at Addr, where a NAT translates it; 0: the
	// cluster's.
	Port uint16

	// MTU is the largest packet of the underlay that gets there, in bytes; 0:
	// what the uplink takes.
	MTU int
}

// Delivery is what probes through an encapsulation found for one peer.
type Delivery struct {
	Encap  Encap
	Result Answer
	// MTU is the largest packet inside the encapsulation that gets to the peer, in
	// bytes, where that is less than the tunnel's device takes; 0: what the
	// device takes.
	MTU    int
	Reason string // why not simply Yes, for people
}
