package rpc

import (
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/events"
)

// TestEventsFollow gets what is kept, then what comes while it follows, each once.
func TestEventsFollow(t *testing.T) {
	t.Parallel()
	said := events.New(slog.DiscardHandler, slog.LevelInfo)
	log := said.Logger().With(events.PartKey, "bgp")
	for range 3 {
		log.Info("before")
	}
	c := apiv1.NewEventsClient(connect(t, func(s *grpc.Server) { apiv1.RegisterEventsServer(s, NewEventsServer(said)) }))
	stream, err := c.List(t.Context(), &apiv1.EventsRequest{Limit: 2, Follow: true, Parts: []string{"bgp"}, Since: timestamppb.New(time.Now().Add(-time.Hour))})
	if err != nil {
		t.Fatal(err)
	}
	var seqs []uint64
	receive := func() {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.GetEvents() {
			seqs = append(seqs, e.GetSeq())
		}
	}
	receive()
	said.Logger().Info("of no part")
	log.Debug("not shown")
	log.Warn("after")
	for len(seqs) < 3 {
		receive()
	}
	if want := []uint64{2, 3, 5}; len(seqs) != 3 || seqs[0] != want[0] || seqs[1] != want[1] || seqs[2] != want[2] {
		t.Errorf("events %v; want %v", seqs, want)
	}
	for _, bad := range []*apiv1.EventsRequest{{Level: "loud"}, {Parts: []string{"nobody"}}} {
		stream, err := c.List(t.Context(), bad)
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
