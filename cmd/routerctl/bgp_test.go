package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// bgpSpeaker answers from the files bgp-routes.json and bgp-event.json of the
// script.
type bgpSpeaker struct {
	apiv1.UnimplementedBGPServer
	dir string
}

func (s *bgpSpeaker) answer() (*apiv1.BGPRoutesResponse, error) {
	r := &apiv1.BGPRoutesResponse{}
	b, err := os.ReadFile(filepath.Join(s.dir, "bgp-routes.json"))
	if err == nil {
		err = protojson.Unmarshal(b, r)
	}
	return r, err
}

func (s *bgpSpeaker) Routes(req *apiv1.BGPRoutesRequest, stream grpc.ServerStreamingServer[apiv1.BGPRoutesResponse]) error {
	if req.GetPeer() == "nobody" {
		return status.Error(codes.NotFound, `peer "nobody": no session of this name`)
	}
	r, err := s.answer()
	if err != nil {
		return err
	}
	for _, route := range r.GetRoutes() { // in parts, as a long answer comes
		if err := stream.Send(&apiv1.BGPRoutesResponse{Routes: []*apiv1.BGPRoute{route}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *bgpSpeaker) Explain(context.Context, *apiv1.BGPExplainRequest) (*apiv1.BGPRoutesResponse, error) {
	return s.answer()
}

func (s *bgpSpeaker) Watch(_ *apiv1.BGPWatchRequest, stream grpc.ServerStreamingServer[apiv1.BGPEvent]) error {
	e := &apiv1.BGPEvent{}
	b, err := os.ReadFile(filepath.Join(s.dir, "bgp-event.json"))
	if err == nil {
		err = protojson.Unmarshal(b, e)
	}
	if err != nil {
		return err
	}
	return stream.Send(e)
}

// Dump sends two parts that say which table they are of.
func (s *bgpSpeaker) Dump(req *apiv1.BGPDumpRequest, stream grpc.ServerStreamingServer[apiv1.BGPDumpResponse]) error {
	for _, part := range []string{"dump of ", req.GetTable().String()} {
		if err := stream.Send(&apiv1.BGPDumpResponse{Data: []byte(part)}); err != nil {
			return err
		}
	}
	return nil
}

// Inject refuses an owner named nobody.
func (s *bgpSpeaker) Inject(_ context.Context, req *apiv1.BGPInjectRequest) (*apiv1.BGPInjectResponse, error) {
	if req.GetOwner() == "nobody" {
		return nil, status.Error(codes.FailedPrecondition, "refused: prefix 192.168.7.0/24: inside the pool 192.168.0.0/16")
	}
	return &apiv1.BGPInjectResponse{}, nil
}

// Hold refuses an owner named nobody, and ends the stream of another as a daemon that ends for good.
func (s *bgpSpeaker) Hold(stream grpc.BidiStreamingServer[apiv1.BGPHoldRequest, apiv1.BGPHoldResponse]) error {
	req, err := stream.Recv()
	if err != nil {
		return err
	}
	r := &apiv1.BGPHoldResponse{}
	if req.GetOwner() == "nobody" {
		r.Error = "refused: prefix 192.168.7.0/24: inside the pool 192.168.0.0/16"
	}
	if err := stream.Send(r); err != nil {
		return err
	}
	return status.Error(codes.FailedPrecondition, "BGP is not enabled on this host")
}

func (s *bgpSpeaker) Withdraw(_ context.Context, req *apiv1.BGPWithdrawRequest) (*apiv1.BGPWithdrawResponse, error) {
	return &apiv1.BGPWithdrawResponse{Withdrawn: uint32(max(1, len(req.GetPrefixes())))}, nil
}

// Injected answers with the script's file injected.json.
func (s *bgpSpeaker) Injected(context.Context, *apiv1.BGPInjectedRequest) (*apiv1.BGPInjectedResponse, error) {
	r := &apiv1.BGPInjectedResponse{}
	b, err := os.ReadFile(filepath.Join(s.dir, "injected.json"))
	if err != nil {
		return r, nil //nolint:nilerr // nothing is injected in most scripts
	}
	return r, protojson.Unmarshal(b, r)
}

// Reflectors answers with the script's file reflectors.json.
func (s *bgpSpeaker) Reflectors(context.Context, *apiv1.BGPReflectorsRequest) (*apiv1.BGPReflectorsResponse, error) {
	r := &apiv1.BGPReflectorsResponse{}
	b, err := os.ReadFile(filepath.Join(s.dir, "reflectors.json"))
	if err != nil {
		return r, nil //nolint:nilerr // none are asked for in most scripts
	}
	return r, protojson.Unmarshal(b, r)
}

// Isolated answers with the lines of the script's file isolated.txt.
func (s *bgpSpeaker) Isolated(stream grpc.ClientStreamingServer[apiv1.BGPIsolatedRequest, apiv1.BGPIsolatedResponse]) error {
	for {
		_, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	b, err := os.ReadFile(filepath.Join(s.dir, "isolated.txt"))
	if err != nil {
		return stream.SendAndClose(&apiv1.BGPIsolatedResponse{}) // most scripts have none
	}
	return stream.SendAndClose(&apiv1.BGPIsolatedResponse{Nodes: strings.Fields(string(b))})
}

// Plan answers with the messages of the script's file plan.json, a line each, and writes what it was asked about into
// asked.txt.
func (s *bgpSpeaker) Plan(stream grpc.BidiStreamingServer[apiv1.BGPPlanRequest, apiv1.BGPPlanResponse]) error {
	var asked []string
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		for _, c := range req.GetChanges() {
			asked = append(asked, c.GetKey())
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, "asked.txt"), []byte(strings.Join(asked, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(s.dir, "plan.json"))
	if err != nil {
		return nil //nolint:nilerr // nothing changes
	}
	for line := range strings.Lines(string(b)) {
		r := &apiv1.BGPPlanResponse{}
		if err := protojson.Unmarshal([]byte(line), r); err != nil {
			return err
		}
		if err := stream.Send(r); err != nil {
			return err
		}
	}
	return nil
}

// counter is a BGP service that counts what Isolated is asked.
type counter struct {
	apiv1.UnimplementedBGPServer
	parts, changes int
}

func (c *counter) Isolated(stream grpc.ClientStreamingServer[apiv1.BGPIsolatedRequest, apiv1.BGPIsolatedResponse]) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&apiv1.BGPIsolatedResponse{Nodes: []string{fmt.Sprint(c.changes)}})
		}
		if err != nil {
			return err
		}
		c.parts++
		c.changes += len(req.GetChanges())
	}
}

// TestManyChanges: more resources than a message of gRPC can carry are judged
// together.
func TestManyChanges(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv, c := grpc.NewServer(), &counter{}
	apiv1.RegisterBGPServer(srv, c)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	var changes []*apiv1.BGPChange
	for range 5000 {
		changes = append(changes, &apiv1.BGPChange{Key: "k", Value: make([]byte, 2000)})
	}
	r, err := sendChanges(t.Context(), apiv1.NewBGPClient(conn), changes)
	if err != nil || len(r.GetNodes()) != 1 || r.GetNodes()[0] != "5000" || c.parts < 10 {
		t.Errorf("%v, %v, in %d parts", r, err, c.parts)
	}
}
