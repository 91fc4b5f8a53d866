package nft

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// crowd is n workloads beside those that there are. Each has ten rules: of a
// policy of its own, or of one that all share.
func crowd(n int, shared bool) filter.Delta {
	d := filter.Delta{
		PutSets:  []filter.Set{{ID: "s-peers"}},
		Members:  []filter.MemberChange{{Set: "s-peers", Add: netMembers("10.1.0.1/32", "10.1.0.2/32")}},
		Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}},
	}
	policies := n
	if shared {
		policies = 1
	}
	for i := range policies {
		p := filter.Policy{ID: filter.PolicyID{Kind: "NetworkPolicy", Namespace: "ns", Name: fmt.Sprint(i)}}
		for j := range 10 {
			port := uint16(1000 + j)
			p.Ingress = append(p.Ingress, filter.Rule{Action: filter.Allow, Family: 4, Protocol: 17, Source: filter.Side{Set: "s-peers"}, Destination: filter.Side{Ports: []filter.PortRange{{Low: port, High: port}}}})
		}
		d.PutPolicies = append(d.PutPolicies, p)
	}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 1, byte((i + 1) >> 8), byte(i + 1)})
		tiers := []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{{ID: d.PutPolicies[i%policies].ID}}}}
		d.PutEndpoints = append(d.PutEndpoints, filter.Endpoint{
			Interface: fmt.Sprintf("cali%d", i+1), Sources: []netip.Prefix{netip.PrefixFrom(a, 32)},
			Ingress: filter.Path{Tiers: tiers}, Egress: filter.Path{Default: filter.Allow},
		})
	}
	return d
}

// BenchmarkLoad loads 1,000 endpoints with 10 rules each.
func BenchmarkLoad(b *testing.B) {
	for _, shared := range []bool{false, true} {
		b.Run(fmt.Sprintf("shared=%t", shared), func(b *testing.B) {
			n := netnstest.New(b)
			d := crowd(1000, shared)
			var cpu time.Duration
			for b.Loop() {
				start := cpuTime(b)
				table := openTable(b, n, Config{Shared: true})
				if err := table.Apply(d); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				cpu += cpuTime(b) - start
				table.Close()
				run(b, n, "nft", "flush", "ruleset")
				b.StartTimer()
			}
			b.ReportMetric(float64(cpu.Microseconds())/float64(b.N), "cpu-us/op")
		})
	}
}

// BenchmarkRestart reads back 1,000 endpoints and finds nothing to do.
func BenchmarkRestart(b *testing.B) {
	n := netnstest.New(b)
	d := crowd(1000, false)
	for b.Loop() {
		table := openTable(b, n, Config{Shared: true})
		if err := table.Apply(d); err != nil {
			b.Fatal(err)
		}
		table.Close()
	}
}

// BenchmarkMember changes one member of a set of 10,000.
func BenchmarkMember(b *testing.B) {
	for _, bits := range []int{32, 31} {
		b.Run(fmt.Sprintf("bits=%d", bits), func(b *testing.B) {
			n := netnstest.New(b)
			table := openTable(b, n, Config{})
			defer table.Close()
			var many []filter.Member
			for i := range 10000 {
				i *= 2
				many = append(many, filter.Member{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), bits)})
			}
			d := crowd(1000, false)
			if err := table.Apply(d); err != nil {
				b.Fatal(err)
			}
			if err := table.Apply(filter.Delta{PutSets: []filter.Set{{ID: "s-many"}}, Members: []filter.MemberChange{{Set: "s-many", Add: many}}}); err != nil {
				b.Fatal(err)
			}
			gone := false
			start := cpuTime(b)
			for b.Loop() {
				c := filter.MemberChange{Set: "s-many", Del: many[:1]}
				if gone {
					c.Del, c.Add = nil, many[:1]
				}
				gone = !gone
				if err := table.Apply(filter.Delta{Members: []filter.MemberChange{c}}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
		})
	}
}

// BenchmarkEndpoint brings an endpoint beside 1,000 others, and takes it away.
func BenchmarkEndpoint(b *testing.B) {
	for _, shared := range []bool{false, true} {
		b.Run(fmt.Sprintf("shared=%t", shared), func(b *testing.B) {
			n := netnstest.New(b)
			table := openTable(b, n, Config{})
			defer table.Close()
			d := crowd(1000, shared)
			if err := table.Apply(d); err != nil {
				b.Fatal(err)
			}
			e := d.PutEndpoints[0]
			e.Interface = "cali-new"
			start := cpuTime(b)
			for b.Loop() {
				if err := table.Apply(filter.Delta{PutEndpoints: []filter.Endpoint{e}}); err != nil {
					b.Fatal(err)
				}
				if err := table.Apply(filter.Delta{DelEndpoints: []string{e.Interface}}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
		})
	}
}

// BenchmarkForward sends the first packets of flows through a host with more
// and more endpoints; without a table for comparison.
func BenchmarkForward(b *testing.B) {
	for _, n := range []int{0, 2, 100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			l := newLab(b)
			if n > 0 {
				table := openTable(b, l.host, Config{})
				defer table.Close()
				if err := table.Apply(crowd(n, false)); err != nil {
					b.Fatal(err)
				}
			}
			f := filter.Flow{In: "cali1", Out: "cali2", Packet: filter.Packet{
				Src: addrs("cali1")[0], Dst: addrs("cali2")[0], Protocol: 17, DstPort: 1009,
			}}
			sent := 0
			for b.Loop() {
				if sent++; sent%30000 == 0 {
					b.StopTimer()
					l.forget(b)
					l.drain(b)
					b.StartTimer()
				}
				f.Packet.SrcPort = uint16(sent%60000 + 1000)
				l.send(b, f)
			}
			l.drain(b)
			arrived := len(l.seen)
			b.ReportMetric(float64(arrived)/float64(sent), "arrived/sent")
		})
	}
}

// cpuTime is what the process has taken of processors, its own and the kernel's for it.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
