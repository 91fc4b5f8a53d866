package conntrack

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// put makes a tracked connection of UDP, as a host has after a packet.
func (t *Table) put(from, to netip.AddrPort) error {
	var b nl.Batch
	b.Begin(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.AF_INET, unix.NFNETLINK_V0, 0, 0)
	f := Flow{Protocol: unix.IPPROTO_UDP}
	writeTuple(&b, attrOrig, f, Tuple{from.Addr(), to.Addr(), from.Port(), to.Port()})
	writeTuple(&b, attrReply, f, Tuple{to.Addr(), from.Addr(), to.Port(), from.Port()})
	b.Net32(7, 600) // CTA_TIMEOUT, in seconds
	return t.c.Do(&b, nil)
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
