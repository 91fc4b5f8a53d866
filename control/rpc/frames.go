package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/routerd/routerd/cni/frame"
	apiv1 "github.com/routerd/routerd/control/api/v1"
)

const (
	// helloTimeout is how long a client may take to say what it speaks, and to send
	// its request.
	helloTimeout = 20 * time.Second
	// framesGrace is how long calls in progress may take after the listener was
	// closed.
	framesGrace = 2 * time.Second
)

// Frames listens for two kinds of clients on one socket: it serves the calls of
// service CNI that come in frames (see package frame), as the plugin of this
// version makes them, and accepts the other connections, for a gRPC server.
type Frames struct {
	net.Listener
	server apiv1.CNIServer
	log    *slog.Logger
	others chan net.Conn

	ctx    context.Context // of the calls: it ends with the listener
	cancel context.CancelFunc
	calls  sync.WaitGroup
	once   sync.Once
	closed chan struct{}
	err    error // why no connection comes any more
}

// NewFrames serves calls in frames on a listener until it is closed.
func NewFrames(l net.Listener, server apiv1.CNIServer, log *slog.Logger) *Frames {
	f := &Frames{Listener: l, server: server, log: log, others: make(chan net.Conn), closed: make(chan struct{})}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	go f.accept()
	return f
}

// accept accepts connections until the listener is closed.
func (f *Frames) accept() {
	defer close(f.closed)
	for {
		conn, err := f.Listener.Accept()
		if err != nil {
			f.err = err
			return
		}
		f.calls.Go(func() { f.greet(conn) })
	}
}

// Accept returns a connection that does not speak in frames.
func (f *Frames) Accept() (net.Conn, error) {
	select {
	case conn := <-f.others:
		return conn, nil
	case <-f.closed:
		return nil, f.err
	}
}

// Close ends the listener. It waits a moment for calls in progress.
func (f *Frames) Close() error {
	err := f.Listener.Close()
	f.once.Do(func() {
		force := time.AfterFunc(framesGrace, f.cancel)
		defer force.Stop()
		<-f.closed
		f.calls.Wait()
		f.cancel()
	})
	return err
}

// greet finds out what a client speaks.
func (f *Frames) greet(conn net.Conn) {
	stop := context.AfterFunc(f.ctx, func() { _ = conn.Close() })
	defer stop()
	var h frame.Header
	if err := conn.SetDeadline(time.Now().Add(helloTimeout)); err != nil {
		_ = conn.Close()
		return
	}
	if _, err := io.ReadFull(conn, h[:]); err != nil {
		_ = conn.Close()
		return
	}
	if !h.Foreign() {
		defer func() { _ = conn.Close() }()
		f.serve(conn, h)
		return
	}
	_ = conn.SetDeadline(time.Time{})
	stop()
	select {
	case f.others <- &begun{conn, h[:]}:
	case <-f.closed:
		_ = conn.Close()
	}
}

// begun is a connection of which the first bytes were read.
type begun struct {
	net.Conn
	first []byte
}

func (c *begun) Read(b []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Read(b)
	}
	n := copy(b, c.first)
	c.first = c.first[n:]
	return n, nil
}

// serve serves the one call of a connection.
func (f *Frames) serve(conn net.Conn, h frame.Header) {
	var req frame.Request
	if err := frame.ReadRest(conn, h, &req); err != nil {
		f.log.Debug("call not read", "error", err)
		return
	}
	ctx, cancel := context.WithTimeout(f.ctx, time.Duration(req.Timeout)*time.Millisecond)
	defer cancel()
	_ = conn.SetDeadline(time.Time{})
	go func() { // a caller that goes away ends its call
		_, _ = conn.Read(make([]byte, 1))
		cancel()
	}()
	resp, err := f.call(ctx, req)
	if err := frame.Write(conn, answer(resp, err)); err != nil {
		f.log.Debug("call not answered", "method", req.Method, "error", err)
	}
}

// call carries out a call as the gRPC server does.
func (f *Frames) call(ctx context.Context, req frame.Request) (any, error) {
	for _, m := range apiv1.CNI_ServiceDesc.Methods {
		if m.MethodName != req.Method {
			continue
		}
		decode := func(v any) error {
			m, ok := v.(proto.Message)
			if !ok {
				return status.Errorf(codes.Internal, "a %T is no message", v)
			}
			if len(req.Message) == 0 {
				return nil
			}
			if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(req.Message, m); err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
			return nil
		}
		return m.Handler(f.server, ctx, decode, intercept(f.log))
	}
	return nil, status.Error(codes.Unimplemented, fmt.Sprintf("unknown method %q", req.Method))
}

// answer puts the end of a call into a frame's form. Of a call that failed the
// first detail says what was done all the same.
func answer(resp any, err error) frame.Response {
	s := status.Convert(err)
	out := frame.Response{Code: uint32(s.Code()), Error: s.Message()}
	if err != nil && len(s.Details()) > 0 {
		resp = s.Details()[0]
	}
	if m, ok := resp.(proto.Message); ok && resp != nil {
		b, encodeErr := protojson.Marshal(m)
		if encodeErr != nil {
			return frame.Response{Code: uint32(codes.Internal), Error: errors.Join(err, encodeErr).Error()}
		}
		out.Message = b
	}
	return out
}
