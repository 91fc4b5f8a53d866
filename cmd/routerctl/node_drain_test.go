package main

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// lateOperator finds that every call's deadline has passed.
type lateOperator struct{ apiv1.OperatorClient }

func (lateOperator) Node(context.Context, *apiv1.NodeRequest, ...grpc.CallOption) (*apiv1.NodeResponse, error) {
	return nil, status.Error(codes.DeadlineExceeded, "context deadline exceeded")
}

// TestDrainTimesOut: whoever notices first that the time is up, the daemon or
// routerctl, the operator is told what to do next.
func TestDrainTimesOut(t *testing.T) {
	t.Parallel()
	a := nodeCommands{&app{streams: streams{stderr: io.Discard}}}
	err := a.awaitQuiet(t.Context(), lateOperator{}, drainOptions{timeout: 50 * time.Millisecond, quiet: time.Hour})
	if err == nil || !strings.Contains(err.Error(), "workloads of this host still receive packets after 50ms") {
		t.Errorf("awaitQuiet: %v; want what to do about the workloads", err)
	}
}
