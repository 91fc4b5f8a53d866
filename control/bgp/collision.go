package bgp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"
)

// confirmed is how long a peer may take for the KEEPALIVE that answers an OPEN,
// a round trip's work, before a lost connection is looked for.
const confirmed = 5 * time.Second

// mindCollision sees to connections that GoBGP loses when two of a session
// collide (RFC 4271 section 6.8).
//
// If the OPEN on GoBGP's own connection comes before the one on the peer's,
// GoBGP (4.8) goes on with its own and forgets the peer's: it is neither read
// nor closed. A peer that decides for its own, as the greater router ID must,
// waits there for its hold time, and takes no other meanwhile; two nodes that do
// so to each other wait both. So what GoBGP has lost is ended when a session
// falls back from OpenConfirm, and when it stays there.
func (s *Speaker) mindCollision(ss *session, was packet.FSMState) {
	wait := time.Duration(0)
	switch {
	case ss.state == packet.BGP_FSM_OPENCONFIRM && was != packet.BGP_FSM_OPENCONFIRM:
		wait = confirmed
	case ss.state == packet.BGP_FSM_IDLE && was == packet.BGP_FSM_OPENCONFIRM:
	default:
		return
	}
	ss.attempt++
	attempt, state, e, peer, port := ss.attempt, ss.state, s.engine, ss.peer, s.cfg.ListenPort
	e.wg.Go(func() {
		select {
		case <-e.ctx.Done():
			return
		case <-time.After(wait):
		}
		s.mu.Lock()
		stays := ss.attempt == attempt && ss.state == state
		s.mu.Unlock()
		if !stays {
			return
		}
		n, err := endLost(peer.Addr, port, state)
		if n > 0 || err != nil {
			s.log.Info("ended connections that had collided", "peer", peer.Name, "address", peer.Addr, "connections", n, "error", err)
		}
	})
}

// connection is a TCP connection of this process.
type connection struct {
	fd            int
	local, remote netip.AddrPort
}

// lost returns those of this process's connections with a peer that GoBGP does
// not use in a state: in Idle it uses none, and in OpenConfirm its own, if it has
// both its own and one that it accepted on its port.
func lost(all []connection, peer netip.Addr, port uint16, state packet.FSMState) []connection {
	var accepted []connection
	own := state == packet.BGP_FSM_IDLE
	for _, c := range all {
		switch {
		case c.remote.Addr() != peer:
		case c.local.Port() == port:
			accepted = append(accepted, c)
		default:
			own = true
		}
	}
	if !own {
		return nil
	}
	return accepted
}

// endLost shuts down what [lost] finds, and returns how many that were. GoBGP
// keeps the descriptors, so they are not closed.
func endLost(peer netip.Addr, port uint16, state packet.FSMState) (int, error) {
	all, err := connections(peer)
	n := 0
	for _, c := range lost(all, peer, port, state) {
		if e := unix.Shutdown(c.fd, unix.SHUT_RDWR); e == nil {
			n++
		} else if !errors.Is(e, unix.ENOTCONN) { // the peer was first
			err = errors.Join(err, fmt.Errorf("shut down the connection from %s: %w", c.remote, e))
		}
	}
	for _, c := range all {
		unix.Close(c.fd)
	}
	return n, err
}

// connections returns this process's TCP connections with a peer. Their
// descriptors are duplicates, for the caller to close: the originals may be
// closed, and their numbers used again, at any time.
func connections(peer netip.Addr) ([]connection, error) {
	const dir = "/proc/self/fd"
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list this process's connections: %w", err)
	}
	var all []connection
	for _, name := range names {
		n, err := strconv.Atoi(name.Name())
		if err != nil {
			continue
		}
		fd, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue // closed meanwhile
		}
		if c, ok := tcpConnection(fd); ok && c.remote.Addr() == peer {
			all = append(all, c)
			continue
		}
		unix.Close(fd)
	}
	return all, nil
}

func tcpConnection(fd int) (connection, bool) {
	if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || p != unix.IPPROTO_TCP {
		return connection{}, false
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return connection{}, false
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return connection{}, false // listens, or was never connected
	}
	c := connection{fd, addrPort(local), addrPort(remote)}
	return c, c.remote.IsValid()
}

// addrPort returns a socket's address. A zone is the device's name, as in a
// peer's address.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		a := netip.AddrFrom16(sa.Addr).Unmap()
		if sa.ZoneId != 0 {
			if device, err := net.InterfaceByIndex(int(sa.ZoneId)); err == nil {
				a = a.WithZone(device.Name)
			}
		}
		return netip.AddrPortFrom(a, uint16(sa.Port))
	}
	return netip.AddrPort{}
}
