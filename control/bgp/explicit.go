package bgp

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// explicit returns the sessions that BGPPeer resources ask of this node, the
// global ones first.
func (d *derivation) explicit() []Peer {
	var global, specific []Peer
	for _, name := range slices.Sorted(maps.Keys(d.v.peers)) {
		spec := d.v.peers[name]
		applies, problem := d.applies(spec)
		if !applies {
			continue
		}
		p, run := d.session(name, spec)
		if !run {
			continue
		}
		if problem != "" {
			p.Problem = problem
		}
		if p.Type == PeerGlobal {
			global = append(global, p)
		} else {
			specific = append(specific, p)
		}
	}
	return slices.Concat(global, specific)
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
			return true, s.wrong // nobody can tell whom it was meant for
		}
		return s.nodes.Matches(d.self.labels), ""
	}
	return true, ""
}

// session translates one BGPPeer. It reports false when the resource asks for
// nothing or names this node itself.
func (d *derivation) session(name string, s peerSpec) (Peer, bool) {
	if s.PeerIP == "" && s.PeerSelector == "" && s.LocalWorkloadSelector == "" {
		return Peer{}, false // an empty spec is accepted and does nothing
	}
	p := Peer{
		Name: name, Type: PeerGlobal, ASN: uint32(s.ASNumber),
		RestartTime: defaultRestartTime, HoldTime: defaultHoldTime, Keepalive: s.keepalive,
	}
	if s.Node != "" || s.NodeSelector != "" {
		p.Type = PeerNode
	}
	if s.PeerIP == "" {
		p.Problem = unsupported(s.BGPPeerSpec)
		return p, true
	}
	var ok bool
	if p.Addr, p.Port, ok = parsePeerIP(s.PeerIP); !ok {
		p.Problem = fmt.Sprintf("spec.peerIP %q: want an address or address:port, such as 10.1.0.1 or 10.1.0.1:1790", s.PeerIP)
		return p, true
	}
	if d.isSelf(p.Addr) {
		return Peer{}, false
	}
	p.Source = d.ipTo(p.Addr)
	d.asNode(&p)
	if p.Port == 0 {
		p.Port = DefaultPort
	}
	d.settings(&p, s.BGPPeerSpec)
	p.Problem = d.problem(p, s)
	return p, true
}

// asNode fills in what follows from the peer being a node of the cluster.
func (d *derivation) asNode(p *Peer) {
	for _, name := range d.v.nodeNames() {
		n := d.v.nodes[name]
		if name == d.node || !slices.Contains(n.addrs(), p.Addr) {
			continue
		}
		p.PoolsOnly = true
		asn := d.asnOf(n)
		if p.ASN == 0 {
			p.ASN = asn
		}
		if p.Port == 0 && p.ASN == asn {
			p.Port = d.v.portOf(name)
		}
		// Calico makes only global peers follow this rule. Two GoBGP speakers
		// that both connect may keep each other out: each closes what comes in
		// while it pauses after its own failed attempt.
		p.Passive = d.passiveTo(p.Addr)
		return
	}
}

func (d *derivation) settings(p *Peer, s v3.BGPPeerSpec) {
	if s.SourceAddress == v3.SourceAddressNone {
		p.Source = netip.Addr{}
	}
	if s.MaxRestartTime != nil {
		p.RestartTime = s.MaxRestartTime.Duration
	}
	if n := s.NumAllowedLocalASNumbers; n != nil && *n >= 0 && *n <= math.MaxUint8 {
		p.AllowOwnASN = uint8(*n)
	}
}

// problem says why a session is not run, naming the field and the cure.
func (d *derivation) problem(p Peer, s peerSpec) string {
	if u := unsupported(s.BGPPeerSpec); u != "" {
		return u
	}
	ibgp := p.ASN == d.asn
	switch {
	case !d.ipTo(p.Addr).IsValid():
		return fmt.Sprintf("spec.peerIP %s: this node has no address of its family to speak from; give it a spec.bgp.%s", p.Addr, addressField(p.Addr))
	case p.Addr.IsLinkLocalUnicast() || p.Addr.Zone() != "" || p.Addr.Is4In6():
		return fmt.Sprintf("spec.peerIP %s: want a plain address that is not link-local: it says on no link where the peer is", p.Addr)
	case p.Addr.IsUnspecified() || p.Addr.IsMulticast():
		return fmt.Sprintf("spec.peerIP %s: not the address of a host", p.Addr)
	case p.ASN == 0:
		return "spec.asNumber is missing: give the AS of the peer"
	case s.LocalASNumber != nil && uint32(*s.LocalASNumber) != d.asn:
		return fmt.Sprintf("spec.localASNumber %d is not supported by this version: only the node's own, %d", *s.LocalASNumber, d.asn)
	case s.SourceAddress != "" && s.SourceAddress != v3.SourceAddressNone && s.SourceAddress != v3.SourceAddressUseNodeIP:
		return fmt.Sprintf("spec.sourceAddress %q: want UseNodeIP or None", s.SourceAddress)
	case s.NumAllowedLocalASNumbers != nil && (*s.NumAllowedLocalASNumbers < 0 || *s.NumAllowedLocalASNumbers > math.MaxUint8):
		return fmt.Sprintf("spec.numAllowedLocalASNumbers is %d: want 0 to 255", *s.NumAllowedLocalASNumbers)
	case s.keepalive != 0 && (s.keepalive < 0 || s.keepalive >= p.HoldTime):
		return fmt.Sprintf("spec.keepaliveTime is %s: want less than the hold time, %s", s.keepalive, p.HoldTime)
	case d.self.cluster != "" && ibgp:
		return "this node has routeReflectorClusterID, and route reflection is not supported by this version"
	}
	return restartProblem("spec.maxRestartTime", p.RestartTime)
}

// unsupported names the first setting of a BGPPeer that this version does not
// have. Running the session without it would be worse than not running it.
func unsupported(s v3.BGPPeerSpec) string {
	for _, f := range []struct {
		field string
		set   bool
	}{
		{"password", s.Password != nil},
		{"peerSelector", s.PeerSelector != ""},
		{"localWorkloadSelector", s.LocalWorkloadSelector != ""},
		{"filters", len(s.Filters) > 0},
		{"ttlSecurity", s.TTLSecurity != nil},
		{"reachableBy", s.ReachableBy != ""},
	} {
		if f.set {
			return fmt.Sprintf("spec.%s is not supported by this version; the session is not run without it", f.field)
		}
	}
	return ""
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
