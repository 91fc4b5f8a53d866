package store

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxRestart is what the 12 bits of the graceful restart capability hold, in
// seconds (RFC 4724, section 3).
const maxRestart = 4095 * time.Second

func (c *checker) bgpPeer(s *v3.BGPPeerSpec) {
	c.reject(s.Node != "" && s.NodeSelector != "", "spec.nodeSelector", s.NodeSelector, "cannot be given together with node; keep one of the two")
	if s.Node != "" {
		c.reference("spec.node", s.Node)
	}
	c.selector("spec.nodeSelector", s.NodeSelector, noGlobal)
	c.selector("spec.peerSelector", s.PeerSelector, noGlobal)
	c.selector("spec.localWorkloadSelector", s.LocalWorkloadSelector, noGlobal)

	peer := c.peerIP(s.PeerIP)
	c.peerTarget(s)
	c.reject(s.LocalASNumber != nil && *s.LocalASNumber == 0, "spec.localASNumber", 0, "AS 0 is reserved; use a number from 1 to 4294967295, or leave it out")
	if s.NextHopMode != nil {
		c.oneOf("spec.nextHopMode", string(*s.NextHopMode), "Auto", "Self", "Keep")
		c.reject(s.KeepOriginalNextHop, "spec.keepOriginalNextHop", true, "is deprecated and cannot be given together with nextHopMode; leave it out")
	}
	if s.ReversePeering != nil {
		c.oneOf("spec.reversePeering", string(*s.ReversePeering), "Auto", "Manual")
	}
	c.password("spec.password", s.Password)
	c.oneOf("spec.sourceAddress", string(s.SourceAddress), string(v3.SourceAddressUseNodeIP), string(v3.SourceAddressNone))
	c.restartTime("spec.maxRestartTime", s.MaxRestartTime)
	if n := s.NumAllowedLocalASNumbers; n != nil && *n < 0 {
		c.add("spec.numAllowedLocalASNumbers", *n, "must not be negative; 0 refuses paths that hold the own AS")
	}
	if n := s.TTLSecurity; n != nil && *n == 0 {
		c.add("spec.ttlSecurity", *n, "must be the number of hops to the peer, from 1 to 255; leave it out to turn the check off")
	}
	c.reachableBy(s, peer)
	c.filterNames(s.Filters)
}

// peerTarget checks that a peer is named in one way only.
func (c *checker) peerTarget(s *v3.BGPPeerSpec) {
	if s.PeerSelector != "" {
		c.reject(s.PeerIP != "", "spec.peerIP", s.PeerIP, "cannot be given together with peerSelector; keep one of the two")
		c.reject(s.ASNumber != 0, "spec.asNumber", uint32(s.ASNumber), "cannot be given together with peerSelector: each node's own AS number is used; leave it out")
	}
	if s.LocalWorkloadSelector != "" {
		c.reject(s.PeerIP != "", "spec.peerIP", s.PeerIP, "cannot be given together with localWorkloadSelector; keep one of the two")
		c.reject(s.PeerSelector != "", "spec.peerSelector", s.PeerSelector, "cannot be given together with localWorkloadSelector; keep one of the two")
		c.reject(s.ASNumber == 0, "spec.asNumber", nil, "required with localWorkloadSelector: the AS number that the workloads use")
	}
}

// peerIP parses "address", "v4:port" and "[v6]:port".
func (c *checker) peerIP(value string) netip.Addr {
	if value == "" {
		return netip.Addr{}
	}
	const field = "spec.peerIP"
	if a, err := netip.ParseAddr(value); err == nil && a.Zone() == "" {
		return a
	}
	ap, err := netip.ParseAddrPort(value)
	if err != nil || ap.Addr().Zone() != "" || ap.Port() == 0 {
		c.add(field, value, "must be an address, with or without a port: 10.1.0.254, 10.1.0.254:1790, fd00::1 or [fd00::1]:1790")
		return netip.Addr{}
	}
	return ap.Addr()
}

func (c *checker) reachableBy(s *v3.BGPPeerSpec, peer netip.Addr) {
	const field = "spec.reachableBy"
	if s.ReachableBy == "" {
		return
	}
	if s.PeerIP == "" {
		c.add(field, s.ReachableBy, "is the gateway to spec.peerIP, which is missing; add it or leave this out")
		return
	}
	family := ""
	if peer.IsValid() {
		family = familyName(peer)
	}
	c.addr(field, s.ReachableBy, family)
}

func (c *checker) filterNames(filters []string) {
	for i, f := range filters {
		c.reference(index("spec.filters", i), f)
		c.reject(slices.Contains(filters[:i], f), index("spec.filters", i), f, "is listed twice")
	}
}

func (c *checker) password(field string, p *v3.BGPPassword) {
	if p == nil {
		return
	}
	ref := p.SecretKeyRef
	c.reject(ref == nil || ref.Name == "" || ref.Key == "", field+".secretKeyRef", nil, "needs both name and key")
}

func (c *checker) restartTime(field string, d *metav1.Duration) {
	if d != nil && (d.Duration < 0 || d.Duration > maxRestart) {
		c.add(field, d.Duration.String(), "must be from 0s to %s", maxRestart)
	}
}

// bgpLogLevels are confd's and BIRD's.
func bgpLogLevels() []string {
	return []string{"Debug", "Info", "Warning", "Error", "Fatal", "None"}
}

func (c *checker) bgpConfiguration(name string, s *v3.BGPConfigurationSpec) {
	c.oneOf("spec.logSeverityScreen", s.LogSeverityScreen, bgpLogLevels()...)
	c.reject(s.ASNumber != nil && *s.ASNumber == 0, "spec.asNumber", 0, "AS 0 is reserved; use a number from 1 to 4294967295, or leave it out for 64512")
	for i, b := range s.ServiceLoadBalancerIPs {
		c.cidr(index("spec.serviceLoadBalancerIPs", i)+".cidr", b.CIDR)
	}
	for i, b := range s.ServiceExternalIPs {
		c.cidr(index("spec.serviceExternalIPs", i)+".cidr", b.CIDR)
	}
	for i, b := range s.ServiceClusterIPs {
		c.cidr(index("spec.serviceClusterIPs", i)+".cidr", b.CIDR)
	}
	if a := s.ServiceLoadBalancerAggregation; a != nil {
		c.oneOf("spec.serviceLoadBalancerAggregation", string(*a), "Enabled", "Disabled")
	}
	c.communities(s)
	c.password("spec.nodeMeshPassword", s.NodeMeshPassword)
	c.restartTime("spec.nodeMeshMaxRestartTime", s.NodeMeshMaxRestartTime)
	if s.BindMode != nil {
		c.oneOf("spec.bindMode", string(*s.BindMode), string(v3.BindModeNone), string(v3.BindModeNodeIP))
	}
	for i, g := range s.IgnoredInterfaces {
		c.interfaceGlob(index("spec.ignoredInterfaces", i), g)
	}
	c.optAddr("spec.localWorkloadPeeringIPV4", s.LocalWorkloadPeeringIPV4, "IPv4")
	c.optAddr("spec.localWorkloadPeeringIPV6", s.LocalWorkloadPeeringIPV6, "IPv6")
	c.meshOnly(name, s)
}

// meshOnly refuses what has a meaning on the default object only, and with
// the mesh only.
func (c *checker) meshOnly(name string, s *v3.BGPConfigurationSpec) {
	if name == DefaultName {
		if s.NodeToNodeMeshEnabled != nil && !*s.NodeToNodeMeshEnabled {
			const cure = "is for the node-to-node mesh, which nodeToNodeMeshEnabled turns off; leave it out, or set it on a BGPPeer"
			c.reject(s.NodeMeshPassword != nil, "spec.nodeMeshPassword", nil, cure)
			if s.NodeMeshMaxRestartTime != nil {
				c.add("spec.nodeMeshMaxRestartTime", s.NodeMeshMaxRestartTime.Duration.String(), cure)
			}
		}
		return
	}
	for _, f := range []struct {
		field string
		set   bool
	}{
		{"spec.nodeToNodeMeshEnabled", s.NodeToNodeMeshEnabled != nil},
		{"spec.asNumber", s.ASNumber != nil},
		{"spec.serviceExternalIPs", len(s.ServiceExternalIPs) > 0},
		{"spec.serviceClusterIPs", len(s.ServiceClusterIPs) > 0},
		{"spec.serviceLoadBalancerIPs", len(s.ServiceLoadBalancerIPs) > 0},
		{"spec.nodeMeshPassword", s.NodeMeshPassword != nil},
		{"spec.nodeMeshMaxRestartTime", s.NodeMeshMaxRestartTime != nil},
	} {
		c.reject(f.set, f.field, nil, "can be set on the BGPConfiguration named %q only, not on %q", DefaultName, name)
	}
}

func (c *checker) communities(s *v3.BGPConfigurationSpec) {
	c.reject(len(s.Communities) > 0 && len(s.PrefixAdvertisements) == 0, "spec.communities", nil, "has no effect without spec.prefixAdvertisements; add these or leave it out")
	names := map[string]bool{}
	for i, m := range s.Communities {
		f := index("spec.communities", i)
		switch {
		case m.Name == "":
			c.add(f+".name", nil, "required")
		case names[m.Name]:
			c.add(f+".name", m.Name, "is given twice")
		default:
			c.reference(f+".name", m.Name)
		}
		names[m.Name] = true
		c.reject(!validCommunity(m.Value), f+".value", m.Value, communityRule)
	}
	for i, a := range s.PrefixAdvertisements {
		f := index("spec.prefixAdvertisements", i)
		c.cidr(f+".cidr", a.CIDR)
		c.reject(len(a.Communities) == 0, f+".communities", nil, "required: names from spec.communities, or values such as 65000:100")
		for j, v := range a.Communities {
			if names[v] || validCommunity(v) {
				continue
			}
			c.add(index(f+".communities", j), v, "is neither a name from spec.communities nor a value; %s", communityRule)
		}
	}
}

const communityRule = "write aa:nn with two numbers up to 65535, or aa:nn:mm with three up to 4294967295"

// validCommunity accepts standard (RFC 1997) and large (RFC 8092)
// communities.
func validCommunity(s string) bool {
	parts := strings.Split(s, ":")
	bits := 16
	switch len(parts) {
	case 2:
	case 3:
		bits = 32
	default:
		return false
	}
	for _, p := range parts {
		if _, err := strconv.ParseUint(p, 10, bits); err != nil || strings.HasPrefix(p, "+") {
			return false
		}
	}
	return true
}

// interfaceGlob accepts an interface's name with the wildcards * and ?.
func (c *checker) interfaceGlob(field, s string) {
	ok, _ := regexp.MatchString(`^[a-zA-Z0-9_.*?-]{1,15}$`, s)
	c.reject(!ok, field, s, "must be an interface's name of at most %d characters, with * and ? as wildcards, such as docker*", MaxInterfaceName)
}

func (c *checker) bgpFilter(s *v3.BGPFilterSpec) {
	v4 := func(field string, r v3.BGPFilterRuleV4) { c.filterRule(field, &r, "IPv4", 32) }
	v6 := func(field string, r v3.BGPFilterRuleV6) { // the API has two types for one thing
		same := v3.BGPFilterRuleV4{CIDR: r.CIDR, Source: r.Source, Interface: r.Interface, MatchOperator: r.MatchOperator, Action: r.Action}
		if l := r.PrefixLength; l != nil {
			same.PrefixLength = &v3.BGPFilterPrefixLengthV4{Min: l.Min, Max: l.Max}
		}
		c.filterRule(field, &same, "IPv6", 128)
	}
	each("spec.exportV4", s.ExportV4, v4)
	each("spec.importV4", s.ImportV4, v4)
	each("spec.exportV6", s.ExportV6, v6)
	each("spec.importV6", s.ImportV6, v6)
}

func (c *checker) filterRule(field string, r *v3.BGPFilterRuleV4, family string, bits int) {
	c.reject(r.Action == "", field+".action", nil, "required: Accept or Reject")
	c.oneOf(field+".action", string(r.Action), string(v3.Accept), string(v3.Reject))
	c.oneOf(field+".source", string(r.Source), string(v3.BGPFilterSourceRemotePeers))
	c.oneOf(field+".matchOperator", string(r.MatchOperator), string(v3.Equal), string(v3.NotEqual), string(v3.In), string(v3.NotIn))
	if r.Interface != "" {
		c.interfaceGlob(field+".interface", r.Interface)
	}
	switch {
	case r.CIDR != "" && r.MatchOperator == "":
		c.add(field+".matchOperator", nil, "required with cidr: one of Equal, NotEqual, In, NotIn")
	case r.CIDR == "" && r.MatchOperator != "":
		c.add(field+".cidr", nil, "required with matchOperator: an %s CIDR", family)
	case r.CIDR == "" && r.PrefixLength != nil:
		c.add(field+".cidr", nil, "required with prefixLength: an %s CIDR", family)
	}
	if r.CIDR != "" {
		if p := c.cidr(field+".cidr", r.CIDR); p.IsValid() && familyName(p.Addr()) != family {
			c.add(field+".cidr", r.CIDR, "is %s; this list takes %s", familyName(p.Addr()), family)
		}
	}
	l := r.PrefixLength
	if l == nil {
		return
	}
	for _, n := range []struct {
		name  string
		value *int32
	}{{"min", l.Min}, {"max", l.Max}} {
		if n.value != nil {
			c.between(field+".prefixLength."+n.name, int(*n.value), 0, bits)
		}
	}
	if l.Min != nil && l.Max != nil && *l.Min > *l.Max {
		c.add(field+".prefixLength.min", *l.Min, "is greater than max, which is %d", *l.Max)
	}
}
