package main

import (
	"context"
	"errors"
	"net/netip"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/node"
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
