package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// errInterrupted says that the tables changed while they were listed, so that
// the listing may be incomplete.
var errInterrupted = errors.New("listing interrupted by changes")

// transport carries requests to the kernel. Tests put one in between that
// refuses what they choose.
type transport interface {
	// batch sends all messages of b at once and returns the refusals by the
	// message's place. The error is one of the connection: what became of
	// the messages is then not known.
	batch(b *builder) (map[int]error, error)
	// dump sends the request in b and calls fn for each answer. After
	// errInterrupted what fn saw must be thrown away.
	dump(b *builder, fn func(message)) error
	// port is the netlink port, by which echoes of our requests are known.
	port() uint32
	Close() error
}

// answerTimeout bounds the wait for an answer, or for the next part of a listing,
// which as a whole takes as long as it is. The kernel answers within the send; only
// a lost answer (no memory) or a broken socket runs into it.
const answerTimeout = 10 * time.Second

// bufferBytes is the size asked for of the sockets' buffers. An overrun costs
// a full listing, so it is generous; memory is used only when needed.
const bufferBytes = 32 << 20

// conn is a connection for requests. One goroutine uses it at a time.
type conn struct {
	c   *netlink.Conn
	raw syscall.RawConn
	seq uint32
	buf []byte
}

var _ transport = (*conn)(nil)

// dialConn opens a connection in the calling thread's network namespace.
func dialConn() (*conn, error) {
	c, raw, err := dial(unix.NETLINK_ROUTE, "rtnetlink", bufferBytes)
	if err != nil {
		return nil, err
	}
	return &conn{c: c, raw: raw, buf: make([]byte, 1<<16)}, nil
}

// dial opens a socket of a netlink protocol in the calling thread's network
// namespace.
func dial(protocol int, name string, buffer int) (*netlink.Conn, syscall.RawConn, error) {
	c, err := netlink.Dial(protocol, &netlink.Config{Strict: true})
	if err != nil {
		return nil, nil, fmt.Errorf("open %s socket: %w", name, err)
	}
	raw, err := c.SyscallConn()
	if err == nil {
		err = errors.Join(
			c.SetReadBuffer(buffer),
			c.SetWriteBuffer(buffer),
			c.SetOption(netlink.CapAcknowledge, true),
		)
	}
	if err != nil {
		c.Close()
		return nil, nil, fmt.Errorf("set up %s socket: %w", name, err)
	}
	return c, raw, nil
}

func (c *conn) port() uint32 { return c.c.PID() }
func (c *conn) Close() error { return c.c.Close() }

// send numbers the messages of b and sends them in one datagram. It returns
// the number of the first.
func (c *conn) send(b *builder) (uint32, error) {
	first := c.seq + 1
	for i := range b.starts {
		c.seq++
		binary.NativeEndian.PutUint32(b.message(i)[8:], c.seq)
	}
	var err error
	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	werr := c.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), b.buf, 0, to)
		return err != unix.EAGAIN && err != unix.EINTR
	})
	if err := errors.Join(werr, os.NewSyscallError("sendto", err)); err != nil {
		return 0, fmt.Errorf("send %d messages: %w", b.len(), err)
	}
	return first, nil
}

// receive reads one datagram from the kernel.
func (c *conn) receive() ([]byte, error) {
	for {
		n, fromKernel, err := receive(c.raw, c.buf)
		if err != nil {
			return nil, fmt.Errorf("receive: %w", err)
		}
		if fromKernel {
			return c.buf[:n], nil
		}
	}
}

// receive reads one datagram, waiting for it if need be.
func receive(raw syscall.RawConn, buf []byte) (n int, fromKernel bool, err error) {
	var from unix.Sockaddr
	rerr := raw.Read(func(fd uintptr) bool {
		for {
			n, from, err = unix.Recvfrom(int(fd), buf, 0)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	if rerr != nil {
		return 0, false, rerr
	}
	if err != nil {
		return 0, false, os.NewSyscallError("recvfrom", err)
	}
	sa, ok := from.(*unix.SockaddrNetlink)
	return n, ok && sa.Pid == 0, nil
}

func (c *conn) batch(b *builder) (map[int]error, error) {
	if b.len() == 0 {
		return nil, nil
	}
	// Only the last message asks for an acknowledgement: refusals come back
	// without being asked for, and acknowledgements cost a quarter of the
	// speed.
	last := b.message(b.len() - 1)
	binary.NativeEndian.PutUint16(last[6:], u16(last[6:])|unix.NLM_F_ACK)
	if err := c.c.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
		return nil, err
	}
	first, err := c.send(b)
	if err != nil {
		return nil, err
	}
	var errs map[int]error
	for {
		data, err := c.receive()
		if err != nil {
			return nil, err
		}
		for m := range messages(data) {
			i := int(int32(m.seq - first))
			if m.typ != unix.NLMSG_ERROR || i < 0 || i >= b.len() {
				continue // the answer to an earlier request that was given up
			}
			if err := parseError(m); err != nil {
				if errs == nil {
					errs = make(map[int]error)
				}
				errs[i] = err
			}
			if i == b.len()-1 {
				return errs, nil
			}
		}
	}
}

func (c *conn) dump(b *builder, fn func(message)) error { return c.exchange(b, unix.NLM_F_DUMP, fn) }

// ask sends the one request in b and calls fn for the answer, if there is one.
func (c *conn) ask(b *builder, fn func(message)) error { return c.exchange(b, unix.NLM_F_ACK, fn) }

func (c *conn) exchange(b *builder, flags uint16, fn func(message)) error {
	head := b.message(0)
	binary.NativeEndian.PutUint16(head[6:], u16(head[6:])|flags)
	seq, err := c.send(b)
	if err != nil {
		return err
	}
	interrupted := false
	for {
		if err := c.c.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
			return err
		}
		data, err := c.receive()
		if err != nil {
			return err
		}
		for m := range messages(data) {
			if m.seq != seq {
				continue
			}
			// The mark may be on any message, the last included.
			interrupted = interrupted || m.flags&nlmDumpIntr != 0
			switch m.typ {
			case unix.NLMSG_ERROR, unix.NLMSG_DONE:
				if err := parseError(m); err != nil && len(m.body) >= 4 {
					if errors.Is(err, unix.EINTR) {
						return errInterrupted
					}
					return err
				}
				if interrupted {
					return errInterrupted
				}
				return nil
			default:
				fn(m)
			}
		}
	}
}
