package main

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// clusterHost is a host that keeps the datastore.
type clusterHost struct {
	apiv1.UnimplementedClusterServer
}

func (clusterHost) JoinToken(_ context.Context, r *apiv1.JoinTokenRequest) (*apiv1.JoinTokenResponse, error) {
	if r.GetTtl().AsDuration() > 24*time.Hour {
		return nil, status.Error(codes.FailedPrecondition, "a token's life of 48h0m0s: want 1m0s to 24h0m0s")
	}
	host := r.GetAddress()
	if host == "" {
		host = "10.1.0.11"
	}
	return &apiv1.JoinTokenResponse{Token: "rjt1.abc", Host: host, Expires: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Add(r.GetTtl().AsDuration()))}, nil
}
