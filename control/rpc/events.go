package rpc

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/events"
)

// NewEventsServer returns the service over the daemon's log.
func NewEventsServer(l *events.Log) apiv1.EventsServer { return &eventsServer{l: l} }

type eventsServer struct {
	apiv1.UnimplementedEventsServer
	l *events.Log
}

func (s *eventsServer) List(req *apiv1.EventsRequest, stream grpc.ServerStreamingServer[apiv1.EventsResponse]) error {
	level := slog.LevelInfo
	if req.GetLevel() != "" {
		var err error
		if level, err = parseLevel(req.GetLevel()); err != nil {
			return err
		}
	}
	for _, p := range req.GetParts() {
		if err := s.checkPart(p); err != nil {
			return err
		}
	}
	wanted := func(e events.Event) bool {
		return e.Level >= level && (len(req.GetParts()) == 0 || slices.Contains(req.GetParts(), e.Part)) &&
			(req.GetSince() == nil || !e.Time.Before(req.GetSince().AsTime()))
	}
	var last uint64
	limit := int(req.GetLimit())
	for {
		list, more := s.l.Since(last)
		if len(list) > 0 {
			last = list[len(list)-1].Seq
		}
		list = slices.DeleteFunc(list, func(e events.Event) bool { return !wanted(e) })
		if limit > 0 && len(list) > limit {
			list = list[len(list)-limit:]
		}
		limit = 0 // what comes from now on is all shown
		for batch := range slices.Chunk(list, maxBatch) {
			if err := stream.Send(&apiv1.EventsResponse{Events: eventProtos(batch)}); err != nil {
				return err
			}
		}
		if !req.GetFollow() {
			return nil
		}
		select {
		case <-more:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (s *eventsServer) Levels(_ context.Context, req *apiv1.LevelsRequest) (*apiv1.LevelsResponse, error) {
	levels := make([]slog.Level, len(req.GetSet()))
	for i, p := range req.GetSet() {
		var err error
		if levels[i], err = parseLevel(p.GetLevel()); err != nil {
			return nil, err
		}
		if p.GetPart() == "" {
			continue
		}
		if err := s.checkPart(p.GetPart()); err != nil {
			return nil, err
		}
	}
	for i, p := range req.GetSet() {
		s.l.SetLevel(p.GetPart(), levels[i])
	}
	all, parts := s.l.Levels()
	out := &apiv1.LevelsResponse{Level: levelName(all)}
	for _, p := range s.l.Parts() {
		out.Parts = append(out.Parts, &apiv1.PartLevel{Part: p, Level: levelName(parts[p])})
	}
	return out, nil
}

func (s *eventsServer) checkPart(name string) error {
	if known := s.l.Parts(); !slices.Contains(known, name) {
		return status.Errorf(codes.InvalidArgument, "this daemon has no part %q; its parts are %s", name, strings.Join(known, ", "))
	}
	return nil
}

func parseLevel(s string) (slog.Level, error) {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if s == levelName(l) {
			return l, nil
		}
	}
	return 0, status.Errorf(codes.InvalidArgument, "level %q: must be one of debug, info, warn, error", s)
}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

func eventProtos(list []events.Event) []*apiv1.LogEvent {
	out := make([]*apiv1.LogEvent, len(list))
	for i, e := range list {
		out[i] = &apiv1.LogEvent{Seq: e.Seq, Time: timestamppb.New(e.Time), Level: levelName(e.Level), Part: e.Part, Message: e.Message}
		for _, a := range e.Attrs {
			out[i].Attrs = append(out[i].Attrs, &apiv1.LogAttr{Key: a.Key, Value: a.Value})
		}
	}
	return out
}
