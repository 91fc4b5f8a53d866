package adjacent

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/ipv6"
)

// heard is a message that came in.
type heard struct {
	link int
	from netip.Addr
	kind kind
}

// socket sends and receives router advertisements and solicitations on all
// devices of a network namespace.
type socket struct {
	conn *ipv6.PacketConn
}

// openSocket opens a socket in the calling thread's network namespace.
func openSocket() (*socket, error) {
	c, err := net.ListenPacket("ip6:ipv6-icmp", "::")
	if err != nil {
		return nil, fmt.Errorf("open an ICMPv6 socket: %w", err)
	}
	s := &socket{conn: ipv6.NewPacketConn(c)}
	var filter ipv6.ICMPFilter
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
	filter.Accept(ipv6.ICMPTypeRouterSolicitation)
	filter.Accept(ipv6.ICMPTypeEchoReply)
	for _, set := range []func() error{
		func() error { return s.conn.SetICMPFilter(&filter) },
		func() error { return s.conn.SetControlMessage(ipv6.FlagHopLimit|ipv6.FlagInterface, true) },
		func() error { return s.conn.SetMulticastHopLimit(255) },
		func() error { return s.conn.SetMulticastLoopback(false) },
	} {
		if err := set(); err != nil {
			_ = c.Close()
			return nil, fmt.Errorf("set up an ICMPv6 socket: %w", err)
		}
	}
	return s, nil
}

func (s *socket) close() error { return s.conn.Close() }

// join makes solicitations that are sent on a link come in. Advertisements do
// so anyway.
func (s *socket) join(link int) error {
	return s.conn.JoinGroup(&net.Interface{Index: link}, &net.IPAddr{IP: net.IPv6linklocalallrouters})
}

// leave undoes join.
func (s *socket) leave(link int) error {
	return s.conn.LeaveGroup(&net.Interface{Index: link}, &net.IPAddr{IP: net.IPv6linklocalallrouters})
}

// send sends to a multicast group on a link.
func (s *socket) send(link int, from netip.Addr, to net.IP, message []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err := s.conn.WriteTo(message, &ipv6.ControlMessage{HopLimit: 255, IfIndex: link, Src: from.AsSlice()}, &net.IPAddr{IP: to})
	return err
}

// receive waits for a message.
func (s *socket) receive() (heard, error) {
	b := make([]byte, 1500)
	for {
		n, cm, from, err := s.conn.ReadFrom(b)
		if err != nil {
			return heard{}, err
		}
		a, ok := from.(*net.IPAddr)
		if cm == nil || !ok {
			continue
		}
		src, _ := netip.AddrFromSlice(a.IP)
		if k := meaning(b[:n], cm.HopLimit, src.IsLinkLocalUnicast()); k != nothing {
			return heard{link: cm.IfIndex, from: src, kind: k}, nil
		}
	}
}
