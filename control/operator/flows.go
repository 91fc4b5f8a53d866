package operator

import (
	"context"
	"net"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
)

// Flows answers [rpc.Operator].
func (p *PolicyServer) Flows(_ context.Context, req *apiv1.FlowsRequest) (*apiv1.FlowsResponse, error) {
	if p == nil {
		return nil, errPolicyOff
	}
	list, err := p.cfg.Flows.Records()
	out := &apiv1.FlowsResponse{Missed: p.cfg.Flows.Missed()}
	if p.cfg.Table != nil {
		if counters, err := p.cfg.Table.Counters(); err == nil {
			out.Unlogged = unlogged(counters)
		}
	}
	if err == nil {
		err = p.cfg.Unable
	}
	if err != nil {
		out.State = err.Error()
	}
	device := deviceNames()
	wanted := p.interfacesOf(req.GetEndpoint())
	for _, r := range list {
		in, outDev := device(r.In), device(r.Out)
		if req.GetDenied() && r.Action != filter.Deny.String() || wanted != nil && !wanted[in] && !wanted[outDev] {
			continue
		}
		out.Flows = append(out.Flows, &apiv1.FlowRecord{
			Time: timestamppb.New(r.Time), Action: r.Action, By: r.By, Direction: r.Direction, Staged: r.Staged,
			Source: r.Src.String(), Destination: r.Dst.String(), Protocol: filter.ProtocolName(r.Protocol),
			SourcePort: uint32(r.SrcPort), DestinationPort: uint32(r.DstPort), In: in, Out: outDev,
		})
	}
	if n := int(req.GetLimit()); n > 0 && len(out.Flows) > n {
		out.Flows = out.Flows[len(out.Flows)-n:]
	}
	return out, nil
}

// unlogged adds up what rules judged without logging it.
func unlogged(list []nft.Counter) (n uint64) {
	for _, c := range list {
		n += c.Unlogged
	}
	return n
}

// interfacesOf returns the interfaces that a user means by a word; nil: all.
func (p *PolicyServer) interfacesOf(word string) map[string]bool {
	if word == "" || p.cfg.Unable != nil {
		return nil
	}
	attached := p.cfg.Workloads()
	wanted := make(map[string]bool)
	p.cfg.Enforcer.View(func(r *filter.Ruleset) {
		for name, e := range r.Endpoints {
			if names(e, attached, word) {
				wanted[name] = true
			}
		}
	})
	return wanted
}

// deviceNames returns what finds the names of this host's devices.
func deviceNames() func(index int) string {
	names := make(map[int]string)
	if list, err := net.Interfaces(); err == nil {
		for _, i := range list {
			names[i.Index] = i.Name
		}
	}
	return func(index int) string { return names[index] }
}
