package nflog

import (
	"encoding/binary"
	"testing"

	"github.com/mdlayher/netlink"
)

// FuzzParseHeader: whatever a workload sends, what is read of a packet that was cut short
// says nothing else than what is read of the whole.
func FuzzParseHeader(f *testing.F) {
	four := make([]byte, 28)
	four[0], four[9] = 0x45, 6
	f.Add(four, 24)
	six := make([]byte, 64)
	six[0], six[6], six[40], six[48] = 0x60, 0, 44, 58
	f.Add(six, 60)
	f.Add([]byte{0x4f}, 0)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		h := ParseHeader(b)
		if h.Src.IsValid() != h.Dst.IsValid() || h.Src.Is4() != h.Dst.Is4() {
			t.Errorf("from %v to %v", h.Src, h.Dst)
		}
		if (h.SrcPort != 0 || h.DstPort != 0) && (h.ICMPType != 0 || h.ICMPCode != 0) {
			t.Errorf("ports and a type of ICMP: %+v", h)
		}
		if cut < 0 || cut > len(b) {
			return
		}
		part := ParseHeader(b[:cut])
		if part.Src.IsValid() && (part.Src != h.Src || part.Dst != h.Dst) {
			t.Errorf("%d of %d bytes are from %v to %v, all from %v to %v", cut, len(b), part.Src, part.Dst, h.Src, h.Dst)
		}
		ports, icmp := part.SrcPort != 0 || part.DstPort != 0, part.ICMPType != 0 || part.ICMPCode != 0
		if ports && (part.SrcPort != h.SrcPort || part.DstPort != h.DstPort) || icmp && (part.ICMPType != h.ICMPType || part.ICMPCode != h.ICMPCode) {
			t.Errorf("%d of %d bytes say %+v, all %+v", cut, len(b), part, h)
		}
	})
}

// FuzzDecode: no message of the log ends the daemon, and the group is the kernel's.
func FuzzDecode(f *testing.F) {
	f.Add(uint16(msgPacket), []byte{2, 0, 0, 7, 8, 0, attrIn, 0, 0, 0, 0, 3})
	f.Add(uint16(msgPacket), []byte{2, 0, 0, 7, 4, 0, attrSeq, 0, 5, 0, attrPayload, 0, 0x45, 0, 0, 0, 4, 0, attrPrefix, 0})
	f.Add(uint16(msgPacket), []byte{2, 0, 0})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		p, _, ok := decode(netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: data})
		switch {
		case ok != (kind == uint16(msgPacket) && len(data) >= nfgenLen):
			t.Errorf("a message of type %#x with %d bytes is taken: %v", kind, len(data), ok)
		case ok && p.Group != binary.BigEndian.Uint16(data[2:]):
			t.Errorf("group %d", p.Group)
		}
	})
}
