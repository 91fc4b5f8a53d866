package conntrack

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// attributes are those of a message about connections.
func attributes(write func(*nl.Batch)) []byte {
	var b nl.Batch
	begin(&b, msgNew, unix.AF_INET)
	write(&b)
	return b.Message(0)[nl.Header+nfgenLen:]
}

func writeTuple(b *nl.Batch, kind uint16, f Flow, t Tuple) {
	src, dst := uint16(attrIPv4Source), uint16(2)
	if t.Src.Is6() {
		src, dst = attrIPv6Source, 4
	}
	b.Nest(kind, func() {
		b.Nest(attrTupleIP, func() {
			b.Addr(src, t.Src)
			b.Addr(dst, t.Dst)
		})
		b.Nest(attrTupleProto, func() {
			b.Uint8(1, f.Protocol)
			b.Net16(2, t.SrcPort)
			b.Net16(3, t.DstPort)
		})
	})
}

// FuzzDecode: what a message says of a connection is what was written, in either family,
// and what the kernel is told to find it by says the same. Nothing that is no such
// message ends the daemon.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{10, 0, 0, 1}, []byte{10, 0, 0, 2}, uint8(6), uint16(1024), uint16(80), uint32(0x20000), attributes(func(b *nl.Batch) { b.Net32(attrMark, 1) }))
	six := netip.MustParseAddr("fd00::1").As16()
	f.Add(six[:], six[:], uint8(58), uint16(1), uint16(2), uint32(0), attributes(func(b *nl.Batch) {
		writeTuple(b, attrOrig, Flow{Protocol: 17}, Tuple{netip.AddrFrom4([4]byte{10, 0, 0, 1}), netip.AddrFrom4([4]byte{10, 0, 0, 2}), 1, 2})
		b.Net16(attrZone, 7)
		b.Net32(attrID, 9)
	}))
	f.Add([]byte{0}, []byte{}, uint8(0), uint16(0), uint16(0), uint32(0), []byte{4, 0, 1, 0x80, 8, 0, 1, 0x80, 4, 0, 1, 0})
	f.Fuzz(func(t *testing.T, a, b []byte, protocol uint8, from, to uint16, mark uint32, raw []byte) {
		if e, err := decode(raw); err == nil && e.orig == nil && (e.Orig != Tuple{} || e.Protocol != 0) {
			t.Errorf("a connection that the kernel cannot be asked for again: %+v", e)
		}
		_, _ = sourceOf(raw, attrOrig), sourceOf(raw, attrReply)

		src, ok := netip.AddrFromSlice(a)
		dst, too := netip.AddrFromSlice(b)
		if !ok || !too || src.Is4() != dst.Is4() {
			return
		}
		want := Flow{Protocol: protocol, Orig: Tuple{src, dst, from, to}, Reply: Tuple{dst, src, to, from}, Mark: mark}
		text := attributes(func(b *nl.Batch) {
			writeTuple(b, attrOrig, want, want.Orig)
			writeTuple(b, attrReply, want, want.Reply)
			b.Net32(attrMark, mark)
		})
		e, err := decode(text)
		if err != nil || e.Flow != want {
			t.Fatalf("%+v is read as %+v, %v", want, e.Flow, err)
		}
		if s, r := sourceOf(text, attrOrig), sourceOf(text, attrReply); s != src || r != dst {
			t.Errorf("the sources of %s are %s and %s", want, s, r)
		}
		var found Flow
		if err := found.decodeTuple(e.orig, &found.Orig); err != nil || found.Orig != want.Orig || found.Protocol != protocol {
			t.Errorf("the kernel would be asked for %+v, %v, instead of %+v", found, err, want)
		}
	})
}
