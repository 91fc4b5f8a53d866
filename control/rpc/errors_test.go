package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

func TestError(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{store.ErrUnavailable, codes.Unavailable},
		// With the datastore away a deadline passes too; what matters is why.
		{fmt.Errorf("assign: %w: %w", store.ErrUnavailable, context.DeadlineExceeded), codes.Unavailable},
		{attach.ErrNotReady, codes.Unavailable},
		{attach.ErrNoAddress, codes.ResourceExhausted},
		{ipam.ErrNoPool, codes.ResourceExhausted},
		{&ipam.Error{Reason: ipam.ErrExhausted, Message: "no"}, codes.ResourceExhausted},
		{ipam.ErrBlockLimit, codes.ResourceExhausted},
		{fmt.Errorf("%w: %w", ipam.ErrTaken, ipam.ErrCooldown), codes.ResourceExhausted},
		{ipam.ErrStrictAffinity, codes.ResourceExhausted},
		{ipam.ErrNotHolder, codes.ResourceExhausted},
		{ipam.ErrNotReady, codes.Unavailable},
		{ipam.ErrNodeMissing, codes.Unavailable},
		{ipam.ErrStopped, codes.Unavailable},
		{ipam.ErrInvalidRequest, codes.InvalidArgument},
		{ipam.ErrUnknownPool, codes.InvalidArgument},
		{ipam.ErrOutsidePools, codes.InvalidArgument},
		{attach.ErrInvalid, codes.InvalidArgument},
		{attach.ErrUnknown, codes.NotFound},
		{workload.ErrNoNamespace, codes.FailedPrecondition},
		{workload.ErrDiffers, codes.FailedPrecondition},
		{workload.ErrClash, codes.AlreadyExists},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{&store.ConflictError{Reason: store.ErrExists}, codes.AlreadyExists},
		{errors.New("other"), codes.Internal},
		{status.Error(codes.DataLoss, "x"), codes.DataLoss},
	} {
		wrapped := tt.err
		if _, ok := status.FromError(tt.err); !ok {
			wrapped = fmt.Errorf("while testing: %w", tt.err)
		}
		got := status.Convert(Error(wrapped))
		if got.Code() != tt.want {
			t.Errorf("%v: code %s, want %s", tt.err, got.Code(), tt.want)
		}
		if wrapped != nil && tt.want != codes.DataLoss && got.Message() != wrapped.Error() {
			t.Errorf("message %q, want %q", got.Message(), wrapped)
		}
	}
}

func TestServerLogsFailures(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	log := slog.New(slog.NewTextHandler(&b, nil))
	if n := len(ServerOptions(log)); n != 3 {
		t.Fatalf("%d options", n)
	}
	call := func(err error) error {
		_, err = intercept(log)(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/x/Y"},
			func(context.Context, any) (any, error) { return "ok", err })
		return err
	}
	if err := call(nil); err != nil {
		t.Error(err)
	}
	if err := call(attach.ErrInvalid); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
	if b.Len() != 0 {
		t.Errorf("logged: %s", b.String())
	}
	if err := call(store.ErrUnavailable); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	if !strings.Contains(b.String(), "method=/x/Y code=Unavailable") {
		t.Errorf("logged: %s", b.String())
	}
}
