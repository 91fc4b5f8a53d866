// Package frame is how the CNI plugin talks to the daemon: a call is one frame
// there and one back, on a connection of its own. It serves both sides.
//
// A frame is its length in four bytes, most significant first, and that many
// bytes of JSON. It is shorter than 16 MiB, so the first byte is zero; a gRPC
// client, which the daemon serves on the same socket, begins with a P (HTTP/2's
// preface, RFC 9113, section 3.4). The messages are those of
// control/api/v1/cni.proto in their JSON form.
package frame

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Max is how long a frame may be, in bytes.
const Max = 8 << 20

// ErrProtocol says that what came is no frame.
var ErrProtocol = errors.New("what answers does not speak routerd's protocol")

// Request is a call.
type Request struct {
	Method  string          `json:"method"`            // of service CNI
	Timeout int64           `json:"timeout"`           // in milliseconds: when the caller gives up
	Message json.RawMessage `json:"message,omitempty"` // the request
}

// Response is how a call ended.
type Response struct {
	Code    uint32          `json:"code,omitempty"`    // gRPC's status code; 0: it succeeded
	Error   string          `json:"error,omitempty"`   // what went wrong
	Message json.RawMessage `json:"message,omitempty"` // the response, or what was done although the call failed
}

// Write writes a value as a frame, in one call of w.
func Write(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > Max {
		return fmt.Errorf("a frame of %d bytes; at most %d are allowed", len(b), Max)
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(make([]byte, 0, HeaderLen+len(b)), uint32(len(b))), b...))
	return err
}

// HeaderLen is how many bytes a frame has before its content.
const HeaderLen = 4

// Header is a frame's first bytes.
type Header [HeaderLen]byte

// Foreign reports whether the bytes are no header: something else is spoken.
func (h Header) Foreign() bool { return h[0] != 0 }

// Read reads a frame into v.
func Read(r io.Reader, v any) error {
	var h Header
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return err
	}
	return ReadRest(r, h, v)
}

// ReadRest is [Read] of a frame whose header was read.
func ReadRest(r io.Reader, h Header, v any) error {
	size := binary.BigEndian.Uint32(h[:])
	if size > Max {
		return ErrProtocol
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return nil
}
