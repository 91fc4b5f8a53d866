package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/dataplane"
)

// Overlaps implements [rpc.Operator].
func (d *router) Overlaps(_ context.Context, cidrs []netip.Prefix) (*apiv1.OverlapsResponse, error) {
	u, ok := d.node.Underlay()
	if !ok {
		return nil, errors.New("the host's network is not known yet: try again in a moment")
	}
	out := &apiv1.OverlapsResponse{Node: d.name}
	for _, c := range cidrs {
		for _, o := range node.Overlaps(u, c) {
			out.Overlaps = append(out.Overlaps, &apiv1.Overlap{Cidr: c.String(), With: o.With})
		}
	}
	return out, nil
}

// unusablePool says why workloads on this host get no addresses of a pool:
// others on a network of the host have them already.
func (d *router) unusablePool(pool string) string {
	for _, o := range d.poolOverlaps(pool) {
		if o.OnLink {
			return fmt.Sprintf("it overlaps %s of this host; make a pool with a range apart from the hosts' networks and delete this one, or take the address away", o.With)
		}
	}
	return ""
}

// notes tell what an operator should know though nothing is wrong.
func (d *router) notes(v view) []string {
	var out []string
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		p := v.node.Addresses[f].Prefix
		if p.IsValid() && p.IsSingleIP() {
			out = append(out, fmt.Sprintf("the address %s is recorded without its subnet, as the interface has it: every other node counts as in another subnet, "+
				"so cross-subnet pools use tunnels to all of them, and unencapsulated pools reach them by BGP only; give the interface the prefix length of its network if that is not meant", p))
		}
	}
	for _, e := range d.endpoints() {
		if e.Lost != "" {
			out = append(out, fmt.Sprintf("workload %s (%s) has no route, for its address is somebody else's: %s; start it anew", workloadName(e), e.ID.ContainerID, e.Lost))
		}
	}
	for _, p := range v.pools {
		for _, o := range d.poolOverlaps(p.Name) {
			if !o.OnLink {
				out = append(out, fmt.Sprintf("pool %s (%s) overlaps %s of this host: what is not in a block of the pool goes that way", p.Name, p.CIDR, o.With))
			}
		}
	}
	return out
}

// poolOverlaps lists what of the host shares addresses with a pool, but for the
// gateways that IPAM gave to the host itself.
func (d *router) poolOverlaps(pool string) []node.Overlap {
	return slices.DeleteFunc(slices.Clone(d.node.PoolOverlaps(pool)), func(o node.Overlap) bool {
		return d.attach != nil && d.attach.KeptForHost(o.Addr)
	})
}
