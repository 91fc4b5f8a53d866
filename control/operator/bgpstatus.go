package operator

import (
	"context"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
)

// peer is a session as the operator's API shows it.
type peer struct {
	proto  *apiv1.BGPPeer
	up     bool // or it is a range that listens
	called bool // it has connected from a range, and goes as it came
}

func (s *Server) bgpStatus(ctx context.Context) bgp.Status {
	if s.cfg.BGP == nil {
		return bgp.Status{}
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	return s.cfg.BGP.Status(ctx) // busy with a large table: without the numbers
}

func (s *Server) sessions() bgp.Status {
	if s.cfg.BGP == nil {
		return bgp.Status{}
	}
	return s.cfg.BGP.Sessions()
}

func peersOf(st bgp.Status) []peer {
	var out []peer
	for _, p := range st.Peers {
		bp := &apiv1.BGPPeer{
			Type: string(p.Type), State: p.State, Since: timestamp(p.Since), Info: p.Info, AsNumber: p.ASN, Name: p.Name,
			Received: uint32(p.Received), Accepted: uint32(p.Accepted), Advertised: uint32(p.Advertised),
			Counted: p.Counted, MaxPrefixes: p.MaxPrefixes, Bfd: p.BFD,
		}
		for _, f := range p.Families {
			bp.Families = append(bp.Families, &apiv1.BGPFamily{
				Family: f.Family, Received: uint32(f.Received), Accepted: uint32(f.Accepted), Advertised: uint32(f.Advertised),
			})
		}
		if !p.Due.IsZero() {
			bp.Due = timestamp(p.Due)
		}
		bp.Address = peerAddress(p)
		out = append(out, peer{
			proto: bp, up: p.State == bgp.StateUp || p.State == bgp.StateListening, called: p.Range.IsValid() && p.Addr.IsValid() && p.Limit == 0,
		})
	}
	return out
}

func (s *Server) addBGP(st bgp.Status, out *apiv1.NodeResponse) {
	out.AsNumber = st.ASN
	if st.RouterID.IsValid() {
		out.RouterId = st.RouterID.String()
	}
	if st.Err != nil {
		out.BgpError = st.Err.Error()
	}
	if s.cfg.BGP == nil {
		out.BgpError = "not enabled (bgp.enabled is false)"
	}
	out.BgpSigning = st.Signing
	for _, p := range peersOf(st) {
		out.Peers = append(out.Peers, p.proto)
	}
	for _, c := range st.Collectors {
		out.Collectors = append(out.Collectors, &apiv1.BMPCollector{
			Address: c.Addr.String(), State: c.State, Since: timestamp(c.Since), Info: c.Info, Sent: c.Sent,
		})
	}
}

func (s *Server) blocks() []*apiv1.BlockStatus {
	var out []*apiv1.BlockStatus
	for _, b := range s.cfg.IPAM.Blocks() {
		out = append(out, &apiv1.BlockStatus{Cidr: b.CIDR.String(), Pool: b.Pool, InUse: int32(b.InUse), Size: int32(b.Size)})
	}
	return out
}

func workloadName(e attach.Endpoint) string {
	if e.Workload.Pod != "" {
		return e.Workload.Namespace + "/" + e.Workload.Pod
	}
	return e.ID.ContainerID
}
