// Package nl speaks netlink (netlink(7)) for the packages of the data plane: it
// builds messages, reads attributes, and carries requests to the kernel, many in
// one send with one acknowledgement for all of them, which is a quarter faster
// than one for each. It knows no kind of object.
//
// Numbers are in the host's order, as rtnetlink has them, or in the network's
// (Net16 and the like), as netfilter has them.
package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Header is the size of a message's header in bytes.
const Header = unix.NLMSG_HDRLEN

// Attrs appends attributes to B. The zero value is ready.
type Attrs struct{ B []byte }

func (a *Attrs) head(kind uint16, length int) {
	a.B = binary.NativeEndian.AppendUint16(a.B, uint16(unix.SizeofNlAttr+length))
	a.B = binary.NativeEndian.AppendUint16(a.B, kind)
}

func (a *Attrs) pad() {
	for len(a.B)%unix.NLMSG_ALIGNTO != 0 {
		a.B = append(a.B, 0)
	}
}

// Bytes appends an attribute with that value, of less than 64 KiB.
func (a *Attrs) Bytes(kind uint16, v ...byte) {
	a.head(kind, len(v))
	a.B = append(a.B, v...)
	a.pad()
}

// Chars is Bytes for a string, without a zero at its end.
func (a *Attrs) Chars(kind uint16, v string) {
	a.head(kind, len(v))
	a.B = append(a.B, v...)
	a.pad()
}

// Text appends a string with a zero at its end.
func (a *Attrs) Text(kind uint16, v string) {
	a.head(kind, len(v)+1)
	a.B = append(append(a.B, v...), 0)
	a.pad()
}

// Uint8 appends a number.
func (a *Attrs) Uint8(kind uint16, v uint8) { a.Bytes(kind, v) }

// Uint32 appends a number in the host's order.
func (a *Attrs) Uint32(kind uint16, v uint32) {
	a.head(kind, 4)
	a.B = binary.NativeEndian.AppendUint32(a.B, v)
}

// Net16 appends a number in the network's order.
func (a *Attrs) Net16(kind, v uint16) {
	a.head(kind, 2)
	a.B = binary.BigEndian.AppendUint16(a.B, v)
	a.pad()
}

// Net32 appends a number in the network's order.
func (a *Attrs) Net32(kind uint16, v uint32) {
	a.head(kind, 4)
	a.B = binary.BigEndian.AppendUint32(a.B, v)
}

// Net64 appends a number in the network's order.
func (a *Attrs) Net64(kind uint16, v uint64) {
	a.head(kind, 8)
	a.B = binary.BigEndian.AppendUint64(a.B, v)
}

// Addr appends an address of 4 or 16 bytes.
func (a *Attrs) Addr(kind uint16, v netip.Addr) {
	if v.Is4() {
		x := v.As4()
		a.Bytes(kind, x[:]...)
		return
	}
	x := v.As16()
	a.Bytes(kind, x[:]...)
}

// Nest appends an attribute that holds what fn appends.
func (a *Attrs) Nest(kind uint16, fn func()) {
	at := len(a.B)
	a.head(kind|unix.NLA_F_NESTED, 0)
	fn()
	binary.NativeEndian.PutUint16(a.B[at:], uint16(len(a.B)-at))
}

// Value is the value of an attribute. One that is too short for what is read of
// it reads as zero.
type Value []byte

// Uint8 reads a number.
func (v Value) Uint8() uint8 {
	if len(v) < 1 {
		return 0
	}
	return v[0]
}

// Uint16 reads a number in the host's order.
func (v Value) Uint16() uint16 {
	if len(v) < 2 {
		return 0
	}
	return binary.NativeEndian.Uint16(v)
}

// Uint32 reads a number in the host's order.
func (v Value) Uint32() uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(v)
}

// Net16 reads a number in the network's order.
func (v Value) Net16() uint16 {
	if len(v) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(v)
}

// Net32 reads a number in the network's order.
func (v Value) Net32() uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

// Net64 reads a number in the network's order.
func (v Value) Net64() uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

// Text reads a string up to the zero at its end.
func (v Value) Text() string { return unix.ByteSliceToString(v) }

// Addr reads an address; invalid if it has neither 4 nor 16 bytes.
func (v Value) Addr() netip.Addr {
	a, _ := netip.AddrFromSlice(v)
	return a
}

// Attributes iterates over the attributes in b: the type without its flags, and
// the value. It stops at the first one that does not fit.
func Attributes(b []byte) iter.Seq2[uint16, Value] {
	return func(yield func(uint16, Value) bool) {
		for len(b) >= unix.SizeofNlAttr {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.SizeofNlAttr || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:n]) {
				return
			}
			b = b[min(len(b), align(n)):]
		}
	}
}

// Find returns the value of the first attribute of a kind in b; nil: there is
// none.
func Find(b []byte, kind uint16) Value {
	for k, v := range Attributes(b) {
		if k == kind {
			return v
		}
	}
	return nil
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// Batch collects messages that travel in one send. The zero value is empty and
// ready.
type Batch struct {
	Attrs
	starts []int // where each message begins
}

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() { b.B, b.starts = b.B[:0], b.starts[:0] }

// Len returns the number of messages.
func (b *Batch) Len() int { return len(b.starts) }

// Begin begins a message whose fixed part is head, of a multiple of four bytes.
// The attributes that are appended next belong to it.
func (b *Batch) Begin(kind, flags uint16, head ...byte) {
	b.starts = append(b.starts, len(b.B))
	b.B = append(b.B, 0, 0, 0, 0)
	b.B = binary.NativeEndian.AppendUint16(b.B, kind)
	b.B = binary.NativeEndian.AppendUint16(b.B, flags|unix.NLM_F_REQUEST)
	b.B = append(b.B, 0, 0, 0, 0, 0, 0, 0, 0)
	b.B = append(b.B, head...)
}

// Message returns message i: its header, in which the length and the number are
// not filled in yet, and its body.
func (b *Batch) Message(i int) []byte {
	end := len(b.B)
	if i+1 < len(b.starts) {
		end = b.starts[i+1]
	}
	return b.B[b.starts[i]:end]
}

// flag sets flags of message i.
func (b *Batch) flag(i int, flags uint16) {
	head := b.Message(i)
	binary.NativeEndian.PutUint16(head[6:], binary.NativeEndian.Uint16(head[6:])|flags)
}

// Finish numbers the messages from first, completes them, and returns all of
// them. [Conn] does it; it is for tests.
func (b *Batch) Finish(first uint32) []byte {
	for i := range b.starts {
		m := b.Message(i)
		binary.NativeEndian.PutUint32(m, uint32(len(m)))
		binary.NativeEndian.PutUint32(m[8:], first+uint32(i))
	}
	return b.B
}

// Message is a message as received.
type Message struct {
	Type, Flags uint16
	Seq, Port   uint32
	Body        []byte
}

// Family returns the kernel's number of an address's family.
func Family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// errCut says that the kernel's answer cannot be understood: what it did is not
// known.
var errCut = errors.New("netlink message is cut off")

// next returns the first message of a datagram and what follows it.
func next(b []byte) (m Message, rest []byte, err error) {
	if len(b) < Header {
		return m, nil, errCut
	}
	n := int(binary.NativeEndian.Uint32(b))
	if n < Header || n > len(b) {
		return m, nil, errCut
	}
	return Message{
		Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
		Seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]), Body: b[Header:n],
	}, b[min(len(b), align(n)):], nil
}

// Messages iterates over the messages of one datagram. It stops at the first one
// that does not fit.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for {
			m, rest, err := next(b)
			if err != nil || !yield(m) {
				return
			}
			b = rest
		}
	}
}

// Error is the kernel's answer to a message that it refused: an error number,
// which it unwraps to, and where the kernel gives one a text (extended
// acknowledgement).
type Error struct {
	Errno unix.Errno
	Text  string
}

func (e *Error) Error() string {
	if e.Text == "" {
		return e.Errno.Error()
	}
	return fmt.Sprintf("%v: %s", e.Errno, e.Text)
}

func (e *Error) Unwrap() error { return e.Errno }

// Err reads an answer of type NLMSG_ERROR; nil is an acknowledgement.
func (m Message) Err() error {
	if len(m.Body) < 4 {
		return &Error{Errno: unix.EBADMSG}
	}
	n := -int32(binary.NativeEndian.Uint32(m.Body))
	if n == 0 {
		return nil
	}
	e := &Error{Errno: unix.Errno(n)}
	// With NETLINK_CAP_ACK only the header of the request is quoted.
	if m.Flags&unix.NLM_F_ACK_TLVS != 0 && len(m.Body) >= 4+Header {
		const attrMessage = 1 // NLMSGERR_ATTR_MSG
		e.Text = Find(m.Body[4+Header:], attrMessage).Text()
	}
	return e
}
