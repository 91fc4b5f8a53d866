package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/routerd/routerd/cni/frame"
)

// The status codes of gRPC that the plugin tells apart.
const (
	codeCanceled           = 1
	codeUnknown            = 2
	codeInvalidArgument    = 3
	codeDeadlineExceeded   = 4
	codeNotFound           = 5
	codeResourceExhausted  = 8
	codeFailedPrecondition = 9
	codeUnimplemented      = 12
	codeUnavailable        = 14
)

// callError is the status of a call that failed.
type callError struct {
	code    uint32
	message string
}

func (e *callError) Error() string { return fmt.Sprintf("status %d: %s", e.code, e.message) }

// client is a connection to the daemon, for one call.
type client struct {
	conn     net.Conn
	socket   string
	deadline time.Time
	limit    time.Duration // of the verb, which errors name
}

// dial connects to the daemon's socket. All that follows must be over at a time, which
// is limit after the verb began.
func dial(socket string, deadline time.Time, limit time.Duration) (*client, error) {
	c := &client{socket: socket, limit: limit, deadline: deadline}
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

// call calls a method of the daemon's service CNI. Into resp goes the answer, and
// also, of a call that failed, what was done all the same: answered reports
// whether there is one.
func (c *client) call(method string, req, resp any) (answered bool, err error) {
	message, err := json.Marshal(req)
	if err != nil {
		return false, err
	}
	if err := c.conn.SetDeadline(c.deadline); err != nil {
		return false, err
	}
	timeout := max(time.Until(c.deadline).Milliseconds(), 1)
	// A peer that has closed its end may have answered before: reading reports the
	// loss if not.
	_ = frame.Write(c.conn, frame.Request{Method: method, Timeout: timeout, Message: message})
	var got frame.Response
	err = frame.Read(c.conn, &got)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return false, &callError{codeDeadlineExceeded, "no answer in time"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return false, &callError{codeUnavailable, "the connection was closed before the answer came"}
	case err != nil:
		return false, &callError{codeUnavailable, err.Error()}
	}
	if got.Message != nil {
		if err := json.Unmarshal(got.Message, resp); err != nil {
			return false, &callError{codeUnavailable, fmt.Sprintf("%v: %v", frame.ErrProtocol, err)}
		}
	}
	if got.Code != 0 {
		return got.Message != nil, &callError{got.Code, got.Error}
	}
	return true, nil
}

// explain turns the status of a call into a CNI error. Other errors stay as
// they are.
func (c *client) explain(err error) error {
	var s *callError
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
