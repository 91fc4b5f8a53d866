package workload

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Packet is the first packet of a connection.
type Packet struct {
	Src, Dst           netip.Addr
	Protocol           uint8 // IP protocol number
	SrcPort, DstPort   uint16
	ICMPType, ICMPCode uint8
	ICMPID             uint16
	// Mark is what the packet is known by where its addresses are translated: the sequence number of TCP, the initiate tag of
	// SCTP, the content of a datagram of UDP, which is empty without.
	Mark uint32
}

// Send sends a packet from a workload's network namespace, as the workload
// would: through its own routes, from an address that it has.
func Send(netns string, p Packet) error {
	n, err := openNamespace(netns)
	if err != nil {
		return err
	}
	defer n.close()
	if err := n.do(p.send); err != nil {
		return fmt.Errorf("send a packet to %s from %s: %w", p.Dst, netns, err)
	}
	return nil
}

// SendHere sends a packet from the network namespace of the caller.
func SendHere(p Packet) error {
	if err := p.send(); err != nil {
		return fmt.Errorf("send a packet to %s: %w", p.Dst, err)
	}
	return nil
}

func (p Packet) send() error {
	family := unix.AF_INET
	if p.Src.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(p.Protocol))
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is lost
	if err := unix.Bind(fd, rawAddr(p.Src)); err != nil {
		return fmt.Errorf("send from %s: %w", p.Src, err)
	}
	return unix.Sendto(fd, p.payload(), 0, rawAddr(p.Dst))
}

func rawAddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}

// payload returns what follows the IP header: connection tracking takes only
// what is well formed.
func (p Packet) payload() []byte {
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, p.SrcPort), p.DstPort)
	var b []byte
	at := 0 // of the checksum
	switch p.Protocol {
	case unix.IPPROTO_TCP: // RFC 9293, section 3.1: a SYN
		b = append(binary.BigEndian.AppendUint32(ports, cmp.Or(p.Mark, 1)), 0, 0, 0, 0, 5<<4, 1<<1, 0xff, 0xff, 0, 0, 0, 0)
		at = 16
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE: // RFC 768; RFC 3828: its length is the covered part
		b = append(ports, 0, 8, 0, 0)
		if p.Mark != 0 {
			b = binary.BigEndian.AppendUint32(b, p.Mark)
			b[5] = byte(len(b))
		}
		at = 6
	case unix.IPPROTO_SCTP:
		return sctpInit(ports, cmp.Or(p.Mark, 1))
	case unix.IPPROTO_ICMP: // RFC 792
		b = []byte{p.ICMPType, p.ICMPCode, 0, 0, byte(p.ICMPID >> 8), byte(p.ICMPID), 0, 1}
		binary.BigEndian.PutUint16(b[2:], onesComplement(b))
		return b
	case unix.IPPROTO_ICMPV6: // RFC 4443; the kernel fills in the checksum
		return []byte{p.ICMPType, p.ICMPCode, 0, 0, byte(p.ICMPID >> 8), byte(p.ICMPID), 0, 1}
	default:
		return make([]byte, 8)
	}
	// The pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1) sums up
	// to the same in both families.
	pseudo := append(p.Src.AsSlice(), p.Dst.AsSlice()...)
	pseudo = append(pseudo, 0, p.Protocol, byte(len(b)>>8), byte(len(b)))
	binary.BigEndian.PutUint16(b[at:], onesComplement(append(pseudo, b...)))
	return b
}

// sctpInit returns an INIT chunk with an initiate tag behind a common header (RFC 9260,
// sections 3.1 and 3.3.2).
func sctpInit(ports []byte, tag uint32) []byte {
	b := append(ports, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 20)
	b = append(binary.BigEndian.AppendUint32(b, tag), 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// onesComplement is the checksum of RFC 1071.
func onesComplement(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		word := uint32(b[i]) << 8
		if i+1 < len(b) {
			word |= uint32(b[i+1])
		}
		sum += word
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum) //nolint:gosec // it was folded
}
