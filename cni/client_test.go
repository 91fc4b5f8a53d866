package cni

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/cni/frame"
	"github.com/routerd/routerd/integration/await"
)

// play answers a call with bytes and closes the connection.
func play(answer []byte) (gcResponse, bool, error) {
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
	c := &client{conn: ours, deadline: time.Now().Add(await.Patience)}
	var resp gcResponse
	answered, err := c.call("GC", gcRequest{Network: "net1"}, &resp)
	_ = ours.Close()
	<-done
	return resp, answered, err
}

func framed(content string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(content))), content...)
}

func expectStatus(t *testing.T, err error, code uint32, says string) {
	t.Helper()
	var s *callError
	if !errors.As(err, &s) || s.code != code || !strings.Contains(s.message, says) {
		t.Errorf("got %v, want status %d that says %q", err, code, says)
	}
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	const message = `{"removed":[{"network":"net1","containerId":"c1","ifname":"eth0"}]}`
	for _, tt := range []struct {
		name     string
		answer   []byte
		answered bool
		code     uint32
		says     string
	}{
		{"success", framed(`{"message":` + message + `}`), true, 0, ""},
		{"success without a message", framed(`{}`), true, 0, ""},
		{"fields that nobody knows", framed(`{"later":1,"message":` + message + `}`), true, 0, ""},
		{"status", framed(`{"code":8,"error":"50 % größer\nnext line"}`), false, codeResourceExhausted, "50 % größer\nnext line"},
		{"status with what was done", framed(`{"code":13,"error":"one is left","message":` + message + `}`), true, 13, "one is left"},
		{"closed", nil, false, codeUnavailable, "closed before the answer"},
		{"closed within the header", []byte{0, 0}, false, codeUnavailable, "closed before the answer"},
		{"closed within the frame", framed(`{}`)[:5], false, codeUnavailable, "closed before the answer"},
		{"too long", []byte{0, 0x80, 0, 1}, false, codeUnavailable, "does not speak"},
		{"no JSON", framed("hello"), false, codeUnavailable, "does not speak"},
		{"another message", framed(`{"message":{"removed":7}}`), false, codeUnavailable, "does not speak"},
		{"web server", []byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), false, codeUnavailable, "does not speak"},
		{"gRPC server", []byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0}, false, codeUnavailable, "closed before the answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			resp, answered, err := play(tt.answer)
			if answered != tt.answered {
				t.Errorf("answered: %v", answered)
			}
			if tt.code != 0 {
				expectStatus(t, err, tt.code, tt.says)
			} else if err != nil {
				t.Error(err)
			}
			if strings.Contains(string(tt.answer), "c1") && (len(resp.Removed) != 1 || resp.Removed[0].ContainerID != "c1") {
				t.Errorf("got %+v", resp)
			}
		})
	}
}

// Whatever the peer sends, the call ends, and what is no answer is an error.
func TestAnswersOfGarbage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 60).Draw(t, "bytes")
		if rapid.Bool().Draw(t, "framed") {
			b = framed(string(b))
		}
		if resp, answered, err := play(b); err == nil && !answered {
			t.Fatalf("neither an answer nor an error: %+v", resp)
		}
	})
}

func TestDeadline(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	defer func() { _, _ = ours.Close(), theirs.Close() }()
	c := &client{conn: ours, deadline: time.Now().Add(10 * time.Millisecond)}
	_, err := c.call("Status", nothing{}, &nothing{})
	expectStatus(t, err, codeDeadlineExceeded, "no answer in time")
}

func TestRequestTooLong(t *testing.T) {
	t.Parallel()
	if err := frame.Write(io.Discard, frame.Request{Method: strings.Repeat("x", frame.Max)}); err == nil {
		t.Error("a frame that nobody reads was written")
	}
}
