package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/store"
)

// table is a BGP of so many routes.
type table struct {
	Injector
	n    int
	last bgp.Query
}

func (s *table) Status(context.Context) bgp.Status {
	a, b := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")
	return bgp.Status{Peers: []bgp.PeerStatus{{Name: "tor", Addr: a, ID: a}, {Name: "both", Addr: a, ID: a}, {Name: "both", Addr: b, ID: b}}}
}

func (s *table) Query(_ context.Context, q bgp.Query, yield func(bgp.Route) bool) error {
	s.last = q
	if q.Peer == netip.MustParseAddr("10.9.9.9") {
		return fmt.Errorf("10.9.9.9: %w", bgp.ErrNoPeer)
	}
	for i := range s.n {
		r := bgp.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32), State: bgp.RouteBest, Since: time.Unix(1, 0)}
		if !yield(r) {
			return nil
		}
	}
	return nil
}

func (s *table) Explain(_ context.Context, p netip.Prefix) ([]bgp.Route, error) {
	return []bgp.Route{{Prefix: p, State: bgp.RouteLost, Reason: "why"}}, nil
}

func (s *table) Watch(_ context.Context, yield func(bgp.Event) error) error {
	return yield(bgp.Event{What: "route", Subject: "10.0.0.0/8"})
}

func (s *table) Dump(_ context.Context, received bool, write func([]byte) error) error {
	return errors.Join(write([]byte("received: ")), write(fmt.Append(nil, received)))
}

func (s *table) Isolated(_ context.Context, changes []store.Event) ([]string, error) {
	var out []string
	for _, c := range changes {
		out = append(out, fmt.Sprintf("%s deleted=%t", c.Key, c.Deleted()))
	}
	return out, nil
}

func (s *table) Plan(_ context.Context, changes []store.Event, yield func(bgp.Plan) error) error {
	for _, c := range changes {
		p := bgp.Plan{Node: c.Key.String(), Settings: []string{fmt.Sprint(c.Deleted())}, Announce: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/26")}}
		for i, addr := range []string{"10.0.0.1", "fe80::1", ""} {
			a, _ := netip.ParseAddr(addr) // the last has none
			port := uint16(179)
			if i == 1 {
				port = 1790
			}
			p.Sessions = append(p.Sessions, bgp.PlannedSession{Peer: bgp.Peer{Name: "tor", Type: bgp.PeerGlobal, Addr: a, Port: port, ASN: 64999}, Fate: bgp.SessionAnew, Why: []string{"x"}})
		}
		if err := yield(p); err != nil {
			return err
		}
	}
	return nil
}

func (s *table) Reflectors() (bgp.ReflectorStatus, error) {
	return bgp.ReflectorStatus{Setting: "2 per rack", Nodes: 3, Mesh: 1, Waiting: []string{"n3"}, Groups: []bgp.ReflectorGroup{{Name: "r1", Nodes: 3, Reflectors: []string{"n1", "n2"}, Leaving: []string{"n2"}}}}, nil
}

// TestBGPReflectors hands on what is known of reflectors.
func TestBGPReflectors(t *testing.T) {
	t.Parallel()
	r, err := bgpClient(t, &table{}).Reflectors(t.Context(), &apiv1.BGPReflectorsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &apiv1.BGPReflectorsResponse{Setting: "2 per rack", Nodes: 3, Mesh: 1, Waiting: []string{"n3"}, Groups: []*apiv1.BGPReflectorGroup{
		{Name: "r1", Nodes: 3, Reflectors: []string{"n1", "n2"}, Leaving: []string{"n2"}},
	}}
	if !proto.Equal(r, want) {
		t.Errorf("got %v, want %v", r, want)
	}
}

// isolated asks in parts.
func isolated(t *testing.T, c apiv1.BGPClient, parts ...[]*apiv1.BGPChange) (*apiv1.BGPIsolatedResponse, error) {
	t.Helper()
	stream, err := c.Isolated(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range parts {
		if err := stream.Send(&apiv1.BGPIsolatedRequest{Changes: p}); err != nil {
			break // the answer says why
		}
	}
	return stream.CloseAndRecv()
}

// TestBGPIsolated takes what sessions depend on, and leaves the rest out.
func TestBGPIsolated(t *testing.T) {
	t.Parallel()
	c := bgpClient(t, &table{})
	conf := store.ResourceKey(store.KindBGPConfiguration, "default").Path()
	r, err := isolated(t, c, []*apiv1.BGPChange{
		{Key: conf, Value: []byte(`{"kind":"BGPConfiguration","apiVersion":"projectcalico.org/v3","metadata":{"name":"default"},"spec":{"nodeToNodeMeshEnabled":false}}`)},
		{Key: store.ResourceKey(store.KindBGPPeer, "tor").Path()},
	}, nil, []*apiv1.BGPChange{
		{Key: store.ResourceKey(store.KindBGPFilter, "f").Path()},
		{Key: store.ResourceKey(store.KindIPPool, "pool").Path(), Value: []byte("not looked at")},
	})
	if got := strings.Join(r.GetNodes(), "; "); err != nil || got != "BGPConfiguration(default) deleted=false; BGPPeer(tor) deleted=true; BGPFilter(f) deleted=true" {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []*apiv1.BGPChange{{Key: "nonsense"}, {Key: conf, Value: []byte("{")}} {
		if _, err := isolated(t, c, []*apiv1.BGPChange{bad}, nil, nil); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if r, err := isolated(t, bgpClient(t, nil)); err != nil || len(r.GetNodes()) != 0 {
		t.Errorf("without BGP: %v, %v", r, err)
	}
}

// TestBGPPlan takes what a node's part in BGP depends on, and hands on what becomes of it, node by node.
func TestBGPPlan(t *testing.T) {
	t.Parallel()
	ask := func(b BGP, parts ...[]*apiv1.BGPChange) (out []*apiv1.BGPPlanResponse, err error) {
		stream, err := bgpClient(t, b).Plan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range parts {
			if err := stream.Send(&apiv1.BGPPlanRequest{Changes: p}); err != nil {
				break // the answer says why
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		for {
			r, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return out, nil
			}
			if err != nil {
				return out, err
			}
			out = append(out, r)
		}
	}
	pool := &apiv1.BGPChange{Key: store.ResourceKey(store.KindIPPool, "pool").Path()}
	got, err := ask(&table{}, []*apiv1.BGPChange{pool}, []*apiv1.BGPChange{{Key: store.ResourceKey(store.KindTier, "t").Path(), Value: []byte("not looked at")}})
	session := func(addr string) *apiv1.BGPPlannedSession {
		return &apiv1.BGPPlannedSession{Name: "tor", Type: "global", Address: addr, Asn: 64999, Fate: "starts anew", Why: []string{"x"}}
	}
	want := &apiv1.BGPPlanResponse{
		Node: "IPPool(pool)", Settings: []string{"true"}, Announce: []string{"10.0.0.0/26"},
		Sessions: []*apiv1.BGPPlannedSession{session("10.0.0.1"), session("[fe80::1]:1790"), session("")},
	}
	if err != nil || len(got) != 1 || !proto.Equal(got[0], want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := ask(&table{}, []*apiv1.BGPChange{{Key: "nonsense"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("nonsense: %v", err)
	}
	if _, err := ask(nil, []*apiv1.BGPChange{pool}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without BGP: %v", err)
	}
}

func bgpClient(t *testing.T, b BGP) apiv1.BGPClient {
	t.Helper()
	return apiv1.NewBGPClient(connect(t, func(s *grpc.Server) { apiv1.RegisterBGPServer(s, NewBGPServer(b)) }))
}

// connect returns a connection to a server with services, which lasts as long as the test.
func connect(t *testing.T, register func(*grpc.Server)) *grpc.ClientConn {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	register(s)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		s.Stop()
		<-done
	})
	return conn
}

// TestBGPRoutes sends a long table in parts.
func TestBGPRoutes(t *testing.T) {
	t.Parallel()
	b := &table{n: 2*maxBatch + 1}
	c := bgpClient(t, b)
	for _, q := range []struct {
		req  *apiv1.BGPRoutesRequest
		want bgp.Query
		code codes.Code
		says string
	}{
		{&apiv1.BGPRoutesRequest{Prefix: "10.0.0.0/8"}, bgp.Query{Prefix: netip.MustParsePrefix("10.0.0.0/8")}, codes.OK, ""},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_RECEIVED, Peer: "tor"}, bgp.Query{Table: bgp.TableReceived, Peer: netip.MustParseAddr("10.1.0.1")}, codes.OK, ""},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_ADVERTISED, Peer: "10.1.0.7"}, bgp.Query{Table: bgp.TableAdvertised, Peer: netip.MustParseAddr("10.1.0.7")}, codes.OK, ""},
		{&apiv1.BGPRoutesRequest{Prefix: "10"}, bgp.Query{}, codes.InvalidArgument, "prefix"},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_RECEIVED}, bgp.Query{}, codes.InvalidArgument, "peer"},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_RECEIVED, Peer: "nobody"}, bgp.Query{}, codes.NotFound, "no session of this name"},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_RECEIVED, Peer: "both"}, bgp.Query{}, codes.InvalidArgument, "name one by its address"},
		{&apiv1.BGPRoutesRequest{Table: apiv1.BGPTable_BGP_TABLE_RECEIVED, Peer: "10.9.9.9"}, bgp.Query{}, codes.NotFound, "no session with this peer"},
	} {
		stream, err := c.Routes(t.Context(), q.req)
		n := 0
		for err == nil {
			var part *apiv1.BGPRoutesResponse
			if part, err = stream.Recv(); err == nil {
				n += len(part.GetRoutes())
			}
		}
		if q.code != codes.OK {
			if status.Code(err) != q.code || !strings.Contains(err.Error(), q.says) {
				t.Errorf("%v: %v, want code %s and %q", q.req, err, q.code, q.says)
			}
			continue
		}
		if n != b.n || b.last != q.want {
			t.Errorf("%v: %d routes for %+v, want %d for %+v", q.req, n, b.last, b.n, q.want)
		}
	}
}

func TestBGPExplainAndWatch(t *testing.T) {
	t.Parallel()
	c := bgpClient(t, &table{})
	r, err := c.Explain(t.Context(), &apiv1.BGPExplainRequest{Prefix: "10.0.0.0/8"})
	if err != nil || len(r.GetRoutes()) != 1 || r.GetRoutes()[0].GetReason() != "why" {
		t.Errorf("explain: %v, %v", r, err)
	}
	if _, err := c.Explain(t.Context(), &apiv1.BGPExplainRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("explain nothing: %v", err)
	}
	w, err := c.Watch(t.Context(), &apiv1.BGPWatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := w.Recv(); err != nil || e.GetSubject() != "10.0.0.0/8" {
		t.Errorf("watch: %v, %v", e, err)
	}
	for _, received := range []bool{false, true} {
		d, err := c.Dump(t.Context(), &apiv1.BGPDumpRequest{Table: map[bool]apiv1.BGPTable{true: apiv1.BGPTable_BGP_TABLE_RECEIVED}[received]})
		all := ""
		for err == nil {
			var part *apiv1.BGPDumpResponse
			if part, err = d.Recv(); err == nil {
				all += string(part.GetData())
			}
		}
		if want := fmt.Sprintf("received: %t", received); !errors.Is(err, io.EOF) || all != want {
			t.Errorf("dump: %q, %v; want %q", all, err, want)
		}
	}
	d, err := c.Dump(t.Context(), &apiv1.BGPDumpRequest{Table: apiv1.BGPTable_BGP_TABLE_ADVERTISED})
	if err == nil {
		_, err = d.Recv()
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("dump of what is advertised: %v", err)
	}
	off := bgpClient(t, nil)
	if _, err := off.Explain(t.Context(), &apiv1.BGPExplainRequest{Prefix: "10.0.0.0/8"}); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "bgp.enabled") {
		t.Errorf("without BGP: %v", err)
	}
}
