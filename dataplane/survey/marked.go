package survey

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Marked is a packet whose addresses and ports are translated on its way, and that is known by what nobody changes in it: the
// sequence number of a TCP SYN, the initiate tag of an SCTP INIT, the first four bytes of a datagram of UDP.
type Marked struct {
	Protocol uint8 // IP protocol number
	Mark     uint32
	// Ports are those from which a datagram is answered. An answer of the other two carries the mark.
	Ports []uint16
}

// markAt is where, behind the IP header, the first packet of a connection has its mark.
func (m Marked) markAt() uint32 {
	switch m.Protocol {
	case unix.IPPROTO_TCP: // RFC 9293, section 3.1
		return 4
	case unix.IPPROTO_SCTP: // RFC 9260, section 3.3.2, behind the common header
		return 16
	}
	return 8 // RFC 768: the datagram's content
}

// mostPorts bounds the filter: a jump in it skips at most 255 instructions.
const mostPorts = 64

// WatchMarked says by which devices of this network namespace a marked packet and its answers come and leave while ctx lasts,
// with the addresses that they have there. An answer is known by the addresses of a packet that was seen before.
func WatchMarked(ctx context.Context, m Marked) ([]Sighting, error) {
	switch m.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	default:
		return nil, fmt.Errorf("watch for a marked packet of protocol %d: it has no place for a mark", m.Protocol)
	}
	if len(m.Ports) > mostPorts {
		return nil, fmt.Errorf("watch for a marked packet that is answered from %d ports: at most %d", len(m.Ports), mostPorts)
	}
	var seen [][2]netip.AddrPort
	return watch(ctx, fmt.Sprintf("the packet marked %#x", m.Mark), m.filter(), func(b []byte) (passing, bool) { return m.match(b, &seen) })
}

// filter keeps packets that may be the marked one or an answer to it. A load beyond the end of a packet drops it, so what stands
// first is compared first.
func (m Marked) filter() []bpf.Instruction {
	type word struct{ off, size, val uint32 }
	var list []word
	switch m.Protocol {
	case unix.IPPROTO_TCP:
		list = append(list, word{8, 4, m.Mark + 1}) // a SYN takes one number: RFC 9293, section 3.4
	case unix.IPPROTO_SCTP:
		list = append(list, word{4, 4, m.Mark}) // the verification tag of all that comes back: RFC 9260, section 8.5
	default:
		for _, p := range m.Ports {
			list = append(list, word{0, 2, uint32(p)})
		}
	}
	list = append(list, word{m.markAt(), 4, m.Mark})
	slices.SortFunc(list, func(a, b word) int { return cmp.Compare(a.off, b.off) })
	n := uint8(2 * len(list)) //nolint:gosec // a few
	// X becomes the length of the IP header.
	out := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipFalse: 4},
		bpf.LoadAbsolute{Off: 6, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(m.Protocol), SkipFalse: n + 5},
		bpf.LoadConstant{Dst: bpf.RegX, Val: 40},
		bpf.Jump{Skip: 3},
		bpf.LoadAbsolute{Off: 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(m.Protocol), SkipFalse: n + 1},
		bpf.LoadMemShift{Off: 0},
	}
	for i, w := range list {
		left := uint8(2 * (len(list) - i - 1)) //nolint:gosec // a few
		out = append(out, bpf.LoadIndirect{Off: w.off, Size: int(w.size)}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: w.val, SkipTrue: left + 1})
	}
	return append(out, bpf.RetConstant{Val: 0}, bpf.RetConstant{Val: keep})
}

// match reports whether a packet, from its IP header on, is the marked one, whose addresses it adds to those that were seen, or
// an answer.
func (m Marked) match(b []byte, seen *[][2]netip.AddrPort) (passing, bool) {
	src, dst, protocol, b := split(b)
	if protocol != m.Protocol || len(b) < 8 {
		return passing{}, false
	}
	from, to := netip.AddrPortFrom(src, binary.BigEndian.Uint16(b)), netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:]))
	if at := int(m.markAt()); len(b) >= at+4 && binary.BigEndian.Uint32(b[at:]) == m.Mark {
		if pair := [2]netip.AddrPort{from, to}; !slices.Contains(*seen, pair) {
			*seen = append(*seen, pair)
		}
		return passing{ends: Ends{src, to}}, true
	}
	return passing{back: true, ends: Ends{dst, from}}, slices.Contains(*seen, [2]netip.AddrPort{to, from})
}
