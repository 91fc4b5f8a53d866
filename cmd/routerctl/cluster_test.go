package main

import (
	"context"
	"time"

	"google.golang.org/grpc"
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

const evenWarning = "2 members with a vote stand the loss of no more than 1 do: promote one more, or demote one"

func (clusterHost) Members(context.Context, *apiv1.MembersRequest) (*apiv1.MembersResponse, error) {
	return &apiv1.MembersResponse{Voters: 2, Quorum: 2, Warning: evenWarning, Members: []*apiv1.ClusterMember{
		{Host: "host11", Id: "a1", Role: "voter", State: "leader", Endpoint: "https://10.1.0.11:2379", Version: "3.7.3", Size: 4 << 20},
		{Host: "host12", Id: "b2", Role: "voter", State: "follower", Endpoint: "https://10.1.0.12:2379", Version: "3.7.3", Size: 3999 << 10, Behind: 20000},
		{Host: "host13", Id: "c3", Role: "learner", State: "not started", Problem: "start routerd on host13, and it goes on; or routerctl cluster remove host13"},
	}}, nil
}

func (clusterHost) ChangeMember(r *apiv1.ChangeMemberRequest, stream grpc.ServerStreamingServer[apiv1.ChangeMemberProgress]) error {
	host := r.GetHost()
	switch host {
	case "":
		host = "this host"
	case "host99":
		return status.Error(codes.FailedPrecondition, "no routerd runs on a host host99")
	}
	told := []*apiv1.ChangeMemberProgress{
		{Message: host + " has its order."},
		{Message: host + " is to start the server."},
		{Message: host + " is a member with a vote.", Done: true, Warning: evenWarning},
	}
	if !r.GetMember() {
		told = []*apiv1.ChangeMemberProgress{{Message: host + " is a client of the datastore.", Done: true}}
	}
	for i, p := range told {
		if host == "slow" && i > 0 {
			<-stream.Context().Done()
			return stream.Context().Err()
		}
		if err := stream.Send(p); err != nil {
			return err
		}
	}
	return nil
}

func (clusterHost) RemoveMember(_ context.Context, r *apiv1.RemoveMemberRequest) (*apiv1.RemoveMemberResponse, error) {
	if r.GetHost() == "host11" && !r.GetForce() {
		return nil, status.Error(codes.FailedPrecondition, "host11 is up: routerctl cluster demote host11")
	}
	return &apiv1.RemoveMemberResponse{Message: r.GetHost() + " is no member any more."}, nil
}
