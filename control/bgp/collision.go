package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
)

const (
	// confirmed is how long a peer may take for the KEEPALIVE that answers an
	// OPEN, a round trip's work, before a lost connection is looked for.
	confirmed = 5 * time.Second
	// unheard is for how long what a peer has sent is left unread on a connection
	// that GoBGP has lost. Whatever it uses has a reader.
	unheard = time.Second
	// looks is how often a lost connection is looked for after a session fell back: what
	// shows it, the peer's next message, may come later than that.
	looks = 5
)

// mindCollision sees to connections that GoBGP loses when two of a session
// collide (RFC 4271 section 6.8).
//
// If the OPEN on GoBGP's own connection comes before the one on the peer's,
// GoBGP (4.8) goes on with its own and forgets the peer's: it is neither read
// nor closed. A peer that decides for its own, as the greater router ID must,
// waits there for its hold time, and takes no other meanwhile; two nodes that do
// so to each other wait both. So what GoBGP has lost is ended when a session
// falls back from OpenConfirm, and when it stays there. Where GoBGP never
// connects itself nothing collides.
func (e *gobgp) mindCollision(p *gobgpPeer, was packet.FSMState) {
	wait, times := time.Duration(0), 1
	switch {
	case p.Passive || !e.listen:
		return
	case p.state == packet.BGP_FSM_OPENCONFIRM && was != packet.BGP_FSM_OPENCONFIRM:
		wait = confirmed
	case p.state == packet.BGP_FSM_IDLE && was == packet.BGP_FSM_OPENCONFIRM:
		times = looks
	default:
		return
	}
	p.attempt++
	attempt, state, peer := p.attempt, p.state, p.Peer
	stays := func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.ctx.Err() == nil && e.peers[peer.Addr] == p && p.attempt == attempt &&
			(p.state == state || state == packet.BGP_FSM_IDLE && p.state < packet.BGP_FSM_OPENSENT)
	}
	e.wg.Go(func() {
		_ = async.Sleep(e.ctx, wait) // stays looks at the context
		for ; times > 0 && stays(); times-- {
			e.looking.Lock() // one look at a time: each walks all descriptors
			n, err := endLost(e.ctx, peer.Addr, e.port)
			e.looking.Unlock()
			if n > 0 || err != nil {
				e.log.Info("ended connections that had collided", "peer", peer.Name, "address", peer.Addr, "connections", n, "error", err)
				return
			}
			if times > 1 {
				_ = async.Sleep(e.ctx, unheard)
			}
		}
	})
}

// connection is a TCP connection of this process.
type connection struct {
	fd            int
	local, remote netip.AddrPort
}

// same reports whether o is the same connection, by another descriptor perhaps.
func (c connection) same(o connection) bool { return c.local == o.local && c.remote == o.remote }

// endLost shuts down the connections that were accepted from a peer on a port and
// that nobody reads, and returns how many that were. GoBGP keeps the descriptors,
// so they are not closed.
func endLost(ctx context.Context, peer netip.Addr, port uint16) (int, error) {
	all, err := connections(peer, port)
	defer func() {
		for _, c := range all {
			unix.Close(c.fd)
		}
	}()
	before := make([]int, len(all))
	for i, c := range all {
		before[i] = c.unread()
	}
	if !slices.ContainsFunc(before, func(n int) bool { return n > 0 }) || async.Sleep(ctx, unheard) != nil {
		return 0, err
	}
	n := 0
	for i, c := range all {
		if before[i] == 0 || c.unread() < before[i] {
			continue
		}
		if e := unix.Shutdown(c.fd, unix.SHUT_RDWR); e == nil {
			n++
		} else if !errors.Is(e, unix.ENOTCONN) { // the peer was first
			err = errors.Join(err, fmt.Errorf("shut down the connection from %s: %w", c.remote, e))
		}
	}
	return n, err
}

// unread is how many bytes have come that nobody has read (SIOCINQ of tcp(7)).
func (c connection) unread() int {
	n, err := unix.IoctlGetInt(c.fd, unix.SIOCINQ)
	if err != nil {
		return 0
	}
	return n
}

// connections returns the connections that this process has accepted from a peer
// on a port, each once. Their descriptors are duplicates, for the caller to
// close: the originals may be closed, and their numbers used again, at any time.
func connections(peer netip.Addr, port uint16) ([]connection, error) {
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
		if what, err := os.Readlink(filepath.Join(dir, name.Name())); err != nil || !strings.HasPrefix(what, "socket:") {
			continue
		}
		fd, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue // closed meanwhile
		}
		c, ok := tcpConnection(fd)
		if ok && c.remote.Addr() == peer && c.local.Port() == port && !slices.ContainsFunc(all, c.same) {
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
