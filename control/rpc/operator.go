package rpc

import (
	"context"
	"errors"
	"io"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// Operator is what the operator's service asks of the daemon.
type Operator interface {
	// Node describes this host.
	Node(ctx context.Context) (*apiv1.NodeResponse, error)

	// Delivered counts the packets that workloads have been sent since their interfaces were made.
	Delivered() (uint64, error)

	// Routes explains the prefixes that overlap filter, or all if filter is
	// not valid; with all, also every other object that is wanted.
	Routes(ctx context.Context, filter netip.Prefix, all bool) (*apiv1.RoutesResponse, error)
	// Paths returns what was measured of the underlay towards each peer.
	Paths(ctx context.Context) (*apiv1.PathsResponse, error)
	// Tunnels returns what probes found of the tunnels to each peer, and has
	// those to the nodes of retry, or all, measured anew.
	Tunnels(ctx context.Context, retry []string, all bool) (*apiv1.TunnelsResponse, error)
	// CNIConfig returns the CNI network configuration list, as JSON.
	CNIConfig(ctx context.Context) ([]byte, error)
	// Overlaps lists what of this host shares addresses with ranges that are
	// to be pools'.
	Overlaps(ctx context.Context, cidrs []netip.Prefix) (*apiv1.OverlapsResponse, error)
	// Policy returns the rules of an endpoint, or all endpoints without theirs.
	Policy(ctx context.Context, endpoint string) (*apiv1.PolicyResponse, error)
	// PolicyExplain says what becomes of a packet.
	PolicyExplain(ctx context.Context, req *apiv1.PolicyExplainRequest) (*apiv1.PolicyExplainResponse, error)
	// Hosts says how every host of the cluster is and what it has counted.
	Hosts(ctx context.Context) (*apiv1.HostsResponse, error)
	// Plan says what a change would do to every host.
	Plan(ctx context.Context, req *apiv1.PlanRequest, yield func(*apiv1.HostPlan) error) error
	// Session says what in a change would end a TCP connection of a client to this host;
	// empty: it goes on.
	Session(ctx context.Context, changes []store.Event, client, host netip.AddrPort) (string, error)
	// Flows returns recent verdicts.
	Flows(ctx context.Context, req *apiv1.FlowsRequest) (*apiv1.FlowsResponse, error)
}

// NewOperatorServer returns the operator's service.
func NewOperatorServer(o Operator) apiv1.OperatorServer { return &operatorServer{o: o} }

type operatorServer struct {
	apiv1.UnimplementedOperatorServer
	o Operator
}

func (s *operatorServer) Node(ctx context.Context, r *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	out, err := s.o.Node(ctx)
	if err == nil && r.GetDelivered() {
		out.DeliveredPackets, err = s.o.Delivered()
	}
	return out, err
}

func (s *operatorServer) Routes(ctx context.Context, req *apiv1.RoutesRequest) (*apiv1.RoutesResponse, error) {
	filter, err := parseFilter(req.GetPrefix())
	if err != nil {
		return nil, err
	}
	return s.o.Routes(ctx, filter, req.GetAllObjects())
}

func (s *operatorServer) Paths(ctx context.Context, _ *apiv1.PathsRequest) (*apiv1.PathsResponse, error) {
	return s.o.Paths(ctx)
}

func (s *operatorServer) Tunnels(ctx context.Context, req *apiv1.TunnelsRequest) (*apiv1.TunnelsResponse, error) {
	return s.o.Tunnels(ctx, req.GetRetry(), req.GetRetryAll())
}

func (s *operatorServer) CNIConfig(ctx context.Context, _ *apiv1.CNIConfigRequest) (*apiv1.CNIConfigResponse, error) {
	b, err := s.o.CNIConfig(ctx)
	if err != nil {
		return nil, err
	}
	return &apiv1.CNIConfigResponse{Conflist: string(b)}, nil
}

func (s *operatorServer) Overlaps(ctx context.Context, req *apiv1.OverlapsRequest) (*apiv1.OverlapsResponse, error) {
	var cidrs []netip.Prefix
	for _, c := range req.GetCidrs() {
		p, err := netip.ParsePrefix(c)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "%q: want a CIDR, such as 192.168.0.0/16", c)
		}
		cidrs = append(cidrs, p.Masked())
	}
	return s.o.Overlaps(ctx, cidrs)
}

func (s *operatorServer) Policy(ctx context.Context, req *apiv1.PolicyRequest) (*apiv1.PolicyResponse, error) {
	return s.o.Policy(ctx, req.GetEndpoint())
}

func (s *operatorServer) PolicyExplain(ctx context.Context, req *apiv1.PolicyExplainRequest) (*apiv1.PolicyExplainResponse, error) {
	if req.GetFrom() == "" || req.GetTo() == "" {
		return nil, status.Error(codes.InvalidArgument, "from and to are required: an endpoint, an address, or host")
	}
	return s.o.PolicyExplain(ctx, req)
}

func (s *operatorServer) Flows(ctx context.Context, req *apiv1.FlowsRequest) (*apiv1.FlowsResponse, error) {
	return s.o.Flows(ctx, req)
}

func (s *operatorServer) Hosts(ctx context.Context, _ *apiv1.HostsRequest) (*apiv1.HostsResponse, error) {
	return s.o.Hosts(ctx)
}

func (s *operatorServer) Plan(stream grpc.BidiStreamingServer[apiv1.PlanRequest, apiv1.HostPlan]) error {
	all := &apiv1.PlanRequest{}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		all.Changes = append(all.Changes, part.GetChanges()...)
	}
	return s.o.Plan(stream.Context(), all, stream.Send)
}

func (s *operatorServer) Session(stream grpc.ClientStreamingServer[apiv1.SessionRequest, apiv1.SessionResponse]) error {
	var asked *apiv1.SessionRequest
	changes, err := received(func() (*apiv1.SessionRequest, error) {
		req, err := stream.Recv()
		if err == nil {
			asked = req
		}
		return req, err
	}, func(store.Kind) bool { return true })
	if err != nil {
		return err
	}
	client, err := netip.ParseAddrPort(asked.GetClient())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "client %q: want ADDRESS:PORT", asked.GetClient())
	}
	host, err := netip.ParseAddrPort(asked.GetHost())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "host %q: want ADDRESS:PORT", asked.GetHost())
	}
	ends, err := s.o.Session(stream.Context(), changes, client, host)
	if err != nil {
		return err
	}
	return stream.SendAndClose(&apiv1.SessionResponse{Ends: ends})
}

// parseFilter reads a prefix or an address; the empty string gives an invalid
// prefix.
func parseFilter(s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, status.Errorf(codes.InvalidArgument, "%q: want an address or a prefix, such as 192.168.0.0/26", s)
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}
