package store

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
)

func (c *checker) node(n *Node) {
	s := &n.Spec
	if v := n.Annotations[AnnotationTunnelAddress]; v != "" {
		if _, err := ParseTunnelAddresses(v); err != nil {
			c.add("metadata.annotations["+AnnotationTunnelAddress+"]", nil, "%v", err)
		}
	}
	if b := s.BGP; b != nil {
		c.nodeBGP(b)
	}
	c.optAddr("spec.ipv4VXLANTunnelAddr", s.IPv4VXLANTunnelAddr, "IPv4")
	c.mac("spec.vxlanTunnelMACAddr", s.VXLANTunnelMACAddr)
	c.optAddr("spec.ipv6VXLANTunnelAddr", s.IPv6VXLANTunnelAddr, "IPv6")
	c.mac("spec.vxlanTunnelMACAddrV6", s.VXLANTunnelMACAddrV6)
	for i, r := range s.OrchRefs {
		c.reject(r.Orchestrator == "", index("spec.orchRefs", i)+".orchestrator", nil, "required, for instance k8s")
	}
	if w := s.Wireguard; w != nil {
		c.optAddr("spec.wireguard.interfaceIPv4Address", w.InterfaceIPv4Address, "IPv4")
		c.optAddr("spec.wireguard.interfaceIPv6Address", w.InterfaceIPv6Address, "IPv6")
	}
	for i, a := range s.Addresses {
		f := index("spec.addresses", i)
		c.reject(a.Address == "", f+".address", nil, "required")
		c.addrOrCIDR(f+".address", a.Address, "")
		c.oneOf(f+".type", a.Type, "CalicoNodeIP", "InternalIP", "ExternalIP")
	}
	for i, ifc := range s.Interfaces {
		f := index("spec.interfaces", i)
		c.interfaceName(f+".name", ifc.Name)
		for j, a := range ifc.Addresses {
			c.addrOrCIDR(index(f+".addresses", j), a, "")
		}
	}
	for i, p := range n.Status.PodCIDRs {
		c.anyCIDR(index("status.podCIDRs", i), p)
	}
}

func (c *checker) nodeBGP(b *NodeBGPSpec) {
	if *b == (NodeBGPSpec{}) {
		c.add("spec.bgp", nil, "must not be empty; give ipv4Address, or leave bgp out for a node that takes no part in BGP")
	}
	c.reject(b.ASNumber != nil && *b.ASNumber == 0, "spec.bgp.asNumber", 0, "AS 0 is reserved; use a number from 1 to 4294967295, or leave it out for the cluster's")
	c.addrOrCIDR("spec.bgp.ipv4Address", b.IPv4Address, "IPv4")
	c.addrOrCIDR("spec.bgp.ipv6Address", b.IPv6Address, "IPv6")
	c.optAddr("spec.bgp.ipv4IPIPTunnelAddr", b.IPv4IPIPTunnelAddr, "IPv4")
	if b.RouteReflectorClusterID != "" {
		if a, err := netip.ParseAddr(b.RouteReflectorClusterID); err != nil || !a.Is4() {
			c.add("spec.bgp.routeReflectorClusterID", b.RouteReflectorClusterID, "must be written like an IPv4 address, such as 244.0.0.1")
		}
	}
}

func (c *checker) workloadEndpoint(w *WorkloadEndpoint) {
	s := &w.Spec
	want, err := WorkloadEndpointName(s)
	var missing FieldErrors
	if errors.As(err, &missing) {
		c.errs = append(c.errs, missing...)
	} else if w.Name != want {
		c.add("metadata.name", w.Name, "must be %q, which follows from spec; leave it out to have it filled in", want)
	}
	if s.Node != "" {
		c.reference("spec.node", s.Node)
	}
	c.reject(s.InterfaceName == "", "spec.interfaceName", nil, "required: the host's end of the wire")
	c.workloadInterface("spec.interfaceName", s.InterfaceName)
	c.mac("spec.mac", s.MAC)
	c.optAddr("spec.ipv4Gateway", s.IPv4Gateway, "IPv4")
	c.optAddr("spec.ipv6Gateway", s.IPv6Gateway, "IPv6")
	c.endpointAddresses(s)
	each("spec.profiles", s.Profiles, c.reference)
	c.nets("spec.allowSpoofedSourcePrefixes", s.AllowSpoofedSourcePrefixes)
	each("spec.ports", s.Ports, c.endpointPort)
	q, err := s.QoS()
	c.reject(err != nil, "spec.qosControls", string(s.QoSControls), "must be numbers that are not negative, such as {\"ingressBandwidth\": 1000000}, bits per second")
	c.reject(q.DSCP != nil && q.DSCP.Validate() != nil, "spec.qosControls.dscp", q.DSCP, "must be %s", dscpWanted)
}

func (c *checker) endpointAddresses(s *WorkloadEndpointSpec) {
	var own []netip.Addr
	for i, n := range s.IPNetworks {
		f := index("spec.ipNetworks", i)
		p := c.net(f, n)
		if !p.IsValid() {
			continue
		}
		c.reject(!p.IsSingleIP(), f, n, "must be one address; write %s", netip.PrefixFrom(p.Addr(), p.Addr().BitLen()))
		own = append(own, p.Addr())
	}
	for i, n := range s.IPNATs {
		f := index("spec.ipNATs", i)
		internal := c.addr(f+".internalIP", n.InternalIP, "")
		external := c.addr(f+".externalIP", n.ExternalIP, "")
		c.reject(internal.IsValid() && !slices.Contains(own, internal), f+".internalIP", n.InternalIP, "is not an address of this endpoint; use one of spec.ipNetworks")
		c.reject(internal.IsValid() && external.IsValid() && internal.Is4() != external.Is4(), f+".externalIP", n.ExternalIP, "must be of the same family as internalIP")
	}
}

func (c *checker) endpointPort(field string, p WorkloadEndpointPort) {
	c.reject(p.Port == 0, field+".port", 0, "must be a number from 1 to 65535")
	c.reject(p.Name == "" && p.HostPort == 0, field+".name", nil, "required: rules refer to the port by it")
	c.reject(strings.ContainsAny(p.Name, " :,") || len(p.Name) > 128, field+".name", p.Name, "must be at most 128 letters, digits, '-', '_' and '.'")
	c.protocol(field+".protocol", &p.Protocol)
	c.reject(!p.Protocol.SupportsPorts(), field+".protocol", p.Protocol.String(), "has no ports; use TCP, UDP or SCTP")
	c.optAddr(field+".hostIP", p.HostIP, "")
}
