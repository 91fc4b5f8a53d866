package operator

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/dataplane/workload"
)

// watchHosts bounds how many hosts watch for one packet to a Service: which endpoint the proxy takes nobody knows before.
const watchHosts = 16

// serviceProbe is a packet that is sent to an address of a Service, or to a port of a node, and known by a mark.
type serviceProbe struct {
	probing
	ports []uint16
	facts trace.ServiceProbeFacts
}

// prepareServiceProbe makes the packet of a trace to a Service, from an end on this host, and finds who is to watch: its own
// host, the node whose proxy takes it, and the hosts of the endpoints that may be chosen. proxy is that node.
func (s *Server) prepareServiceProbe(req *apiv1.TraceRequest, find func(string) (location, error), t *toService, proxy string, choice service.Choice) (*serviceProbe, error) {
	if err := s.isHere(t.from); err != nil {
		return nil, err
	}
	port := t.port.Port
	if t.atNode() {
		port = t.port.NodePort
	}
	sub := &apiv1.TraceRequest{Protocol: strings.ToLower(t.port.Protocol), Port: uint32(port), SourcePort: req.GetSourcePort()}
	p, err := traced(sub, t.from, location{name: t.addr.String(), addrs: []netip.Addr{t.addr}})
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	out := &serviceProbe{
		probing: probing{from: t.from, packet: workload.Packet{
			Src: p.Src, Dst: p.Dst, Protocol: p.Protocol, DstPort: p.DstPort,
			SrcPort: cmp.Or(p.SrcPort, uint16(32768+rand.N(28232))), Mark: rand.Uint32() | 1, //nolint:gosec // to be told from others, no secret
		}},
		ports: []uint16{port},
		facts: trace.ServiceProbeFacts{Protocol: p.Protocol, To: netip.AddrPortFrom(t.addr, port), Proxy: proxy, Hosts: []trace.ProbeEnd{{Node: t.from.node, Device: t.from.iface}}},
	}
	if err := s.sender(&out.probing); err != nil {
		return nil, err
	}
	return out, out.watchers(find, proxy, choice)
}

// watchers finds the hosts that are to watch.
func (p *serviceProbe) watchers(find func(string) (location, error), proxy string, choice service.Choice) error {
	f := &p.facts
	var left []string
	add := func(node string) {
		switch {
		case node == "" || slices.Contains(left, node) || slices.ContainsFunc(f.Hosts, func(e trace.ProbeEnd) bool { return e.Node == node }):
		case len(f.Hosts) == watchHosts:
			left = append(left, node)
		default:
			f.Hosts = append(f.Hosts, trace.ProbeEnd{Node: node})
		}
	}
	add(proxy)
	for _, c := range choice.Chosen() {
		at, err := find(c.Addr.String())
		if err != nil {
			return status.Errorf(codes.NotFound, "endpoint %s: %v", c.Addr, err)
		}
		e := trace.ProbeEndpoint{Addr: netip.AddrPortFrom(c.Addr, c.Port), Node: at.node, Device: at.iface, Name: cmp.Or(c.Pod, at.name)}
		f.Endpoints = append(f.Endpoints, e)
		if !slices.Contains(p.ports, c.Port) {
			p.ports = append(p.ports, c.Port)
		}
		add(at.node)
	}
	if len(left) > 0 {
		f.Unknown = append(f.Unknown, fmt.Sprintf("%s did not watch for the packet: at most %d hosts do so for one probe", someOf(left), watchHosts))
	}
	return nil
}

// probeService sends the packet and has the hosts watch for it.
func (s *Server) probeService(ctx context.Context, p *serviceProbe) trace.ServiceProbeFacts {
	req := &apiv1.WatchRequest{Protocol: uint32(p.packet.Protocol), Mark: p.packet.Mark, For: durationpb.New(probeFor)}
	for _, port := range p.ports {
		req.Ports = append(req.Ports, uint32(port))
	}
	var ends []*trace.ProbeEnd
	for i := range p.facts.Hosts {
		ends = append(ends, &p.facts.Hosts[i])
	}
	p.facts.Err = s.sendWatched(ctx, &p.probing, req, ends)
	return p.facts
}
