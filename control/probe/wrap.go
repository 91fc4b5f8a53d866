package probe

import (
	"encoding/binary"
	"net/netip"
)

// Lengths of headers in bytes.
const (
	ipv4Len  = 20
	ipv6Len  = 40
	udpLen   = 8
	vxlanLen = 8
)

// IP protocol numbers.
const (
	protoIPIP = 4
	protoUDP  = 17
)

// wrapping is how a message is wrapped below the outer IP header, so that it looks
// like the tunnel's packets. The kernel drops it where it has no listener of ours:
// in VXLAN it has no valid VNI (RFC 7348, section 5: the I flag is not set), in
// IPIP the packet inside goes to a multicast group that nobody joins
// (233.252.0.0/24, RFC 6676).
type wrapping struct {
	proto int    // of the outer IP header
	port  uint16 // UDP port of VXLAN; 0 for IPIP
}

// header is the number of bytes between the outer IP header and the payload.
func (w wrapping) header() int {
	if w.port == 0 {
		return ipv4Len + udpLen
	}
	return udpLen + vxlanLen
}

// headerLen is the length of the outer IP header without options.
func headerLen(a netip.Addr) int {
	if a.Is4() {
		return ipv4Len
	}
	return ipv6Len
}

// wrap appends to b what follows the outer IP header, padded with zeros so
// that the whole packet has size bytes. With a smaller size nothing is padded.
func (w wrapping) wrap(b []byte, src netip.Addr, dst netip.AddrPort, payload []byte, size int) []byte {
	pad := max(0, size-headerLen(src)-w.header()-len(payload))
	n := len(payload) + pad
	start := len(b)
	if w.port == 0 {
		b = appendInner(b, n)
	} else {
		b = binary.BigEndian.AppendUint16(b, w.port)
		b = binary.BigEndian.AppendUint16(b, dst.Port())
		b = binary.BigEndian.AppendUint16(b, uint16(udpLen+vxlanLen+n))
		b = binary.BigEndian.AppendUint16(b, 0)
		b = append(b, make([]byte, vxlanLen)...)
	}
	b = append(append(b, payload...), make([]byte, pad)...)
	if w.port != 0 {
		binary.BigEndian.PutUint16(b[start+6:], udpChecksum(src, dst.Addr(), b[start:]))
	}
	return b
}

// The packet inside IPIP: from a documentation address (RFC 5737) to a
// multicast group for documentation, to the discard port.
const (
	innerSrc  = 0xc0000200 // 192.0.2.0
	innerDst  = 0xe9fc004d // 233.252.0.77
	innerPort = 9
)

// appendInner appends the headers of the packet inside IPIP. Its UDP checksum
// is left out, as RFC 768 allows.
func appendInner(b []byte, payload int) []byte {
	start := len(b)
	b = append(b, 0x45, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(ipv4Len+udpLen+payload))
	b = append(b, 0, 0, 0x40, 0, 1, protoUDP, 0, 0) // DF, TTL 1
	b = binary.BigEndian.AppendUint32(b, innerSrc)
	b = binary.BigEndian.AppendUint32(b, innerDst)
	binary.BigEndian.PutUint16(b[start+10:], ^fold(add(0, b[start:])))
	b = binary.BigEndian.AppendUint16(b, innerPort)
	b = binary.BigEndian.AppendUint16(b, innerPort)
	b = binary.BigEndian.AppendUint16(b, uint16(udpLen+payload))
	return append(b, 0, 0)
}

// udpChecksum is that of RFC 768, and of RFC 8200, section 8.1.
func udpChecksum(src, dst netip.Addr, datagram []byte) uint16 {
	s := add(add(0, src.AsSlice()), dst.AsSlice())
	s += protoUDP + uint32(len(datagram))
	c := ^fold(add(s, datagram))
	if c == 0 {
		return 0xffff
	}
	return c
}

// add adds up 16-bit words (RFC 1071).
func add(s uint32, b []byte) uint32 {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// unwrap returns the payload of what a raw socket delivered, which for IPv4
// begins with the outer header, and the source port. It reports false for
// anything too short.
func (w wrapping) unwrap(b []byte, v4 bool) (payload []byte, port uint16, ok bool) {
	if v4 {
		if len(b) < ipv4Len || len(b) < int(b[0]&15)*4 {
			return nil, 0, false
		}
		b = b[int(b[0]&15)*4:]
	}
	if len(b) < w.header() {
		return nil, 0, false
	}
	if w.port != 0 {
		port = binary.BigEndian.Uint16(b)
	}
	return b[w.header():], port, true
}
