package survey

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Connection is what the packets of a connection have in common, in the direction of the first one.
type Connection struct {
	Src, Dst         netip.Addr
	Protocol         uint8 // IP protocol number
	SrcPort, DstPort uint16
	ICMPID           uint16 // of echo requests and their answers
}

// Sighting is a device by which packets of a connection came or left.
type Sighting struct {
	Device  string
	Out     bool // they left by it
	Back    bool // they are answers
	Packets int
}

// maxWatched bounds how many packets a watch looks at: a filter in the kernel lets those of the two addresses through.
const maxWatched = 20000

// Watch says by which devices of this network namespace the packets of a connection come and leave while ctx lasts, in the
// order in which they were first seen. It holds a packet socket (packet(7)), which ends with the process, and nothing else.
func Watch(ctx context.Context, c Connection) ([]Sighting, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	defer unix.Close(fd)
	if err := attach(fd, c); err != nil {
		return nil, fmt.Errorf("watch for packets of %s and %s: %w", c.Src, c.Dst, err)
	}
	proto := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto}); err != nil {
		return nil, fmt.Errorf("watch all devices: %w", err)
	}
	tv := unix.NsecToTimeval((20 * time.Millisecond).Nanoseconds()) // how soon the end is seen
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return nil, fmt.Errorf("watch all devices: %w", err)
	}
	var seen sightings
	b := make([]byte, 256)
	for n := 0; n < maxWatched && ctx.Err() == nil; {
		size, from, err := unix.Recvfrom(fd, b, 0)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENETDOWN): // a device went
			continue
		case err != nil:
			return nil, fmt.Errorf("watch all devices: %w", err)
		}
		n++
		at, ok := from.(*unix.SockaddrLinklayer)
		if back, mine := c.match(b[:size]); ok && mine && at.Pkttype != unix.PACKET_OTHERHOST {
			seen.add(at.Ifindex, at.Pkttype == unix.PACKET_OUTGOING, back)
		}
	}
	return seen.list(), nil
}

type sighting struct {
	index     int
	out, back bool
}

// sightings counts packets by where they are seen, in the order of the first.
type sightings struct {
	order []sighting
	count map[sighting]int
}

func (s *sightings) add(index int, out, back bool) {
	at := sighting{index, out, back}
	if s.count == nil {
		s.count = map[sighting]int{}
	}
	if s.count[at] == 0 {
		s.order = append(s.order, at)
	}
	s.count[at]++
}

func (s *sightings) list() []Sighting {
	out := make([]Sighting, 0, len(s.order))
	for _, at := range s.order {
		name := fmt.Sprintf("if%d", at.index) // it went meanwhile
		if i, err := net.InterfaceByIndex(at.index); err == nil {
			name = i.Name
		}
		out = append(out, Sighting{Device: name, Out: at.out, Back: at.back, Packets: s.count[at]})
	}
	return out
}

// attach has the kernel pass on only packets between the two addresses, of their beginning what [Connection.match] reads.
func attach(fd int, c Connection) error {
	raw, err := bpf.Assemble(between(c))
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}) //nolint:gosec // a short program
}

// between is a filter of packets of a protocol between two addresses, in both directions. It sees a packet from its IP header
// on, as the socket is one of datagrams.
func between(c Connection) []bpf.Instruction {
	const keep = 128 // bytes
	version, protocolAt, srcAt := uint32(4), uint32(9), uint32(12)
	if c.Src.Is6() {
		version, protocolAt, srcAt = 6, 6, 8
	}
	src, dst := words(c.Src), words(c.Dst)
	n := uint8(len(src)) //nolint:gosec // one or four
	dstAt := srcAt + 4*uint32(n)
	out := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: version, SkipFalse: 8*n + 4},
		bpf.LoadAbsolute{Off: protocolAt, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(c.Protocol), SkipFalse: 8*n + 2},
	}
	// Each direction compares 2n words, by two instructions each, and keeps what is equal; else the next one is tried.
	for _, pair := range [][2][]uint32{{src, dst}, {dst, src}} {
		all := append(append([]uint32{}, pair[0]...), pair[1]...)
		for i, w := range all {
			off := srcAt + 4*uint32(i) //nolint:gosec // at most seven
			if i >= int(n) {
				off = dstAt + 4*uint32(i-int(n)) //nolint:gosec // at most three
			}
			rest := uint8(2 * (len(all) - i - 1)) //nolint:gosec // at most 14
			out = append(out, bpf.LoadAbsolute{Off: off, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: w, SkipFalse: rest + 1})
		}
		out = append(out, bpf.RetConstant{Val: keep})
	}
	return append(out, bpf.RetConstant{Val: 0})
}

func words(a netip.Addr) []uint32 {
	b := a.AsSlice()
	var out []uint32
	for i := 0; i < len(b); i += 4 {
		out = append(out, binary.BigEndian.Uint32(b[i:]))
	}
	return out
}

// match reports whether a packet, from its IP header on, is one of the connection, and of which direction.
func (c Connection) match(b []byte) (back, ok bool) {
	var src, dst netip.Addr
	var protocol uint8
	switch {
	case len(b) >= 20 && b[0]>>4 == 4: // RFC 791, section 3.1
		src, dst, protocol = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9]
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return false, false // a later fragment has no ports
		}
		b = b[min(len(b), 4*int(b[0]&0xf)):]
	case len(b) >= 40 && b[0]>>4 == 6: // RFC 8200, section 3
		src, dst, protocol = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), b[6]
		b = b[40:]
	default:
		return false, false
	}
	if protocol != c.Protocol || len(b) < 8 {
		return false, false
	}
	switch {
	case src == c.Src && dst == c.Dst && c.carries(b, false):
		return false, true
	case src == c.Dst && dst == c.Src && c.carries(b, true):
		return true, true
	}
	return false, false
}

// carries reports whether what follows an IP header has the connection's ports or identifier.
func (c Connection) carries(b []byte, back bool) bool {
	first, second := binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	switch c.Protocol {
	case unix.IPPROTO_ICMP: // RFC 792: type, code, checksum, identifier
		return b[0] == echoType(8, 0, back) && binary.BigEndian.Uint16(b[4:]) == c.ICMPID
	case unix.IPPROTO_ICMPV6: // RFC 4443, section 4
		return b[0] == echoType(128, 129, back) && binary.BigEndian.Uint16(b[4:]) == c.ICMPID
	}
	if back {
		first, second = second, first
	}
	return first == c.SrcPort && second == c.DstPort
}

func echoType(request, reply byte, back bool) byte {
	if back {
		return reply
	}
	return request
}
