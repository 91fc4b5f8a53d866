package felix

import (
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// xtables is one of the two families of iptables' own interface, which has
// nothing but socket options that copy a whole table
// (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h).
type xtables struct {
	ipv6   bool
	list   string // file of /proc/net with the names of the tables that there are
	domain int
	level  int
	target int // where in an entry the offset of its target is, and 2 bytes behind that of the next entry
}

// In front of both offsets stand the match of addresses, 84 or 136 bytes, and
// 4 bytes of flags.
func ipTables() xtables {
	return xtables{false, "ip_tables_names", unix.AF_INET, unix.SOL_IP, 88}
}

func ip6Tables() xtables {
	return xtables{true, "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 140}
}

// The kernel's numbers, of both families.
const (
	optInfo    = 64 // IPT_SO_GET_INFO
	optEntries = 65 // IPT_SO_GET_ENTRIES
	nameLen    = 32 // XT_TABLE_MAXNAMELEN
	infoLen    = 84 // struct ipt_getinfo, which ends with the entries' size
	headLen    = 40 // struct ipt_get_entries: name, size, and padding
	targetLen  = 32 // struct xt_entry_target: size, name, revision
	errorName  = "ERROR"
)

// tries is how often a table is read anew because it changed size meanwhile.
const tries = 5

// chains returns the names of the chains that somebody made in a table.
func (x xtables) chains(table string) ([]string, error) {
	fd, err := unix.Socket(x.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for range tries {
		info := make([]byte, infoLen)
		copy(info[:nameLen-1], table)
		if err := getsockopt(fd, x.level, optInfo, info); err != nil {
			return nil, err
		}
		size := binary.NativeEndian.Uint32(info[infoLen-4:])
		b := make([]byte, headLen+int(size))
		copy(b[:nameLen-1], table)
		binary.NativeEndian.PutUint32(b[nameLen:], size)
		err = getsockopt(fd, x.level, optEntries, b)
		if err == nil {
			return x.chainNames(b[headLen:]), nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
	}
	return nil, err
}

// chainNames reads the names of chains out of a table's entries: a chain begins
// with an entry whose target is an error that has the chain's name, and so ends
// the table, with a name of its own.
func (x xtables) chainNames(b []byte) []string {
	var names []string
	for len(b) >= x.target+4 {
		at, next := int(binary.NativeEndian.Uint16(b[x.target:])), int(binary.NativeEndian.Uint16(b[x.target+2:]))
		if next < x.target+4 || next > len(b) || at+targetLen > next {
			return names
		}
		target := b[at:next]
		if text(target[2:targetLen-1]) == errorName {
			if name := text(target[targetLen:]); name != errorName {
				names = append(names, name)
			}
		}
		b = b[next:]
	}
	return names
}

func text(b []byte) string { return unix.ByteSliceToString(b) }

func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))                                                                             //nolint:gosec // some megabytes
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), //nolint:gosec // small numbers
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0) //nolint:gosec // the option takes no other form
	if errno != 0 {
		return errno
	}
	return nil
}
