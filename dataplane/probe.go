package dataplane

import "net/netip"

// ProbeTarget is a peer to which a path is to be measured: the underlay between
// the two hosts or, with [ProbePath.Tunnel], what a tunnel over it delivers.
// What was found is a [Reach] and a [Delivery].
type ProbeTarget struct {
	// ProbePath is what does not depend on the peer. Thousands of peers have the same,
	// which is kept once: nobody changes it.
	*ProbePath

	Node       string
	Registered netip.Addr // the peer's own address on the underlay
	Public     netip.Addr // what the peer publishes for hosts that cannot reach that; may be invalid

	// Peer is where the peer answers inside the tunnel.
	Peer netip.Addr
	// Gateway on the tunnel's device leads to Peer, where the kernel needs a route to
	// use it: for IPv6, and into tunnels in IPv6. Not valid: the kernel takes Peer to be
	// on the device.
	Gateway netip.Addr
}

// Equal reports whether the same is to be measured in the same way.
func (t ProbeTarget) Equal(o ProbeTarget) bool {
	same := t.ProbePath == o.ProbePath || t.ProbePath != nil && o.ProbePath != nil && *t.ProbePath == *o.ProbePath
	t.ProbePath, o.ProbePath = nil, nil
	return same && t == o
}

// ProbePath is this host's side of what is measured.
type ProbePath struct {
	Family Family       // of the underlay
	Uplink string       // this host's device towards the peer
	Local  netip.Prefix // this host's own address on the underlay, with its subnet's length

	// Encap is what is probed. For the underlay it has no VNI; the zero value is
	// a peer to which no tunnel goes: only the neighbour table is asked.
	Encap  Encap
	Tunnel ProbeTunnel // zero: the underlay is probed
}

// ProbeTunnel is this host's end of the tunnel of a [ProbeTarget].
type ProbeTunnel struct {
	Inner Family // of the packets inside
	Link  string // the tunnel's device on this host
	MTU   int    // of the device, bytes
	Local netip.Addr

	// InUse says that packets of workloads go this way; else they are to.
	InUse bool
	// Skip says why this tunnel cannot be measured; empty: it can.
	Skip string
}
