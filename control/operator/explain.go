package operator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// location is where a packet starts or arrives.
type location struct {
	node  string // "": outside of the cluster, or not known
	iface string // of a workload; "": the host itself
	name  string // for people
	addrs []netip.Addr
	apart bool // node is empty, and yet the cluster's: what happens there is followed apart
}

// hasFamilyOf reports whether it has an address of the family of a.
func (l location) hasFamilyOf(a netip.Addr) bool {
	return slices.ContainsFunc(l.addrs, func(b netip.Addr) bool { return b.Is4() == a.Is4() })
}

// PolicyExplain answers [rpc.Operator]. It judges on the hosts of both ends:
// here by the rules in force, elsewhere by what the datastore says now.
func (s *PolicyServer) PolicyExplain(ctx context.Context, req *apiv1.PolicyExplainRequest) (*apiv1.PolicyExplainResponse, error) {
	if err := s.able(); err != nil {
		return nil, err
	}
	objects, err := s.clusterObjects(ctx)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "read the cluster's endpoints: %v", err)
	}
	from, err := locate(objects, s.cfg.Node, req.GetFrom())
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "from: %v", err)
	}
	to, err := locate(objects, s.cfg.Node, req.GetTo())
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "to: %v", err)
	}
	p, err := packetOf(req, from, to)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	out := &apiv1.PolicyExplainResponse{Allowed: true, Packet: showPacket(p)}
	nodes := []string{from.node}
	if to.node != from.node {
		nodes = append(nodes, to.node)
	}
	for _, node := range nodes {
		if node == "" {
			continue
		}
		end, err := s.explainAt(ctx, objects, node, from, to, p)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "explain on %s: %v", node, err)
		}
		out.Ends = append(out.Ends, end)
		out.Allowed = out.Allowed && end.GetAllowed()
	}
	if len(out.Ends) == 0 {
		return nil, status.Error(codes.InvalidArgument, "neither end is a workload or a host of the cluster, so no policy rule applies to this packet")
	}
	if req.GetTrace() {
		if err := s.trace(ctx, out, from, p); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// clusterObjects lists all that policy follows from.
func (s *PolicyServer) clusterObjects(ctx context.Context) ([]store.Event, error) {
	return listed(ctx, s.cfg.Store, policy.Kinds()...)
}

// listed lists the objects of some kinds that can be read.
func listed(ctx context.Context, from store.Store, kinds ...store.Kind) ([]store.Event, error) {
	var out []store.Event
	for _, kind := range kinds {
		list, _, err := from.List(ctx, kind, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return nil, err
		}
		for _, o := range list {
			if o.Value != nil {
				out = append(out, store.Event{Key: o.Key, Object: o})
			}
		}
	}
	return out, nil
}

// locate finds what a user of the host called self means by a word: host, an endpoint
// anywhere in the cluster, a node, or any address.
func locate(objects []store.Event, self, word string) (location, error) {
	if word == "host" {
		word = self
	}
	addr, addrErr := netip.ParseAddr(word)
	for _, ev := range objects {
		switch v := ev.Object.Value.(type) {
		case *store.WorkloadEndpoint:
			p := location{node: v.Spec.Node, iface: v.Spec.InterfaceName, name: ev.Key.String()}
			for _, n := range v.Spec.IPNetworks {
				if prefix, err := netip.ParsePrefix(n); err == nil {
					p.addrs = append(p.addrs, prefix.Addr())
				}
			}
			called := []string{v.Name, v.Namespace + "/" + v.Name, ev.Key.String(), v.Spec.ContainerID}
			if v.Spec.Pod != "" {
				called = append(called, v.Spec.Pod, v.Namespace+"/"+v.Spec.Pod)
			}
			if v.Spec.Node == self {
				called = append(called, v.Spec.InterfaceName)
			}
			if slices.Contains(called, word) {
				return p, nil
			}
			if addrErr == nil && slices.Contains(p.addrs, addr) {
				p.addrs = []netip.Addr{addr}
				return p, nil
			}
		case *store.Node:
			p := location{node: v.Name, name: ev.Key.String(), addrs: nodeAddrs(v)}
			if v.Name == word {
				return p, nil
			}
			if addrErr == nil && slices.Contains(p.addrs, addr) {
				p.addrs = []netip.Addr{addr}
				return p, nil
			}
		}
	}
	if addrErr == nil {
		return location{name: "outside of the cluster", addrs: []netip.Addr{addr}}, nil
	}
	return location{}, fmt.Errorf("%q is not an endpoint, pod, container, node or address of the cluster; see routerctl get workloadendpoints -A", word)
}

// nodeAddrs returns a node's own addresses, those of its tunnels last.
func nodeAddrs(n *store.Node) []netip.Addr {
	var out []netip.Addr
	add := func(s string) {
		s, _, _ = strings.Cut(s, "/")
		if a, err := netip.ParseAddr(s); err == nil && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	if b := n.Spec.BGP; b != nil {
		add(b.IPv4Address)
		add(b.IPv6Address)
		add(b.IPv4IPIPTunnelAddr)
	}
	for _, a := range n.Spec.Addresses {
		add(a.Address)
	}
	add(n.Spec.IPv4VXLANTunnelAddr)
	add(n.Spec.IPv6VXLANTunnelAddr)
	return out
}

// packetOf makes the packet that is asked about, of a family that both ends
// have.
func packetOf(req *apiv1.PolicyExplainRequest, from, to location) (filter.Packet, error) {
	protocol, err := filter.ParseProtocol(req.GetProtocol())
	if err != nil {
		return filter.Packet{}, err
	}
	if req.GetPort() > 65535 || req.GetSourcePort() > 65535 || req.GetIcmpType() > 255 || req.GetIcmpCode() > 255 {
		return filter.Packet{}, errors.New("ports are at most 65535, ICMP types and codes at most 255")
	}
	p := filter.Packet{
		Protocol: protocol, SrcPort: uint16(req.GetSourcePort()), DstPort: uint16(req.GetPort()),
		ICMPType: uint8(req.GetIcmpType()), ICMPCode: uint8(req.GetIcmpCode()),
	}
	for _, src := range from.addrs {
		for _, dst := range to.addrs {
			wrong := protocol == 1 && !src.Is4() || protocol == 58 && src.Is4()
			if src.Is4() == dst.Is4() && !wrong {
				p.Src, p.Dst = src, dst
				return p, nil
			}
		}
	}
	return filter.Packet{}, fmt.Errorf("%s and %s have no addresses of one family for %s", from.name, to.name, filter.ProtocolName(protocol))
}

// explainAt judges the packet on one host.
func (s *PolicyServer) explainAt(ctx context.Context, objects []store.Event, node string, from, to location, p filter.Packet) (*apiv1.PolicyEnd, error) {
	f := flowAt(node, from, to, p)
	end := &apiv1.PolicyEnd{Node: node, From: from.name, To: to.name}
	explain := func(r *filter.Ruleset) {
		v := r.Judge(f)
		end.Allowed, end.Steps = v.Allowed, showSteps(r, v)
	}
	if node == s.cfg.Node {
		s.cfg.Enforcer.View(explain)
		return end, nil
	}
	rules, err := s.rulesOf(ctx, objects, node)
	if err != nil {
		return nil, err
	}
	explain(rules)
	return end, nil
}

// flowAt is a packet as a host sees it.
func flowAt(node string, from, to location, p filter.Packet) filter.Flow {
	f := filter.Flow{In: otherHosts, Out: otherHosts, Packet: p}
	if from.node == node {
		f.In = from.iface
	}
	if to.node == node {
		f.Out = to.iface
	}
	return f
}

// rulesOf are the rules of another host, by what the datastore says.
func (s *PolicyServer) rulesOf(ctx context.Context, objects []store.Event, node string) (*filter.Ruleset, error) {
	calc := policy.New(policy.Config{Node: node, AutoHostEndpoints: s.cfg.AutoHostEndpoints, Services: s.cfg.Services})
	calc.Update(store.Batch{Events: objects, Synced: true})
	if err := s.tellServices(ctx, calc); err != nil {
		return nil, err
	}
	if _, ok := calc.Flush(); !ok {
		return nil, errors.New("the cluster's state is not complete")
	}
	return calc.Snapshot(), nil
}

// tellServices tells a calculator the endpoints of the Services that rules name: of few namespaces,
// where there are any.
func (s *PolicyServer) tellServices(ctx context.Context, calc *policy.Calculator) error {
	if s.cfg.Services == policy.NoServices {
		return nil
	}
	asked := ""
	for _, service := range calc.Services() { // by namespace
		if service.Namespace == asked {
			continue
		}
		asked = service.Namespace
		for _, kind := range policy.ServiceKinds() {
			list, _, err := s.cfg.Store.List(ctx, kind, asked)
			if err != nil && !errors.Is(err, store.ErrDecode) {
				return fmt.Errorf("read the endpoints of Services in namespace %s: %w", asked, err)
			}
			var b store.Batch
			for _, o := range list {
				if o.Value != nil {
					b.Events = append(b.Events, store.Event{Key: o.Key, Object: o})
				}
			}
			calc.Update(b)
		}
	}
	return nil
}

// otherHosts stands for the interface towards everybody else: a host endpoint
// of all interfaces is on it, one of a single interface is not looked for.
const otherHosts = "uplink"
