package nft

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// conn is a netlink socket for requests. The kernel carries out a request
// before sendto returns, so its answers are there when we read. One goroutine
// uses a conn at a time.
type conn struct {
	fd   int
	port uint32 // by which others know who wrote
	seq  uint32 // of requests that are no transactions
	buf  []byte
}

var errInterrupted = errors.New("somebody changed it meanwhile")

// sendBuffer must hold a transaction: it is one message to the socket.
// receiveBuffer holds the answers.
const (
	sendBuffer    = 256 << 20
	receiveBuffer = 8 << 20
)

func open(groups uint32) (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netfilter socket: %w", err)
	}
	c := &conn{fd: fd, seq: 1 << 30, buf: make([]byte, 64<<10)}
	if err := c.setup(groups); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("set up a netfilter socket: %w", err)
	}
	return c, nil
}

func (c *conn) setup(groups uint32) error {
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		return err
	}
	// Errors come without the request, which may be long.
	if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1); err != nil {
		return err
	}
	const wait = 10 // seconds, for a kernel that does not answer at all
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: wait}); err != nil {
		return err
	}
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return err
	}
	a, err := unix.Getsockname(c.fd)
	if err != nil {
		return err
	}
	if nl, ok := a.(*unix.SockaddrNetlink); ok {
		c.port = nl.Pid
	}
	return nil
}

func (c *conn) close() { unix.Close(c.fd) }

// message is a netlink message.
type message struct {
	kind, flags uint16
	seq, port   uint32
	data        []byte
}

// receive calls fn with each message of one read.
func (c *conn) receive(flags int, fn func(message)) error {
	n, _, err := unix.Recvfrom(c.fd, c.buf, flags)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(c.fd, c.buf, flags)
	}
	if err != nil {
		return err
	}
	parse(c.buf[:n], fn)
	return nil
}

func parse(b []byte, fn func(message)) {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(nativeU32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return
		}
		fn(message{
			kind: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
			seq: nativeU32(b[8:]), port: nativeU32(b[12:]), data: b[unix.SizeofNlMsghdr:n],
		})
		b = b[min((n+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
}

// errno returns the error of a message that says how a request ended.
func (m message) errno() error {
	if len(m.data) < 4 {
		return nil
	}
	if code := int32(nativeU32(m.data)); code != 0 { //nolint:gosec // two's complement
		return unix.Errno(-code)
	}
	return nil
}

// refusedError is the kernel's no to one message of a transaction, of which
// nothing was done.
type refusedError struct {
	subject
	err error
}

func (e *refusedError) Error() string {
	return fmt.Sprintf("%s %s %s: %v", e.verb, e.what, e.name, e.err)
}

func (e *refusedError) Unwrap() error { return e.err }

// commit carries out a transaction: all of it or nothing.
func (c *conn) commit(b *batch) error {
	last := b.last()
	if err := unix.Sendto(c.fd, b.frame(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send a transaction of %d messages and %d bytes: %w", len(b.subjects), len(b.b), err)
	}
	var first error
	for done := false; !done; {
		err := c.receive(0, func(m message) {
			if m.kind != unix.NLMSG_ERROR || m.seq < firstSeq || m.seq > last+1 {
				return
			}
			if err := m.errno(); err != nil && first == nil {
				first = err
				if i := int(m.seq) - firstSeq - 1; i >= 0 && i < len(b.subjects) {
					first = &refusedError{b.subjects[i], err}
				}
			}
			done = done || m.seq == last || m.seq == firstSeq
		})
		if err != nil {
			return fmt.Errorf("read the answer to a transaction: %w", err)
		}
	}
	c.drain()
	return first
}

// drain throws away what else there is to read.
func (c *conn) drain() {
	for c.receive(unix.MSG_DONTWAIT, func(message) {}) == nil {
	}
}

// request asks for something and calls fn with the attributes of each answer.
func (c *conn) request(kind, flags uint16, ask func(*attrs), fn func([]byte)) error {
	c.drain()
	c.seq++
	b := new(batch)
	if flags == 0 {
		flags = unix.NLM_F_ACK
	}
	at := b.start(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, unix.NFPROTO_INET, c.seq)
	if ask != nil {
		ask(&b.attrs)
	}
	b.finish(at)
	if err := unix.Sendto(c.fd, b.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	var failed error
	interrupted := false
	for done := false; !done; {
		err := c.receive(0, func(m message) {
			if m.seq != c.seq {
				return
			}
			interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.kind == unix.NLMSG_ERROR, m.kind == unix.NLMSG_DONE:
				failed, done = m.errno(), true
			case len(m.data) > 4:
				fn(m.data[4:])
			}
		})
		if err != nil {
			return err
		}
	}
	if failed == nil && interrupted || errors.Is(failed, unix.EINTR) {
		return errInterrupted
	}
	return failed
}
