package bgp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
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
			return &ListenError{Addr: ap, Holder: holder("/proc", ap), Err: err}
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

// holder names the program that listens where we would, as far as /proc shows it to us
// (proc(5): /proc/net/tcp and /proc/pid/fd). Where a program shares its listener with
// those that it started, it is the first of them.
func holder(proc string, at netip.AddrPort) string {
	inodes := map[string]bool{}
	for _, f := range []string{"net/tcp", "net/tcp6"} {
		b, err := os.ReadFile(filepath.Join(proc, f))
		if err != nil {
			continue
		}
		for _, inode := range listeners(string(b), at) {
			inodes["socket:["+inode+"]"] = true
		}
	}
	fds, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "fd", "*"))
	if err != nil || len(inodes) == 0 {
		return ""
	}
	pids := map[string]bool{}
	for _, fd := range fds {
		if link, err := os.Readlink(fd); err == nil && inodes[link] {
			pids[filepath.Base(filepath.Dir(filepath.Dir(fd)))] = true
		}
	}
	for _, pid := range slices.Sorted(maps.Keys(pids)) {
		if comm, parent, ok := statOf(proc, pid); ok && !pids[parent] {
			return fmt.Sprintf("%s (pid %s)", comm, pid)
		}
	}
	return ""
}

// statOf reads a process's name and its parent's number (proc(5): /proc/pid/stat).
func statOf(proc, pid string) (comm, parent string, ok bool) {
	b, err := os.ReadFile(filepath.Join(proc, pid, "stat"))
	from, to := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if err != nil || from < 0 || to < from {
		return "", "", false
	}
	rest := strings.Fields(string(b[to+1:])) // state, parent, ...
	if len(rest) < 2 {
		return "", "", false
	}
	return string(b[from+1 : to]), rest[1], true
}

// listeners reads the inodes of the sockets that listen on a port, at an address or at
// all of them, from the text of /proc/net/tcp or tcp6.
func listeners(table string, at netip.AddrPort) []string {
	const listen = "0A" // TCP_LISTEN
	var inodes []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != listen {
			continue
		}
		if a, ok := localAddress(f[1]); ok && a.Port() == at.Port() && clash(a.Addr(), at.Addr()) {
			inodes = append(inodes, f[9])
		}
	}
	return inodes
}

// clash reports whether a listener at one address may keep another from listening: :: may
// be of IPv4 too (ipv6(7), IPV6_V6ONLY).
func clash(there, here netip.Addr) bool {
	same := there.Is4() == here.Is4()
	return there == here || there.IsUnspecified() && (same || there.Is6()) || here.IsUnspecified() && same
}

// localAddress reads an address as /proc/net/tcp has it: words of four bytes, each as the
// host's number.
func localAddress(s string) (netip.AddrPort, bool) {
	words, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(words)
	if err != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	p, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), ok && err == nil
}
