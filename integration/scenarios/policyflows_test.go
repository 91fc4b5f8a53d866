package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
)

// attempt is one connection that is tried: a handshake over TCP or SCTP, a
// datagram and its echo over UDP and UDP-Lite, an echo request.
type attempt struct {
	from     string // HOST/POD
	to       netip.Addr
	protocol int // IPPROTO_*
	port     uint16

	fd     int
	passed bool
	err    error // the socket could not be made
}

func (a *attempt) String() string {
	return fmt.Sprintf("%s → %s protocol %d", a.from, netip.AddrPortFrom(a.to, a.port), a.protocol)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func stream(protocol int) bool {
	return protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_SCTP
}

func echoes(protocol int) bool {
	return protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6
}

// open makes the socket and sends the first packet.
func (a *attempt) open() {
	kind := unix.SOCK_DGRAM
	if stream(a.protocol) {
		kind = unix.SOCK_STREAM
	}
	a.fd, a.err = unix.Socket(familyOf(a.to), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, a.protocol)
	if a.err != nil {
		a.fd = -1
		return
	}
	a.err = unix.Connect(a.fd, sockaddr(netip.AddrPortFrom(a.to, a.port)))
	if errors.Is(a.err, unix.EINPROGRESS) {
		a.err = nil
	}
	if a.err == nil && !stream(a.protocol) {
		_, a.err = unix.Write(a.fd, []byte("hello"))
	}
}

// look sees whether the attempt has succeeded.
func (a *attempt) look() {
	if stream(a.protocol) {
		e, err := unix.GetsockoptInt(a.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		a.passed = err == nil && e == 0
		return
	}
	var b [16]byte
	n, err := unix.Read(a.fd, b[:])
	a.passed = err == nil && n > 0
}

// tryAll makes all attempts at once. Those that nothing was heard of within the
// time did not pass; datagrams and handshakes are repeated meanwhile.
func tryAll(t *testing.T, l *lab.Lab, all []*attempt, within time.Duration) {
	t.Helper()
	byPlace := map[string][]*attempt{}
	pings := make(chan error)
	waiting := 0
	for _, a := range all {
		if !echoes(a.protocol) {
			byPlace[a.from] = append(byPlace[a.from], a)
			continue
		}
		waiting++
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			r, err := traffic.Probe(ctx, l.Space(a.from), []netip.Addr{a.to}, traffic.Options{IPv6: a.to.Is6()})
			a.passed = r[a.to].OK
			pings <- err
		}()
	}
	var open []*attempt
	for from, list := range byPlace {
		err := ns.Do(l.Space(from), func() error {
			for _, a := range list {
				a.open()
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, list...)
	}
	defer func() {
		for _, a := range open {
			if a.fd >= 0 {
				unix.Close(a.fd)
			}
		}
	}()
	waitAll(t, open, within)
	for range waiting {
		if err := <-pings; err != nil {
			t.Error(err)
		}
	}
}

func waitAll(t *testing.T, open []*attempt, within time.Duration) {
	t.Helper()
	deadline := time.Now().Add(within)
	again := time.Now().Add(within / 3)
	for {
		var fds []unix.PollFd
		var who []*attempt
		for _, a := range open {
			if a.err == nil && !a.passed {
				want := int16(unix.POLLIN)
				if stream(a.protocol) {
					want = unix.POLLOUT
				}
				fds, who = append(fds, unix.PollFd{Fd: int32(a.fd), Events: want}), append(who, a)
			}
		}
		left := time.Until(deadline)
		if len(fds) == 0 || left <= 0 {
			return
		}
		n, err := unix.Poll(fds, int(min(left, 100*time.Millisecond).Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
		if n > 0 {
			for i := range fds {
				if fds[i].Revents != 0 {
					who[i].look()
					if !who[i].passed {
						who[i].err = errors.New("refused") // an answer, and not the wanted one
					}
				}
			}
		}
		if time.Now().After(again) {
			again = deadline
			for _, a := range who {
				if a.err == nil && !a.passed && !stream(a.protocol) {
					_, _ = unix.Write(a.fd, []byte("again")) // a datagram may be lost where nothing forbids it
				}
			}
		}
	}
}

// serve answers on ports of a place, on all of its addresses, until the test
// ends.
func serve(t *testing.T, l *lab.Lab, where string, protocol int, ports ...uint16) {
	t.Helper()
	err := ns.Do(l.Space(where), func() error {
		for _, port := range ports {
			if err := serveOne(t, protocol, port); err != nil {
				return fmt.Errorf("serve protocol %d port %d: %w", protocol, port, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func serveOne(t *testing.T, protocol int, port uint16) error {
	kind := unix.SOCK_DGRAM
	if stream(protocol) {
		kind = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "server")
	if err := errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0),
		unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}),
	); err != nil {
		return errors.Join(err, f.Close())
	}
	if stream(protocol) {
		// Handshakes are completed by the kernel.
		t.Cleanup(func() { _ = f.Close() })
		return unix.Listen(fd, 1024)
	}
	if protocol == unix.IPPROTO_UDP {
		c, err := net.FilePacketConn(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo(b[:n], from)
			}
		}()
		return nil
	}
	return echoLite(t, f, fd)
}

// echoLite echoes datagrams of a socket that package net does not know.
func echoLite(t *testing.T, f *os.File, fd int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	t.Cleanup(func() { _ = f.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			var from unix.Sockaddr
			var n int
			err := raw.Read(func(uintptr) bool {
				var err error
				n, from, err = unix.Recvfrom(fd, b, 0)
				return !errors.Is(err, unix.EAGAIN)
			})
			if err != nil {
				return
			}
			if from != nil {
				_ = unix.Sendto(fd, b[:n], 0, from)
			}
		}
	}()
	return nil
}
