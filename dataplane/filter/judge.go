package filter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// Packet is what rules look at: the first packet of a flow.
type Packet struct {
	Src, Dst         netip.Addr
	Protocol         uint8
	SrcPort, DstPort uint16 // of protocols that have ports
	ICMPType         uint8  // of ICMP and ICMPv6
	ICMPCode         uint8
}

// Flow is a packet on its way through the host. An empty interface is the host
// itself, [Elsewhere] one that nobody knows.
type Flow struct {
	In, Out string
	Packet  Packet
}

// Hook is a place where an endpoint's rules are applied, in the order in which
// a packet comes by.
type Hook uint8

// The hooks.
const (
	Untracked Hook = iota // before connection tracking
	PreDNAT               // before destination NAT
	Normal                // local traffic of the host; all traffic of a workload
	Forward               // traffic through a host endpoint
)

func (h Hook) String() string {
	switch h {
	case Untracked:
		return "untracked"
	case PreDNAT:
		return "pre-DNAT"
	case Normal:
		return "normal"
	case Forward:
		return "forward"
	}
	return fmt.Sprintf("hook(%d)", uint8(h))
}

// Reason says what took a step.
type Reason string

// The reasons.
const (
	ByRule       Reason = "rule"
	ByTierEnd    Reason = "end of tier"
	ByPathEnd    Reason = "no policy or profile decided"
	ByFailsafe   Reason = "failsafe port"
	ByHosts      Reason = "between hosts of the cluster"
	BySpoofing   Reason = "source is not the workload's"
	ByToHost     Reason = "action of workloads to their host"
	ByNoEndpoint Reason = "workload interface without an endpoint"
	ByNeighbour  Reason = "IPv6 neighbour discovery of the host's own"
	ByTunnel     Reason = "tunnel packet from whom none is taken"
	ByOutside    Reason = "tunnel packet from outside the cluster"
	ByError      Reason = "ICMP error about what is not the workload's"
	ByMany       Reason = "more than a workload may have"
	ByLimit      Reason = "beyond the workload's limits"
	ByGuard      Reason = "port that hosts keep for each other"
	ByLoopback   Reason = "loopback address of the host"
	ByNobody     Reason = "no endpoint on the way"
	ByCut        Reason = "connection that a later rule denied"
)

// NoRule is [Step.Rule] where no rule took the step.
const NoRule = -1

// Step is one thing that happened to a packet.
type Step struct {
	Interface string // of the endpoint's own name: "*" where that one applies
	Hook      Hook
	Direction Direction
	Tier      string
	Policy    PolicyID
	Rule      int // index in the policy's list of this direction, or NoRule
	Action    Action
	Reason    Reason
}

// Verdict is what becomes of a packet, with the steps that led there. The last
// step is the one that decided.
type Verdict struct {
	Allowed bool
	Steps   []Step
}

// Judge says what becomes of the first packet of a flow. Connection tracking,
// which accepts the rest of an allowed flow, and NAT are left out.
//
// Traffic from the host to its own workloads is allowed, as Calico does it. So
// is the host's own neighbour discovery, without which it has no IPv6.
func (r *Ruleset) Judge(f Flow) Verdict {
	j := judge{r: r, p: f.Packet}
	in, inWorkload := r.endpointAt(f.In)
	out, outWorkload := r.endpointAt(f.Out)
	decided := false
	switch {
	case f.In == "" && outWorkload:
		return j.verdict()
	case f.In != "" && f.Out == "" && r.outside(f.Packet):
		j.end(Step{Interface: f.In, Rule: NoRule, Action: Deny, Hook: Normal, Direction: Ingress, Reason: ByOutside})
		return j.verdict()
	case f.discovery(in, inWorkload):
		j.end(Step{Interface: f.In + f.Out, Rule: NoRule, Action: Allow, Hook: Normal, Direction: directionOf(f), Reason: ByNeighbour})
		return j.verdict()
	case inWorkload:
		decided = j.fromWorkload(f, in)
	case in != nil:
		decided = j.intoHost(f, in)
	default:
	}
	if decided || f.Out == "" {
		return j.verdict()
	}
	switch {
	case outWorkload && out == nil:
		j.end(Step{Interface: f.Out, Rule: NoRule, Direction: Ingress, Hook: Normal, Action: Deny, Reason: ByNoEndpoint})
	case outWorkload:
		j.walk(out, Normal, Ingress)
	case out != nil && f.In != "":
		j.walk(out, Forward, Egress)
	case out != nil:
		if j.stage(out, Untracked, Egress) == Pass {
			j.stage(out, Normal, Egress)
		}
	}
	return j.verdict()
}

// outside reports whether the packet is one of a tunnel's that no host of the cluster
// sent. Probes, which look like it and that no tunnel decapsulates, are not told apart
// here: they are never data.
func (r *Ruleset) outside(p Packet) bool {
	return !r.Contains(TunnelSources, p.Src, 0, 0) && slices.ContainsFunc(r.Settings.Tunnels, func(t Tunnel) bool {
		return p.of(t) && t.Over(dataplane.FamilyOf(p.Src))
	})
}

// discovery reports whether a packet is one of those ICMPv6 messages between
// the host and a link without which there is no IPv6 (RFC 4861, RFC 2710, RFC
// 3810). Routers' messages are not taken from workloads.
func (f Flow) discovery(from *Endpoint, workload bool) bool {
	src := f.Packet.Src
	switch {
	case f.Packet.Protocol != protoICMPv6 || !src.Is6() || f.In != "" && f.Out != "":
		return false
	case workload && !src.IsLinkLocalUnicast() && !src.IsUnspecified() && (from == nil || !contains(from.Sources, src)):
		return false
	}
	for _, t := range Discovery(workload) {
		if t.Low <= uint16(f.Packet.ICMPType) && uint16(f.Packet.ICMPType) <= t.High {
			return true
		}
	}
	return false
}

// Discovery returns the types of ICMPv6 messages that pass between the host
// and a link whatever the rules say.
func Discovery(workload bool) []PortRange {
	if workload {
		return []PortRange{{130, 133}, {135, 136}, {143, 143}}
	}
	return []PortRange{{130, 137}, {143, 143}}
}

func directionOf(f Flow) Direction {
	if f.Out != "" {
		return Egress
	}
	return Ingress
}

// of reports whether the packet is one of a tunnel's.
func (p Packet) of(t Tunnel) bool {
	return p.Protocol == t.Protocol && (t.Port == 0 || p.DstPort == t.Port)
}

// endpointAt returns the endpoint that judges at an interface, and whether the
// interface is a workload's.
func (r *Ruleset) endpointAt(name string) (e *Endpoint, workload bool) {
	if name == "" || name == Elsewhere {
		return nil, false
	}
	if e, ok := r.Endpoints[name]; ok {
		return &e, !e.Host
	}
	if slices.ContainsFunc(r.Settings.WorkloadPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
		return nil, true
	}
	if e, ok := r.Endpoints[AnyInterface]; ok && name != "lo" {
		return &e, false
	}
	return nil, false
}

type judge struct {
	r *Ruleset
	p Packet
	v Verdict
}

func (j *judge) end(s Step) {
	j.v.Allowed = s.Action != Deny
	j.v.Steps = append(j.v.Steps, s)
}

func (j *judge) verdict() Verdict {
	if len(j.v.Steps) == 0 {
		j.end(Step{Rule: NoRule, Hook: Normal, Action: Allow, Reason: ByNobody})
	}
	return j.v
}

// fromWorkload judges what a workload sends, up to the routing decision. It
// reports whether that is all.
func (j *judge) fromWorkload(f Flow, e *Endpoint) bool {
	s := Step{Interface: f.In, Hook: Normal, Direction: Egress, Rule: NoRule, Action: Deny}
	if e == nil {
		s.Reason = ByNoEndpoint
		j.end(s)
		return true
	}
	if j.p.Dst.IsLoopback() {
		s.Reason = ByLoopback
		j.end(s)
		return true
	}
	if !contains(e.Sources, j.p.Src) {
		s.Reason = BySpoofing
		j.end(s)
		return true
	}
	if slices.ContainsFunc(j.r.Settings.WorkloadTunnel(), j.p.of) {
		s.Reason = ByTunnel
		j.end(s)
		return true
	}
	if slices.ContainsFunc(j.r.Settings.Guarded, j.p.of) && (f.Out == "" || j.r.Contains(TunnelSources, j.p.Dst, 0, 0)) {
		s.Reason = ByGuard
		j.end(s)
		return true
	}
	if j.walk(e, Normal, Egress) == Deny {
		return true
	}
	if f.Out != "" {
		return false
	}
	s.Reason = ByToHost
	if j.r.Settings.WorkloadToHost != HostDrop {
		s.Action = Allow
	}
	j.end(s)
	return true
}

// intoHost judges what comes in through a host endpoint. It reports whether
// that is all.
func (j *judge) intoHost(f Flow, e *Endpoint) bool {
	a := j.stage(e, Untracked, Ingress)
	if a == Pass {
		a = j.stage(e, PreDNAT, Ingress)
	}
	switch {
	case a != Pass: // what is allowed here passes the other paths of this endpoint, not those of the next
	case f.Out == "":
		a = j.stage(e, Normal, Ingress)
	default:
		a = j.walk(e, Forward, Ingress)
	}
	return a == Deny || f.Out == ""
}

// stage applies one hook of a host endpoint, with its failsafe ports.
func (j *judge) stage(e *Endpoint, h Hook, d Direction) Action {
	why := ByFailsafe
	switch {
	case j.failsafe(h, d):
	case j.betweenHosts(h, d):
		why = ByHosts
	default:
		return j.walk(e, h, d)
	}
	if h != Normal {
		return Pass
	}
	j.end(Step{Interface: e.Interface, Hook: h, Direction: d, Rule: NoRule, Action: Allow, Reason: why})
	return Allow
}

// betweenHosts reports whether the packet is of what hosts send each other.
func (j *judge) betweenHosts(h Hook, d Direction) bool {
	far := j.p.Src
	if d == Egress {
		far = j.p.Dst
	}
	return j.r.Contains(TunnelSources, far, 0, 0) && slices.ContainsFunc(j.r.Settings.HostTraffic, func(t Tunnel) bool {
		return j.p.of(t) || h == Untracked && t.Port != 0 && t.Protocol == j.p.Protocol && t.Port == j.p.SrcPort
	})
}

// failsafe reports whether the packet is to or from a failsafe port. Answers
// matter only where there is no connection tracking yet.
func (j *judge) failsafe(h Hook, d Direction) bool {
	here, there, other := j.r.Settings.FailsafeIn, j.r.Settings.FailsafeOut, j.p.Src
	if d == Egress {
		here, there, other = there, here, j.p.Dst
	}
	match := func(list []Failsafe, port uint16) bool {
		return slices.ContainsFunc(list, func(f Failsafe) bool {
			return f.Protocol == j.p.Protocol && f.Port == port && (!f.Net.IsValid() || f.Net.Contains(other))
		})
	}
	return match(here, j.p.DstPort) || h == Untracked && match(there, j.p.SrcPort)
}

// walk applies one path. It returns Pass where the path leaves the decision to
// the next hook.
func (j *judge) walk(e *Endpoint, h Hook, d Direction) Action {
	path := e.Path(h, d)
	s := Step{Interface: e.Interface, Hook: h, Direction: d}
	for _, t := range path.Tiers {
		if !t.Enforced() {
			continue
		}
		s.Tier = t.Name
		if a := j.tier(t, s); a != Pass {
			return a
		}
	}
	s.Tier = ""
	for _, id := range path.Profiles {
		if a, ok := j.policy(id, s); ok && a != Pass {
			return a
		}
	}
	if path.Default != Pass {
		s.Rule, s.Action, s.Reason = NoRule, path.Default, ByPathEnd
		j.end(s)
	}
	return path.Default
}

// tier returns what the policies of a tier, or its end, decide.
func (j *judge) tier(t Tier, s Step) Action {
	for _, ref := range t.Policies {
		if ref.Staged {
			continue
		}
		if a, ok := j.policy(ref.ID, s); ok {
			return a
		}
	}
	s.Rule, s.Action, s.Reason = NoRule, t.End, ByTierEnd
	j.end(s)
	return t.End
}

// policy returns what the first rule that matches decides, if one does.
func (j *judge) policy(id PolicyID, s Step) (Action, bool) {
	for i, rule := range j.r.Policies[id].Rules(s.Direction) {
		if !j.r.matches(&rule, &j.p) {
			continue
		}
		s.Policy, s.Rule, s.Action, s.Reason = id, i, rule.Action, ByRule
		j.end(s)
		if rule.Action != Log {
			return rule.Action, true
		}
	}
	return Pass, false
}

func (r *Ruleset) matches(rule *Rule, p *Packet) bool {
	switch {
	case rule.Family != 0 && rule.Family != dataplane.FamilyOf(p.Dst),
		rule.Protocol != 0 && rule.Protocol != p.Protocol,
		rule.NotProtocol != 0 && rule.NotProtocol == p.Protocol,
		rule.ICMP.Set && !rule.ICMP.matches(p),
		rule.NotICMP.Set && rule.NotICMP.matches(p):
		return false
	}
	return r.side(&rule.Source, p.Src, p.Protocol, p.SrcPort) && r.side(&rule.Destination, p.Dst, p.Protocol, p.DstPort)
}

func (m ICMP) matches(p *Packet) bool {
	return m.Type == p.ICMPType && (!m.CodeSet || m.Code == p.ICMPCode)
}

func (r *Ruleset) side(s *Side, a netip.Addr, protocol uint8, port uint16) bool {
	if s.Nets != nil && !contains(s.Nets, a) {
		return false
	}
	if s.NotNets != nil && (contains(s.NotNets, a) || !anyOfFamily(s.NotNets, a)) {
		return false
	}
	if s.Set != "" && !r.Contains(s.Set, a, protocol, port) || s.NotSet != "" && r.Contains(s.NotSet, a, protocol, port) {
		return false
	}
	if s.Ports != nil || s.PortSet != "" {
		if !inRanges(s.Ports, port) && (s.PortSet == "" || !r.Contains(s.PortSet, a, protocol, port)) {
			return false
		}
	}
	return !inRanges(s.NotPorts, port) && (s.NotPortSet == "" || !r.Contains(s.NotPortSet, a, protocol, port))
}

// Contains reports whether a set has a member for the address, and if it is
// one of ports for the protocol and the port too.
func (r *Ruleset) Contains(id SetID, a netip.Addr, protocol uint8, port uint16) bool {
	members := r.Members[id]
	if r.Sets[id].Type == Ports {
		_, ok := members[Member{Prefix: netip.PrefixFrom(a, a.BitLen()), Protocol: protocol, Port: port}]
		return ok
	}
	for bits := a.BitLen(); bits >= 0; bits-- {
		p, err := a.Prefix(bits)
		if err != nil {
			return false
		}
		if _, ok := members[Member{Prefix: p}]; ok {
			return true
		}
	}
	return false
}

func contains(nets []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(nets, func(p netip.Prefix) bool { return p.Contains(a) })
}

func anyOfFamily(nets []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(nets, func(p netip.Prefix) bool { return p.Addr().Is4() == a.Is4() })
}

func inRanges(ranges []PortRange, port uint16) bool {
	return slices.ContainsFunc(ranges, func(r PortRange) bool { return r.Low <= port && port <= r.High })
}
