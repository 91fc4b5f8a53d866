package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// IP protocol numbers (IANA).
const (
	ProtoICMP   = 1
	ProtoIPIP   = 4
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoIPv6   = 41 // IPv6 in IP (RFC 2473, RFC 4213)
	ProtoICMPv6 = 58
)

// VXLANPort is the UDP port of VXLAN (RFC 7348), on which a capture looks for
// inner packets.
const VXLANPort = 4789

// Header is what a capture tells of one IPv4 or IPv6 header.
type Header struct {
	Src, Dst netip.Addr
	Proto    int
	TTL      int
	DF       bool // IPv6 packets are never fragmented on their way
	Len      int  // of the packet, in bytes
	Fragment bool
}

// Packet is an IP packet that was seen on a device, with the packet that it
// carries, if it is a tunnel's.
type Packet struct {
	Time    time.Time
	Outer   Header
	SrcPort int // UDP and TCP; 0: none
	DstPort int
	VNI     int    // of VXLAN
	Inner   Header // valid for IP in IP and VXLAN: see Tunnelled
}

// Tunnelled reports whether the packet carries another.
func (p Packet) Tunnelled() bool { return p.Inner.Src.IsValid() }

// Payload is the innermost header.
func (p Packet) Payload() Header {
	if p.Tunnelled() {
		return p.Inner
	}
	return p.Outer
}

func (h Header) String() string {
	s := fmt.Sprintf("%s > %s proto %d ttl %d length %d", h.Src, h.Dst, h.Proto, h.TTL, h.Len)
	if h.DF {
		s += " DF"
	}
	if h.Fragment {
		s += " fragment"
	}
	return s
}

func (p Packet) String() string {
	var b strings.Builder
	b.WriteString(p.Outer.String())
	if p.DstPort != 0 {
		fmt.Fprintf(&b, " port %d > %d", p.SrcPort, p.DstPort)
	}
	if p.VNI != 0 {
		fmt.Fprintf(&b, " vni %d", p.VNI)
	}
	if p.Tunnelled() {
		fmt.Fprintf(&b, " [%s]", p.Inner)
	}
	return b.String()
}

const (
	etherHeaderLen = 14
	etherTypeIPv4  = 0x0800
	etherTypeIPv6  = 0x86dd
	udpHeaderLen   = 8
	vxlanHeaderLen = 8
	vxlanFlagVNI   = 0x08
)

// parseFrame reads an Ethernet frame; it reports false for what is not IP.
func parseFrame(b []byte) (Packet, bool) {
	body, ok := etherPayload(b)
	if !ok {
		return Packet{}, false
	}
	var p Packet
	if p.Outer, body, ok = parseHeader(body); !ok {
		return Packet{}, false
	}
	if p.Outer.Fragment {
		return p, true // without the beginning, nothing more can be said
	}
	switch p.Outer.Proto {
	case ProtoIPIP, ProtoIPv6:
		p.Inner, _, _ = parseHeader(body)
	case ProtoTCP, ProtoUDP:
		if len(body) < udpHeaderLen {
			return p, true
		}
		p.SrcPort, p.DstPort = int(binary.BigEndian.Uint16(body)), int(binary.BigEndian.Uint16(body[2:]))
		// Behind a port-translating NAT one of the two is another.
		if p.Outer.Proto == ProtoUDP && (p.DstPort == VXLANPort || p.SrcPort == VXLANPort) {
			p.parseVXLAN(body[udpHeaderLen:])
		}
	}
	return p, true
}

func (p *Packet) parseVXLAN(b []byte) {
	if len(b) < vxlanHeaderLen || b[0]&vxlanFlagVNI == 0 {
		return
	}
	p.VNI = int(binary.BigEndian.Uint32(b[4:]) >> 8)
	if inner, ok := etherPayload(b[vxlanHeaderLen:]); ok {
		p.Inner, _, _ = parseHeader(inner)
	}
}

func etherPayload(b []byte) ([]byte, bool) {
	if len(b) < etherHeaderLen {
		return nil, false
	}
	if t := binary.BigEndian.Uint16(b[12:]); t != etherTypeIPv4 && t != etherTypeIPv6 {
		return nil, false
	}
	return b[etherHeaderLen:], true
}

// parseHeader reads an IP header and returns what follows it.
func parseHeader(b []byte) (Header, []byte, bool) {
	if len(b) > 0 && b[0]>>4 == 6 {
		return parseHeader6(b)
	}
	return parseHeader4(b)
}

// parseHeader6 reads an IPv6 header (RFC 8200) and, if that is the next one, a
// fragment header.
func parseHeader6(b []byte) (Header, []byte, bool) {
	const headerLen, fragment, fragmentLen, offsetAndMore = 40, 44, 8, 0xfff9
	if len(b) < headerLen {
		return Header{}, nil, false
	}
	h := Header{
		Src:   netip.AddrFrom16([16]byte(b[8:24])),
		Dst:   netip.AddrFrom16([16]byte(b[24:40])),
		Proto: int(b[6]),
		TTL:   int(b[7]),
		DF:    true,
		Len:   headerLen + int(binary.BigEndian.Uint16(b[4:])),
	}
	body := b[headerLen:]
	if h.Proto == fragment && len(body) >= fragmentLen {
		h.Proto, h.DF = int(body[0]), false
		h.Fragment = binary.BigEndian.Uint16(body[2:])&offsetAndMore != 0
		body = body[fragmentLen:]
	}
	return h, body, true
}

// parseHeader4 reads an IPv4 header (RFC 791).
func parseHeader4(b []byte) (Header, []byte, bool) {
	const minLen, flagDF, flagMF, offsetMask = 20, 0x4000, 0x2000, 0x1fff
	if len(b) < minLen || b[0]>>4 != 4 {
		return Header{}, nil, false
	}
	l := int(b[0]&0x0f) * 4
	if l < minLen || len(b) < l {
		return Header{}, nil, false
	}
	frag := binary.BigEndian.Uint16(b[6:])
	return Header{
		Src:      netip.AddrFrom4([4]byte(b[12:16])),
		Dst:      netip.AddrFrom4([4]byte(b[16:20])),
		Proto:    int(b[9]),
		TTL:      int(b[8]),
		DF:       frag&flagDF != 0,
		Len:      int(binary.BigEndian.Uint16(b[2:])),
		Fragment: frag&(flagMF|offsetMask) != 0,
	}, b[l:], true
}
