package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
)

// echo is a real gRPC server; GC returns what it is sent.
type echo struct {
	apiv1.UnimplementedCNIServer
}

func (echo) GC(ctx context.Context, req *apiv1.GCRequest) (*apiv1.GCResponse, error) {
	if _, ok := ctx.Deadline(); !ok {
		return nil, status.Error(codes.Internal, "the deadline did not arrive")
	}
	// Headers larger than a frame come in several.
	if err := grpc.SetHeader(ctx, metadata.Pairs("x-long", strings.Repeat("x", 40000))); err != nil {
		return nil, err
	}
	return &apiv1.GCResponse{Removed: req.GetValid()}, nil
}

// Check fails, with all that it is sent among the details.
func (echo) Check(_ context.Context, req *apiv1.CheckRequest) (*apiv1.CheckResponse, error) {
	s, err := status.New(codes.NotFound, "unknown").WithDetails(req, new(apiv1.CheckResponse))
	if err != nil {
		return nil, err
	}
	return nil, s.Err()
}

func (echo) Status(context.Context, *apiv1.StatusRequest) (*apiv1.StatusResponse, error) {
	return nil, status.Error(codes.Unavailable, "50 % größer\nnext line")
}

func startEcho(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	apiv1.RegisterCNIServer(s, echo{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() { s.Stop(); <-done })
	return socket
}

func connect(t *testing.T, socket string) *client {
	t.Helper()
	c, err := dial(socket, await.Patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

// The first detail of a status comes with it, of any size: in more than a frame,
// and with nothing in it.
func TestCallDetail(t *testing.T) {
	t.Parallel()
	socket := startEcho(t)
	for _, n := range []int{0, 1, 2, 3, 50000} {
		want := checkRequest{Netns: strings.Repeat("x", n)}.encode()
		if n == 0 {
			want = nil
		}
		got, err := connect(t, socket).call("Check", want)
		var s *rpcError
		if !errors.As(err, &s) || s.code != codeNotFound || got == nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes: %v with a detail of %d (%v)", len(want), err, len(got), got == nil)
		}
	}
	if got, err := connect(t, socket).call("Status", nil); err == nil || got != nil {
		t.Errorf("a status without details has %q, %v", got, err)
	}
}

// Messages of all sizes pass, those beyond a frame and beyond the windows too.
func TestCallSizes(t *testing.T) {
	t.Parallel()
	socket := startEcho(t)
	for _, n := range []int{0, 1, 400, 2000, 50000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			req := gcRequest{Network: "net1"}
			for i := range n {
				req.Valid = append(req.Valid, attachment{"net1", fmt.Sprintf("container-%d", i), "eth0"})
			}
			b, err := connect(t, socket).call("GC", req.encode())
			if err != nil {
				t.Fatal(err)
			}
			var resp gcResponse
			if err := resp.decode(b); err != nil {
				t.Fatal(err)
			}
			if len(resp.Removed) != n || n > 0 && resp.Removed[n-1] != req.Valid[n-1] {
				t.Errorf("%d of %d came back", len(resp.Removed), n)
			}
		})
	}
}

func expectStatus(t *testing.T, err error, code int, says string) {
	t.Helper()
	var s *rpcError
	if !errors.As(err, &s) || s.code != code || !strings.Contains(s.message, says) {
		t.Errorf("got %v, want status %d that says %q", err, code, says)
	}
}

func TestCallStatus(t *testing.T) {
	t.Parallel()
	socket := startEcho(t)
	_, err := connect(t, socket).call("Status", nil)
	expectStatus(t, err, codeUnavailable, "50 % größer\nnext line")
	_, err = connect(t, socket).call("Nothing", nil)
	expectStatus(t, err, codeUnimplemented, "Nothing")
	_, err = connect(t, socket).call("GC", []byte{0xff})
	expectStatus(t, err, codeInternal, "unmarshal")
}

// script is what a peer sends.
type script struct {
	exchange
	block bytes.Buffer
	enc   *hpack.Encoder
}

func newScript() *script {
	s := &script{}
	s.enc = hpack.NewEncoder(&s.block)
	s.frame(frameSettings, 0, 0, nil)
	return s
}

// headers encodes name, value, name, value …
func (s *script) headers(pairs ...string) []byte {
	s.block.Reset()
	for i := 0; i < len(pairs); i += 2 {
		_ = s.enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return bytes.Clone(s.block.Bytes())
}

// play answers a call with bytes and closes the connection.
func play(answer []byte) ([]byte, error) {
	ours, theirs := net.Pipe()
	defer func() { _ = ours.Close() }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(io.Discard, theirs)
	}()
	go func() {
		_, _ = theirs.Write(answer)
		_ = theirs.Close()
	}()
	b, err := invoke(ours, "/x/Y", []byte("request"), time.Now().Add(await.Patience))
	_ = ours.Close()
	<-done
	return b, err
}

func TestFrames(t *testing.T) {
	t.Parallel()
	ok := []string{":status", "200", "content-type", "application/grpc"}
	trailers := []string{"grpc-status", "0"}
	message := []byte("\x00\x00\x00\x00\x02hi")
	for _, tt := range []struct {
		name  string
		build func(*script)
		code  int
		says  string
	}{
		{"plain", func(s *script) {
			s.frame(frameHeaders, flagEndHeaders, 1, s.headers(ok...))
			s.frame(frameData, 0, 1, message)
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(trailers...))
		}, 0, "hi"},
		{"in pieces, padded, with a priority, and unknown frames between", func(s *script) {
			h := s.headers(ok...)
			s.frame(frameHeaders, flagPadded|flagPriority, 1, append(append([]byte{3, 0, 0, 0, 0, 16}, h[:2]...), 0, 0, 0))
			s.frame(frameContinuation, 0, 1, h[2:4])
			s.frame(frameContinuation, flagEndHeaders, 1, h[4:])
			s.frame(framePing, 0, 0, []byte("12345678"))
			s.frame(0x77, 0, 0, []byte("?"))
			s.frame(frameWindowUpdate, 0, 0, []byte{0, 0, 0, 9})
			s.frame(frameData, flagPadded, 1, append([]byte{2}, append(message[:3:3], 0, 0)...))
			s.frame(frameData, 0, 1, message[3:])
			s.frame(frameGoAway, 0, 0, []byte{0, 0, 0, 1, 0, 0, 0, 0})
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(trailers...))
		}, 0, "hi"},
		{"status alone", func(s *script) {
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(append(ok, "grpc-status", "8", "grpc-message", "no%20more%zz")...))
		}, codeResourceExhausted, "no%20more%zz"},
		{"no status", func(s *script) {
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(":status", "404"))
		}, codeUnknown, `HTTP status "404"`},
		{"status is no number", func(s *script) {
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers("grpc-status", "fine"))
		}, codeUnknown, `"fine" is not a number`},
		{"compressed", func(s *script) {
			s.frame(frameData, 0, 1, []byte("\x01\x00\x00\x00\x02hi"))
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(trailers...))
		}, codeInternal, "not one uncompressed message"},
		{"message cut short", func(s *script) {
			s.frame(frameData, 0, 1, message[:6])
			s.frame(frameHeaders, flagEndHeaders|flagEndStream, 1, s.headers(trailers...))
		}, codeInternal, "not one uncompressed message"},
		{"reset", func(s *script) { s.frame(frameReset, 0, 1, []byte{0, 0, 0, 7}) }, codeUnavailable, "HTTP/2 error 7"},
		{"given up", func(s *script) { s.frame(frameReset, 0, 1, []byte{0, 0, 0, 8}) }, codeCanceled, "gave up"},
		{"going away", func(s *script) {
			s.frame(frameGoAway, 0, 0, append(make([]byte, 8), "maintenance"...))
		}, codeUnavailable, "going away: maintenance"},
		{"closed", func(*script) {}, codeUnavailable, "closed before the answer"},
		{"closed within a frame", func(s *script) {
			s.frame(frameData, 0, 1, message)
			s.out = s.out[:len(s.out)-1]
		}, codeUnavailable, "closed before the answer"},
		{"frame too long", func(s *script) { s.frame(frameData, 0, 1, make([]byte, maxFrame+1)) }, codeUnavailable, "does not speak HTTP/2"},
		{"another stream", func(s *script) { s.frame(frameData, 0, 3, message) }, codeUnavailable, "does not speak HTTP/2"},
		{"padding longer than the frame", func(s *script) { s.frame(frameData, flagPadded, 1, []byte{9, 1}) }, codeUnavailable, "does not speak HTTP/2"},
		{"padding missing", func(s *script) { s.frame(frameData, flagPadded, 1, nil) }, codeUnavailable, "does not speak HTTP/2"},
		{"priority missing", func(s *script) { s.frame(frameHeaders, flagPriority, 1, []byte{0}) }, codeUnavailable, "does not speak HTTP/2"},
		{"header block broken off", func(s *script) {
			s.frame(frameHeaders, 0, 1, s.headers(ok...))
			s.frame(frameData, 0, 1, message)
		}, codeUnavailable, "does not speak HTTP/2"},
		{"header block of garbage", func(s *script) {
			s.frame(frameHeaders, flagEndHeaders, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		}, codeUnavailable, ""},
		{"settings cut short", func(s *script) { s.frame(frameSettings, 0, 0, []byte{0, 4, 0}) }, codeUnavailable, "does not speak HTTP/2"},
		{"window update cut short", func(s *script) { s.frame(frameWindowUpdate, 0, 0, []byte{0}) }, codeUnavailable, "does not speak HTTP/2"},
		{"reset cut short", func(s *script) { s.frame(frameReset, 0, 1, nil) }, codeUnavailable, "does not speak HTTP/2"},
		{"goaway cut short", func(s *script) { s.frame(frameGoAway, 0, 0, nil) }, codeUnavailable, "does not speak HTTP/2"},
		{"web server", func(s *script) {
			s.out = []byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		}, codeUnavailable, "does not speak HTTP/2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newScript()
			tt.build(s)
			b, err := play(s.out)
			if tt.code == codeOK {
				if err != nil || string(b) != tt.says {
					t.Errorf("got %q, %v, want %q", b, err, tt.says)
				}
				return
			}
			expectStatus(t, err, tt.code, tt.says)
		})
	}
}

// Whatever the peer sends, the call ends.
func TestFramesOfGarbage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := newScript()
		for range rapid.IntRange(0, 6).Draw(t, "frames") {
			s.frame(rapid.ByteRange(0, 10).Draw(t, "kind"), rapid.Byte().Draw(t, "flags"), rapid.Uint32Range(0, 3).Draw(t, "stream"),
				rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "payload"))
		}
		if b, err := play(append(s.out, rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "tail")...)); err == nil && b == nil {
			t.Fatal("neither a message nor an error")
		}
	})
}

func TestDeadline(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	defer func() { _, _ = ours.Close(), theirs.Close() }()
	_, err := invoke(ours, "/x/Y", nil, time.Now().Add(10*time.Millisecond))
	expectStatus(t, err, codeDeadlineExceeded, "no answer in time")
}
