package operator

import (
	"context"
	"os"

	"github.com/routerd/routerd/cni"
	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/dataplane"
)

// Node implements [rpc.Operator].
func (s *Server) Node(ctx context.Context) (*apiv1.NodeResponse, error) {
	v := s.view(ctx, s.bgpStatus(ctx))
	ns, rep := v.node, s.reportOf(v)
	out := &apiv1.NodeResponse{
		Name: s.cfg.Node, Version: s.cfg.Version, Pid: int64(os.Getpid()), Started: timestamp(s.cfg.Started),
		Datastore: s.cfg.Datastore, WorkloadMtu: int32(s.cfg.WorkloadMTU()),
		Health: &apiv1.Health{Live: checkProto(rep.Live), Ready: checkProto(rep.Ready)},
	}
	addAddresses(ns, out)
	out.Drain = string(ns.Drain)
	for _, c := range rep.Conditions {
		out.Health.Conditions = append(out.Health.Conditions, checkProto(c))
	}
	s.addBGP(v.bgp, out)
	out.Workloads = int32(len(s.cfg.Attach.Endpoints()))
	for _, p := range v.pools {
		ps := &apiv1.PoolStatus{Name: p.Name, Cidr: p.CIDR.String(), Encapsulation: string(p.Encapsulation), Usable: true}
		if err := s.poolError(p); err != nil {
			ps.Usable, ps.Reason = false, err.Error()
		} else {
			ps.Reason = delays(p)
		}
		out.Pools = append(out.Pools, ps)
	}
	out.Blocks = s.blocks()
	out.Notes = s.notes(v)
	return out, nil
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

// CNIConfig implements [rpc.Operator].
func (s *Server) CNIConfig(context.Context) ([]byte, error) {
	return cni.Conflist(s.cfg.Conflist)
}
