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
	Ends    Ends // as they were there; of packets known by a mark alone
	Packets int
}

// Ends are the addresses of a connection. The client's port is left out: translation may choose another for each packet.
type Ends struct {
	Client netip.Addr
	Server netip.AddrPort
}

// maxWatched bounds how many packets a watch looks at: a filter in the kernel lets through what may be of the connection.
const maxWatched = 20000

// Watch says by which devices of this network namespace the packets of a connection come and leave while ctx lasts, in the
// order in which they were first seen. It holds a packet socket (packet(7)), which ends with the process, and nothing else.
func Watch(ctx context.Context, c Connection) ([]Sighting, error) {
	return watch(ctx, fmt.Sprintf("packets of %s and %s", c.Src, c.Dst), between(c), func(b []byte) (at passing, ok bool) {
		at.back, ok = c.match(b)
		return at, ok
	})
}

// watch says where packets are seen that a filter lets through and match knows.
func watch(ctx context.Context, what string, filter []bpf.Instruction, match func([]byte) (passing, bool)) ([]Sighting, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	defer unix.Close(fd)
	if err := attach(fd, filter); err != nil {
		return nil, fmt.Errorf("watch for %s: %w", what, err)
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
	for n := 0; ctx.Err() == nil; {
		if n == maxWatched {
			return seen.list(), fmt.Errorf("watch for %s: more than %d have come that may be one of them", what, maxWatched)
		}
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
		if !ok || at.Pkttype == unix.PACKET_OTHERHOST {
			continue
		}
		if p, mine := match(b[:size]); mine {
			seen.add(sighting{p, at.Ifindex, at.Pkttype == unix.PACKET_OUTGOING})
		}
	}
	return seen.list(), nil
}

// passing is a packet of a connection.
type passing struct {
	back bool
	ends Ends
}

type sighting struct {
	passing
	index int
	out   bool
}

// sightings counts packets by where they are seen, in the order of the first.
type sightings struct {
	order []sighting
	count map[sighting]int
}

func (s *sightings) add(at sighting) {
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
		out = append(out, Sighting{Device: name, Out: at.out, Back: at.back, Ends: at.ends, Packets: s.count[at]})
	}
	return out
}

// attach has the kernel pass on only what a filter keeps.
func attach(fd int, list []bpf.Instruction) error {
	raw, err := bpf.Assemble(list)
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}) //nolint:gosec // a short program
}

// keep is how many bytes of a packet a filter passes on.
const keep = 128

// between is a filter of packets of a protocol between two addresses, in both directions. It sees a packet from its IP header
// on, as the socket is one of datagrams.
func between(c Connection) []bpf.Instruction {
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
	src, dst, protocol, b := split(b)
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

// split takes a packet apart: what follows its IP header is nil where that has no ports.
func split(b []byte) (src, dst netip.Addr, protocol uint8, payload []byte) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4: // RFC 791, section 3.1
		src, dst, protocol = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9]
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return src, dst, protocol, nil // a later fragment
		}
		return src, dst, protocol, b[min(len(b), 4*int(b[0]&0xf)):]
	case len(b) >= 40 && b[0]>>4 == 6: // RFC 8200, section 3
		return netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), b[6], b[40:]
	}
	return src, dst, 0, nil
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
