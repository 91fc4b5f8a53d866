package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/portholder"
)

// ListenError says why BGP's port cannot be had. Sessions that this node opens
// itself work all the same.
type ListenError struct {
	Addr   netip.AddrPort
	Holder string // "bird (pid 1234)"; empty when it is not known
	Err    error
}

func (e *ListenError) Error() string {
	switch {
	case errors.Is(e.Err, syscall.EADDRINUSE):
		by := "another program"
		if e.Holder != "" {
			by = e.Holder
		}
		return fmt.Sprintf("port %d on %s is taken by %s: stop it, or set listenPort in the BGPConfiguration", e.Addr.Port(), e.Addr.Addr(), by)
	case errors.Is(e.Err, syscall.EACCES):
		return fmt.Sprintf("port %d on %s may not be opened: run as root or with CAP_NET_BIND_SERVICE", e.Addr.Port(), e.Addr.Addr())
	case errors.Is(e.Err, syscall.EADDRNOTAVAIL):
		return fmt.Sprintf("this host does not have the address %s to listen on", e.Addr.Addr())
	}
	return fmt.Sprintf("listen on %s: %v", e.Addr, e.Err)
}

// Unwrap gives access to the system's error.
func (e *ListenError) Unwrap() error { return e.Err }

// withoutIPv6 leaves out the address that peers on links come to where the kernel
// does not speak IPv6: no link has such peers then, and IPv4 is to be listened on
// all the same. A node with an IPv6 address keeps its error.
func (c *Config) withoutIPv6(speaks func() bool) {
	if !c.NextHop6.IsValid() && slices.Contains(c.ListenAddrs, netip.IPv6Unspecified()) && !speaks() {
		c.ListenAddrs = slices.DeleteFunc(slices.Clone(c.ListenAddrs), netip.Addr.Is6)
	}
}

// speaksIPv6 reports whether the kernel speaks IPv6.
func speaksIPv6() bool {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return !errors.Is(err, unix.EAFNOSUPPORT)
	}
	unix.Close(fd)
	return true
}

// canListen tries the addresses for a moment and returns a *ListenError for
// the first that cannot be had.
func canListen(ctx context.Context, addrs []netip.Addr, port uint16) error {
	for _, a := range addrs {
		ap := netip.AddrPortFrom(a, port)
		if err := tryListen(ctx, ap); err != nil {
			return &ListenError{Addr: ap, Holder: portholder.Find("/proc", portholder.TCP, ap).Program, Err: err}
		}
	}
	return nil
}

// tryListen listens for a moment. No program is started meanwhile: until it runs
// it has this one's sockets, and would keep the port from who listens next.
func tryListen(ctx context.Context, at netip.AddrPort) error {
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6"
	}
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, at.String())
	if err != nil {
		return err
	}
	return l.Close()
}
