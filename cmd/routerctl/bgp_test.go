package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
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

// Bereft answers with the lines of the script's file bereft.txt.
func (s *bgpSpeaker) Bereft(context.Context, *apiv1.BGPBereftRequest) (*apiv1.BGPBereftResponse, error) {
	b, err := os.ReadFile(filepath.Join(s.dir, "bereft.txt"))
	if err != nil {
		return &apiv1.BGPBereftResponse{}, nil //nolint:nilerr // most scripts have none
	}
	return &apiv1.BGPBereftResponse{Nodes: strings.Fields(string(b))}, nil
}
