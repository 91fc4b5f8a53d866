package operator

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// withPort reads a port that stands behind what a packet is for, as NODE:PORT or [ADDRESS]:PORT.
func withPort(req *apiv1.TraceRequest) (*apiv1.TraceRequest, error) {
	if _, err := netip.ParseAddr(req.GetTo()); err == nil {
		return req, nil // colons of an IPv6 address
	}
	host, text, err := net.SplitHostPort(req.GetTo())
	if err != nil {
		return req, nil //nolint:nilerr // there is none
	}
	port, err := strconv.ParseUint(text, 10, 16)
	switch {
	case err != nil || port == 0:
		return nil, fmt.Errorf("%q: want a port from 1 to 65535 behind the colon", req.GetTo())
	case req.GetPort() != 0 && uint64(req.GetPort()) != port:
		return nil, fmt.Errorf("%q: --port says %d: leave one of them out", req.GetTo(), req.GetPort())
	}
	out, ok := proto.Clone(req).(*apiv1.TraceRequest)
	if !ok {
		return req, nil
	}
	out.To, out.Port = host, uint32(port)
	return out, nil
}

// atNodePort finds the Service that has the port of nodes to which a packet goes; nil: none has, or it goes to no node.
func (s *Server) atNodePort(ctx context.Context, req *apiv1.TraceRequest, to location) (*toService, error) {
	port := uint16(min(req.GetPort(), 65535)) //nolint:gosec // bounded
	if s.cfg.Service == nil || port == 0 || to.node == "" || to.iface != "" {
		return nil, nil
	}
	list, err := listed(ctx, s.cfg.Store, store.KindService)
	if err != nil {
		return nil, err
	}
	for _, ev := range list {
		if v, ok := ev.Object.Value.(*store.Service); !ok || !slices.Contains(v.NodePorts, port) {
			continue
		}
		d, err := s.cfg.Service(ctx, ev.Key)
		if err != nil {
			return nil, err
		}
		if _, ok := service.NodePortOf(d, req.GetProtocol(), port); ok { // else it is of another protocol
			return &toService{detail: d, node: to}, nil
		}
	}
	return nil, nil
}
