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
	// Password signs segments (RFC 2385); empty: none does. Those of accepted
	// connections are the listener's ([Listener.SetPassword]).
	Password string
	Others   Passwords // that the peer may have instead
	Hops     uint8     // to the peer for the check of RFC 5082; 0: no check
}

// Passwords are some that a peer may have, of which the empty one is none; so that
// Options can be compared they are in no slice.
type Passwords struct {
	N    int
	List [2]string
}

// password is the one to try at the n-th attempt in a row of which nothing is heard.
func (o *Options) password(n int) string {
	if n %= o.Others.N + 1; n > 0 {
		return o.Others.List[n-1]
	}
	return o.Password
}

const maxTTL = 255

// dial connects to the peer with a password.
func (o *Options) dial(ctx context.Context, password string) (*net.TCPConn, error) {
	d := net.Dialer{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) error {
		return control(raw, func(fd int) error {
			if o.Device != "" {
				if err := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, o.Device); err != nil {
					return fmt.Errorf("bind to device %s: %w", o.Device, err)
				}
			}
			if password != "" {
				if err := SetPassword(fd, o.Peer.Addr(), password); err != nil {
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

// SetPassword has a socket sign what it exchanges with an address, or with an empty
// password no longer (TCP_MD5SIG, tcp(7)).
func SetPassword(fd int, a netip.Addr, password string) error {
	return setKey(fd, unix.TCP_MD5SIG, &unix.TCPMD5Sig{}, a, password)
}

// SetRangePassword is [SetPassword] with all addresses of a prefix that have no password of their own (TCP_MD5SIG_EXT).
func SetRangePassword(fd int, p netip.Prefix, password string) error {
	const byPrefix = 1 // TCP_MD5SIG_FLAG_PREFIX
	if err := setKey(fd, unix.TCP_MD5SIG_EXT, &unix.TCPMD5Sig{Flags: byPrefix, Prefixlen: uint8(p.Bits())}, p.Addr(), password); err != nil {
		return fmt.Errorf("range %s: %w", p, err)
	}
	return nil
}

func setKey(fd, option int, k *unix.TCPMD5Sig, a netip.Addr, password string) error {
	k.Keylen = uint16(len(password))
	if len(password) > len(k.Key) {
		return fmt.Errorf("password of %d bytes, where the kernel has room for %d", len(password), len(k.Key))
	}
	copy(k.Key[:], password)
	if a.Is4() {
		k.Addr.Family = unix.AF_INET
		b := a.As4()
		copy(k.Addr.Data[2:], b[:]) // struct sockaddr_in: port, address
	} else {
		k.Addr.Family = unix.AF_INET6
		b := a.As16()
		copy(k.Addr.Data[6:], b[:]) // struct sockaddr_in6: port, flow label, address
	}
	err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, option, k)
	if err != nil && !(password == "" && errors.Is(err, unix.ENOENT)) {
		return fmt.Errorf("set the password for %s: %w", a, err)
	}
	return nil
}

// CanSign says why the kernel signs no segments; nil: it does.
func CanSign() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	return SetPassword(fd, netip.AddrFrom4([4]byte{127, 0, 0, 1}), "try")
}

// Listener accepts the connections of all peers that come to one address.
type Listener struct{ tcp *net.TCPListener }

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
	return &Listener{l.(*net.TCPListener)}, nil
}

// Addr is where the listener listens.
func (l *Listener) Addr() netip.AddrPort { return l.tcp.Addr().(*net.TCPAddr).AddrPort() }

// SetPassword has connections from a peer signed; empty: no longer.
func (l *Listener) SetPassword(peer netip.Addr, password string) error {
	return l.control(func(fd int) error { return SetPassword(fd, peer, password) })
}

// SetRangePassword is [Listener.SetPassword] of all peers in a prefix that have no password of their own.
func (l *Listener) SetRangePassword(p netip.Prefix, password string) error {
	return l.control(func(fd int) error { return SetRangePassword(fd, p, password) })
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
