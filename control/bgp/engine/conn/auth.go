package conn

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Auth is how the segments of connections with a peer are signed; the zero value: they are not. Values can be compared.
type Auth struct {
	Password string // RFC 2385
	Keys     Keys   // RFC 5925, and then there is no Password
}

// signing is how a socket signs what it exchanges with the addresses of a prefix, as far as this side has set it.
type signing struct {
	password string
	keys     []Key
}

// set has a socket sign as a says, and drop what is not signed so. What failed is tried again by the next call.
func (s *signing) set(fd int, to netip.Prefix, a Auth) error {
	// The kernel takes a password or keys for an address, not both: what is there goes first.
	if s.password != "" && a.Password == "" {
		if err := setPassword(fd, to, ""); err != nil {
			return err
		}
		s.password = ""
	}
	if len(s.keys) > 0 || a.Keys.N > 0 {
		if err := s.setKeys(fd, to, a.Keys); err != nil {
			return err
		}
	}
	if a.Password == "" {
		return nil
	}
	s.password = a.Password
	return setPassword(fd, to, a.Password)
}

// alone is the prefix of one address.
func alone(a netip.Addr) netip.Prefix {
	return netip.PrefixFrom(a.WithZone(""), a.BitLen())
}

// SetPassword has a socket sign what it exchanges with an address, or with an empty
// password no longer (TCP_MD5SIG, tcp(7)).
func SetPassword(fd int, a netip.Addr, password string) error {
	return setPassword(fd, alone(a), password)
}

// setPassword is [SetPassword] with all addresses of a prefix that have no password of their own (TCP_MD5SIG_EXT).
func setPassword(fd int, to netip.Prefix, password string) error {
	const byPrefix = 1 // TCP_MD5SIG_FLAG_PREFIX
	k := unix.TCPMD5Sig{Keylen: uint16(len(password))}
	if len(password) > len(k.Key) {
		return fmt.Errorf("password of %d bytes, where the kernel has room for %d", len(password), len(k.Key))
	}
	copy(k.Key[:], password)
	option := unix.TCP_MD5SIG
	if !to.IsSingleIP() {
		option, k.Flags, k.Prefixlen = unix.TCP_MD5SIG_EXT, byPrefix, uint8(to.Bits())
	}
	k.Addr.Family = putAddr(k.Addr.Data[:], to.Addr())
	err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, option, &k)
	if err != nil && !(password == "" && errors.Is(err, unix.ENOENT)) {
		return fmt.Errorf("set the password for %s: %w", to, err)
	}
	return nil
}

// putAddr writes an address into what is behind the family in a struct sockaddr_storage, and returns the family.
func putAddr(data []byte, a netip.Addr) (family uint16) {
	if a.Is4() {
		copy(data[2:], a.AsSlice()) // struct sockaddr_in: port, address
		return unix.AF_INET
	}
	copy(data[6:], a.AsSlice()) // struct sockaddr_in6: port, flow label, address
	return unix.AF_INET6
}

// CanSign says why the kernel signs no segments with passwords; nil: it does.
func CanSign() error {
	return try(func(fd int) error { return SetPassword(fd, netip.AddrFrom4([4]byte{127, 0, 0, 1}), "try") })
}

// try does something with a socket that is of no other use.
func try(do func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	return do(fd)
}
