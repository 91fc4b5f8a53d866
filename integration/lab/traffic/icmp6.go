package traffic

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// ICMPv6 types (RFC 4443).
const (
	typeUnreachable6  = 1
	typePacketTooBig  = 2
	typeTimeExceeded6 = 3
	typeEcho6         = 128
	typeEchoReply6    = 129
)

// socket6 opens a raw ICMPv6 socket (RFC 3542).
func socket6(o Options) (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6)
	if err != nil {
		return -1, err
	}
	set := func(level, name, value int) {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, name, value)
		}
	}
	set(unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	set(unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1)
	if o.DF {
		set(unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
		set(unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1)
	} else {
		set(unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DONT)
	}
	if o.TTL != 0 {
		set(unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, o.TTL)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// parse6 reads an ICMPv6 message, which comes without its IP header; it reports
// false for what is not about us. The kernel has verified the checksum.
func (c *conn) parse6(b, oob []byte, from *net.IPAddr) (message, bool) {
	if len(b) < icmpHeaderLen || from == nil {
		return message{}, false
	}
	src, ok := netip.AddrFromSlice(from.IP)
	if !ok {
		return message{}, false
	}
	m := message{from: src.WithZone(""), ttl: hopLimit(oob), size: ipv6HeaderLen + len(b)}
	switch b[0] {
	case typeEchoReply6:
		if len(b) < icmpHeaderLen+cookieLen || binary.BigEndian.Uint16(b[4:]) != c.id || binary.BigEndian.Uint64(b[8:]) != c.secret {
			return message{}, false
		}
		m.seq, m.dst = binary.BigEndian.Uint64(b[16:]), m.from
		return m, true
	case typeUnreachable6, typePacketTooBig, typeTimeExceeded6:
		// The message quotes as much of the request as fits.
		q := b[icmpHeaderLen:]
		if len(q) < ipv6HeaderLen+icmpHeaderLen || q[0]>>4 != 6 || q[6] != unix.IPPROTO_ICMPV6 {
			return message{}, false
		}
		quoted := q[ipv6HeaderLen:]
		if quoted[0] != typeEcho6 || binary.BigEndian.Uint16(quoted[4:]) != c.id {
			return message{}, false
		}
		m.dst, m.err = netip.AddrFrom16([16]byte(q[24:40])), complaint6(b)
		return m, true
	}
	return message{}, false
}

// complaint6 puts an ICMPv6 error into words.
func complaint6(b []byte) string {
	switch {
	case b[0] == typeTimeExceeded6:
		return "time to live exceeded"
	case b[0] == typePacketTooBig:
		return fmt.Sprintf("packet too big, mtu %d", binary.BigEndian.Uint32(b[4:]))
	case b[1] == 0:
		return "network unreachable"
	case b[1] == 3:
		return "host unreachable"
	}
	return fmt.Sprintf("unreachable, code %d", b[1])
}

// hopLimit finds the hop limit among the control messages of a packet.
func hopLimit(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0
	}
	for _, m := range msgs {
		if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_HOPLIMIT && len(m.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return 0
}
