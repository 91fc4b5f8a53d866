package probe

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// DefaultPort is the port, of UDP and TCP, on which hosts answer probes inside
// their tunnels. All hosts of a cluster use the same.
const DefaultPort = 7747

// Target is a tunnel to a peer that is to be measured.
type Target struct {
	*dataplane.ProbeTarget // shared: nobody changes it

	// Accepts says that the peer has published that it accepts this
	// encapsulation, so that its silence means something.
	Accepts bool
	// Card is the uplink by name and driver: with another network card nothing
	// holds that was found before.
	Card string
}

// tunnelKey identifies a tunnel among those of one moment.
type tunnelKey struct {
	node  string
	fam   dataplane.Family
	inner dataplane.Family
	encap dataplane.Encap
}

// same reports whether nothing is different about a target.
func (t Target) same(o Target) bool {
	return t.ProbeTarget.Equal(*o.ProbeTarget) && t.Accepts == o.Accepts && t.Card == o.Card
}

func (t Target) key() tunnelKey { return tunnelKey{t.Node, t.Family, t.Tunnel.Inner, t.Encap} }

// path names what a finding depends on, apart from the kernel. Whether a tunnel
// is in use is not part of it.
func (t Target) path() string {
	if t.plain() {
		return fmt.Sprintf("%s %s from %s to %s via %s at %s over %s", t.Encap, t.Tunnel.Link, t.Tunnel.Local, t.Peer, t.Gateway, t.Registered, t.Card)
	}
	return fmt.Sprintf("%s %s mtu %d from %s to %s at %s over %s", t.Encap, t.Tunnel.Link, t.Tunnel.MTU, t.Tunnel.Local, t.Peer, t.Registered, t.Card)
}

// carrier names what the offloads' faults depend on: who cuts and checks the
// packets on the way to this peer.
func (t Target) carrier() string {
	return fmt.Sprintf("%s %s in %s to %s at %s over %s", t.Node, t.Tunnel.Inner, t.Encap, t.Tunnel.Link, t.Registered, t.Card)
}

// nextHop derives a number from the target.
func (t Target) nextHop() dataplane.NextHopID {
	h := fnv.New32a()
	fmt.Fprint(h, t.Node, t.Encap, t.Tunnel.Inner) //nolint:errcheck // hash.Hash never returns an error
	return dataplane.NextHopID(h.Sum32() | probeHops)
}

// hint says what to look at when nothing comes back.
func (t Target) hint() string {
	if t.Encap.Driver == dataplane.DriverVXLAN {
		return fmt.Sprintf("is UDP port %d open between the hosts?", t.Encap.Port)
	}
	if t.Encap.Outer == dataplane.IPv6 {
		return "are protocols 4 and 41 (IP in IPv6) allowed between the hosts?"
	}
	return "is protocol 4 (IP in IP) allowed between the hosts?"
}

// endpoint is a device and an address of this host inside its tunnel, where
// other hosts' probes come in. Endpoints are comparable.
type endpoint struct {
	link  string // empty: plain packets to the address
	index int    // of the device: one that was made anew needs a new socket
	addr  netip.Addr
}

func (e endpoint) plain() bool { return e.link == "" }

// tunnelView is all that the tunnels' prober must know of the cluster and this
// host.
type tunnelView struct {
	tunnels   []Target
	endpoints []endpoint
	outside   map[int]bool // indexes of devices that lead to other hosts and are no tunnel
	key       []byte       // shared by the cluster's hosts; empty: not known yet
}

// Measurer measures one path. An error says that nothing could be measured
// because of this host; what the network did to the packets is in the finding.
type Measurer interface {
	Measure(ctx context.Context, t Target, key []byte) (Finding, error)
}
