package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/store"
)

// BGP answers what `routerctl bgp` asks; [*bgp.Controller] does.
type BGP interface {
	Status(ctx context.Context) bgp.Status
	Query(ctx context.Context, q bgp.Query, yield func(bgp.Route) bool) error
	Explain(ctx context.Context, prefix netip.Prefix) ([]bgp.Route, error)
	Watch(ctx context.Context, yield func(bgp.Event) error) error
	Dump(ctx context.Context, received bool, write func([]byte) error) error
	Isolated(ctx context.Context, changes []store.Event) ([]string, error)
	Plan(ctx context.Context, changes []store.Event, yield func(bgp.Plan) error) error
	Injector
	Reflectors() (bgp.ReflectorStatus, error)
}

// NewBGPServer returns the service; with a nil b, on a host without BGP, every
// call says so.
func NewBGPServer(b BGP) apiv1.BGPServer { return &bgpServer{b: b} }

type bgpServer struct {
	apiv1.UnimplementedBGPServer
	b BGP
}

// maxBatch is how many routes one message carries: well below gRPC's limit of
// 4 MiB for a message.
const maxBatch = 1000

func (s *bgpServer) ready() error {
	if s.b == nil {
		return status.Error(codes.FailedPrecondition, "BGP is not enabled on this host (bgp.enabled is false)")
	}
	return nil
}

func (s *bgpServer) Routes(req *apiv1.BGPRoutesRequest, stream grpc.ServerStreamingServer[apiv1.BGPRoutesResponse]) error {
	if err := s.ready(); err != nil {
		return err
	}
	ctx := stream.Context()
	q, err := s.query(ctx, req)
	if err != nil {
		return err
	}
	batch := &apiv1.BGPRoutesResponse{}
	var sendErr error
	err = s.b.Query(ctx, q, func(r bgp.Route) bool {
		if batch.Routes = append(batch.Routes, bgpRoute(r)); len(batch.Routes) == maxBatch {
			sendErr = stream.Send(batch)
			batch = &apiv1.BGPRoutesResponse{}
		}
		return sendErr == nil
	})
	if err == nil && sendErr == nil && len(batch.Routes) > 0 {
		sendErr = stream.Send(batch)
	}
	return bgpError(errors.Join(err, sendErr))
}

func (s *bgpServer) query(ctx context.Context, req *apiv1.BGPRoutesRequest) (bgp.Query, error) {
	var q bgp.Query
	var err error
	if q.Prefix, err = parseFilter(req.GetPrefix()); err != nil {
		return q, err
	}
	switch req.GetTable() {
	case apiv1.BGPTable_BGP_TABLE_RECEIVED:
		q.Table = bgp.TableReceived
	case apiv1.BGPTable_BGP_TABLE_ADVERTISED:
		q.Table = bgp.TableAdvertised
	case apiv1.BGPTable_BGP_TABLE_BEST:
		return q, nil
	}
	q.Peer, err = s.peer(ctx, req.GetPeer())
	return q, err
}

// peer finds a peer by its address or its name.
func (s *bgpServer) peer(ctx context.Context, name string) (netip.Addr, error) {
	if name == "" {
		return netip.Addr{}, status.Error(codes.InvalidArgument, "peer: want the address of a peer, or the name of a node or a BGPPeer")
	}
	if a, err := netip.ParseAddr(name); err == nil {
		return a, nil
	}
	at, _ := netip.ParseAddrPort(name)
	var found []netip.Addr
	for _, p := range s.b.Status(ctx).Peers {
		if p.Addr.IsValid() && (p.Name == name || netip.AddrPortFrom(p.Addr, p.Port) == at) {
			found = append(found, p.ID)
		}
	}
	var names []string
	for _, id := range found {
		names = append(names, bgp.PeerName(id))
	}
	switch len(found) {
	case 0:
		return netip.Addr{}, status.Errorf(codes.NotFound, "peer %q: no session of this name; see `routerctl bgp peers`", name)
	case 1:
		return found[0], nil
	}
	return netip.Addr{}, status.Errorf(codes.InvalidArgument, "peer %q has the sessions %s: name one by its address", name, strings.Join(names, ", "))
}

func (s *bgpServer) Explain(ctx context.Context, req *apiv1.BGPExplainRequest) (*apiv1.BGPRoutesResponse, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	prefix, err := parseFilter(req.GetPrefix())
	if err != nil {
		return nil, err
	}
	if !prefix.IsValid() {
		return nil, status.Error(codes.InvalidArgument, "prefix: want a prefix such as 192.168.0.0/26")
	}
	routes, err := s.b.Explain(ctx, prefix)
	if err != nil {
		return nil, bgpError(err)
	}
	out := &apiv1.BGPRoutesResponse{}
	for _, r := range routes {
		out.Routes = append(out.Routes, bgpRoute(r))
	}
	return out, nil
}

func (s *bgpServer) Watch(_ *apiv1.BGPWatchRequest, stream grpc.ServerStreamingServer[apiv1.BGPEvent]) error {
	if err := s.ready(); err != nil {
		return err
	}
	return s.b.Watch(stream.Context(), func(e bgp.Event) error {
		return stream.Send(&apiv1.BGPEvent{Time: timestamppb.New(e.Time), What: e.What, Subject: e.Subject, Detail: e.Detail})
	})
}

func (s *bgpServer) Dump(req *apiv1.BGPDumpRequest, stream grpc.ServerStreamingServer[apiv1.BGPDumpResponse]) error {
	if err := s.ready(); err != nil {
		return err
	}
	if req.GetTable() == apiv1.BGPTable_BGP_TABLE_ADVERTISED {
		return status.Error(codes.InvalidArgument, "table: a dump has what peers sent, or what was let in of it")
	}
	err := s.b.Dump(stream.Context(), req.GetTable() == apiv1.BGPTable_BGP_TABLE_RECEIVED, func(part []byte) error {
		return stream.Send(&apiv1.BGPDumpResponse{Data: part})
	})
	return bgpError(err)
}

func (s *bgpServer) Isolated(stream grpc.ClientStreamingServer[apiv1.BGPIsolatedRequest, apiv1.BGPIsolatedResponse]) error {
	changes, err := received(stream.Recv, func(k store.Kind) bool { return k != store.KindIPPool && PlannedByBGP(k) })
	if err != nil {
		return err
	}
	if s.b == nil {
		return stream.SendAndClose(&apiv1.BGPIsolatedResponse{}) // without BGP nobody loses a session
	}
	nodes, err := s.b.Isolated(stream.Context(), changes)
	if err != nil {
		return Error(err)
	}
	return stream.SendAndClose(&apiv1.BGPIsolatedResponse{Nodes: nodes})
}

func (s *bgpServer) Plan(stream grpc.BidiStreamingServer[apiv1.BGPPlanRequest, apiv1.BGPPlanResponse]) error {
	changes, err := received(stream.Recv, PlannedByBGP)
	if err != nil {
		return err
	}
	if err := s.ready(); err != nil {
		return err
	}
	err = s.b.Plan(stream.Context(), changes, func(p bgp.Plan) error {
		out := &apiv1.BGPPlanResponse{Node: p.Node, Settings: p.Settings, Announce: texts(p.Announce), Withdraw: texts(p.Withdraw)}
		for _, x := range p.Sessions {
			out.Sessions = append(out.Sessions, plannedSession(x))
		}
		return stream.Send(out)
	})
	if err != nil {
		return Error(err)
	}
	return nil
}

func plannedSession(x bgp.PlannedSession) *apiv1.BGPPlannedSession {
	addr := ""
	switch p := x.Peer; {
	case p.Addr.IsValid() && p.Port != bgp.DefaultPort && p.Port != 0:
		addr = netip.AddrPortFrom(p.Addr, p.Port).String()
	case p.Addr.IsValid():
		addr = p.Addr.String()
	}
	return &apiv1.BGPPlannedSession{
		Name: x.Peer.Name, Type: string(x.Peer.Type), Address: addr, Interface: x.Peer.Interface, Asn: x.Peer.ASN, Fate: string(x.Fate), Why: x.Why,
	}
}

func texts(list []netip.Prefix) []string {
	out := make([]string, len(list))
	for i, p := range list {
		out[i] = p.String()
	}
	return out
}

// PlannedByBGP reports whether a node's part in BGP depends on a kind that operators write.
func PlannedByBGP(k store.Kind) bool {
	switch k {
	case store.KindNode, store.KindBGPPeer, store.KindBGPConfiguration, store.KindBGPFilter, store.KindIPPool:
		return true
	}
	return false
}

// received reads changes that come in parts, of the kinds that concern whoever asks.
func received[M interface{ GetChanges() []*apiv1.BGPChange }](recv func() (M, error), concerns func(store.Kind) bool) ([]store.Event, error) {
	var changes []store.Event
	for {
		req, err := recv()
		if errors.Is(err, io.EOF) {
			return changes, nil
		}
		if err != nil {
			return nil, err
		}
		part, err := Changes(req.GetChanges(), concerns)
		if err != nil {
			return nil, err
		}
		changes = append(changes, part...)
	}
}

// Changes reads changes of resources, of the kinds that concern whoever asks.
func Changes(list []*apiv1.BGPChange, concerns func(store.Kind) bool) ([]store.Event, error) {
	var changes []store.Event
	for _, c := range list {
		key, ok := store.ParsePath(c.GetKey())
		if !ok {
			return nil, status.Errorf(codes.InvalidArgument, "key %q: want the key of a resource", c.GetKey())
		}
		if !concerns(key.Kind) {
			continue
		}
		e, err := changeOf(key, c.GetValue())
		if err != nil {
			return nil, err
		}
		changes = append(changes, e)
	}
	return changes, nil
}

// changeOf reads a change of a resource.
func changeOf(key store.Key, raw []byte) (store.Event, error) {
	e := store.Event{Key: key, Object: store.Object{Key: key}}
	if len(raw) > 0 {
		value, err := store.Decode(key, raw)
		if err != nil {
			return e, status.Errorf(codes.InvalidArgument, "%s: %v", key, err)
		}
		e.Object.Value, e.Object.Raw = value, raw
	}
	return e, nil
}

func (s *bgpServer) Reflectors(context.Context, *apiv1.BGPReflectorsRequest) (*apiv1.BGPReflectorsResponse, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	st, err := s.b.Reflectors()
	if err != nil {
		return nil, Error(err)
	}
	out := &apiv1.BGPReflectorsResponse{Setting: st.Setting, Problem: st.Problem, Nodes: uint32(st.Nodes), Mesh: uint32(st.Mesh), Waiting: st.Waiting}
	for _, g := range st.Groups {
		out.Groups = append(out.Groups, &apiv1.BGPReflectorGroup{Name: g.Name, Nodes: uint32(g.Nodes), Reflectors: g.Reflectors, Leaving: g.Leaving})
	}
	return out, nil
}

func bgpError(err error) error {
	if errors.Is(err, bgp.ErrNoPeer) {
		return status.Error(codes.NotFound, fmt.Sprintf("%v; see `routerctl bgp peers`", err))
	}
	return Error(err)
}

func bgpRoute(r bgp.Route) *apiv1.BGPRoute {
	out := &apiv1.BGPRoute{
		Prefix: r.Prefix.String(), Peer: r.Peer, AsPath: r.ASPath, Origin: r.Origin, LocalPref: r.LocalPref, Med: r.MED,
		Communities: r.Communities, Stale: r.Stale, Own: r.Own, Owner: r.Owner, State: r.State, Reason: r.Reason,
	}
	if r.NextHop.IsValid() {
		out.NextHop = r.NextHop.String()
	}
	if r.PeerAddr.IsValid() {
		out.PeerAddress = bgp.PeerName(r.PeerAddr)
	}
	if r.Since.After(time.Unix(0, 0)) {
		out.Since = timestamppb.New(r.Since)
	}
	return out
}
