package main

import (
	"net/netip"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// addressMethods says how this host's addresses are found.
func addressMethods(c config.Config) map[dataplane.Family]string {
	return map[dataplane.Family]string{dataplane.IPv4: c.Address.IPv4, dataplane.IPv6: c.Address.IPv6}
}

// defaultPools lists the pools to be made where there are none.
func defaultPools(c config.Config) []node.DefaultPool {
	p := c.DefaultPool
	var out []node.DefaultPool
	for _, d := range []struct {
		cidr, encapsulation string
		blockSize           int
	}{{p.CIDR, p.Encapsulation, p.BlockSize}, {p.CIDR6, p.Encapsulation6, p.BlockSize6}} {
		if cidr, err := netip.ParsePrefix(d.cidr); err == nil { // else it is "none": Validate has looked
			out = append(out, node.DefaultPool{CIDR: cidr, Encapsulation: store.Encapsulation(d.encapsulation), BlockSize: d.blockSize})
		}
	}
	return out
}

// addAddresses adds what this host is registered with to an answer.
func addAddresses(ns node.Status, out *apiv1.NodeResponse) {
	if d, ok := ns.Addresses[dataplane.IPv4]; ok {
		out.Ipv4Address, out.Uplink, out.AddressMethod = d.Prefix.String(), d.Link, d.Method
	}
	if d, ok := ns.Addresses[dataplane.IPv6]; ok {
		out.Ipv6Address, out.Ipv6Uplink, out.Ipv6AddressMethod = d.Prefix.String(), d.Link, d.Method
	}
	for t, a := range ns.Tunnels {
		switch t {
		case node.TunnelIPIP:
			out.IpipTunnelAddress = a.String()
		case node.TunnelVXLAN:
			out.VxlanTunnelAddress = a.String()
		case node.TunnelIPIPv6:
			out.IpipTunnelAddressV6 = a.String()
		case node.TunnelVXLANv6:
			out.VxlanTunnelAddressV6 = a.String()
		}
	}
}
