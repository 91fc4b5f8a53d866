package workload

import (
	"encoding/binary"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// batch is a series of rtnetlink requests (rtnetlink(7)) that go to the kernel
// in one send. It carries them out in their order, each whatever became of the
// one before.
type batch struct{ nl.Batch }

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
	m.Begin(unix.RTM_GETLINK, 0, linkHeader(0, false)...)
	m.Text(unix.IFLA_IFNAME, name)
	m.Uint32(unix.IFLA_EXT_MASK, skipStats)
}

// linkState is what the kernel says of a device.
type linkState struct {
	index     int
	mac       dataplane.MAC
	operState netlink.LinkOperState
}

// reply is what the kernel answers to a batch.
type reply struct {
	refused error // of the first request that was
	links   []linkState
}

// exchange sends a batch and returns the answers.
func exchange(c *nl.Conn, m *batch) (r reply, err error) {
	errs, err := c.Batch(&m.Batch, func(_ int, m nl.Message) {
		if m.Type == unix.RTM_NEWLINK && len(m.Body) >= unix.SizeofIfInfomsg {
			r.links = append(r.links, parseLink(m.Body))
		}
	})
	_, r.refused = nl.First(errs)
	return r, err
}

func parseLink(body []byte) linkState {
	l := linkState{index: int(int32(nl.Value(body[4:]).Uint32()))}
	for kind, v := range nl.Attributes(body[unix.SizeofIfInfomsg:]) {
		switch kind {
		case unix.IFLA_ADDRESS:
			copy(l.mac[:], v)
		case unix.IFLA_OPERSTATE:
			l.operState = netlink.LinkOperState(v.Uint8())
		}
	}
	return l
}

// openSocket opens a socket in the calling thread's namespace.
func openSocket() (*nl.Conn, error) { return nl.Dial(unix.NETLINK_ROUTE, 0, 0) }

// sockets keeps sockets of one namespace open, as many as were used at a time.
type sockets struct {
	ns   *namespace
	free chan *nl.Conn
}

// keptSockets bounds how many sockets stay open while nobody uses them.
const keptSockets = 16

func newSockets(ns *namespace) *sockets { return &sockets{ns, make(chan *nl.Conn, keptSockets)} }

// exchange does what [exchange] does, on a socket that nobody else has.
func (k *sockets) exchange(m *batch) (reply, error) {
	var s *nl.Conn
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
	r, err := exchange(s, m)
	if err != nil {
		_ = s.Close()
		return r, err
	}
	select {
	case k.free <- s:
	default:
		_ = s.Close()
	}
	return r, nil
}

func (k *sockets) close() {
	for {
		select {
		case s := <-k.free:
			_ = s.Close()
		default:
			return
		}
	}
}

// hardware is a MAC as attributes have it.
func hardware(m dataplane.MAC) net.HardwareAddr { return net.HardwareAddr(m[:]) }
