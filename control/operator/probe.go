package operator

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/dataplane/workload"
)

// How a probe is sent. Another host is asked over the datastore to watch, and does not say when it begins: so the packet is sent
// several times.
const (
	probeFor   = 2500 * time.Millisecond
	probeEvery = 500 * time.Millisecond
	probeTimes = 4
	// watchMost bounds for how long a host watches for another one, and watchesAtOnce how many at a time.
	watchMost     = 5 * time.Second
	watchesAtOnce = 4
)

// probing is one probe: what is sent, from where to where.
type probing struct {
	packet   workload.Packet
	netns    string // of the workload that sends; empty: this host does
	from, to location
}

// prepareProbe makes the probe of a trace. Its source is on this host: nobody has another host send packets.
func (s *Server) prepareProbe(from, to location, p filter.Packet) (*probing, error) {
	if from.node != s.cfg.Node {
		return nil, status.Errorf(codes.FailedPrecondition, "probe: %s is not on this host, and a host sends packets for its own operator alone: ask on %s", from.name, cmp.Or(from.node, "a host of the cluster"))
	}
	out := &probing{from: from, to: to, packet: workload.Packet{Src: p.Src, Dst: p.Dst, Protocol: p.Protocol, SrcPort: p.SrcPort, DstPort: p.DstPort, ICMPType: p.ICMPType, ICMPCode: p.ICMPCode}}
	switch p.Protocol {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		out.packet.ICMPID = uint16(rand.N(1 << 16)) //nolint:gosec // to be told from others, no secret
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP:
		if p.DstPort == 0 {
			return nil, status.Errorf(codes.InvalidArgument, "probe: %s needs --port: which one is the packet for?", filter.ProtocolName(p.Protocol))
		}
		if p.SrcPort == 0 {
			out.packet.SrcPort = uint16(32768 + rand.N(28232)) //nolint:gosec // the same
		}
	default:
		return nil, status.Errorf(codes.InvalidArgument, "probe: of protocol %s one packet cannot be told from another: take tcp, udp, udplite, sctp, or an echo request", filter.ProtocolName(p.Protocol))
	}
	if from.iface == "" {
		return out, nil
	}
	list := s.cfg.Attach.Endpoints()
	i := slices.IndexFunc(list, func(e attach.Endpoint) bool { return e.Device == from.iface && slices.Contains(e.Addresses, p.Src) })
	if i < 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "probe: no workload of this host has %s", p.Src)
	}
	out.netns = list[i].Netns
	return out, nil
}

// probe sends the packet and has the hosts of both ends watch for it.
func (s *Server) probe(ctx context.Context, p *probing) trace.ProbeFacts {
	k := p.packet
	req := &apiv1.WatchRequest{
		Source: k.Src.String(), Destination: k.Dst.String(), Protocol: uint32(k.Protocol), SourcePort: uint32(k.SrcPort), Port: uint32(k.DstPort), IcmpId: uint32(k.ICMPID),
		For: durationpb.New(probeFor),
	}
	out := trace.ProbeFacts{Protocol: k.Protocol, From: trace.ProbeEnd{Node: p.from.node, Device: p.from.iface}, To: trace.ProbeEnd{Node: p.to.node, Device: p.to.iface}}
	var both sync.WaitGroup
	watch := func(e *trace.ProbeEnd) {
		both.Go(func() {
			a, err := s.ask(ctx, e.Node, &apiv1.Question{Watch: req})
			e.Seen, e.Err = a.GetWatch().GetSeen(), err
		})
	}
	watch(&out.From)
	if out.To.Node != "" && out.To.Node != out.From.Node {
		watch(&out.To)
	}
	for range probeTimes {
		if async.Sleep(ctx, probeEvery) != nil {
			break
		}
		if out.Err = p.send(); out.Err != nil {
			break
		}
	}
	both.Wait()
	return out
}

func (p *probing) send() error {
	if p.netns == "" {
		return workload.SendHere(p.packet)
	}
	return workload.Send(p.netns, p.packet)
}

// watch watches on this host for packets of a connection.
func (s *Server) watch(ctx context.Context, req *apiv1.WatchRequest) (*apiv1.WatchResponse, error) {
	src, err1 := netip.ParseAddr(req.GetSource())
	dst, err2 := netip.ParseAddr(req.GetDestination())
	if err := errors.Join(err1, err2); err != nil || src.Is4() != dst.Is4() {
		return nil, status.Errorf(codes.InvalidArgument, "watch for %q and %q: want two addresses of one family", req.GetSource(), req.GetDestination())
	}
	select {
	case s.watching <- struct{}{}:
		defer func() { <-s.watching }()
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "this host watches for %d probes already: try again in a moment", watchesAtOnce)
	}
	ctx, cancel := context.WithTimeout(ctx, min(req.GetFor().AsDuration(), watchMost))
	defer cancel()
	seen, err := survey.Watch(ctx, survey.Connection{
		Src: src, Dst: dst, Protocol: uint8(req.GetProtocol()), //nolint:gosec // what is too large matches nothing
		SrcPort: uint16(req.GetSourcePort()), DstPort: uint16(req.GetPort()), ICMPID: uint16(req.GetIcmpId()), //nolint:gosec // the same
	})
	if err != nil {
		return nil, err
	}
	out := &apiv1.WatchResponse{}
	for _, w := range seen {
		out.Seen = append(out.Seen, &apiv1.Sighting{Back: w.Back, Node: s.cfg.Node, Device: w.Device, Out: w.Out, Packets: uint32(w.Packets)}) //nolint:gosec // bounded
	}
	return out, nil
}
