package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// put makes a tracked connection of UDP, as a host has after a packet.
func (t *Table) put(from, to netip.AddrPort) error {
	tuple := func(src, dst netip.AddrPort) func(*netlink.AttributeEncoder) error {
		return func(ae *netlink.AttributeEncoder) error {
			ae.Nested(attrTupleIP, func(ae *netlink.AttributeEncoder) error {
				ae.Bytes(attrIPv4Source, src.Addr().AsSlice())
				ae.Bytes(2, dst.Addr().AsSlice())
				return nil
			})
			ae.Nested(attrTupleProto, func(ae *netlink.AttributeEncoder) error {
				ae.ByteOrder = binary.BigEndian
				ae.Uint8(1, 17)
				ae.Uint16(2, src.Port())
				ae.Uint16(3, dst.Port())
				return nil
			})
			return nil
		}
	}
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.Nested(attrOrig, tuple(from, to))
	ae.Nested(attrReply, tuple(to, from))
	ae.Uint32(7, 600) // CTA_TIMEOUT, in seconds
	attrs, err := ae.Encode()
	if err != nil {
		return err
	}
	_, err = t.c.Execute(netlink.Message{
		Header: netlink.Header{Type: msgNew, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
		Data:   append(nfgen(unix.AF_INET), attrs...),
	})
	return err
}

// BenchmarkJudge looks at the connections of some addresses among 200,000.
func BenchmarkJudge(b *testing.B) {
	const connections = 200_000
	ns := netnstest.New(b)
	var tb *Table
	if err := ns.Do(func() (err error) { tb, err = Open(); return err }); err != nil {
		b.Fatal(err)
	}
	defer tb.Close()
	server := netip.MustParseAddrPort("192.0.2.1:53")
	for i := range connections {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 16), byte(i >> 8)})
		if err := tb.put(netip.AddrPortFrom(a, uint16(1024+i&255)), server); err != nil {
			b.Fatal(err)
		}
	}
	for _, n := range []int{0, 1, fewAddresses, fewAddresses + 1} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var of []netip.Addr
			for i := range n {
				of = append(of, netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
			}
			looked := 0
			for b.Loop() {
				looked = 0
				if _, _, err := tb.Judge(b.Context(), of, func(Flow) Verdict { looked++; return Keep }); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(looked), "looked-at")
		})
	}
}
