package cni

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// service is the path of the daemon's CNI service (control/api/v1/cni.proto).
const service = "/routerd.v1.CNI/"

// client is a connection to the daemon, for one call.
type client struct {
	conn     net.Conn
	socket   string
	deadline time.Time
	limit    time.Duration
}

// dial connects to the daemon's socket. All that follows must be over within
// limit.
func dial(socket string, limit time.Duration) (*client, error) {
	c := &client{socket: socket, limit: limit, deadline: time.Now().Add(limit)}
	d := net.Dialer{Deadline: c.deadline}
	conn, err := d.Dial("unix", socket)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return nil, types.NewError(types.ErrTryAgainLater,
			fmt.Sprintf("routerd does not answer on %s: %v; is it running? See: systemctl status routerd", socket, err), "")
	}
	c.conn = conn
	return c, nil
}

func (c *client) close() { _ = c.conn.Close() }

// call calls a method of the service: see invoke.
func (c *client) call(method string, req []byte) ([]byte, error) {
	return invoke(c.conn, service+method, req, c.deadline)
}

// explain turns the status of a call into a CNI error. Other errors stay as
// they are.
func (c *client) explain(err error) error {
	var s *rpcError
	if !errors.As(err, &s) {
		return err
	}
	code, message := types.ErrInternal, s.message
	switch s.code {
	case codeUnavailable:
		code, message = types.ErrTryAgainLater, fmt.Sprintf("routerd on %s cannot serve now: %s", c.socket, s.message)
	case codeDeadlineExceeded, codeCanceled:
		code, message = types.ErrTryAgainLater, fmt.Sprintf(
			"routerd on %s did not answer within %s: the datastore may be unavailable; see: routerctl node status, systemctl status routerd", c.socket, c.limit)
	case codeResourceExhausted:
		code = types.ErrTryAgainLater
	case codeInvalidArgument:
		code = types.ErrInvalidNetworkConfig
	case codeNotFound:
		code = types.ErrUnknownContainer
	case codeUnimplemented, codeUnknown:
		message = fmt.Sprintf("what answers on %s is not routerd, or another version of it: %s", c.socket, s.message)
	}
	return types.NewError(code, message, "")
}
