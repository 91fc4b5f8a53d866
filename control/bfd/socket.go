package bfd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Ports that packets go to: RFC 5881 section 4 and RFC 5883 section 5.
const (
	Port         = 3784
	MultihopPort = 4784
)

// ttl that packets are sent with, and that those over one hop must have when they arrive (RFC 5881 section 5).
const ttl = 255

// Source ports (RFC 5881 section 4).
const firstPort, lastPort = 49152, 65535

func port(multihop bool) int {
	if multihop {
		return MultihopPort
	}
	return Port
}

func network(a netip.Addr) string {
	if a.Is4() {
		return "udp4"
	}
	return "udp6"
}

// sender sends a session's packets, all from one port that no other session of this host has.
type sender struct{ conn *net.UDPConn }

func newSender(k Key) (*sender, error) {
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		return setSocket(raw, func(fd int) error {
			return setHeader(fd, k.Local.Is4())
		})
	}}
	// Ports of others are taken; so many in a row only if all are.
	var err error
	for range 64 {
		from := netip.AddrPortFrom(k.Local, uint16(firstPort+rand.IntN(lastPort-firstPort+1))) //nolint:gosec // within the range, and no secret
		var conn net.PacketConn
		conn, err = c.ListenPacket(context.Background(), network(k.Local), from.String())
		if err == nil {
			udp := conn.(*net.UDPConn)
			return &sender{udp}, connect(udp, k)
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("open a socket on %v: %w", k.Local, err)
}

// class is CS6, as routing protocols have it: full queues drop others first.
const class = 0xc0

func setHeader(fd int, v4 bool) error {
	if v4 {
		return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl), unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, class))
	}
	return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, ttl), unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, class))
}

// connect fixes the peer, so that the kernel looks its route up once and says what is wrong with it.
func connect(c *net.UDPConn, k Key) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var to unix.Sockaddr
	if k.Remote.Is4() {
		to = &unix.SockaddrInet4{Port: port(k.Multihop), Addr: k.Remote.As4()}
	} else {
		to = &unix.SockaddrInet6{Port: port(k.Multihop), Addr: k.Remote.As16(), ZoneId: zone(k.Remote)}
	}
	if err := setSocket(raw, func(fd int) error { return unix.Connect(fd, to) }); err != nil {
		c.Close()
		return fmt.Errorf("connect a socket to %v: %w", k.Remote, err)
	}
	return nil
}

func zone(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	if n, err := strconv.ParseUint(a.Zone(), 10, 32); err == nil {
		return uint32(n)
	}
	i, err := net.InterfaceByName(a.Zone())
	if err != nil {
		return 0
	}
	return uint32(i.Index)
}

func (s *sender) send(b []byte) error {
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		_, sent = unix.Write(int(fd), b)
		// A full queue is no reason to wait: the next packet is newer.
		return true
	})
	// What a packet before met, such as a peer without a socket, is reported once at the next one.
	if errors.Is(sent, unix.ECONNREFUSED) {
		sent = nil
	}
	if sent != nil {
		return fmt.Errorf("send: %w", sent)
	}
	return err
}

func (s *sender) close() { s.conn.Close() }

func setSocket(raw syscall.RawConn, do func(fd int) error) error {
	var done error
	if err := raw.Control(func(fd uintptr) { done = do(int(fd)) }); err != nil {
		return err
	}
	return done
}

// inbox has the sockets that packets arrive at, one for each family and kind that a session needs.
type inbox struct {
	sockets map[place]*net.UDPConn
	faults  map[place]error // of those that cannot be opened
	readers sync.WaitGroup
	done    chan struct{}
}

type place struct {
	v4, multihop bool
}

func placeOf(k Key) place { return place{k.Local.Is4(), k.Multihop} }

func newInbox() inbox {
	return inbox{sockets: map[place]*net.UDPConn{}, faults: map[place]error{}, done: make(chan struct{})}
}

// serve opens what the sessions need and is not open. It returns whether all is.
func (in *inbox) serve(sessions map[Key]*session, to chan<- received) bool {
	clear(in.faults)
	for k := range sessions {
		at := placeOf(k)
		if in.sockets[at] != nil || in.faults[at] != nil {
			continue
		}
		c, next, err := listen(at)
		if err != nil {
			in.faults[at] = err
			continue
		}
		in.sockets[at] = c
		in.readers.Go(func() { read(next, at.multihop, to, in.done) })
	}
	return len(in.faults) == 0
}

func (in *inbox) close() {
	close(in.done)
	for _, c := range in.sockets {
		c.Close()
	}
	in.readers.Wait()
}

func listen(at place) (*net.UDPConn, func(*received) (hops int, err error), error) {
	name := "udp6"
	if at.v4 {
		name = "udp4"
	}
	c, err := net.ListenUDP(name, &net.UDPAddr{Port: port(at.multihop)})
	if err != nil {
		return nil, nil, fmt.Errorf("listen on UDP port %d, which another program may have: %w", port(at.multihop), err)
	}
	next, err := reader(c, at.v4)
	if err != nil {
		c.Close()
		return nil, nil, fmt.Errorf("ask for the TTL of packets: %w", err)
	}
	return c, next, nil
}

// read hands packets over until the socket is closed. Over one hop only those count that no router has forwarded.
func read(next func(*received) (int, error), multihop bool, to chan<- received, done <-chan struct{}) {
	for {
		r := received{multihop: multihop}
		hops, err := next(&r)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !multihop && hops != ttl {
			continue
		}
		select {
		case to <- r:
		case <-done:
			return
		}
	}
}

// reader returns a function that reads one packet, its addresses and the TTL that it arrived with.
func reader(c *net.UDPConn, v4 bool) (func(*received) (hops int, err error), error) {
	if v4 {
		p := ipv4.NewPacketConn(c)
		err := p.SetControlMessage(ipv4.FlagTTL|ipv4.FlagDst, true)
		return func(r *received) (int, error) {
			n, m, from, err := p.ReadFrom(r.data[:])
			if err != nil || m == nil {
				return 0, err
			}
			r.n, r.to, r.from = n, address(m.Dst, ""), address(from.(*net.UDPAddr).IP, "")
			return m.TTL, nil
		}, err
	}
	p := ipv6.NewPacketConn(c)
	err := p.SetControlMessage(ipv6.FlagHopLimit|ipv6.FlagDst, true)
	return func(r *received) (int, error) {
		n, m, from, err := p.ReadFrom(r.data[:])
		if err != nil || m == nil {
			return 0, err
		}
		u := from.(*net.UDPAddr)
		r.n, r.to, r.from = n, address(m.Dst, u.Zone), address(u.IP, u.Zone)
		return m.HopLimit, nil
	}, err
}

// address returns an unmapped address, with its zone if it is link-local.
func address(ip net.IP, zone string) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	a = a.Unmap()
	if a.IsLinkLocalUnicast() && a.Is6() {
		a = a.WithZone(zone)
	}
	return a
}
