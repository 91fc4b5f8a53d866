package bgp

import (
	"fmt"
	"iter"
	"math"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// explicit returns the sessions that BGPPeer resources ask of this node: the
// global ones first, then those for some nodes, then those that other nodes'
// sessions to this one ask for in turn.
func (d *derivation) explicit() iter.Seq[Peer] {
	return func(yield func(Peer) bool) { d.eachExplicit(yield) }
}

func (d *derivation) eachExplicit(yield func(Peer) bool) {
	type choice struct {
		name, problem string
	}
	var global, specific []choice
	for _, name := range d.v.index().peers {
		spec := d.v.peers[name]
		switch applies, problem := d.applies(spec); {
		case !applies:
		case spec.Node == "" && spec.NodeSelector == "":
			global = append(global, choice{name, problem})
		default:
			specific = append(specific, choice{name, problem})
		}
	}
	for _, c := range slices.Concat(global, specific) {
		for p := range d.sessions(c.name, d.v.peers[c.name]) {
			if c.problem != "" {
				p.Problem = c.problem
			}
			if !yield(p) {
				return
			}
		}
	}
	for _, name := range d.v.index().peers {
		for p := range d.reverse(name, d.v.peers[name]) {
			if !yield(p) {
				return
			}
		}
	}
}

// reverse returns the sessions of the other direction: a node that a BGPPeer's
// peerSelector selects peers with all nodes that the BGPPeer is for.
func (d *derivation) reverse(name string, s peerSpec) iter.Seq[Peer] {
	if s.peerSel == nil || !s.peerSel.Matches(d.self.labels) || s.ReversePeering != nil && *s.ReversePeering == v3.ReversePeeringManual {
		return none
	}
	return d.withNodes(name, s, true, s.isFor)
}

func none(func(Peer) bool) {}

func one(p Peer) iter.Seq[Peer] { return func(yield func(Peer) bool) { yield(p) } }

// isFor reports whether a BGPPeer is for a node.
func (s peerSpec) isFor(name string, n nodeFacts) bool {
	switch {
	case s.Node != "":
		return s.Node == name
	case s.NodeSelector != "":
		return s.nodes != nil && s.nodes.Matches(n.labels)
	}
	return true
}

// withNodes makes a BGPPeer's sessions with the nodes that match, one for each
// family that both have; reverse says that it is those nodes that the BGPPeer
// is for.
func (d *derivation) withNodes(name string, s peerSpec, reverse bool, match func(string, nodeFacts) bool) iter.Seq[Peer] {
	return func(yield func(Peer) bool) {
		for _, other := range d.v.nodeNames() {
			n := d.v.nodes[other]
			if other == d.node || !match(other, n) {
				continue
			}
			for _, addr := range n.addrs() {
				if d.ipTo(addr).IsValid() && !yield(d.withNode(name, s, reverse, other, addr)) {
					return
				}
			}
		}
	}
}

// withNode makes a BGPPeer's session with an address of another node.
func (d *derivation) withNode(name string, s peerSpec, reverse bool, other string, addr netip.Addr) Peer {
	p := d.newPeer(name, s)
	p.Addr, p.Source, p.ASN, p.Port = addr, d.ipTo(addr), d.asnOf(d.v.nodes[other]), d.v.portOf(other)
	p.ExtendedNextHop = s.extended && addr.Is6()
	own := s
	if reverse && s.LocalASNumber != nil { // it is the other node that shows it
		p.ASN, own.LocalASNumber = uint32(*s.LocalASNumber), nil
	}
	d.settings(&p, own)
	d.asNode(&p)
	p.Problem = d.problem(p, s)
	switch {
	case d.isSelf(addr):
		p.Problem = fmt.Sprintf("node %s has the address of this node, %s: give one of the two another spec.bgp.%s", other, addr, addressField(addr))
	case p.Problem == "" && d.bothShow(s, other):
		p.Problem = fmt.Sprintf("spec.localASNumber %d: the BGPPeer applies to this node and to node %s and selects both as peers, so each would use this AS and expect another of its peer: select each node on one side only", *s.LocalASNumber, other)
	}
	return p
}

// bothShow reports whether a BGPPeer gives this node and another one a local AS
// towards each other that is not the own AS of both.
func (d *derivation) bothShow(s peerSpec, other string) bool {
	if s.LocalASNumber == nil {
		return false
	}
	n, asn := d.v.nodes[other], uint32(*s.LocalASNumber)
	return (asn != d.asn || asn != d.asnOf(n)) && s.isFor(d.node, d.self) && s.isFor(other, n) &&
		s.peerSel.Matches(d.self.labels) && s.peerSel.Matches(n.labels)
}

// applies reports whether a BGPPeer is for this node, and what is wrong with
// its choice of nodes.
func (d *derivation) applies(s peerSpec) (bool, string) {
	switch {
	case s.Node != "" && s.NodeSelector != "":
		return s.Node == d.node, "spec.node and spec.nodeSelector exclude each other: keep one"
	case s.Node != "":
		return s.Node == d.node, ""
	case s.NodeSelector != "":
		if s.nodes == nil {
			return true, s.wrong // it is not known which peer it was meant for
		}
		return s.nodes.Matches(d.self.labels), ""
	}
	return true, ""
}

func (d *derivation) newPeer(name string, s peerSpec) Peer {
	p := Peer{Name: name, Type: PeerGlobal, ASN: uint32(s.ASNumber), RestartTime: defaultRestartTime, HoldTime: defaultHoldTime}
	if s.Node != "" || s.NodeSelector != "" {
		p.Type = PeerNode
	}
	return p
}

// sessions translates one BGPPeer. There are none when the resource asks for
// nothing or names this node itself.
func (d *derivation) sessions(name string, s peerSpec) iter.Seq[Peer] {
	p := d.newPeer(name, s)
	switch {
	case s.PeerSelector != "" && s.peerSel == nil:
		p.Problem = s.wrongPeer
		return one(p)
	case s.PeerSelector != "":
		return d.withNodes(name, s, false, func(_ string, n nodeFacts) bool { return s.peerSel.Matches(n.labels) })
	case s.LocalWorkloadSelector != "":
		p.Problem = "spec.localWorkloadSelector is not supported by this version; no session with a workload is run"
		return one(p)
	case s.PeerIP == "" && s.device == "" && s.listen == (store.ListenRange{}) && s.linkNote == "":
		return none // an empty spec is accepted and does nothing
	}
	if s.PeerIP != "" {
		var ok bool
		if p.Addr, p.Port, ok = parsePeerIP(s.PeerIP); !ok {
			p.Problem = fmt.Sprintf("spec.peerIP %q: want an address or address:port, such as 10.1.0.1 or 10.1.0.1:1790", s.PeerIP)
			return one(p)
		}
	}
	if d.isSelf(p.Addr) {
		return none
	}
	p.Range, p.Limit = s.listen.Prefix, s.listen.Limit
	p.Source = d.ipTo(p.at())
	if n, ok := d.nodeAt(p.Addr); ok {
		asn := d.asnOf(d.v.nodes[n])
		if p.ASN == 0 {
			p.ASN = asn
		}
		if p.Port == 0 && p.ASN == asn {
			p.Port = d.v.portOf(n)
		}
	}
	if p.Port == 0 {
		p.Port = DefaultPort
	}
	p.Interface, p.ExtendedNextHop = s.device, s.extended || s.device != ""
	if p.Interface != "" && p.Addr.IsLinkLocalUnicast() {
		p.Addr = p.Addr.WithZone(p.Interface)
	}
	d.settings(&p, s)
	if p.Interface != "" {
		p.Source = netip.Addr{} // the device's own
	}
	d.asNode(&p)
	d.asLocal(&p)
	p.Problem = d.problem(p, s)
	return one(p)
}

// nodeAt returns the other node that has an address.
func (d *derivation) nodeAt(a netip.Addr) (string, bool) {
	for _, name := range d.v.index().at[a] {
		if name != d.node {
			return name, true
		}
	}
	return "", false
}

// asNode fills in what follows from the peer being a node of the cluster or
// not, and from this node being a reflector.
func (d *derivation) asNode(p *Peer) {
	name, ok := d.nodeAt(p.Addr)
	if ok {
		p.PoolsOnly = true
		// Calico makes only global peers follow this rule. Here all do, so that no
		// two nodes' connections collide.
		p.Passive = d.passiveTo(p.Addr)
		if p.Port == d.v.portOf(name) { // else it is another program's of that host
			d.sign(p, d.v.nodes[name])
		}
	}
	if d.self.cluster == "" || !p.ibgp(d.asn) {
		return
	}
	p.Reflect = true
	if ok && d.v.nodes[name].cluster == d.self.cluster {
		return // two reflectors of one cluster: plain iBGP
	}
	if id, err := netip.ParseAddr(d.self.cluster); err == nil && id.Is4() {
		p.ClusterID = id
	}
}

func (d *derivation) settings(p *Peer, s peerSpec) {
	if s.SourceAddress == v3.SourceAddressNone {
		p.Source = netip.Addr{}
	}
	if s.MaxRestartTime != nil {
		p.RestartTime = s.MaxRestartTime.Duration
	}
	if n := s.NumAllowedLocalASNumbers; n != nil && *n >= 0 && *n <= math.MaxUint8 {
		p.AllowOwnASN = uint8(*n)
	}
	if s.LocalASNumber != nil && uint32(*s.LocalASNumber) != d.asn {
		p.LocalASN = uint32(*s.LocalASNumber)
	}
	if s.TTLSecurity != nil {
		p.TTLSecurity = *s.TTLSecurity
	}
	p.NextHopMode = d.nextHopMode(*p, s.BGPPeerSpec)
	p.Filters = strings.Join(s.Filters, ",")
	p.Secret, _ = secretOf(s.Password)
	p.AO = aoKeys(s.ao)
	if s.ReachableBy != "" {
		p.ReachableBy, _ = netip.ParseAddr(s.ReachableBy) // problem says when it is none
	}
	p.MaxPrefixes, p.StaleTime, p.Keepalive, p.BFD = s.maxPrefixes, s.staleTime, s.keepalive, s.bfd
	if s.holdTime != 0 {
		p.HoldTime = s.holdTime
	}
}

// nextHopMode reads nextHopMode and its older form, which acts on eBGP only.
func (d *derivation) nextHopMode(p Peer, s v3.BGPPeerSpec) NextHopMode {
	switch {
	case s.NextHopMode == nil && s.KeepOriginalNextHop && !p.ibgp(d.asn):
		return NextHopKeep
	case s.NextHopMode == nil:
		return NextHopAuto
	case string(*s.NextHopMode) == string(v3.NextHopModeSelf):
		return NextHopSelf
	case string(*s.NextHopMode) == string(v3.NextHopModeKeep):
		return NextHopKeep
	}
	return NextHopAuto
}

// secretOf reads a reference to a password, and says what is wrong with it.
func secretOf(p *v3.BGPPassword) (SecretRef, string) {
	if p == nil {
		return SecretRef{}, ""
	}
	if p.SecretKeyRef == nil || p.SecretKeyRef.Name == "" || p.SecretKeyRef.Key == "" {
		return SecretRef{}, ".secretKeyRef needs both name and key; the session is not run without a password"
	}
	return SecretRef{p.SecretKeyRef.Name, p.SecretKeyRef.Key}, ""
}

// problem says why a session is not run, naming the field and the cure.
func (d *derivation) problem(p Peer, s peerSpec) string {
	_, secret := secretOf(s.Password)
	switch {
	case secret != "":
		return "spec.password" + secret
	case s.wrongNote != "":
		return s.wrongNote
	case p.linkProblem(s) != "":
		return p.linkProblem(s)
	case p.Interface == "" && !d.ipTo(p.at()).IsValid():
		return fmt.Sprintf("%s: this node has no address of its family as source; give it a spec.bgp.%s", p.field(), addressField(p.at()))
	case p.Interface == "" && (p.Addr.IsLinkLocalUnicast() || p.Addr.Zone() != "" || p.Addr.Is4In6()):
		return fmt.Sprintf("spec.peerIP %s: want a plain address that is not link-local, which does not tell the link; annotation %s names the link's device", p.Addr, store.AnnotationPeerInterface)
	case p.Local && d.v.injection.limit == 0:
		return fmt.Sprintf("spec.peerIP %s: programs on this host may not inject routes (bgp.inject.maxRoutes is 0)", p.Addr)
	case p.Local && s.ReachableBy != "":
		return fmt.Sprintf("spec.reachableBy %q: the peer is on this host: leave it out", s.ReachableBy)
	case p.Addr.IsUnspecified() || p.Addr.IsMulticast():
		return fmt.Sprintf("spec.peerIP %s: not the address of a host", p.Addr)
	case s.LocalASNumber != nil && *s.LocalASNumber == 0:
		return "spec.localASNumber is 0, which is reserved: leave it out for the node's own"
	case p.ASN == 0:
		return "spec.asNumber is missing: give the AS of the peer"
	case s.SourceAddress != "" && s.SourceAddress != v3.SourceAddressNone && s.SourceAddress != v3.SourceAddressUseNodeIP:
		return fmt.Sprintf("spec.sourceAddress %q: want UseNodeIP or None", s.SourceAddress)
	case s.NumAllowedLocalASNumbers != nil && (*s.NumAllowedLocalASNumbers < 0 || *s.NumAllowedLocalASNumbers > math.MaxUint8):
		return fmt.Sprintf("spec.numAllowedLocalASNumbers is %d: want 0 to 255", *s.NumAllowedLocalASNumbers)
	case s.keepalive != 0 && (s.keepalive < 0 || s.keepalive >= p.HoldTime):
		return fmt.Sprintf("spec.keepaliveTime is %s: want less than the hold time, %s", s.keepalive, p.HoldTime)
	case s.TTLSecurity != nil && *s.TTLSecurity == 0:
		return "spec.ttlSecurity is 0: want the number of hops to the peer, from 1 to 255; leave it out to turn the check off"
	case s.ReachableBy != "" && (!p.ReachableBy.IsValid() || p.ReachableBy.Is4() != p.Addr.Is4()):
		return fmt.Sprintf("spec.reachableBy %q: want the address of a gateway of the peer's family", s.ReachableBy)
	case p.Reflect && !p.ClusterID.IsValid() && !d.sameCluster(p.Addr):
		return fmt.Sprintf("this node's spec.bgp.routeReflectorClusterID is %q: want an identifier in the form of an IPv4 address, such as 244.0.0.1", d.self.cluster)
	}
	return restartProblem("spec.maxRestartTime", p.RestartTime)
}

// sameCluster reports whether an address is another reflector's of this node's
// cluster id.
func (d *derivation) sameCluster(a netip.Addr) bool {
	name, ok := d.nodeAt(a)
	return ok && d.v.nodes[name].cluster == d.self.cluster
}

// parsePeerIP reads `10.1.0.1`, `10.1.0.1:1790`, `fd00::1` or `[fd00::1]:1790`.
// The port is 0 when there is none.
func parsePeerIP(s string) (netip.Addr, uint16, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a, 0, true
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil || ap.Port() == 0 {
		return netip.Addr{}, 0, false
	}
	return ap.Addr(), ap.Port(), true
}
