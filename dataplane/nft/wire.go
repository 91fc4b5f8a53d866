package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// attrs builds netlink attributes. Numbers are big endian, as nf_tables has
// them.
type attrs struct{ b []byte }

func (a *attrs) pad() {
	for len(a.b)%unix.NLMSG_ALIGNTO != 0 {
		a.b = append(a.b, 0)
	}
}

func (a *attrs) head(kind uint16, length int) {
	a.b = binary.NativeEndian.AppendUint16(a.b, uint16(unix.SizeofNlAttr+length)) //nolint:gosec // lists are cut below 64 KiB
	a.b = binary.NativeEndian.AppendUint16(a.b, kind)
}

func (a *attrs) bytes(kind uint16, v []byte) {
	a.head(kind, len(v))
	a.b = append(a.b, v...)
	a.pad()
}

func (a *attrs) str(kind uint16, v string) {
	a.head(kind, len(v)+1)
	a.b = append(append(a.b, v...), 0)
	a.pad()
}

func (a *attrs) u16(kind uint16, v uint16) {
	a.head(kind, 2)
	a.b = binary.BigEndian.AppendUint16(a.b, v)
	a.pad()
}

func (a *attrs) u32(kind uint16, v uint32) {
	a.head(kind, 4)
	a.b = binary.BigEndian.AppendUint32(a.b, v)
}

func (a *attrs) u64(kind uint16, v uint64) {
	a.head(kind, 8)
	a.b = binary.BigEndian.AppendUint64(a.b, v)
}

// nest appends an attribute that holds what fn appends.
func (a *attrs) nest(kind uint16, fn func()) {
	at := len(a.b)
	a.head(kind|unix.NLA_F_NESTED, 0)
	fn()
	binary.NativeEndian.PutUint16(a.b[at:], uint16(len(a.b)-at)) //nolint:gosec // lists are cut below 64 KiB
}

// attr is a decoded attribute.
type attr struct {
	kind uint16
	v    []byte
}

func (a attr) u32() uint32 {
	if len(a.v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(a.v)
}

func (a attr) u64() uint64 {
	if len(a.v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(a.v)
}

func (a attr) str() string {
	v := a.v
	for i, c := range v {
		if c == 0 {
			return string(v[:i])
		}
	}
	return string(v)
}

// each calls fn with each attribute in b, and stops at what is none.
func each(b []byte, fn func(attr)) {
	for len(b) >= unix.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofNlAttr || n > len(b) {
			return
		}
		fn(attr{binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:n]})
		b = b[min((n+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
}

// The nested attributes of one kind of list.
func eachOf(b []byte, kind uint16, fn func([]byte)) {
	each(b, func(a attr) {
		if a.kind == kind {
			fn(a.v)
		}
	})
}

// batch collects the messages of one transaction.
type batch struct {
	attrs
	subjects []subject
}

// subject says what a message is about, for errors.
type subject struct {
	verb, what, name string
}

const (
	headerLen = unix.SizeofNlMsghdr + 4 // with struct nfgenmsg
	firstSeq  = 1                       // of the message that begins a transaction
)

func (b *batch) empty() bool { return len(b.subjects) == 0 }

// start opens a message and returns where it starts.
func (b *batch) start(kind, flags uint16, family byte, seq uint32) int {
	at := len(b.b)
	b.b = append(b.b, 0, 0, 0, 0)
	b.b = binary.NativeEndian.AppendUint16(b.b, kind)
	b.b = binary.NativeEndian.AppendUint16(b.b, unix.NLM_F_REQUEST|flags)
	b.b = binary.NativeEndian.AppendUint32(b.b, seq)
	b.b = append(b.b, 0, 0, 0, 0, family, unix.NFNETLINK_V0, 0, 0)
	return at
}

func (b *batch) finish(at int) {
	binary.NativeEndian.PutUint32(b.b[at:], uint32(len(b.b)-at)) //nolint:gosec // batches are cut
}

// add appends a request about something of our table.
func (b *batch) add(kind, flags uint16, s subject, fn func()) {
	if len(b.b) == 0 {
		b.edge(unix.NFNL_MSG_BATCH_BEGIN, firstSeq)
	}
	b.subjects = append(b.subjects, s)
	at := b.start(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, unix.NFPROTO_INET, b.last())
	fn()
	b.finish(at)
}

// last returns the sequence number of the last request.
func (b *batch) last() uint32 { return firstSeq + uint32(len(b.subjects)) } //nolint:gosec // some millions at most

func (b *batch) edge(kind uint16, seq uint32) {
	at := b.start(kind, 0, unix.AF_UNSPEC, seq)
	b.b[at+unix.SizeofNlMsghdr+3] = unix.NFNL_SUBSYS_NFTABLES // res_id, big endian
	b.finish(at)
}

// frame ends the transaction and returns it. The last request asks for an
// answer, which the kernel gives when all are carried out.
func (b *batch) frame() []byte {
	at := 0
	for range len(b.subjects) {
		at += int(binary.NativeEndian.Uint32(b.b[at:]))
	}
	flags := b.b[at+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	b.edge(unix.NFNL_MSG_BATCH_END, b.last()+1)
	return b.b
}
