package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// Options are those of connections with one peer.
type Options struct {
	Peer   netip.AddrPort // with a zone over link-local addresses
	Source netip.Addr     // to connect from; invalid: the kernel chooses
	Device string         // of a VRF or link that the connection is bound to; empty: none
	// Auth signs segments. That of accepted connections is the listener's ([Listener.Sign]).
	Auth   Auth
	Others Passwords // that the peer may have in place of Auth.Password
	Hops   uint8     // to the peer for the check of RFC 5082; 0: no check
}

// Passwords are some that a peer may have, of which the empty one is none; so that
// Options can be compared they are in no slice.
type Passwords struct {
	N    int
	List [2]string
}

// auth is what to try at the n-th attempt in a row of which nothing is heard.
func (o *Options) auth(n int) Auth {
	a := o.Auth
	a.Keys = a.Keys.at(n)
	if n %= o.Others.N + 1; n > 0 {
		a.Password = o.Others.List[n-1]
	}
	return a
}

// ways is in how many ways a peer may sign that has not been heard yet.
func (o *Options) ways() int { return max(o.Others.N+1, o.Auth.Keys.N) }

const maxTTL = 255

// dial connects to the peer, and signs so.
func (o *Options) dial(ctx context.Context, a Auth) (*net.TCPConn, error) {
	d := net.Dialer{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) error {
		return control(raw, func(fd int) error {
			if o.Device != "" {
				if err := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, o.Device); err != nil {
					return fmt.Errorf("bind to device %s: %w", o.Device, err)
				}
			}
			if err := (&signing{}).set(fd, alone(o.Peer.Addr()), a); err != nil {
				return err
			}
			if a.Keys.N > 0 {
				if err := begin(fd, a.Keys.List[0]); err != nil {
					return err
				}
			}
			return o.setTTL(fd)
		})
	}}
	if o.Source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(o.Source, 0))
	}
	c, err := d.DialContext(ctx, "tcp", o.Peer.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// setTTL lets segments travel any number of hops, which a peer with RFC 5082 asks for,
// and drops what came from further away than it may.
func (o *Options) setTTL(fd int) error {
	level, ttl, least := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_MINTTL
	if o.Peer.Addr().Is6() {
		level, ttl, least = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_MINHOPCOUNT
	}
	if err := unix.SetsockoptInt(fd, level, ttl, maxTTL); err != nil {
		return fmt.Errorf("set TTL %d: %w", maxTTL, err)
	}
	if o.Hops == 0 {
		return nil
	}
	if err := unix.SetsockoptInt(fd, level, least, maxTTL+1-int(o.Hops)); err != nil {
		return fmt.Errorf("require TTL %d: %w", maxTTL+1-int(o.Hops), err)
	}
	return nil
}

// control calls do with a socket's descriptor.
func control(raw syscall.RawConn, do func(fd int) error) error {
	var err error
	return errors.Join(raw.Control(func(fd uintptr) { err = do(int(fd)) }), err)
}

// Listener accepts the connections of all peers that come to one address.
type Listener struct {
	tcp    *net.TCPListener
	signed map[netip.Prefix]*signing
}

// Listen listens on an address.
func Listen(ctx context.Context, at netip.AddrPort) (*Listener, error) {
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6"
	}
	lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) error {
		// The answer to a peer with RFC 5082 has to have it before it is accepted.
		return control(raw, (&Options{Peer: at}).setTTL)
	}}
	l, err := lc.Listen(ctx, network, at.String())
	if err != nil {
		return nil, err
	}
	return &Listener{l.(*net.TCPListener), map[netip.Prefix]*signing{}}, nil
}

// Addr is where the listener listens.
func (l *Listener) Addr() netip.AddrPort { return l.tcp.Addr().(*net.TCPAddr).AddrPort() }

// Sign has connections from a prefix signed, or no longer: those from one address, or from all of several that have nothing of their
// own. It is called by one goroutine at a time.
func (l *Listener) Sign(from netip.Prefix, a Auth) error {
	s := l.signed[from]
	if s == nil {
		s = &signing{}
		l.signed[from] = s
	}
	err := l.control(func(fd int) error { return s.set(fd, from, a) })
	if err == nil && a == (Auth{}) {
		delete(l.signed, from)
	}
	return err
}

func (l *Listener) control(do func(fd int) error) error {
	raw, err := l.tcp.SyscallConn()
	if err != nil {
		return err
	}
	return control(raw, do)
}

// Accept returns the next connection. It is to be handed to [Peer.Accept], or closed.
func (l *Listener) Accept() (*net.TCPConn, error) { return l.tcp.AcceptTCP() }

// Close ends Accept.
func (l *Listener) Close() error { return l.tcp.Close() }
