package rpc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/dataplane"
)

// Attacher is what the CNI service calls; *[attach.Attacher] is one.
type Attacher interface {
	Add(ctx context.Context, req attach.AddRequest) (attach.Result, error)
	Del(ctx context.Context, req attach.DelRequest) error
	Check(ctx context.Context, req attach.CheckRequest) error
	Status(ctx context.Context) error
	GC(ctx context.Context, network string, valid []attach.ID) (attach.Collected, error)
	Allocate(ctx context.Context, req attach.AllocateRequest) (attach.Result, error)
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
		Forwarding: req.GetAllowIpForwarding(), Node: req.GetNode(), PodCIDR: req.GetPodCidr(),
	}
	if r.Addresses, err = addrsOf("requested_ips", req.GetRequestedIps()); err != nil {
		return nil, err
	}
	if r.Given, err = addrsOf("given", req.GetGiven()); err != nil {
		return nil, err
	}
	if r.Floating, err = addrsOf("floating_ips", req.GetFloatingIps()); err != nil {
		return nil, err
	}
	r.PodUID, r.Sources = req.GetWorkload().GetUid(), req.GetSourcePrefixes()
	if r.NamespaceLabels, err = labelsOf(req.GetNamespaceLabels()); err != nil {
		return nil, err
	}
	if req.GetMac() != "" {
		if r.MAC, err = dataplane.ParseMAC(req.GetMac()); err != nil {
			return nil, invalid("mac", err)
		}
	}
	res, err := s.attacher.Add(ctx, r)
	if err != nil {
		return nil, Error(err)
	}
	resp := &apiv1.AddResponse{
		HostInterface: res.Device, HostMac: res.HostMAC.String(), ContainerMac: res.MAC.String(), Mtu: int32(res.MTU),
	}
	resp.Addresses = addressesOf(res)
	return resp, nil
}

func (s *cniServer) Allocate(ctx context.Context, req *apiv1.AllocateRequest) (*apiv1.AllocateResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := attach.AllocateRequest{
		ID: id, Workload: workloadOf(req.GetWorkload()), Node: req.GetNode(),
		IPv4: req.GetAssignIpv4(), IPv6: req.GetAssignIpv6(), IPv4Pools: req.GetIpv4Pools(), IPv6Pools: req.GetIpv6Pools(),
		Link: req.GetLink(), Gateway: req.GetGateway(), PodUID: req.GetWorkload().GetUid(),
	}
	if r.Addresses, err = addrsOf("requested_ips", req.GetRequestedIps()); err != nil {
		return nil, err
	}
	if r.NamespaceLabels, err = labelsOf(req.GetNamespaceLabels()); err != nil {
		return nil, err
	}
	res, err := s.attacher.Allocate(ctx, r)
	if err != nil {
		return nil, Error(err)
	}
	return &apiv1.AllocateResponse{Addresses: addressesOf(res)}, nil
}

// addressesOf puts a result's addresses into the API's form, in which an
// address or a block that is not there is empty.
func addressesOf(res attach.Result) []*apiv1.Address {
	var out []*apiv1.Address
	for _, a := range res.Addresses {
		m := &apiv1.Address{Cidr: netip.PrefixFrom(a.Addr, a.Addr.BitLen()).String()}
		if a.Gateway.IsValid() {
			m.Gateway = a.Gateway.String()
		}
		if a.Block.IsValid() {
			m.Block = a.Block.String()
		}
		out = append(out, m)
	}
	return out
}

func addrsOf(field string, list []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, invalid(field, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// labelsOf reads labels in the form KEY=VALUE.
func labelsOf(list []string) (map[string]string, error) {
	var out map[string]string
	for _, s := range list {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, invalid("namespace_labels", fmt.Errorf("%q: want KEY=VALUE", s))
		}
		if out == nil {
			out = map[string]string{}
		}
		out[k] = v
	}
	return out, nil
}

func (s *cniServer) Del(ctx context.Context, req *apiv1.DelRequest) (*apiv1.DelResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	if err := s.attacher.Del(ctx, attach.DelRequest{ID: id, Workload: workloadOf(req.GetWorkload()), AddressesOnly: req.GetAddressesOnly()}); err != nil {
		return nil, Error(err)
	}
	return &apiv1.DelResponse{}, nil
}

func (s *cniServer) Check(ctx context.Context, req *apiv1.CheckRequest) (*apiv1.CheckResponse, error) {
	id, err := idOf(req.GetAttachment())
	if err != nil {
		return nil, err
	}
	r := attach.CheckRequest{ID: id, Netns: req.GetNetns(), Device: req.GetHostInterface(), MAC: req.GetContainerMac(), AddressesOnly: req.GetAddressesOnly()}
	if r.Addresses, err = addrsOf("addresses", req.GetAddresses()); err != nil {
		return nil, err
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
	done, err := s.attacher.GC(ctx, req.GetNetwork(), valid)
	resp := &apiv1.GCResponse{Removed: attachmentsOf(done.Removed), Left: attachmentsOf(done.Left), Unlisted: done.Unlisted}
	if err != nil {
		return nil, errorWith(err, resp)
	}
	return resp, nil
}

func attachmentsOf(ids []attach.ID) []*apiv1.Attachment {
	var out []*apiv1.Attachment
	for _, id := range ids {
		out = append(out, &apiv1.Attachment{Network: id.Network, ContainerId: id.ContainerID, Ifname: id.Interface})
	}
	return out
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
