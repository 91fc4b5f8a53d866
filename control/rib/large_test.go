package rib

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"
)

// many is an update of n prefixes with the same next hops.
func many(n int, hops ...string) Update {
	u := Update{Put: make([]Path, n)}
	of := learnedPath("0.0.0.0/0", hops...)
	for i := range u.Put {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 20<<24+uint32(i)<<8)
		u.Put[i] = of
		u.Put[i].Prefix = netip.PrefixFrom(netip.AddrFrom4(a), 24)
	}
	return u
}

// heap is what is in use of it, in bytes, and in how many objects.
func heap() (bytes, objects uint64) {
	runtime.GC()
	runtime.GC() // what the first one made collectable
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc, m.HeapObjects
}

// TestBytesPerPrefix: what is kept of a prefix is one record, and nothing that the
// collector has to follow.
func TestBytesPerPrefix(t *testing.T) {
	const n = 100_000
	tab, u := newHost(t), many(n, "10.1.0.2", "10.1.0.3")
	bytes, objects := heap()
	tab.SetPaths(u)
	tab.settle()
	tab.HandedOver()
	tab.objects.HandedOver()
	nowBytes, nowObjects := heap()
	each := float64(nowBytes-bytes) / n
	t.Logf("%.1f bytes and %d objects for %d prefixes", each, nowObjects-objects, n)
	if each > 50 || nowObjects-objects > n/100 {
		t.Errorf("%.1f bytes a prefix in %d objects; want at most 50, and chunks", each, nowObjects-objects)
	}
	if routes, _ := tab.Counts(); routes != n {
		t.Fatalf("%d routes", routes)
	}
	// And it goes with the prefixes.
	tab.SetPaths(Update{Reset: true})
	tab.settle()
	tab.HandedOver()
	tab.objects.HandedOver()
	if nowBytes, _ = heap(); float64(nowBytes)-float64(bytes) > n {
		t.Errorf("%d bytes are left of a table that was withdrawn", nowBytes-bytes)
	}
	runtime.KeepAlive(u)
}

// BenchmarkLargeTable learns 500,000 prefixes by two next hops, loses one and
// finds it again.
func BenchmarkLargeTable(b *testing.B) {
	const n = 500_000
	first, second := many(n, "10.1.0.2", "10.1.0.3"), many(n, "10.1.0.3")
	for b.Loop() {
		tab := newHost(b)
		for _, u := range []Update{first, second} {
			tab.SetPaths(u)
			tab.settle()
			handedOver(tab)
		}
	}
}
