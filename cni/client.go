package cni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// client is a connection to the daemon, for one call.
type client struct {
	apiv1.CNIClient
	conn   *grpc.ClientConn
	socket string
}

// dial connects to the daemon's socket. The connection is made here and not by
// gRPC, which would hide why it could not be made and try again for seconds.
func dial(ctx context.Context, socket string) (*client, error) {
	var d net.Dialer
	raw, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return nil, unavailable(socket, err)
	}
	var used atomic.Bool
	conn, err := grpc.NewClient("passthrough:///routerd",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if used.Swap(true) {
				return nil, errors.New("the connection was lost")
			}
			return raw, nil
		}),
		// What a client of one call does not need.
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithNoProxy(),
		grpc.WithWriteBufferSize(4<<10), grpc.WithReadBufferSize(4<<10),
		grpc.WithStaticConnWindowSize(1<<20), grpc.WithStaticStreamWindowSize(1<<20),
	)
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return &client{CNIClient: apiv1.NewCNIClient(conn), conn: conn, socket: socket}, nil
}

func (c *client) close() { _ = c.conn.Close() }

// rpcFailure is what a call's status says.
type rpcFailure struct {
	message      string
	precondition bool
}

// failure returns what the status of err says; nil when err is not one.
func failure(err error) *rpcFailure {
	s, ok := status.FromError(err)
	if err == nil || !ok {
		return nil
	}
	return &rpcFailure{message: s.Message(), precondition: s.Code() == codes.FailedPrecondition}
}

// explain turns the status of a call into a CNI error. Other errors stay as
// they are.
func (c *client) explain(err error, limit time.Duration) error {
	var done *types.Error
	if err == nil || errors.As(err, &done) {
		return err
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	switch s.Code() {
	case codes.Unavailable:
		return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("routerd on %s cannot serve now: %s", c.socket, s.Message()), "")
	case codes.DeadlineExceeded, codes.Canceled:
		return types.NewError(types.ErrTryAgainLater,
			fmt.Sprintf("routerd on %s did not answer within %s: the datastore may be unavailable; see: routerctl node status, systemctl status routerd", c.socket, limit), s.Message())
	case codes.ResourceExhausted:
		return types.NewError(types.ErrTryAgainLater, s.Message(), "")
	case codes.InvalidArgument:
		return types.NewError(types.ErrInvalidNetworkConfig, s.Message(), "")
	case codes.NotFound:
		return types.NewError(types.ErrUnknownContainer, s.Message(), "")
	case codes.Unimplemented:
		return types.NewError(types.ErrInternal, fmt.Sprintf("what answers on %s is not routerd, or another version of it: %s", c.socket, s.Message()), "")
	}
	return types.NewError(types.ErrInternal, s.Message(), "")
}
