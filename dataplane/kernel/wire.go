package kernel

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Numbers of linux/rtnetlink.h, linux/nexthop.h and linux/netlink.h that
// package unix does not have.
const (
	rtmDelNextHop = 105
	rtmGetNextHop = 106
	rtaNHID       = 30
	rtaVia        = 18
	nhaFDB        = 11
	nhaResGroup   = 12

	// linux/if_tunnel.h, and the flag of linux/ip6_tunnel.h that says "no
	// encapsulation limit option".
	tunLink       = 1
	tunLocal      = 2
	tunRemote     = 3
	tunTTL        = 4
	tunEncapLimit = 6
	tunFlags      = 8
	tunProto      = 9
	tunMetadata   = 19
	tunNoLimit    = 1

	// linux/lwtunnel.h.
	encapIP6 = 4
	encapDst = 2
	encapSrc = 3
	encapTTL = 4

	// enum in6_addr_gen_mode: the device makes no link-local address.
	genModeNone = 1

	nlmDumpIntr = 0x10
	nlmAckTLVs  = 0x200
)

const nlHeader = unix.NLMSG_HDRLEN

// builder appends netlink messages to one buffer, so that many travel in one
// send. The zero value is empty and ready.
type builder struct {
	buf    []byte
	starts []int // where each message begins
}

func (b *builder) reset()   { b.buf, b.starts = b.buf[:0], b.starts[:0] }
func (b *builder) len() int { return len(b.starts) }

// message returns message i.
func (b *builder) message(i int) []byte {
	end := len(b.buf)
	if i+1 < len(b.starts) {
		end = b.starts[i+1]
	}
	return b.buf[b.starts[i]:end]
}

// begin starts a message whose fixed part is head.
func (b *builder) begin(typ, flags uint16, head ...byte) {
	b.starts = append(b.starts, len(b.buf))
	b.buf = append(b.buf, make([]byte, nlHeader)...)
	h := b.buf[len(b.buf)-nlHeader:]
	binary.NativeEndian.PutUint16(h[4:], typ)
	binary.NativeEndian.PutUint16(h[6:], flags|unix.NLM_F_REQUEST)
	b.buf = append(b.buf, head...)
}

// end completes the message that begin started.
func (b *builder) end() {
	start := b.starts[len(b.starts)-1]
	binary.NativeEndian.PutUint32(b.buf[start:], uint32(len(b.buf)-start))
}

func (b *builder) attr(typ uint16, value ...byte) {
	b.buf = binary.NativeEndian.AppendUint16(b.buf, uint16(4+len(value)))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, typ)
	b.buf = append(b.buf, value...)
	b.pad()
}

func (b *builder) pad() {
	for len(b.buf)%unix.NLMSG_ALIGNTO != 0 {
		b.buf = append(b.buf, 0)
	}
}

func (b *builder) attrU8(typ uint16, v uint8) { b.attr(typ, v) }

func (b *builder) attrU32(typ uint16, v uint32) {
	b.buf = binary.NativeEndian.AppendUint16(b.buf, 8)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, typ)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, v)
}

func (b *builder) attrString(typ uint16, s string) {
	b.attr(typ, append([]byte(s), 0)...)
}

func (b *builder) attrAddr(typ uint16, a netip.Addr) {
	if a.Is4() {
		x := a.As4()
		b.attr(typ, x[:]...)
		return
	}
	x := a.As16()
	b.attr(typ, x[:]...)
}

// nest starts an attribute that holds attributes and returns the place to give
// to unnest.
func (b *builder) nest(typ uint16) int {
	at := len(b.buf)
	b.attr(typ | unix.NLA_F_NESTED)
	return at
}

func (b *builder) unnest(at int) {
	binary.NativeEndian.PutUint16(b.buf[at:], uint16(len(b.buf)-at))
}

func u16(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }
func u32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// attrs iterates over the attributes in b: type without its flags, and value.
// It stops at the first one that does not fit.
func attrs(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			n := int(u16(b))
			if n < 4 || n > len(b) {
				return
			}
			if !yield(u16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:n]) {
				return
			}
			b = b[min(len(b), (n+3)&^3):]
		}
	}
}

// attrInt reads a 32-bit attribute; 0 if it is too short.
func attrInt(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return u32(v)
}

// attrByte reads an 8-bit attribute; 0 if it is empty.
func attrByte(v []byte) uint8 {
	if len(v) < 1 {
		return 0
	}
	return v[0]
}

// attrText reads a string attribute without its closing zero.
func attrText(v []byte) string {
	if n := len(v); n > 0 && v[n-1] == 0 {
		v = v[:n-1]
	}
	return string(v)
}

// attrIP reads an address attribute; invalid if it has another length.
func attrIP(v []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(v)
	return a
}

// message is one netlink message as received.
type message struct {
	typ   uint16
	flags uint16
	seq   uint32
	pid   uint32
	body  []byte
	at    time.Time // when a notification was read from its socket; else zero
}

// messages iterates over the messages of one datagram.
func messages(b []byte) iter.Seq[message] {
	return func(yield func(message) bool) {
		for len(b) >= nlHeader {
			n := int(u32(b))
			if n < nlHeader || n > len(b) {
				return
			}
			m := message{typ: u16(b[4:]), flags: u16(b[6:]), seq: u32(b[8:]), pid: u32(b[12:]), body: b[nlHeader:n]}
			if !yield(m) {
				return
			}
			b = b[min(len(b), (n+3)&^3):]
		}
	}
}

// refusal is the kernel's answer to a message that it did not accept: an error
// number and, where the kernel gives one, a text (extended acknowledgement).
type refusal struct {
	errno unix.Errno
	text  string
}

func (e *refusal) Error() string {
	if e.text == "" {
		return e.errno.Error()
	}
	return fmt.Sprintf("%v: %s", e.errno, e.text)
}

func (e *refusal) Unwrap() error { return e.errno }

// parseError reads the body of NLMSG_ERROR; nil is an acknowledgement.
func parseError(m message) error {
	if len(m.body) < 4 {
		return &refusal{errno: unix.EBADMSG}
	}
	n := -int32(u32(m.body))
	if n == 0 {
		return nil
	}
	e := &refusal{errno: unix.Errno(n)}
	// With NETLINK_CAP_ACK only the header of the request is quoted.
	if m.flags&nlmAckTLVs != 0 && len(m.body) >= 4+nlHeader {
		for t, v := range attrs(m.body[4+nlHeader:]) {
			if t == 1 { // NLMSGERR_ATTR_MSG
				e.text = attrText(v)
			}
		}
	}
	return e
}
