package workload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// batch is a series of rtnetlink requests (rtnetlink(7)) that go to the kernel
// in one send. It carries them out in their order, each whatever became of the
// one before.
type batch struct {
	b     []byte
	count int
}

// start begins a request and returns what ends it.
func (m *batch) start(kind, flags uint16, header []byte) (end func()) {
	at := len(m.b)
	m.count++
	m.b = append(m.b, make([]byte, unix.SizeofNlMsghdr)...)
	h := m.b[at:]
	binary.NativeEndian.PutUint16(h[4:], kind)
	binary.NativeEndian.PutUint16(h[6:], flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	binary.NativeEndian.PutUint32(h[8:], uint32(m.count))
	m.b = append(m.b, header...)
	return func() { binary.NativeEndian.PutUint32(m.b[at:], uint32(len(m.b)-at)) }
}

// attr appends an attribute.
func (m *batch) attr(kind uint16, value []byte) {
	m.b = binary.NativeEndian.AppendUint16(m.b, uint16(unix.SizeofRtAttr+len(value)))
	m.b = binary.NativeEndian.AppendUint16(m.b, kind)
	m.b = append(m.b, value...)
	for len(m.b)%unix.RTA_ALIGNTO != 0 {
		m.b = append(m.b, 0)
	}
}

func (m *batch) number(kind uint16, v uint32) { m.attr(kind, binary.NativeEndian.AppendUint32(nil, v)) }

func (m *batch) text(kind uint16, s string) { m.attr(kind, append([]byte(s), 0)) }

// nest begins an attribute made of attributes, with a header of its own or
// none, and returns what ends it.
func (m *batch) nest(kind uint16, header []byte) (end func()) {
	at := len(m.b)
	m.attr(kind, header)
	return func() { binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at)) }
}

// linkHeader is a struct ifinfomsg; with up it sets the device up.
func linkHeader(index int, up bool) []byte {
	b := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	if up {
		binary.NativeEndian.PutUint32(b[8:], unix.IFF_UP)
		binary.NativeEndian.PutUint32(b[12:], unix.IFF_UP)
	}
	return b
}

// skipStats is RTEXT_FILTER_SKIP_STATS (linux/rtnetlink.h).
const skipStats = 1 << 3

// getLink asks for a device.
func (m *batch) getLink(name string) {
	end := m.start(unix.RTM_GETLINK, 0, linkHeader(0, false))
	m.text(unix.IFLA_IFNAME, name)
	m.number(unix.IFLA_EXT_MASK, skipStats)
	end()
}

// linkState is what the kernel says of a device.
type linkState struct {
	index     int
	mac       dataplane.MAC
	operState netlink.LinkOperState
}

// reply is what the kernel answers to a batch.
type reply struct {
	errs  []error // of each request; nil: done
	links []linkState
}

// first returns the first error of a reply.
func (r reply) first() error {
	for _, err := range r.errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// socket is an rtnetlink socket of the namespace that it was opened in. One
// goroutine uses it at a time.
type socket struct {
	fd  int
	buf []byte
}

// openSocket opens a socket in the calling thread's namespace.
func openSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	// The kernel answers before the send returns; this is for one that does not.
	const seconds = 10
	err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: seconds})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("set up netlink socket: %w", err)
	}
	return &socket{fd: fd, buf: make([]byte, 16<<10)}, nil
}

func (s *socket) close() { _ = unix.Close(s.fd) }

// errAnswer says that the kernel's answer cannot be understood; what it did is
// not known then.
var errAnswer = errors.New("netlink answer cannot be understood")

// exchange sends a batch and returns the answers. After an error the socket is
// of no use any more: old answers may be in it.
func (s *socket) exchange(m *batch) (reply, error) {
	r := reply{errs: make([]error, m.count)}
	if err := unix.Sendto(s.fd, m.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return r, fmt.Errorf("send %d netlink requests: %w", m.count, err)
	}
	for left := m.count; left > 0; {
		n, from, err := unix.Recvfrom(s.fd, s.buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return r, fmt.Errorf("read the answer to %d netlink requests: %w", m.count, err)
		}
		if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
			continue // only the kernel answers
		}
		done, err := r.take(s.buf[:n])
		if err != nil {
			return r, err
		}
		left -= done
	}
	return r, nil
}

// take reads the messages of one datagram, and returns how many requests they
// end.
func (r *reply) take(b []byte) (done int, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return done, errAnswer
		}
		kind, seq, body := binary.NativeEndian.Uint16(b[4:]), int(binary.NativeEndian.Uint32(b[8:])), b[unix.SizeofNlMsghdr:n]
		switch {
		case seq < 1 || seq > len(r.errs):
			return done, errAnswer
		case kind == unix.NLMSG_ERROR && len(body) >= 4:
			if code := int32(binary.NativeEndian.Uint32(body)); code != 0 { //nolint:gosec // two's complement
				r.errs[seq-1] = unix.Errno(-code)
			}
			done++
		case kind == unix.RTM_NEWLINK && len(body) >= unix.SizeofIfInfomsg:
			r.links = append(r.links, parseLink(body))
		}
		b = b[min((n+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
	return done, nil
}

func parseLink(body []byte) linkState {
	l := linkState{index: int(int32(binary.NativeEndian.Uint32(body[4:])))} //nolint:gosec // as the kernel has it
	for b := body[unix.SizeofIfInfomsg:]; len(b) >= unix.SizeofRtAttr; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			break
		}
		switch value := b[unix.SizeofRtAttr:n]; binary.NativeEndian.Uint16(b[2:]) {
		case unix.IFLA_ADDRESS:
			copy(l.mac[:], value)
		case unix.IFLA_OPERSTATE:
			if len(value) > 0 {
				l.operState = netlink.LinkOperState(value[0])
			}
		}
		b = b[min((n+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1), len(b)):]
	}
	return l
}

// sockets keeps sockets of one namespace open, as many as were used at a time.
type sockets struct {
	ns   *namespace
	free chan *socket
}

// keptSockets bounds how many sockets stay open while nobody uses them.
const keptSockets = 16

func newSockets(ns *namespace) *sockets { return &sockets{ns, make(chan *socket, keptSockets)} }

// exchange does what [socket.exchange] does, on a socket that nobody else has.
func (k *sockets) exchange(m *batch) (reply, error) {
	var s *socket
	select {
	case s = <-k.free:
	default:
		err := k.ns.do(func() (err error) {
			s, err = openSocket()
			return err
		})
		if err != nil {
			return reply{}, err
		}
	}
	r, err := s.exchange(m)
	if err != nil {
		s.close()
		return r, err
	}
	select {
	case k.free <- s:
	default:
		s.close()
	}
	return r, nil
}

func (k *sockets) close() {
	for {
		select {
		case s := <-k.free:
			s.close()
		default:
			return
		}
	}
}

// hardware is a MAC as attributes have it.
func hardware(m dataplane.MAC) net.HardwareAddr { return net.HardwareAddr(m[:]) }
