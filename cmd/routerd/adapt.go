package main

import (
	"context"
	"errors"
	"net/netip"

	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// tunnelIPAM gives the node's agent what it asks of IPAM.
type tunnelIPAM struct{ *ipam.Allocator }

func tunnelKind(t node.Tunnel) ipam.TunnelKind {
	switch t {
	case node.TunnelIPIP:
		return ipam.IPIPTunnel
	case node.TunnelIPIPv6:
		return ipam.IPIPv6Tunnel
	case node.TunnelVXLANv6:
		return ipam.VXLANv6Tunnel
	case node.TunnelVXLAN:
	}
	return ipam.VXLANTunnel
}

// Ensure gives no address when the pools of the encapsulation do not select
// this host: it has no workloads in them.
func (w tunnelIPAM) Ensure(ctx context.Context, t node.Tunnel, leaving bool) (netip.Addr, bool, error) {
	got, old, err := w.EnsureTunnel(ctx, tunnelKind(t), leaving)
	if errors.Is(err, ipam.ErrNoPool) {
		return netip.Addr{}, false, nil
	}
	return got.Addr, len(old) > 0, err
}

func (w tunnelIPAM) Release(ctx context.Context, t node.Tunnel, keep netip.Addr) error {
	return w.ReleaseTunnel(ctx, tunnelKind(t), keep)
}

// pathUpdate is what BGP learned, for the core.
func pathUpdate(ch bgp.Changes) rib.Update {
	u := rib.Update{Reset: ch.Reset, Put: make([]rib.Path, len(ch.Put)), Del: ch.Del, Down: ch.Down, Up: ch.Up, Synced: ch.Synced}
	for i, p := range ch.Put {
		u.Put[i] = rib.Path{Prefix: p.Prefix, Announced: p.Announced}
	}
	return u
}

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
