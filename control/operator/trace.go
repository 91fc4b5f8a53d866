package operator

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload"
)

// traceWithin is how long a packet may take through this host.
const traceWithin = time.Second

// trace sends the packet from its workload and has connection tracking say
// whether this host let it pass: only then is its connection in the table.
func (s *PolicyServer) trace(ctx context.Context, out *apiv1.PolicyExplainResponse, from location, p filter.Packet) error {
	attached := s.cfg.Workloads()
	i := slices.IndexFunc(attached, func(e attach.Endpoint) bool {
		return from.node == s.cfg.Node && e.Device == from.iface && slices.Contains(e.Addresses, p.Src)
	})
	if i < 0 {
		return status.Errorf(codes.FailedPrecondition, "trace: %s is not a workload of this host: run the command on the workload's host", from.name)
	}
	ports := slices.Contains([]uint8{6, 17, 132, 136}, p.Protocol)
	echo := p.Protocol == 1 && p.ICMPType == 8 || p.Protocol == 58 && p.ICMPType == 128
	if !ports && !echo {
		return status.Error(codes.InvalidArgument, "trace: only TCP, UDP, UDP-Lite, SCTP and echo requests (icmp type 8, icmpv6 type 128) can be told apart in connection tracking")
	}
	probe := workload.Packet{
		Src: p.Src, Dst: p.Dst, Protocol: p.Protocol, SrcPort: p.SrcPort, DstPort: p.DstPort,
		ICMPType: p.ICMPType, ICMPCode: p.ICMPCode, ICMPID: uint16(rand.N(1 << 16)), //nolint:gosec // to be told from others, no secret
	}
	if ports && probe.SrcPort == 0 {
		probe.SrcPort = uint16(32768 + rand.N(28232)) //nolint:gosec // to be told from others, no secret
	}
	if err := workload.Send(attached[i].Netns, probe); err != nil {
		return status.Errorf(codes.Internal, "trace: %v", err)
	}
	passed, err := s.passed(ctx, probe)
	if err != nil {
		return status.Errorf(codes.Internal, "trace: %v", err)
	}
	here := true
	for _, end := range out.GetEnds() {
		if end.GetNode() == s.cfg.Node {
			here = end.GetAllowed()
		}
	}
	switch {
	case passed == here && passed:
		out.Trace = "the kernel of this host let the packet pass, as the rules say"
	case passed == here:
		out.Trace = "the kernel of this host dropped the packet, as the rules say"
	case passed:
		out.Trace, out.TraceDiffers = "the kernel of this host let the packet PASS, but the rules deny it", true
	default:
		out.Trace, out.TraceDiffers = "the kernel of this host DROPPED the packet, or found no route, but the rules allow it", true
	}
	return nil
}

// passed waits for the packet's connection in the table of connections.
func (s *PolicyServer) passed(ctx context.Context, p workload.Packet) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, traceWithin)
	defer cancel()
	for {
		list, err := s.cfg.Connections.ListOf(p.Src)
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(list, func(f conntrack.Flow) bool {
			return f.Protocol == p.Protocol && f.Orig.Src == p.Src && f.Orig.Dst == p.Dst && f.Orig.SrcPort == p.SrcPort &&
				f.Orig.DstPort == p.DstPort && (p.Protocol != 1 && p.Protocol != 58 || f.ICMPID == p.ICMPID)
		}) {
			return true, nil
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}
