package operator

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
)

// Routes implements [rpc.Operator].
func (s *Server) Routes(ctx context.Context, filter netip.Prefix, all bool) (*apiv1.RoutesResponse, error) {
	cands, err := s.cfg.Core.Explain(ctx, filter)
	if err != nil {
		return nil, err
	}
	statuses := s.cfg.Kernel.Statuses()
	byPrefix := map[netip.Prefix]dataplane.Status{}
	for _, st := range statuses {
		if r, ok := st.Object.(dataplane.Route); ok {
			byPrefix[r.Prefix] = st
		}
	}
	out := &apiv1.RoutesResponse{}
	for _, e := range s.cfg.Attach.Endpoints() {
		for _, a := range e.Addresses {
			p := netip.PrefixFrom(a, a.BitLen())
			if filter.IsValid() && !filter.Overlaps(p) {
				continue
			}
			r := &apiv1.Route{
				Prefix: p.String(), Best: true, Source: rib.SourceLocal, Type: "workload", Device: e.Device,
				Peer: e.ID.ContainerID, Reason: "workload " + workloadName(e) + " on this host",
			}
			s.addState(r, byPrefix[p])
			out.Routes = append(out.Routes, r)
		}
	}
	for _, c := range cands {
		r := &apiv1.Route{
			Prefix: c.Prefix.String(), Best: c.Best, Source: c.Source, Type: c.Type, Driver: c.Driver, Pool: c.Pool,
			Peer: c.Peer, Device: c.Link, Reason: c.Reason,
		}
		if c.NextHop.IsValid() {
			r.NextHop = c.NextHop.String()
		}
		if c.Via.IsValid() {
			r.Via = c.Via.String()
		}
		if c.Best {
			s.addState(r, byPrefix[c.Prefix])
		}
		out.Routes = append(out.Routes, r)
	}
	if all {
		for _, st := range statuses {
			o := &apiv1.ObjectStatus{
				Kind: st.Object.Key().Kind().String(), Object: st.Object.String(), Source: st.Source.String(),
				State: st.State.String(), Since: timestamp(st.Since),
			}
			if st.Err != nil {
				o.Reason = st.Err.Error()
			}
			out.Objects = append(out.Objects, o)
		}
	}
	return out, nil
}

// addState says what became of a chosen route in the kernel.
func (s *Server) addState(r *apiv1.Route, st dataplane.Status) {
	route, ok := st.Object.(dataplane.Route)
	if !ok {
		r.State = dataplane.Pending.String()
		return
	}
	r.State, r.Since, r.NextHopId = st.State.String(), timestamp(st.Since), uint32(route.NextHop)
	if st.Err != nil {
		r.Reason = st.Err.Error()
	}
	var b strings.Builder
	if route.Type == dataplane.Blackhole {
		b.WriteString("blackhole ")
	}
	b.WriteString(route.Prefix.String())
	if route.NextHop != 0 {
		fmt.Fprintf(&b, " nhid %d via %s dev %s", route.NextHop, r.GetVia(), r.GetDevice())
	}
	if route.Link != "" {
		fmt.Fprintf(&b, " dev %s", route.Link)
	}
	fmt.Fprintf(&b, " proto %s", s.protocolName())
	switch {
	case route.NextHop != 0:
		b.WriteString(" onlink")
	case route.Link != "":
		b.WriteString(" scope link")
	}
	r.Kernel = b.String()
}

// protocolName is how ip(8) shows our routes where rt_protos.d is installed.
func (s *Server) protocolName() string {
	if s.cfg.RouteProtocol == 77 {
		return "routerd"
	}
	return fmt.Sprint(s.cfg.RouteProtocol)
}
