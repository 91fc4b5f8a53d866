package wire

import (
	"encoding/binary"
	"fmt"
)

// Sizes of messages in bytes (RFC 4271 section 4.1, RFC 8654).
const (
	HeaderLen   = 19
	MaxLen      = 4096
	MaxExtended = 65535
)

// Type is the type of a message.
type Type uint8

// The types of messages (RFC 4271, RFC 2918).
const (
	Open Type = 1 + iota
	UpdateMessage
	Notification
	Keepalive
	RouteRefresh
)

// least is the smallest length of each type of message, with its header.
var least = [...]int{Open: 29, UpdateMessage: 23, Notification: 21, Keepalive: HeaderLen, RouteRefresh: 23}

const marker = 1<<64 - 1

// Frame returns the message that b begins with, which aliases b, and its length;
// 0 as long as b does not hold all of it. longest is what the session allows:
// [MaxLen], or [MaxExtended] once this side has offered extended messages (RFC 8654
// section 4), which OPEN and KEEPALIVE never are. Faults are found as soon as the
// header is there.
func Frame(b []byte, longest int) (t Type, body []byte, n int, err error) {
	if len(b) < HeaderLen {
		return 0, nil, 0, nil
	}
	if binary.BigEndian.Uint64(b) != marker || binary.BigEndian.Uint64(b[8:]) != marker {
		return 0, nil, 0, &Error{Code: CodeHeader, Subcode: HeaderNotSynchronized, Reason: "the marker is not all ones"}
	}
	n, t = int(binary.BigEndian.Uint16(b[16:])), Type(b[18])
	if t < Open || t > RouteRefresh {
		return 0, nil, 0, &Error{Code: CodeHeader, Subcode: HeaderBadType, Data: []byte{b[18]}, Reason: fmt.Sprintf("message of unknown type %d", t)}
	}
	if t == Open || t == Keepalive {
		longest = MaxLen
	}
	if n < least[t] || n > longest || t == Keepalive && n != HeaderLen {
		return 0, nil, 0, &Error{
			Code: CodeHeader, Subcode: HeaderBadLength, Data: []byte{b[16], b[17]},
			Reason: fmt.Sprintf("message of type %d and %d bytes, where %d to %d are right", t, n, least[t], longest),
		}
	}
	if len(b) < n {
		return 0, nil, 0, nil
	}
	return t, b[HeaderLen:n], n, nil
}

// appendHeader appends the header of a message whose length finish sets.
func appendHeader(b []byte, t Type) []byte {
	b = binary.BigEndian.AppendUint64(b, marker)
	b = binary.BigEndian.AppendUint64(b, marker)
	return append(b, 0, 0, byte(t))
}

// finish sets the length of the message that b ends with.
func finish(b []byte, start int) {
	binary.BigEndian.PutUint16(b[start+16:], uint16(len(b)-start))
}

// AppendMessage appends a message with its header. It has to fit into [MaxExtended].
func AppendMessage(b []byte, t Type, body []byte) []byte {
	start := len(b)
	b = append(appendHeader(b, t), body...)
	finish(b, start)
	return b
}
