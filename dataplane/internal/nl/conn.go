package nl

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrInterrupted says that the table changed while it was dumped (NLM_F_DUMP_INTR),
// so that the dump may be incomplete.
var ErrInterrupted = errors.New("dump interrupted by changes")

// answerSeconds bounds the wait for an answer, or for the next part of a dump,
// which as a whole takes as long as it is. The kernel answers within the send;
// only a lost answer (no memory) or a broken socket runs into it.
const answerSeconds = 10

// Conn carries requests. It is safe for concurrent use; requests wait for one
// another.
//
// Its socket blocks: the answers are there when they are read, so the runtime's
// poller would only be woken for nothing, which costs a small request a quarter
// of its speed.
type Conn struct {
	port uint32

	mu  sync.Mutex
	fd  int // -1: closed
	seq uint32
	buf []byte
}

// Dial opens a connection of a netlink protocol (NETLINK_*) in the calling
// thread's network namespace. Send and receive are the sizes asked for of the
// socket's buffers in bytes; 0: the kernel's default. What is sent at once must
// fit the first.
func Dial(protocol, send, receive int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open %s socket: %w", name(protocol), err)
	}
	c := &Conn{fd: fd, buf: make([]byte, 1<<16)}
	if err := c.setup(send, receive); err != nil {
		return nil, errors.Join(fmt.Errorf("set up %s socket: %w", name(protocol), err), c.Close())
	}
	return c, nil
}

func (c *Conn) setup(send, receive int) error {
	for _, b := range []struct{ size, force, option int }{{send, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}, {receive, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}} {
		if b.size > 0 && unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, b.force, b.size) != nil {
			if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, b.option, b.size); err != nil {
				return err
			}
		}
	}
	// Refusals come with a text, and without the request, which may be long.
	for _, option := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK, unix.NETLINK_GET_STRICT_CHK} {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, option, 1); err != nil {
			return err
		}
	}
	err := errors.Join(
		unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerSeconds}),
		unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		return err
	}
	own, err := unix.Getsockname(c.fd)
	if sa, ok := own.(*unix.SockaddrNetlink); ok {
		c.port = sa.Pid
	}
	return err
}

// Listen opens a socket for the notifications of multicast groups (RTNLGRP_*,
// NFNLGRP_*) in the calling thread's network namespace, with a buffer of that
// many bytes; 0: the kernel's default.
func Listen(protocol, buffer int, groups ...uint32) (*netlink.Conn, syscall.RawConn, error) {
	c, err := netlink.Dial(protocol, &netlink.Config{Strict: true})
	if err != nil {
		return nil, nil, fmt.Errorf("open %s socket: %w", name(protocol), err)
	}
	raw, err := c.SyscallConn()
	if err == nil && buffer > 0 {
		err = c.SetReadBuffer(buffer)
	}
	for _, g := range groups {
		if err == nil {
			err = c.JoinGroup(g)
		}
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("set up %s socket for groups %v: %w", name(protocol), groups, err), c.Close())
	}
	return c, raw, nil
}

func name(protocol int) string {
	switch protocol {
	case unix.NETLINK_ROUTE:
		return "rtnetlink"
	case unix.NETLINK_NETFILTER:
		return "nfnetlink"
	case unix.NETLINK_GENERIC:
		return "generic netlink"
	}
	return fmt.Sprintf("netlink %d", protocol)
}

// Port is the port by which notifications tell our requests from others'.
func (c *Conn) Port() uint32 { return c.port }

// Close ends the connection, after a request in progress; a second call does
// nothing. Later requests fail with [net.ErrClosed].
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return nil
	}
	fd := c.fd
	c.fd = -1
	return os.NewSyscallError("close", unix.Close(fd))
}

// Batch sends all messages of b at once and returns the refusals by the message's
// place. It calls answer, unless that is nil, for each message of the answers,
// with the place of the request; the body is valid until answer returns, which must
// wait for nobody who may use the connection. The error is one of the connection: what became of the messages is then not known.
func (c *Conn) Batch(b *Batch, answer func(i int, m Message)) (map[int]error, error) {
	return c.exchange(b, answer, nil, nil)
}

// Do is Batch for messages of which none may be refused: it returns the first
// refusal.
func (c *Conn) Do(b *Batch, answer func(i int, m Message)) error {
	errs, err := c.Batch(b, answer)
	_, refused := First(errs)
	return errors.Join(err, refused)
}

// Transaction carries out all messages of b, or none, for a subsystem of
// netfilter that has transactions (NFNL_SUBSYS_*). It returns the refusals by the
// message's place; what is refused as a whole is an error.
func (c *Conn) Transaction(subsystem byte, b *Batch) (map[int]error, error) {
	var begin, end Batch
	begin.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, subsystem)
	end.Begin(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, subsystem)
	return c.exchange(b, nil, &begin, &end)
}

// First returns the refusal of the message that comes first, and its place.
func First(errs map[int]error) (i int, err error) {
	for j, e := range errs {
		if err == nil || j < i {
			i, err = j, e
		}
	}
	return i, err
}

func (c *Conn) exchange(b *Batch, answer func(int, Message), begin, end *Batch) (map[int]error, error) {
	n := b.Len()
	if n == 0 {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// Only the last message asks for an acknowledgement: refusals come back
	// without being asked for.
	b.flag(n-1, unix.NLM_F_ACK)
	first := c.seq + 2 // one before it for begin, one after the last for end
	c.seq = first + uint32(n)
	list := [][]byte{b.Finish(first)}
	if begin != nil {
		list = [][]byte{begin.Finish(first - 1), list[0], end.Finish(c.seq)}
	}
	err := c.send(list)
	if err != nil {
		return nil, fmt.Errorf("send %d messages of %d bytes: %w", n, len(b.B), err)
	}
	r := replies{first: first, n: n, answer: answer}
	err = c.receive(r.take)
	return r.errs, err
}

// replies is what the kernel answers to n requests, numbered from first.
type replies struct {
	first  uint32
	n      int
	answer func(int, Message)
	errs   map[int]error
}

// take reads one message, and reports whether it is the last.
func (r *replies) take(m Message) (done bool, err error) {
	i := int(int32(m.Seq - r.first))
	switch {
	case i < -1 || i >= r.n:
		return false, nil // the answer to an earlier request that was given up
	case m.Type != unix.NLMSG_ERROR:
		if r.answer != nil && i >= 0 {
			r.answer(i, m)
		}
		return false, nil
	}
	err = m.Err()
	if i < 0 {
		return err != nil, err // the transaction as a whole
	}
	if err != nil {
		if r.errs == nil {
			r.errs = make(map[int]error)
		}
		r.errs[i] = err
	}
	return i == r.n-1, nil
}

// Dump sends the one request in b and calls fn for each message of the answer,
// whose body is valid until fn returns. The connection is busy meanwhile: fn must
// wait for nobody who may use it. After [ErrInterrupted] what fn saw may be
// incomplete.
func (c *Conn) Dump(b *Batch, fn func(Message)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.flag(0, unix.NLM_F_DUMP)
	c.seq += 2
	if err := c.send([][]byte{b.Finish(c.seq)}); err != nil {
		return fmt.Errorf("send a request: %w", err)
	}
	interrupted := false
	return c.receive(func(m Message) (done bool, err error) {
		if m.Seq != c.seq {
			return false, nil
		}
		// The mark may be on any message, the last included.
		interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
		if m.Type != unix.NLMSG_ERROR && m.Type != unix.NLMSG_DONE {
			fn(m)
			return false, nil
		}
		if len(m.Body) >= 4 {
			err = m.Err()
		}
		if err == nil && interrupted || errors.Is(err, unix.EINTR) {
			err = ErrInterrupted
		}
		return true, err
	})
}

// Undisturbed calls dump, which begins anew each time, until nothing interrupts
// it, so often at most; then its error is [ErrInterrupted].
func Undisturbed(tries int, dump func() error) (err error) {
	for range tries {
		if err = dump(); !errors.Is(err, ErrInterrupted) {
			return err
		}
	}
	return fmt.Errorf("%w each time of %d", err, tries)
}

// List asks for a listing over a connection of its own, in the network namespace of
// the calling thread, and returns the messages of one that nothing interrupted, of so
// many tries at most.
func List(protocol, tries int, b *Batch) ([]Message, error) {
	c, err := Dial(protocol, 0, 0)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var list []Message
	err = Undisturbed(tries, func() error {
		list = nil
		return c.Dump(b, func(m Message) {
			m.Body = bytes.Clone(m.Body)
			list = append(list, m)
		})
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// send sends one datagram.
func (c *Conn) send(parts [][]byte) error {
	if c.fd < 0 {
		return net.ErrClosed
	}
	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	for {
		var err error
		if len(parts) == 1 {
			err = unix.Sendto(c.fd, parts[0], 0, to)
		} else {
			_, err = unix.SendmsgBuffers(c.fd, parts, nil, to, 0)
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("send", err)
		}
	}
}

// receive calls fn for each message that the kernel sends, until it is done or
// fails.
func (c *Conn) receive(fn func(Message) (done bool, err error)) error {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("the kernel does not answer within %d s", answerSeconds)
		case err != nil:
			return os.NewSyscallError("recvfrom", err)
		}
		if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
			continue // only the kernel answers
		}
		if done, err := each(c.buf[:n], fn); done || err != nil {
			return err
		}
	}
}

// each calls fn for each message of a datagram, until it is done or fails.
func each(b []byte, fn func(Message) (done bool, err error)) (done bool, err error) {
	for len(b) > 0 && !done && err == nil {
		var m Message
		if m, b, err = next(b); err == nil {
			done, err = fn(m)
		}
	}
	return done, err
}
