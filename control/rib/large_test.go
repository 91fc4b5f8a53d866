package rib

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"
)

// BenchmarkLargeTable learns 500,000 prefixes by two next hops, loses one and
// finds it again. It reports what a prefix takes of the heap.
func BenchmarkLargeTable(b *testing.B) {
	const n = 500_000
	both, one := learnedPath("0.0.0.0/0", "10.1.0.2", "10.1.0.3"), learnedPath("0.0.0.0/0", "10.1.0.3")
	update := func(of Path) Update {
		u := Update{Put: make([]Path, n)}
		for i := range u.Put {
			var a [4]byte
			binary.BigEndian.PutUint32(a[:], 20<<24+uint32(i)<<8)
			u.Put[i] = of
			u.Put[i].Prefix = netip.PrefixFrom(netip.AddrFrom4(a), 24)
		}
		return u
	}
	first, second := update(both), update(one)
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		tab := newHost(b)
		before := heap()
		tab.SetPaths(first)
		tab.settle()
		handedOver(tab)
		tab.moved = set[netip.Prefix]{}
		tab.dirty = set[netip.Prefix]{}
		b.ReportMetric(float64(heap()-before)/n, "B/prefix")
		tab.SetPaths(second)
		tab.settle()
		handedOver(tab)
	}
}
