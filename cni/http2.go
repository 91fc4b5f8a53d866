package cni

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2/hpack"
)

// This file makes one unary gRPC call on one connection: HTTP/2 (RFC 9113) as
// far as that needs it, and gRPC's protocol upon it
// (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md).

// The status codes of gRPC that the plugin tells apart.
const (
	codeOK                 = 0
	codeCanceled           = 1
	codeUnknown            = 2
	codeInvalidArgument    = 3
	codeDeadlineExceeded   = 4
	codeNotFound           = 5
	codeResourceExhausted  = 8
	codeFailedPrecondition = 9
	codeUnimplemented      = 12
	codeInternal           = 13
	codeUnavailable        = 14
)

// rpcError is the status of a call that failed.
type rpcError struct {
	code    int
	message string
}

func (e *rpcError) Error() string { return fmt.Sprintf("rpc status %d: %s", e.code, e.message) }

// Frame types and flags (RFC 9113, section 6).
const (
	frameData         = 0
	frameHeaders      = 1
	frameReset        = 3
	frameSettings     = 4
	framePing         = 6
	frameGoAway       = 7
	frameWindowUpdate = 8
	frameContinuation = 9

	flagEndStream  = 1
	flagAck        = 1
	flagEndHeaders = 4
	flagPadded     = 8
	flagPriority   = 0x20
)

const (
	preface           = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	frameHeaderLen    = 9
	maxFrame          = 16384 // what both sides take without asking for more
	defaultWindow     = 65535
	settingPush       = 2
	settingWindow     = 4
	callStream        = 1
	resetCancel       = 8
	maxResponse       = 8 << 20 // the window that the daemon is given, and so the longest answer
	maxHeaderBlock    = 1 << 20
	messagePrefixLen  = 5 // gRPC: compressed or not, and the length
	grpcStatusTrailer = "grpc-status"
	grpcMessage       = "grpc-message"
	grpcDetails       = "grpc-status-details-bin"
)

// exchange is one call under way.
type exchange struct {
	conn net.Conn
	r    *bufio.Reader
	out  []byte // frames to be written

	// What the peer lets us send (RFC 9113, section 5.2).
	connWindow, streamWindow, initialWindow int

	decoder *hpack.Decoder
	block   []byte            // header block as far as it came
	headers map[string]string // of the answer, the trailers included
	body    []byte
	done    bool // the peer ended the stream
	endSeen bool // … in a header frame whose block goes on
}

// invoke calls a method with a request and returns the response, or the status
// and what it has as its first detail; nil: nothing. deadline is when both sides
// give up. The connection serves one call.
func invoke(conn net.Conn, method string, req []byte, deadline time.Time) ([]byte, error) {
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	x := &exchange{
		conn: conn, r: bufio.NewReaderSize(conn, 4096),
		connWindow: defaultWindow, streamWindow: defaultWindow, initialWindow: defaultWindow,
		headers: make(map[string]string),
	}
	x.decoder = hpack.NewDecoder(4096, func(f hpack.HeaderField) { x.headers[f.Name] = f.Value })
	err := x.run(method, req, deadline)
	var status *rpcError
	switch {
	case err == nil:
		return x.response()
	case errors.As(err, &status):
		return nil, err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, &rpcError{codeDeadlineExceeded, "no answer in time"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, &rpcError{codeUnavailable, "the connection was closed before the answer came"}
	}
	return nil, &rpcError{codeUnavailable, err.Error()}
}

func (x *exchange) run(method string, req []byte, deadline time.Time) error {
	x.out = append(x.out, preface...)
	var settings []byte
	settings = appendSetting(settings, settingPush, 0)
	settings = appendSetting(settings, settingWindow, maxResponse)
	x.frame(frameSettings, 0, 0, settings)
	x.frame(frameWindowUpdate, 0, 0, binary.BigEndian.AppendUint32(nil, maxResponse-defaultWindow))
	x.frame(frameHeaders, flagEndHeaders, callStream, requestHeaders(method, deadline))

	body := make([]byte, messagePrefixLen, messagePrefixLen+len(req))
	binary.BigEndian.PutUint32(body[1:], uint32(len(req)))
	body = append(body, req...)
	for !x.done {
		body = x.send(body)
		x.flush()
		if err := x.receive(); err != nil {
			return err
		}
	}
	return nil
}

// requestHeaders returns the header block of a call.
func requestHeaders(method string, deadline time.Time) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	timeout := max(time.Until(deadline).Milliseconds(), 1)
	for _, f := range []hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "http"},
		{Name: ":path", Value: method},
		{Name: ":authority", Value: "localhost"},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "te", Value: "trailers"},
		{Name: "user-agent", Value: PluginType},
		// At most eight digits are allowed.
		{Name: "grpc-timeout", Value: strconv.FormatInt(min(timeout, 99999999), 10) + "m"},
	} {
		// A bytes.Buffer takes everything.
		_ = enc.WriteField(f)
	}
	return b.Bytes()
}

func appendSetting(b []byte, id uint16, value uint32) []byte {
	b = binary.BigEndian.AppendUint16(b, id)
	return binary.BigEndian.AppendUint32(b, value)
}

// frame queues a frame.
func (x *exchange) frame(kind, flags byte, stream uint32, payload []byte) {
	x.out = append(x.out, byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload)), kind, flags)
	x.out = binary.BigEndian.AppendUint32(x.out, stream)
	x.out = append(x.out, payload...)
}

// send queues as much of the request as the windows allow and returns the
// rest: nil when the end is queued.
func (x *exchange) send(body []byte) []byte {
	for body != nil {
		n := min(len(body), maxFrame, x.connWindow, x.streamWindow)
		if n <= 0 {
			return body
		}
		var flags byte
		if n == len(body) {
			flags = flagEndStream
		}
		x.frame(frameData, flags, callStream, body[:n])
		x.connWindow -= n
		x.streamWindow -= n
		if body = body[n:]; len(body) == 0 {
			body = nil
		}
	}
	return nil
}

// flush writes what is queued. A peer that has closed its end may have answered
// before: reading tells, and reports the loss if not.
func (x *exchange) flush() {
	if len(x.out) > 0 {
		_, _ = x.conn.Write(x.out)
		x.out = x.out[:0]
	}
}

var errProtocol = errors.New("what answers does not speak HTTP/2")

// receive reads one frame and acts on it.
func (x *exchange) receive() error {
	var h [frameHeaderLen]byte
	if _, err := io.ReadFull(x.r, h[:]); err != nil {
		return err
	}
	size := int(h[0])<<16 | int(h[1])<<8 | int(h[2])
	kind, flags := h[3], h[4]
	stream := binary.BigEndian.Uint32(h[5:]) & (1<<31 - 1)
	if size > maxFrame {
		return errProtocol
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(x.r, payload); err != nil {
		return err
	}
	if len(x.block) > 0 && kind != frameContinuation {
		return errProtocol
	}
	switch kind {
	case frameData, frameHeaders, frameContinuation, frameReset:
		if stream != callStream {
			return errProtocol
		}
		return x.onStream(kind, flags, payload)
	case frameSettings:
		if flags&flagAck != 0 {
			return nil
		}
		x.frame(frameSettings, flagAck, 0, nil)
		return x.settings(payload)
	case framePing:
		if flags&flagAck == 0 {
			x.frame(framePing, flagAck, 0, payload)
		}
	case frameWindowUpdate:
		return x.windowUpdate(stream, payload)
	case frameGoAway:
		if size < 8 {
			return errProtocol
		}
		if last := binary.BigEndian.Uint32(payload) & (1<<31 - 1); last < callStream {
			return &rpcError{codeUnavailable, fmt.Sprintf("the daemon is going away: %s", payload[8:])}
		}
	}
	return nil
}

func (x *exchange) settings(b []byte) error {
	if len(b)%6 != 0 {
		return errProtocol
	}
	for ; len(b) > 0; b = b[6:] {
		if binary.BigEndian.Uint16(b) == settingWindow {
			window := int(binary.BigEndian.Uint32(b[2:]))
			x.streamWindow += window - x.initialWindow
			x.initialWindow = window
		}
	}
	return nil
}

func (x *exchange) windowUpdate(stream uint32, b []byte) error {
	if len(b) != 4 {
		return errProtocol
	}
	n := int(binary.BigEndian.Uint32(b) & (1<<31 - 1))
	switch stream {
	case 0:
		x.connWindow += n
	case callStream:
		x.streamWindow += n
	}
	return nil
}

// onStream handles a frame of the call's stream.
func (x *exchange) onStream(kind, flags byte, payload []byte) error {
	if kind == frameReset {
		if len(payload) != 4 {
			return errProtocol
		}
		reason := binary.BigEndian.Uint32(payload)
		if reason == resetCancel {
			// What a server does whose deadline passes before ours.
			return &rpcError{codeCanceled, "the daemon gave up"}
		}
		return &rpcError{codeUnavailable, fmt.Sprintf("the daemon broke the call off (HTTP/2 error %d)", reason)}
	}
	payload, err := unpad(kind, flags, payload)
	if err != nil {
		return err
	}
	if kind == frameData {
		x.body = append(x.body, payload...)
		if len(x.body) > maxResponse {
			return errProtocol
		}
		x.done = flags&flagEndStream != 0
		return nil
	}
	x.block = append(x.block, payload...)
	if len(x.block) > maxHeaderBlock {
		return errProtocol
	}
	if kind == frameHeaders {
		x.endSeen = flags&flagEndStream != 0
	}
	if flags&flagEndHeaders == 0 {
		return nil
	}
	_, err = x.decoder.Write(x.block)
	if err == nil {
		err = x.decoder.Close()
	}
	x.block = nil
	x.done = x.endSeen
	return err
}

// unpad takes away padding and priority (RFC 9113, sections 6.1 and 6.2).
func unpad(kind, flags byte, b []byte) ([]byte, error) {
	if kind == frameContinuation {
		return b, nil
	}
	pad := 0
	if flags&flagPadded != 0 {
		if len(b) == 0 {
			return nil, errProtocol
		}
		pad, b = int(b[0]), b[1:]
	}
	if kind == frameHeaders && flags&flagPriority != 0 {
		if len(b) < 5 {
			return nil, errProtocol
		}
		b = b[5:]
	}
	if pad > len(b) {
		return nil, errProtocol
	}
	return b[:len(b)-pad], nil
}

// response returns the message of a call that is over, or its status with the
// first detail.
func (x *exchange) response() ([]byte, error) {
	status, ok := x.headers[grpcStatusTrailer]
	if !ok {
		return nil, &rpcError{codeUnknown, fmt.Sprintf("what answers does not speak gRPC: HTTP status %q", x.headers[":status"])}
	}
	code, err := strconv.Atoi(status)
	if err != nil {
		return nil, &rpcError{codeUnknown, fmt.Sprintf("status %q is not a number", status)}
	}
	if code != codeOK {
		message, err := url.PathUnescape(x.headers[grpcMessage])
		if err != nil {
			message = x.headers[grpcMessage]
		}
		return x.detail(), &rpcError{code, message}
	}
	if len(x.body) < messagePrefixLen || x.body[0] != 0 || int64(binary.BigEndian.Uint32(x.body[1:])) != int64(len(x.body)-messagePrefixLen) {
		return nil, &rpcError{codeInternal, "the answer is not one uncompressed message"}
	}
	return x.body[messagePrefixLen:], nil
}

// detail returns the first detail of the status. One that cannot be read is none:
// the status counts without it.
func (x *exchange) detail() []byte {
	// Padding may be there or not.
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(x.headers[grpcDetails], "="))
	if err != nil {
		return nil
	}
	detail, err := detailOf(b)
	if err != nil {
		return nil
	}
	return detail
}
