// Package portholder names the program that has a port which another one wants.
package portholder

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Table names the sockets of a protocol below /proc/net, and there with a 6 behind it.
type Table string

// The tables.
const (
	TCP Table = "net/tcp"
	UDP Table = "net/udp"
)

// InThread is the table of the network namespace that a thread is in.
func (t Table) InThread(tid int) Table { return Table(fmt.Sprintf("self/task/%d/%s", tid, t)) }

// Holder is who has a port.
type Holder struct {
	Program string // "bird (pid 1234)"; empty when it cannot be told
	Kernel  bool   // a socket of the kernel's own has it, as those of tunnels
}

// Find tells who has a port where we would listen, as far as /proc shows it to us
// (proc(5): /proc/net/tcp and /proc/pid/fd). Where a program shares its socket with
// those that it started, it is the first of them.
func Find(proc string, table Table, at netip.AddrPort) Holder {
	inodes := map[string]bool{}
	kernel := false
	for _, f := range []Table{table, table + "6"} {
		b, err := os.ReadFile(filepath.Join(proc, string(f)))
		if err != nil {
			continue
		}
		for _, inode := range listeners(string(b), strings.HasSuffix(string(table), string(TCP)), at) {
			if inode == "0" {
				kernel = true
				continue
			}
			inodes["socket:["+inode+"]"] = true
		}
	}
	return Holder{programOf(proc, inodes), kernel}
}

// programOf names the first of the programs that have one of some sockets.
func programOf(proc string, inodes map[string]bool) string {
	if len(inodes) == 0 {
		return ""
	}
	fds, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "fd", "*"))
	if err != nil {
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

// listeners reads the inodes of the sockets that have a port, of TCP those that listen, at
// an address or at all of them, from the text of /proc/net/tcp or another such.
func listeners(table string, tcp bool, at netip.AddrPort) []string {
	const listen = "0A" // TCP_LISTEN
	var inodes []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 10 || tcp && f[3] != listen {
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
