package dataplane

import "net/netip"

// ProbeTarget is a path to a peer that is to be measured: the underlay between
// the two hosts or, with [ProbeTarget.Tunnel], what a tunnel over it delivers.
// What was found is a [Reach] and a [Delivery]. ProbeTargets are comparable.
type ProbeTarget struct {
	Node   string
	Family Family // of the underlay
	Uplink string // this host's device towards it

	Local      netip.Prefix // this host's own address on the underlay, with its subnet's length
	Registered netip.Addr   // the peer's own address there
	Public     netip.Addr   // what the peer publishes for hosts that cannot reach that; may be invalid

	// Encap is what is probed. For the underlay it has no VNI; the zero value is
	// a peer to which no tunnel goes: only the neighbour table is asked.
	Encap  Encap
	Tunnel ProbeTunnel // zero: the underlay is probed
}

// ProbeTunnel is the tunnel of a [ProbeTarget], with both ends.
type ProbeTunnel struct {
	Inner Family // of the packets inside
	Link  string // the tunnel's device on this host
	MTU   int    // of the device, bytes
	Local netip.Addr
	Peer  netip.Addr // where the peer answers inside the tunnel

	// Gateway on Link leads to Peer, where the kernel needs a route to use a
	// device: for IPv6, and into tunnels in IPv6. Not valid: the kernel takes Peer
	// to be on Link.
	Gateway netip.Addr

	// InUse says that packets of workloads go this way; else they are to.
	InUse bool
	// Skip says why this tunnel cannot be measured; empty: it can.
	Skip string
}
