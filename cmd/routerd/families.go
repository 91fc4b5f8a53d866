package main

import (
	"net/netip"

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
