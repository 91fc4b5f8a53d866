package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/bgp/inject"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// Error returns err as a gRPC status. It is the one place where errors get
// codes. An error that is a status already stays as it is.
func Error(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codeOf(err), err.Error())
}

// errorWith is [Error] with a message among the details: what was done although
// the call failed.
func errorWith(err error, done protoadapt.MessageV1) error {
	err = Error(err)
	if s, detailErr := status.Convert(err).WithDetails(done); detailErr == nil {
		return s.Err()
	}
	return err
}

// codeOf goes by what matters most to the caller: whether trying again helps
// comes first.
func codeOf(err error) codes.Code {
	for _, c := range []struct {
		target error
		code   codes.Code
	}{
		{store.ErrUnavailable, codes.Unavailable},
		{attach.ErrNotReady, codes.Unavailable},
		{ipam.ErrNotReady, codes.Unavailable},
		{ipam.ErrNodeMissing, codes.Unavailable},
		{ipam.ErrStopped, codes.Unavailable},
		{attach.ErrNoAddress, codes.ResourceExhausted},
		{ipam.ErrNoPool, codes.ResourceExhausted},
		{ipam.ErrExhausted, codes.ResourceExhausted},
		{ipam.ErrBlockLimit, codes.ResourceExhausted},
		{ipam.ErrTaken, codes.ResourceExhausted},
		{ipam.ErrStrictAffinity, codes.ResourceExhausted},
		{ipam.ErrNotHolder, codes.ResourceExhausted},
		{attach.ErrInvalid, codes.InvalidArgument},
		{ipam.ErrInvalidRequest, codes.InvalidArgument},
		{ipam.ErrUnknownPool, codes.InvalidArgument},
		{ipam.ErrOutsidePools, codes.InvalidArgument},
		{store.ErrInvalid, codes.InvalidArgument},
		{inject.ErrInvalid, codes.InvalidArgument},
		{inject.ErrLimit, codes.ResourceExhausted},
		{inject.ErrTaken, codes.AlreadyExists},
		{bgp.ErrRefused, codes.FailedPrecondition},
		{attach.ErrUnknown, codes.NotFound},
		{workload.ErrNoNamespace, codes.FailedPrecondition},
		{workload.ErrDiffers, codes.FailedPrecondition},
		{workload.ErrClash, codes.AlreadyExists},
		{store.ErrNotFound, codes.NotFound},
		{store.ErrExists, codes.AlreadyExists},
		{store.ErrConflict, codes.Aborted},
		{context.DeadlineExceeded, codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
	} {
		if errors.Is(err, c.target) {
			return c.code
		}
	}
	return codes.Internal
}

// ServerOptions makes a server's calls return [Error]s, and logs those that
// fail: at level Warn, and at Debug what only the caller can mend.
func ServerOptions(log *slog.Logger) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(intercept(log)),
		// Windows that are given are not measured: a call of the CNI plugin, the only
		// one on its connection, is not asked for its round trip time in between.
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window),
	}
}

// window is how many bytes of a request may be under way, in bytes.
const window = 1 << 20

func intercept(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		resp, err := next(ctx, req)
		if err == nil {
			return resp, nil
		}
		err = Error(err)
		code := status.Code(err)
		level := slog.LevelWarn
		switch code {
		case codes.InvalidArgument, codes.NotFound, codes.Canceled:
			level = slog.LevelDebug
		}
		log.Log(ctx, level, "call failed", "method", info.FullMethod, "code", code.String(), "error", status.Convert(err).Message())
		return nil, err
	}
}

// invalid returns an error about a field of a request.
func invalid(field string, err error) error {
	return status.Error(codes.InvalidArgument, fmt.Sprintf("%s: %v", field, err))
}
