package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	if err := s.isHere(from); err != nil {
		return nil, err
	}
	out := &probing{from: from, to: to, packet: workload.Packet{Src: p.Src, Dst: p.Dst, Protocol: p.Protocol, SrcPort: p.SrcPort, DstPort: p.DstPort, ICMPType: p.ICMPType, ICMPCode: p.ICMPCode}}
	switch p.Protocol {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		out.packet.ICMPID = uint16(rand.N(1 << 16)) //nolint:gosec // to be told from others, no secret
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP:
		if p.DstPort == 0 {
			return nil, status.Errorf(codes.InvalidArgument, "probe: %s needs --port, the destination port of the packet", filter.ProtocolName(p.Protocol))
		}
		if p.SrcPort == 0 {
			out.packet.SrcPort = uint16(32768 + rand.N(28232)) //nolint:gosec // the same
		}
	default:
		return nil, status.Errorf(codes.InvalidArgument, "probe: packets of protocol %s cannot be told apart: use tcp, udp, udplite, sctp, or an echo request", filter.ProtocolName(p.Protocol))
	}
	return out, s.sender(out)
}

// isHere says why this host does not send a packet from an end.
func (s *Server) isHere(from location) error {
	if from.node == s.cfg.Node {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "probe: %s is not on this host, and a host sends probes only for commands run on itself: run the command on %s", from.name, cmp.Or(from.node, "a host of the cluster"))
}

// sender finds the network namespace that the probe is sent from.
func (s *Server) sender(p *probing) error {
	if p.from.iface == "" {
		return nil
	}
	list := s.cfg.Attach.Endpoints()
	i := slices.IndexFunc(list, func(e attach.Endpoint) bool {
		return e.Device == p.from.iface && slices.Contains(e.Addresses, p.packet.Src)
	})
	if i < 0 {
		return status.Errorf(codes.FailedPrecondition, "probe: no workload of this host has %s", p.packet.Src)
	}
	p.netns = list[i].Netns
	return nil
}

// probe sends the packet and has the hosts of both ends watch for it.
func (s *Server) probe(ctx context.Context, p *probing) trace.ProbeFacts {
	k := p.packet
	req := &apiv1.WatchRequest{
		Source: k.Src.String(), Destination: k.Dst.String(), Protocol: uint32(k.Protocol), SourcePort: uint32(k.SrcPort), Port: uint32(k.DstPort), IcmpId: uint32(k.ICMPID),
		For: durationpb.New(probeFor),
	}
	out := trace.ProbeFacts{Protocol: k.Protocol, From: trace.ProbeEnd{Node: p.from.node, Device: p.from.iface}, To: trace.ProbeEnd{Node: p.to.node, Device: p.to.iface}}
	ends := []*trace.ProbeEnd{&out.From}
	if out.To.Node != "" && out.To.Node != out.From.Node {
		ends = append(ends, &out.To)
	}
	out.Err = s.sendWatched(ctx, p, req, ends)
	return out
}

// sendWatched sends the packet while hosts watch for it.
func (s *Server) sendWatched(ctx context.Context, p *probing, req *apiv1.WatchRequest, ends []*trace.ProbeEnd) (err error) {
	var all sync.WaitGroup
	for _, e := range ends {
		all.Go(func() {
			a, err := s.ask(ctx, e.Node, &apiv1.Question{Watch: req})
			e.Seen, e.Err = a.GetWatch().GetSeen(), err
		})
	}
	for range probeTimes {
		if async.Sleep(ctx, probeEvery) != nil {
			break
		}
		if err = p.send(); err != nil {
			break
		}
	}
	all.Wait()
	return err
}

func (p *probing) send() error {
	if p.netns == "" {
		return workload.SendHere(p.packet)
	}
	return workload.Send(p.netns, p.packet)
}

// watch watches on this host for packets of a connection.
func (s *Server) watch(ctx context.Context, req *apiv1.WatchRequest) (*apiv1.WatchResponse, error) {
	look, err := watcher(req)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	select {
	case s.watching <- struct{}{}:
		defer func() { <-s.watching }()
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "this host already watches for %d probes: try again in a moment", watchesAtOnce)
	}
	ctx, cancel := context.WithTimeout(ctx, min(req.GetFor().AsDuration(), watchMost))
	defer cancel()
	seen, err := look(ctx)
	if err != nil {
		return nil, err
	}
	out := &apiv1.WatchResponse{}
	for _, w := range seen {
		at := &apiv1.Sighting{Back: w.Back, Node: s.cfg.Node, Device: w.Device, Out: w.Out, Packets: uint32(w.Packets)} //nolint:gosec // bounded
		switch {
		case !w.Ends.Client.IsValid():
		case w.Back:
			at.Source, at.Destination = w.Ends.Server.String(), w.Ends.Client.String()
		default:
			at.Source, at.Destination = w.Ends.Client.String(), w.Ends.Server.String()
		}
		out.Seen = append(out.Seen, at)
	}
	return out, nil
}

// watcher returns what watches for the packets of a request.
func watcher(req *apiv1.WatchRequest) (func(context.Context) ([]survey.Sighting, error), error) {
	protocol := uint8(req.GetProtocol()) //nolint:gosec // what is too large matches nothing
	if req.GetSource() == "" && req.GetMark() != 0 {
		m := survey.Marked{Protocol: protocol, Mark: req.GetMark()}
		for _, p := range req.GetPorts() {
			m.Ports = append(m.Ports, uint16(p)) //nolint:gosec // the same
		}
		return func(ctx context.Context) ([]survey.Sighting, error) { return survey.WatchMarked(ctx, m) }, nil
	}
	src, err1 := netip.ParseAddr(req.GetSource())
	dst, err2 := netip.ParseAddr(req.GetDestination())
	if err := errors.Join(err1, err2); err != nil || src.Is4() != dst.Is4() {
		return nil, fmt.Errorf("watch for %q and %q: want two addresses of one family", req.GetSource(), req.GetDestination())
	}
	c := survey.Connection{
		Src: src, Dst: dst, Protocol: protocol,
		SrcPort: uint16(req.GetSourcePort()), DstPort: uint16(req.GetPort()), ICMPID: uint16(req.GetIcmpId()), //nolint:gosec // the same
	}
	return func(ctx context.Context) ([]survey.Sighting, error) { return survey.Watch(ctx, c) }, nil
}
