package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// pageHost is a host that serves its page where the file ui.listen says.
type pageHost struct {
	apiv1.UnimplementedUIServer
	dir string
}

func (h pageHost) Open(context.Context, *apiv1.OpenRequest) (*apiv1.OpenResponse, error) {
	b, err := os.ReadFile(filepath.Join(h.dir, "ui.listen"))
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, "ui.listen is empty, so this host serves no page: set it")
	}
	return &apiv1.OpenResponse{Listen: strings.TrimSpace(string(b)), Token: "t0k-en_", Expires: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))}, nil
}
