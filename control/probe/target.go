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

// Target is a tunnel to a peer that is to be measured. Targets are comparable;
// one that differs in anything is measured anew.
type Target struct {
	Node   string
	Family dataplane.Family // of the underlay
	Inner  dataplane.Family // of the packets in the tunnel
	Form   dataplane.Form

	Link  string     // the tunnel's device on this host
	MTU   int        // of the device, bytes
	Local netip.Addr // this host's address inside
	Addr  netip.Addr // the peer's address inside, where it answers
	Outer netip.Addr // the peer's address on the underlay

	// Via is the gateway on Link towards Addr, where the kernel needs a route to
	// use a device: for IPv6, and into tunnels in IPv6. While the tunnel is not in
	// use such a route is there for as long as a measurement lasts. Not valid: the
	// kernel takes Addr to be on Link.
	Via netip.Addr

	// Uplink is the device that carries the tunnel, by name and driver: with
	// another network card nothing holds that was found before.
	Uplink string
	// Accepts says that the peer has told that it takes this form in, so that
	// its silence means something.
	Accepts bool
	// InUse says that workloads' packets go this way: what was found good is not
	// called bad because the peer is silent for a while.
	InUse bool
	// Skip says why this tunnel cannot be measured; empty: it can. The answer is
	// then Unknown from the start.
	Skip string
}

// key identifies a target among those of one moment.
type key struct {
	Node   string
	Family dataplane.Family
	Inner  dataplane.Family
	Form   dataplane.Form
}

func (t Target) key() key { return key{t.Node, t.Family, t.Inner, t.Form} }

// path names what a finding depends on, apart from the kernel. Whether a tunnel
// is in use is not part of it.
func (t Target) path() string {
	return fmt.Sprintf("%s %s mtu %d from %s to %s at %s over %s", t.Form, t.Link, t.MTU, t.Local, t.Addr, t.Outer, t.Uplink)
}

// carrier names what the offloads' faults depend on: who cuts and checks the
// packets on the way to this peer.
func (t Target) carrier() string {
	return fmt.Sprintf("%s %s in %s to %s at %s over %s", t.Node, t.Inner, t.Form, t.Link, t.Outer, t.Uplink)
}

// Probes' next hops have numbers that the core's do not: those of the upper
// half. Their routes stand behind all others to the same address.
const (
	probeHops   = 1 << 31
	routeMetric = 1 << 30
)

// nextHop derives a number from the target.
func (t Target) nextHop() dataplane.NextHopID {
	h := fnv.New32a()
	fmt.Fprint(h, t.Node, t.Form, t.Inner) //nolint:errcheck // hash.Hash never returns an error
	return dataplane.NextHopID(h.Sum32() | probeHops)
}

// hint says what to look at when nothing comes back.
func (t Target) hint() string {
	if t.Form.Driver == dataplane.DriverVXLAN {
		return fmt.Sprintf("is UDP port %d open between the hosts?", t.Form.Port)
	}
	if t.Form.Outer == dataplane.IPv6 {
		return "are protocols 4 and 41 (IP in IPv6) allowed between the hosts?"
	}
	return "is protocol 4 (IP in IP) allowed between the hosts?"
}

// Endpoint is a device and an address of this host inside its tunnel, where
// other hosts' probes come in. Endpoints are comparable.
type Endpoint struct {
	Link  string
	Index int // of the device: one that was made anew needs a new socket
	Addr  netip.Addr
}

// World is all that a [Prober] must know of the cluster and this host. It is a
// snapshot: do not change it.
type World struct {
	Targets   []Target
	Endpoints []Endpoint
	Peers     []netip.Addr // who may ask, by the address inside the tunnel
	Key       []byte       // shared by the cluster's hosts; empty: not known yet
}

// Measurer measures one path. An error says that nothing could be measured
// because of this host; what the network did to the packets is in the finding.
type Measurer interface {
	Measure(ctx context.Context, t Target, key []byte) (Finding, error)
}

// Status is what is known of one target.
type Status struct {
	Target  Target
	Result  dataplane.Answer
	Settled bool    // measured at least once, or known from before a restart
	Need    Setting // that this path needs of the device
	Device  Setting // that the device has, for all its peers
	MTU     int     // bytes that get through, where less than the device's; 0: the device's
	Reason  string
	Goodput float64 // of the last transfer, bytes a second
	At      int64   // Unix seconds of the last answer; 0: none
}

func familyOf(a netip.Addr) dataplane.Family { return dataplane.FamilyOf(a) }
