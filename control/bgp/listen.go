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
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenError says why BGP's port cannot be had. Sessions that this node opens
// itself work all the same.
type ListenError struct {
	Addr   netip.AddrPort
	Holder string // "bird (pid 1234)"; empty when it cannot be told
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
			return &ListenError{Addr: ap, Holder: holder("/proc", port), Err: err}
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

// holder names the program that listens on a TCP port, as far as /proc shows
// it to us (proc(5): /proc/net/tcp and /proc/pid/fd).
func holder(proc string, port uint16) string {
	inodes := map[string]bool{}
	for _, f := range []string{"net/tcp", "net/tcp6"} {
		b, err := os.ReadFile(filepath.Join(proc, f))
		if err != nil {
			continue
		}
		for _, inode := range listeners(string(b), port) {
			inodes["socket:["+inode+"]"] = true
		}
	}
	fds, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "fd", "*"))
	if err != nil || len(inodes) == 0 {
		return ""
	}
	for _, fd := range fds {
		link, err := os.Readlink(fd)
		if err != nil || !inodes[link] {
			continue
		}
		dir := filepath.Dir(filepath.Dir(fd))
		comm, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil {
			continue
		}
		return fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(comm)), filepath.Base(dir))
	}
	return ""
}

// listeners reads the inodes of the sockets that listen on a port from the
// text of /proc/net/tcp.
func listeners(table string, port uint16) []string {
	const listen = "0A" // TCP_LISTEN
	var inodes []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != listen {
			continue
		}
		_, hex, ok := strings.Cut(f[1], ":")
		if !ok {
			continue
		}
		if p, err := strconv.ParseUint(hex, 16, 16); err == nil && uint16(p) == port {
			inodes = append(inodes, f[9])
		}
	}
	return inodes
}
