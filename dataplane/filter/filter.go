package filter

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// SetID names a set. It is a function of what the set is meant to hold, so it
// is the same after a restart and on every host. It has at most 24 characters
// of a-z, 0-9 and '-'.
type SetID string

// The sets that every ruleset has.
const (
	NATSources    SetID = "nat-sources"    // pools whose addresses are translated on their way out
	NATExempt     SetID = "nat-exempt"     // destinations to which nothing is translated
	TunnelSources SetID = "tunnel-sources" // addresses of hosts of the cluster, those that others see of them, and externalNodesList
)

// SetType says what the members of a set are.
type SetType uint8

// The types of set.
const (
	Nets  SetType = iota // prefixes; members never overlap, so they can be intervals as they are
	Ports                // an address, a protocol and a port; Prefix is that of one address
)

func (t SetType) String() string {
	if t == Ports {
		return "ports"
	}
	return "nets"
}

// Set is a set without its members. Members of both families are in one set.
type Set struct {
	ID     SetID
	Type   SetType
	Origin string // what the members have in common, for people: a selector in canonical form
}

// Member is an element of a set.
type Member struct {
	Prefix   netip.Prefix // masked
	Protocol uint8        // IP protocol number; of Ports only
	Port     uint16       // of Ports only
}

func (m Member) String() string {
	if m.Port == 0 {
		return m.Prefix.String()
	}
	return fmt.Sprintf("%s protocol %d port %d", m.Prefix.Addr(), m.Protocol, m.Port)
}

// Compare orders members by address, length, protocol and port.
func (m Member) Compare(o Member) int {
	return cmp.Or(
		m.Prefix.Addr().Compare(o.Prefix.Addr()), cmp.Compare(m.Prefix.Bits(), o.Prefix.Bits()),
		cmp.Compare(m.Protocol, o.Protocol), cmp.Compare(m.Port, o.Port),
	)
}

// Action is what a rule does, or the end of a list of rules.
type Action uint8

// The actions.
const (
	Deny  Action = iota // drop (or reject, as [Settings] say)
	Allow               // accept
	Pass                // leave this tier, or this profile, and go on with the next
	Log                 // log and go on with the next rule
)

func (a Action) String() string {
	switch a {
	case Deny:
		return "Deny"
	case Allow:
		return "Allow"
	case Pass:
		return "Pass"
	case Log:
		return "Log"
	}
	return fmt.Sprintf("action(%d)", uint8(a))
}

// PolicyID names a policy or a profile by its resource.
type PolicyID struct {
	Kind      string // Profile, NetworkPolicy, …
	Namespace string
	Name      string
}

func (id PolicyID) String() string {
	if id.Namespace == "" {
		return fmt.Sprintf("%s(%s)", id.Kind, id.Name)
	}
	return fmt.Sprintf("%s(%s/%s)", id.Kind, id.Namespace, id.Name)
}

// Compare orders identities by kind, namespace and name.
func (id PolicyID) Compare(o PolicyID) int {
	return cmp.Or(cmp.Compare(id.Kind, o.Kind), cmp.Compare(id.Namespace, o.Namespace), cmp.Compare(id.Name, o.Name))
}

// Policy is the rules of a policy or of a profile. All endpoints that refer to
// it share it.
type Policy struct {
	ID      PolicyID
	Ingress []Rule // the index of a rule is its index in the resource
	Egress  []Rule
}

// Rules returns the rules of a direction.
func (p Policy) Rules(d Direction) []Rule {
	if d == Ingress {
		return p.Ingress
	}
	return p.Egress
}

// Rule acts on packets that all its parts match. A part that is zero matches
// every packet.
type Rule struct {
	Action      Action
	Family      dataplane.Family // 0: both
	Protocol    uint8            // IP protocol number
	NotProtocol uint8
	ICMP        ICMP // of ICMP or ICMPv6, as Protocol says
	NotICMP     ICMP
	Source      Side
	Destination Side
}

// ICMP matches the type of an ICMP or ICMPv6 message, and its code if CodeSet.
// The zero value means no match on ICMP.
type ICMP struct {
	Set     bool
	Type    uint8
	CodeSet bool
	Code    uint8
}

// PortRange is from Low to High, both included.
type PortRange struct{ Low, High uint16 }

func (r PortRange) String() string {
	if r.Low == r.High {
		return fmt.Sprint(r.Low)
	}
	return fmt.Sprintf("%d-%d", r.Low, r.High)
}

// Side matches the source or the destination of a packet. Its parts are ANDed;
// the entries of a list, and Ports with PortSet, are ORed.
//
// A list of nets that has none of the packet's family does not match it, be
// the list positive or negative: such a rule is about the other family.
type Side struct {
	Nets    []netip.Prefix // masked; the address is in one of them
	NotNets []netip.Prefix // the address is in none of them

	// The address is, or is not, in the set. Of a set of type Ports the
	// protocol and the port belong to the member too.
	Set    SetID
	NotSet SetID

	// The port is in one of the ranges, or address, protocol and port are a
	// member of PortSet.
	Ports   []PortRange
	PortSet SetID

	// The port is in none of the ranges, and address, protocol and port are no
	// member of NotPortSet.
	NotPorts   []PortRange
	NotPortSet SetID
}

// sets lists the sets that the side names.
func (s *Side) sets() []SetID { return []SetID{s.Set, s.NotSet, s.PortSet, s.NotPortSet} }

// Sets returns the sets that a rule names, with repeats.
func (r *Rule) Sets() []SetID {
	var ids []SetID
	for _, id := range append(r.Source.sets(), r.Destination.sets()...) {
		if id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}

// Direction is seen from an endpoint.
type Direction uint8

// The directions.
const (
	Ingress Direction = iota // to the workload, or into the host through the interface
	Egress                   // from the workload, or out of the host through the interface
)

func (d Direction) String() string {
	if d == Ingress {
		return "ingress"
	}
	return "egress"
}

// PolicyRef is a policy's place in a tier.
type PolicyRef struct {
	ID PolicyID

	// Staged: count and log what the rules would do, and go on as if they were
	// not there.
	Staged bool
}

// Tier is the policies of one tier that concern one endpoint and direction, in
// their order.
type Tier struct {
	Name     string
	Policies []PolicyRef
	End      Action // Deny or Pass: of what no rule decided
}

// Enforced reports whether the tier has a policy that is not staged. One that
// has none decides nothing.
func (t Tier) Enforced() bool {
	for _, p := range t.Policies {
		if !p.Staged {
			return true
		}
	}
	return false
}

// Path is what a packet meets in one direction of an endpoint: the tiers, then
// the profiles, then Default.
type Path struct {
	Tiers    []Tier
	Profiles []PolicyID

	// Default is what becomes of a packet that nothing before decided: Deny,
	// Allow, or Pass for the paths that others follow (Untracked, PreDNAT).
	Default Action
}

// AnyInterface is the interface of an endpoint that stands for all of the
// host's interfaces that have no endpoint of their own, except workloads' and
// the loopback.
const AnyInterface = "*"

// Elsewhere stands in a [Flow] for an interface that nobody knows: no endpoint
// judges there, [AnyInterface]'s neither.
const Elsewhere = "\x00elsewhere"

// Endpoint is an interface that packets are judged at.
type Endpoint struct {
	Interface string
	Name      string // of the resource, for people: WorkloadEndpoint(ns1/…)
	Host      bool   // an interface of the host itself, not a workload's

	// Ingress and Egress judge what the workload receives and sends; of a host
	// endpoint, what the host itself receives and sends.
	Ingress, Egress Path

	// Of a host endpoint only. Forwarded packets are judged by Forward, not by
	// Ingress and Egress. Untracked comes before connection tracking and judges
	// each packet by itself; what it allows is judged no further, nor tracked.
	// PreDNAT comes before destination NAT, and what it allows passes the host's
	// other paths.
	ForwardIngress, ForwardEgress     Path
	UntrackedIngress, UntrackedEgress Path
	PreDNATIngress                    Path

	// DSCP is of what a workload, or the host by a host endpoint's interface, sends to destinations
	// outside the cluster.
	DSCP DSCP

	// Of a workload only.
	Sources []netip.Prefix // addresses that it may send from: its own, then those it may pretend
	Own     int            // how many of Sources are its own
	NAT     []Translation  // floating addresses
	Limits  Limits
}

// DSCP is a code point of differentiated services (RFC 2474 section 3). The zero value leaves
// what the sender wrote.
type DSCP struct {
	Set   bool
	Value uint8 // up to 63
}

// Limits bound what a workload receives and sends, beside what policy allows.
type Limits struct{ Ingress, Egress Limit }

// Limit is a bound in one direction. Zero stands for none.
type Limit struct {
	Bandwidth   uint64 // bytes per second
	Burst       uint32 // bytes at once, beyond those of one second
	Peak        uint64 // bytes per second, also while a burst lasts
	PeakBurst   uint32 // bytes at once, beyond those of one second at the peak
	Packets     uint32 // per second
	PacketBurst uint32 // at once
	Connections uint32 // at a time
}

// Device is a network device by which packets of workloads' flows come.
type Device struct {
	Name     string
	Index    int  // tells one that took another's name
	Workload bool // flows from and to it may be offloaded
}

// Hooks lists where the endpoint's packets are judged.
func (e Endpoint) Hooks() []Hook {
	if e.Host {
		return []Hook{Untracked, PreDNAT, Normal, Forward}
	}
	return []Hook{Normal}
}

// Path returns the path of a hook and direction.
func (e Endpoint) Path(h Hook, d Direction) Path {
	in := d == Ingress
	switch {
	case h == Untracked && in:
		return e.UntrackedIngress
	case h == Untracked:
		return e.UntrackedEgress
	case h == PreDNAT:
		return e.PreDNATIngress
	case h == Forward && in:
		return e.ForwardIngress
	case h == Forward:
		return e.ForwardEgress
	case in:
		return e.Ingress
	}
	return e.Egress
}

// paths lists all of the endpoint's paths.
func (e Endpoint) paths() [7]Path {
	return [...]Path{e.Ingress, e.Egress, e.ForwardIngress, e.ForwardEgress, e.UntrackedIngress, e.UntrackedEgress, e.PreDNATIngress}
}

// Policies returns the policies and profiles that the endpoint names, each
// once, in no particular order.
func (e Endpoint) Policies() []PolicyID {
	seen := make(map[PolicyID]bool)
	var ids []PolicyID
	add := func(id PolicyID) {
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, p := range e.paths() {
		for _, t := range p.Tiers {
			for _, ref := range t.Policies {
				add(ref.ID)
			}
		}
		for _, id := range p.Profiles {
			add(id)
		}
	}
	return ids
}

// NamesAny reports whether the endpoint names one of these policies and
// profiles.
func (e Endpoint) NamesAny(ids map[PolicyID]bool) bool {
	for _, p := range e.paths() {
		for _, t := range p.Tiers {
			if slices.ContainsFunc(t.Policies, func(ref PolicyRef) bool { return ids[ref.ID] }) {
				return true
			}
		}
		if slices.ContainsFunc(p.Profiles, func(id PolicyID) bool { return ids[id] }) {
			return true
		}
	}
	return false
}

// Translation is a floating address: packets to External go to Internal, and
// what Internal sends comes from External.
type Translation struct{ External, Internal netip.Addr }

// CutMark is the bit of a tracked connection's mark that says that a rule denies
// it which came after it was allowed: it carries nothing more, in either
// direction. It is one of the bits that Calico's iptablesMarkMask claims by
// default (0xffff0000).
const CutMark uint32 = 1 << 28

// Failsafe is a port that host endpoints leave open whatever their policies
// say, so that nobody locks himself out.
type Failsafe struct {
	Protocol uint8
	Port     uint16
	Net      netip.Prefix // of the other end; invalid: any
}

// HostAction is what becomes of a packet from a workload to its own host that
// the workload's egress allows (Felix's defaultEndpointToHostAction).
type HostAction uint8

// The actions.
const (
	HostDrop   HostAction = iota
	HostAccept            // past the host's own rules
	HostReturn            // to the host's own rules
)

// Settings is what holds for the whole host.
type Settings struct {
	WorkloadPrefixes []string // of the names of workloads' interfaces
	WorkloadToHost   HostAction
	FailsafeIn       []Failsafe // Port is a destination port of the host
	FailsafeOut      []Failsafe // Port is a destination port elsewhere

	// HostTraffic is what hosts of the cluster send each other. Host endpoints
	// leave it open to and from [TunnelSources], whatever their policies say: who
	// closes them would else take the workloads behind them off the network.
	HostTraffic []Tunnel

	// Guarded is which of that the daemons of hosts take from each other alone:
	// workloads reach it neither at their own host nor at those of [TunnelSources].
	Guarded []Tunnel

	// Tunnels is the encapsulations that the host decapsulates, from [TunnelSources]
	// alone. Of protocol 41 only what comes over IPv6 is meant: over IPv4 it is some
	// other program's (RFC 4213).
	Tunnels []Tunnel

	// Virtual says that the host balances by IPVS (kube-proxy's mode ipvs): what it passes on to a
	// workload for others does not come by forwarding, but leaves as if the host had made it.
	Virtual bool

	// MaxConnections is how many tracked connections of its own a workload may have at a
	// time, on this host; 0: any number.
	MaxConnections uint32

	Reject        bool // denied packets are answered (Felix's Reject), not dropped
	AllowReturns  bool // allowed packets go on to the host's own rules (Felix's Return)
	AllowInvalid  bool // packets that connection tracking finds invalid are not dropped
	LogPrefix     string
	WorkloadIPIP  bool     // workloads may send IPv4 or IPv6 in either
	WorkloadVXLAN bool     // workloads may send VXLAN packets
	VXLANPorts    []uint16 // UDP ports at which hosts of the cluster take VXLAN packets, all that some of them do

	NAT NAT
}

// WorkloadTunnel returns the IP protocol, and the UDP port if it has one, of
// tunnel packets that workloads may not send.
func (s *Settings) WorkloadTunnel() []Tunnel {
	var list []Tunnel
	if !s.WorkloadIPIP {
		list = append(list, Tunnel{Protocol: protoIPIP}, Tunnel{Protocol: protoIPv6})
	}
	if !s.WorkloadVXLAN {
		for _, port := range s.VXLANPorts {
			list = append(list, Tunnel{Protocol: protoUDP, Port: port})
		}
	}
	return list
}

// Tunnel is how the packets of a tunnel, or of something else between hosts,
// look: by protocol, and by destination port unless that is 0.
type Tunnel struct {
	Protocol uint8
	Port     uint16
}

// Over reports whether the tunnel's packets travel over a family of the underlay.
func (t Tunnel) Over(f dataplane.Family) bool { return t.Protocol != protoIPv6 || f == dataplane.IPv6 }

// Numbers of protocols (IANA, Assigned Internet Protocol Numbers).
const (
	protoIPIP   = 4
	protoUDP    = 17
	protoIPv6   = 41
	protoICMPv6 = 58
)

// NAT is the translation of what leaves the cluster: source in [NATSources],
// destination not in [NATExempt].
type NAT struct {
	// PortLow to PortHigh are the source ports to use, with TCP, UDP and SCTP;
	// 0: the kernel's choice.
	PortLow, PortHigh uint16
	Address           netip.Addr // source address to use in its family; invalid: the interface's
	KeepPorts         bool       // source ports stay as they are where they can; false: all are random
	OutInterface      string     // only what leaves through this one; a final '+' stands for any rest; "": all
}
