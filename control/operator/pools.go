package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/dataplane"
)

// Overlaps implements [rpc.Operator].
func (s *Server) Overlaps(_ context.Context, cidrs []netip.Prefix) (*apiv1.OverlapsResponse, error) {
	u, ok := s.cfg.Agent.Underlay()
	if !ok {
		return nil, errors.New("the host's network is not known yet: try again in a moment")
	}
	out := &apiv1.OverlapsResponse{Node: s.cfg.Node}
	for _, c := range cidrs {
		for _, o := range node.Overlaps(u, c, s.cfg.Agent.OwnPodCIDRs()) {
			if o.OtherPods {
				continue // IPAM goes round it
			}
			out.Overlaps = append(out.Overlaps, &apiv1.Overlap{Cidr: c.String(), With: o.With})
		}
	}
	return out, nil
}

// UnusablePool says why workloads on this host get no addresses of a pool:
// others on a network of the host have them already.
func (s *Server) UnusablePool(pool string) string {
	if s.cfg.OccupiedError != nil {
		if err := s.cfg.OccupiedError(); err != nil {
			return err.Error()
		}
	}
	for _, o := range s.poolOverlaps(pool) {
		if o.OnLink && !o.OtherPods {
			return fmt.Sprintf("it overlaps %s of this host; create a pool whose range does not overlap the hosts' networks and delete this one, or remove the address", o.With)
		}
	}
	return ""
}

// notes say what an operator should know though nothing is wrong.
func (s *Server) notes(v view) []string {
	var out []string
	for _, f := range dataplane.Families() {
		p := v.node.Addresses[f].Prefix
		if p.IsValid() && p.IsSingleIP() {
			out = append(out, fmt.Sprintf("the address %s is registered without its subnet, as on the interface: every other node counts as being in another subnet, "+
				"so cross-subnet pools use tunnels to all of them, and unencapsulated pools reach them by BGP only; if that is not intended, give the interface the prefix length of its network", p))
		}
	}
	for _, e := range s.cfg.Attach.Endpoints() {
		if e.Lost != "" {
			out = append(out, fmt.Sprintf("workload %s (%s) has no route, because its address belongs to something else: %s; recreate the workload", workloadName(e), e.ID.ContainerID, e.Lost))
		}
	}
	for _, p := range v.pools {
		routes := 0
		for _, o := range s.poolOverlaps(p.Name) {
			switch {
			case o.OtherPods && o.OnLink:
				out = append(out, fmt.Sprintf("%s covers the node's pod CIDR: it leads to pods that another network plugin attached, and policy does not apply to packets between them; recreate these pods", o.With))
			case o.OtherPods:
				routes++
			case !o.OnLink:
				out = append(out, fmt.Sprintf("pool %s (%s) overlaps %s of this host: packets to addresses outside the pool's blocks take that route", p.Name, p.CIDR, o.With))
			}
		}
		if routes > 0 {
			out = append(out, fmt.Sprintf("pool %s (%s): routes of another network plugin lead to %d parts of it, on nodes without routerd", p.Name, p.CIDR, routes))
		}
	}
	return out
}

// poolOverlaps lists what of the host shares addresses with a pool, but for the
// gateways that IPAM gave to the host itself.
func (s *Server) poolOverlaps(pool string) []node.Overlap {
	return slices.DeleteFunc(slices.Clone(s.cfg.Agent.PoolOverlaps(pool)), func(o node.Overlap) bool {
		return s.cfg.Attach.KeptForHost(o.Addr)
	})
}

// delays says to which peers this host does not yet send as a pool asks for; it
// is empty where it does to all.
func delays(p encap.PoolStatus) string {
	if p.BehindTotal == 0 {
		return ""
	}
	var parts []string
	for _, b := range p.Behind {
		parts = append(parts, fmt.Sprintf("%s (%s): %s", b.Node, cmp.Or(b.Encap.String(), "nothing"), b.Reason))
	}
	if more := p.BehindTotal - len(p.Behind); more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("not yet using %s: %s", p.Mode, strings.Join(parts, "; "))
}
