package survey

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Packet is what is asked about.
type Packet struct {
	From, To netip.Addr
	In       string // the device that it comes in by; empty: this host sends it
}

func (p Packet) String() string {
	s := fmt.Sprintf("%s from %s", p.To, p.From)
	if p.In != "" {
		s += " iif " + p.In
	}
	return s
}

// Hop is where the kernel sends a packet.
type Hop struct {
	Device  string
	Gateway netip.Addr // invalid: it is on the link
	Table   uint32     // of the route
}

func (h Hop) String() string {
	s := "dev " + h.Device
	if h.Gateway.IsValid() {
		s = "via " + h.Gateway.String() + " " + s
	}
	if h.Table != dataplane.MainTable {
		s += fmt.Sprintf(" table %d", h.Table)
	}
	return s
}

// Why a packet goes nowhere.
var (
	// ErrSource says that the answer to the packet's source would leave by another
	// device, and the one that it came in by is strict about that (RFC 3704).
	ErrSource = errors.New("its source is not reached by the device that it comes in by, and that one is strict (rp_filter)")
	// ErrNotForwarded says that the device that it comes in by does not forward.
	ErrNotForwarded = errors.New("the device that it comes in by does not forward")
	// ErrNoRoute says that no route leads there.
	ErrNoRoute = errors.New("no route leads there")
	// ErrForbidden says that a route or a rule drops it.
	ErrForbidden = errors.New("a route or a rule drops it")
)

// Asker asks the kernel where packets go, in one network namespace. It is safe for
// concurrent use.
type Asker struct{ conn *nl.Conn }

// Open returns an Asker for the network namespace of the calling thread.
func Open() (*Asker, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, 0, 0)
	if err != nil {
		return nil, err
	}
	return &Asker{c}, nil
}

// Close ends the Asker.
func (a *Asker) Close() error { return a.conn.Close() }

// Ask returns where the kernel sends a packet (RTM_GETROUTE). Policy routing rules,
// the source check and forwarding have their say, the packet filter has not.
func (a *Asker) Ask(p Packet) (Hop, error) {
	head := make([]byte, unix.SizeofRtMsg)
	head[0] = nl.Family(p.To)
	head[1] = byte(p.To.BitLen())
	if p.To.Is4() { // for IPv6 the kernel says it unasked, and takes no flag
		binary.NativeEndian.PutUint32(head[8:], unix.RTM_F_LOOKUP_TABLE) // say which table
	}
	var b nl.Batch
	in := uint32(0)
	if p.In != "" {
		link, err := net.InterfaceByName(p.In)
		if err != nil {
			return Hop{}, fmt.Errorf("find device %s: %w", p.In, err)
		}
		in = uint32(link.Index)
	}
	if p.From.IsValid() {
		head[2] = byte(p.From.BitLen())
	}
	b.Begin(unix.RTM_GETROUTE, 0, head...)
	b.Addr(unix.RTA_DST, p.To)
	if p.From.IsValid() {
		b.Addr(unix.RTA_SRC, p.From)
	}
	if in != 0 {
		b.Uint32(unix.RTA_IIF, in)
	}
	var h Hop
	var oif uint32
	err := a.conn.Do(&b, func(_ int, m nl.Message) {
		if m.Type != unix.RTM_NEWROUTE || len(m.Body) < unix.SizeofRtMsg {
			return
		}
		h.Table = uint32(m.Body[4])
		for t, v := range nl.Attributes(m.Body[unix.SizeofRtMsg:]) {
			switch t {
			case unix.RTA_OIF:
				oif = v.Uint32()
			case unix.RTA_GATEWAY:
				h.Gateway = v.Addr()
			case unix.RTA_TABLE:
				h.Table = v.Uint32()
			}
		}
	})
	switch {
	case err == nil:
	case errors.Is(err, unix.EXDEV):
		return Hop{}, ErrSource
	case errors.Is(err, unix.EHOSTUNREACH):
		return Hop{}, ErrNotForwarded
	case errors.Is(err, unix.ENETUNREACH):
		return Hop{}, ErrNoRoute
	case errors.Is(err, unix.EINVAL) && p.In != "":
		// Since Linux 6.13 the answer is the same for all that is dropped on its way in.
		if back, err := a.Ask(Packet{To: p.From}); err == nil && back.Device != p.In {
			return Hop{}, ErrSource
		}
		return Hop{}, ErrForbidden
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return Hop{}, ErrForbidden
	default:
		return Hop{}, fmt.Errorf("ask for the route of %s: %w", p, err)
	}
	h.Device = linkName(oif)
	return h, nil
}

// linkName returns the name of a device; of one that is gone its number.
func linkName(index uint32) string {
	l, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return fmt.Sprintf("if%d", index)
	}
	return l.Name
}
