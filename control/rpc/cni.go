package rpc

import (
	"context"
	"errors"
	"net/netip"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
)

// Attacher is what the CNI service calls; *[attach.Attacher] is one.
type Attacher interface {
	Add(ctx context.Context, req attach.AddRequest) (attach.Result, error)
	Del(ctx context.Context, req attach.DelRequest) error
	Check(ctx context.Context, req attach.CheckRequest) error
	Status(ctx context.Context) error
	GC(ctx context.Context, network string, valid []attach.ID) ([]attach.ID, error)
}

// NewCNIServer returns the CNI service.
func NewCNIServer(a Attacher) apiv1.CNIServer { return &cniServer{attacher: a} }

type cniServer struct {
	apiv1.UnimplementedCNIServer
	attacher Attacher
}

func (s *cniServer) Add(ctx context.Context, req *apiv1.AddRequest) (*apiv1.AddResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := attach.AddRequest{
		ID: id, Workload: workloadOf(req.GetWorkload()), Netns: req.GetNetns(), MTU: int(req.GetMtu()),
		IPv4: req.GetAssignIpv4(), IPv6: req.GetAssignIpv6(),
		IPv4Pools: req.GetIpv4Pools(), IPv6Pools: req.GetIpv6Pools(),
		Forwarding: req.GetAllowIpForwarding(),
	}
	for _, ip := range req.GetRequestedIps() {
		a, err := netip.ParseAddr(ip)
		if err != nil {
			return nil, invalid("requested_ips", err)
		}
		r.Addresses = append(r.Addresses, a)
	}
	res, err := s.attacher.Add(ctx, r)
	if err != nil {
		return nil, Error(err)
	}
	resp := &apiv1.AddResponse{
		HostInterface: res.Device, HostMac: res.HostMAC.String(), ContainerMac: res.MAC.String(), Mtu: int32(res.MTU),
	}
	for _, a := range res.Addresses {
		resp.Addresses = append(resp.Addresses, &apiv1.Address{
			Cidr:    netip.PrefixFrom(a.Addr, a.Addr.BitLen()).String(),
			Gateway: a.Gateway.String(),
			Block:   a.Block.String(),
		})
	}
	return resp, nil
}

func (s *cniServer) Del(ctx context.Context, req *apiv1.DelRequest) (*apiv1.DelResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	if err := s.attacher.Del(ctx, attach.DelRequest{ID: id, Workload: workloadOf(req.GetWorkload())}); err != nil {
		return nil, Error(err)
	}
	return &apiv1.DelResponse{}, nil
}

func (s *cniServer) Check(ctx context.Context, req *apiv1.CheckRequest) (*apiv1.CheckResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := attach.CheckRequest{ID: id, Netns: req.GetNetns(), Device: req.GetHostInterface(), MAC: req.GetContainerMac()}
	for _, a := range req.GetAddresses() {
		addr, err := netip.ParseAddr(a)
		if err != nil {
			return nil, invalid("addresses", err)
		}
		r.Addresses = append(r.Addresses, addr)
	}
	if err := s.attacher.Check(ctx, r); err != nil {
		return nil, Error(err)
	}
	return &apiv1.CheckResponse{}, nil
}

func (s *cniServer) Status(ctx context.Context, _ *apiv1.StatusRequest) (*apiv1.StatusResponse, error) {
	if err := s.attacher.Status(ctx); err != nil {
		return nil, Error(err)
	}
	return &apiv1.StatusResponse{}, nil
}

func (s *cniServer) GC(ctx context.Context, req *apiv1.GCRequest) (*apiv1.GCResponse, error) {
	if req.GetNetwork() == "" {
		return nil, invalid("network", errEmpty())
	}
	valid := make([]attach.ID, 0, len(req.GetValid()))
	for _, v := range req.GetValid() {
		valid = append(valid, attach.ID{Network: req.GetNetwork(), ContainerID: v.GetContainerId(), Interface: v.GetIfname()})
	}
	removed, err := s.attacher.GC(ctx, req.GetNetwork(), valid)
	if err != nil {
		return nil, Error(err)
	}
	resp := &apiv1.GCResponse{}
	for _, id := range removed {
		resp.Removed = append(resp.Removed, &apiv1.Attachment{Network: id.Network, ContainerId: id.ContainerID, Ifname: id.Interface})
	}
	return resp, nil
}

func errEmpty() error { return errors.New("is empty") }

// idOf reads the names of an attachment; all three are required.
func idOf(a *apiv1.Attachment) (attach.ID, error) {
	switch {
	case a.GetNetwork() == "":
		return attach.ID{}, invalid("attachment.network", errEmpty())
	case a.GetContainerId() == "":
		return attach.ID{}, invalid("attachment.container_id", errEmpty())
	case a.GetIfname() == "":
		return attach.ID{}, invalid("attachment.ifname", errEmpty())
	}
	return attach.ID{Network: a.GetNetwork(), ContainerID: a.GetContainerId(), Interface: a.GetIfname()}, nil
}

func workloadOf(w *apiv1.Workload) attach.Workload {
	return attach.Workload{Orchestrator: w.GetOrchestrator(), Namespace: w.GetNamespace(), Pod: w.GetPod()}
}
