package rpc

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/bgp/inject"
)

// Injector has routes of other programs on the host advertised.
type Injector interface {
	Inject(owner string, l inject.Lease, routes []inject.Route, all bool) error
	OpenInjection(owner string, grace time.Duration) (*bgp.Injection, error)
	WithdrawInjected(owner string, prefixes []netip.Prefix) (int, error)
	Injected() []bgp.InjectedRoute
}

func (s *bgpServer) Inject(_ context.Context, req *apiv1.BGPInjectRequest) (*apiv1.BGPInjectResponse, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	routes, err := injectedRoutes(req.GetRoutes())
	if err != nil {
		return nil, err
	}
	l := inject.Lease{TTL: req.GetTtl().AsDuration(), PID: int(req.GetPid())}
	return &apiv1.BGPInjectResponse{}, Error(s.b.Inject(req.GetOwner(), l, routes, req.GetAll()))
}

func (s *bgpServer) Hold(stream grpc.BidiStreamingServer[apiv1.BGPHoldRequest, apiv1.BGPHoldResponse]) error {
	if err := s.ready(); err != nil {
		return err
	}
	var held *bgp.Injection
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if held == nil {
			if held, err = s.b.OpenInjection(req.GetOwner(), req.GetGrace().AsDuration()); err != nil {
				return Error(err)
			}
			defer held.Close()
		}
		resp := &apiv1.BGPHoldResponse{}
		if err := hold(held, req); err != nil {
			resp.Error = err.Error()
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

func hold(held *bgp.Injection, req *apiv1.BGPHoldRequest) error {
	routes, err := injectedRoutes(req.GetRoutes())
	if err != nil {
		return err
	}
	gone, err := prefixesOf("withdraw", req.GetWithdraw())
	if err != nil {
		return err
	}
	if len(routes) > 0 || req.GetAll() {
		if err := held.Put(routes, req.GetAll()); err != nil {
			return err
		}
	}
	if len(gone) > 0 {
		_, err = held.Withdraw(gone)
	}
	return err
}

func (s *bgpServer) Withdraw(_ context.Context, req *apiv1.BGPWithdrawRequest) (*apiv1.BGPWithdrawResponse, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	prefixes, err := prefixesOf("prefixes", req.GetPrefixes())
	if err != nil {
		return nil, err
	}
	n, err := s.b.WithdrawInjected(req.GetOwner(), prefixes)
	return &apiv1.BGPWithdrawResponse{Withdrawn: uint32(n)}, Error(err)
}

func (s *bgpServer) Injected(_ context.Context, req *apiv1.BGPInjectedRequest) (*apiv1.BGPInjectedResponse, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	out := &apiv1.BGPInjectedResponse{}
	for _, r := range s.b.Injected() {
		if req.GetOwner() != "" && r.Owner != req.GetOwner() {
			continue
		}
		p := &apiv1.BGPInjectedRoute{
			Prefix: r.Prefix.String(), LocalPref: r.LocalPref, Communities: r.Communities,
			Owner: r.Owner, Stream: r.Stream, Pid: uint32(r.PID), Refused: r.Refused,
		}
		if r.NextHop.IsValid() {
			p.NextHop = r.NextHop.String()
		}
		if r.TTL > 0 {
			p.Ttl = durationpb.New(r.TTL)
		}
		out.Routes = append(out.Routes, p)
	}
	return out, nil
}

func injectedRoutes(list []*apiv1.BGPInjectedRoute) ([]inject.Route, error) {
	out := make([]inject.Route, 0, len(list))
	for _, r := range list {
		p, err := netip.ParsePrefix(r.GetPrefix())
		if err != nil {
			return nil, invalid("routes.prefix", err)
		}
		route := inject.Route{Prefix: p, LocalPref: r.GetLocalPref(), Communities: r.GetCommunities()}
		if h := r.GetNextHop(); h != "" {
			if route.NextHop, err = netip.ParseAddr(h); err != nil {
				return nil, invalid("routes.next_hop", err)
			}
		}
		out = append(out, route)
	}
	return out, nil
}

func prefixesOf(field string, list []string) ([]netip.Prefix, error) {
	out := make([]netip.Prefix, 0, len(list))
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, invalid(field, err)
		}
		out = append(out, p)
	}
	return out, nil
}
