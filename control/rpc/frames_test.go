package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/cni/frame"
	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/integration/await"
)

// collector is an Attacher of which GC says what it is sent, and STATUS waits for
// the caller to go away.
type collector struct {
	Attacher
	gone chan error
}

func (c *collector) GC(ctx context.Context, _ string, valid []attach.ID) (attach.Collected, error) {
	if _, ok := ctx.Deadline(); !ok {
		return attach.Collected{}, errors.New("the deadline did not arrive")
	}
	return attach.Collected{Removed: valid}, errors.New("one is left")
}

func (c *collector) Status(ctx context.Context) error {
	<-ctx.Done()
	c.gone <- ctx.Err()
	return ctx.Err()
}

func (c *collector) Del(context.Context, attach.DelRequest) error { return nil }

// listenBoth serves both kinds of clients on a socket.
func listenBoth(t *testing.T) (socket string, c *collector, stop func()) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	c = &collector{gone: make(chan error, 1)}
	log := slog.New(slog.DiscardHandler)
	server := NewCNIServer(c)
	s := grpc.NewServer(ServerOptions(log)...)
	apiv1.RegisterCNIServer(s, server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(NewFrames(l, server, log))
	}()
	stop = func() { s.GracefulStop(); <-done }
	t.Cleanup(func() { s.Stop(); <-done })
	return socket, c, stop
}

func dial(t *testing.T, socket string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func callFrame(t *testing.T, socket string, req frame.Request) frame.Response {
	t.Helper()
	conn := dial(t, socket)
	if err := frame.Write(conn, req); err != nil {
		t.Fatal(err)
	}
	var resp frame.Response
	if err := frame.Read(conn, &resp); err != nil {
		t.Fatal(err)
	}
	return resp
}

// gRPC clients, as plugins of earlier versions are, and calls in frames get the
// same answers on one socket, of any size.
func TestOneSocketForBoth(t *testing.T) {
	t.Parallel()
	socket, _, _ := listenBoth(t)
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	for _, n := range []int{0, 1, 400, 20000} {
		req := &apiv1.GCRequest{Network: "net1"}
		for i := range n {
			req.Valid = append(req.Valid, &apiv1.Attachment{Network: "net1", ContainerId: fmt.Sprint("c", i), Ifname: "eth0"})
		}
		_, err := apiv1.NewCNIClient(conn).GC(await.Context(t), req)
		s := status.Convert(err)
		if s.Code() != codes.Internal || s.Message() != "one is left" || len(s.Details()) != 1 {
			t.Fatalf("gRPC: %v with %d details", err, len(s.Details()))
		}
		if got := len(s.Details()[0].(*apiv1.GCResponse).GetRemoved()); got != n {
			t.Errorf("gRPC: %d of %d came back", got, n)
		}
		message, err := json.Marshal(map[string]any{"network": "net1", "valid": req.GetValid(), "later": 1})
		if err != nil {
			t.Fatal(err)
		}
		message = []byte(strings.ReplaceAll(string(message), "container_id", "containerId"))
		resp := callFrame(t, socket, frame.Request{Method: "GC", Timeout: 60000, Message: message})
		var got struct {
			Removed []struct{ ContainerID string }
		}
		if err := json.Unmarshal(resp.Message, &got); err != nil {
			t.Fatalf("%+v: %v", resp, err)
		}
		if resp.Code != uint32(codes.Internal) || resp.Error != "one is left" || len(got.Removed) != n || n > 0 && got.Removed[n-1].ContainerID != fmt.Sprint("c", n-1) {
			t.Errorf("in a frame: status %d, %q, %d of %d came back", resp.Code, resp.Error, len(got.Removed), n)
		}
	}
}

func TestFrameStatus(t *testing.T) {
	t.Parallel()
	socket, _, _ := listenBoth(t)
	for _, tt := range []struct {
		req  frame.Request
		code codes.Code
		says string
	}{
		{frame.Request{Method: "Del", Timeout: 1000, Message: []byte(`{"attachment":{"network":"n","containerId":"c","ifname":"eth0"}}`)}, codes.OK, ""},
		{frame.Request{Method: "Del", Timeout: 1000, Message: []byte(`{}`)}, codes.InvalidArgument, "attachment.network"},
		{frame.Request{Method: "Del", Timeout: 1000, Message: []byte(`{"attachment":7}`)}, codes.InvalidArgument, "unexpected token 7"},
		{frame.Request{Method: "Del", Timeout: 1000}, codes.InvalidArgument, "attachment.network"},
		{frame.Request{Method: "Nothing", Timeout: 1000}, codes.Unimplemented, "Nothing"},
		{frame.Request{Method: "Status", Timeout: 10}, codes.DeadlineExceeded, ""},
	} {
		if got := callFrame(t, socket, tt.req); got.Code != uint32(tt.code) || !strings.Contains(got.Error, tt.says) {
			t.Errorf("%s %s: %+v, want status %s that says %q", tt.req.Method, tt.req.Message, got, tt.code, tt.says)
		}
	}
}

// A caller that goes away ends its call.
func TestFrameCallerGone(t *testing.T) {
	t.Parallel()
	socket, c, _ := listenBoth(t)
	conn := dial(t, socket)
	if err := frame.Write(conn, frame.Request{Method: "Status", Timeout: 3600000}); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	select {
	case err := <-c.gone:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	case <-await.Context(t).Done():
		t.Error("the call goes on")
	}
}

// Connections that say nothing, or nonsense, neither hold up others nor the end.
func TestFrameNonsense(t *testing.T) {
	t.Parallel()
	socket, _, stop := listenBoth(t)
	silent := dial(t, socket)
	for _, b := range [][]byte{{0, 0}, {0, 0, 0, 3, 'x', 'y', 'z'}, {0, 0xff, 0xff, 0xff}, []byte("GET / HTTP/1.1\r\n\r\n")} {
		conn := dial(t, socket)
		if _, err := conn.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
	if got := callFrame(t, socket, frame.Request{Method: "Nothing", Timeout: 1000}); got.Code != uint32(codes.Unimplemented) {
		t.Errorf("got %+v", got)
	}
	stop()
	if _, err := silent.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives the server")
	}
}
