package bgp

import (
	"context"
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

func heapInUse() uint64 {
	runtime.GC()
	runtime.GC() // what the first one made collectable
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func prefixOf(i int) wire.Prefix {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 20<<24|uint32(i)<<6)
	return wire.FromNetip(netip.PrefixFrom(netip.AddrFrom4(b), 26))
}

// TestMemory: what is kept between the engine and the core takes few bytes a prefix, and
// nothing is allocated for one, whatever is said of it.
func TestMemory(t *testing.T) {
	const n = 200_000
	tor := func(i byte) Hop {
		a := netip.AddrFrom4([4]byte{10, 0, 0, i})
		return Hop{NextHop: a, PeerAddr: a, Peer: "tor", ASPath: "65001"}
	}
	both := []Hop{tor(1), tor(2)}
	before := heapInUse()
	r := newRIB()
	for i := range n {
		r.set(prefixOf(i), both)
	}
	if each := float64(heapInUse()-before) / n; each > 40 {
		t.Errorf("%.1f bytes a prefix of which the reader has not heard", each)
	}
	for !r.take().Empty() {
	}
	if each := float64(heapInUse()-before) / n; each > 30 {
		t.Errorf("%.1f bytes a prefix", each)
	}
	i, one := 0, both[:1]
	if got := testing.AllocsPerRun(1000, func() {
		r.set(prefixOf(i), one)
		r.set(prefixOf(i), both)
		i++
	}); got > 30 { // a set is made anew, for no other prefix has it
		t.Errorf("%v allocations for a change of all paths", got)
	}
	i = 0
	if got := testing.AllocsPerRun(1000, func() {
		r.set(prefixOf(i), one)
		i++
	}); got > 0 {
		t.Errorf("%v allocations for a change of a prefix to what others have", got)
	}
	runtime.KeepAlive(r)
}

// TestTaken: who has much to tell waits until the speaker has taken what was told.
func TestTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newQueue()
		<-q.taken() // nothing is there
		q.put(event{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		select {
		case <-q.taken():
			t.Error("what is there counts as taken")
		case <-ctx.Done():
		}
		wait := q.taken()
		if got := q.take(); len(got) != 1 {
			t.Errorf("%d events", len(got))
		}
		<-wait
		<-q.taken()
	})
}

// TestReaderAllocations: the engine's paths become those of the speaker, and a step for the
// core, without an object for each prefix.
func TestReaderAllocations(t *testing.T) {
	tor := netip.MustParseAddr("10.0.0.1")
	b := &backend{policy: newPolicy(&Config{ASN: 64512, Peers: []Peer{{Name: "tor", Addr: tor, ASN: 65001}}})}
	sets := attrs.NewTable()
	var all [2]attrs.Handle // which differ in MED
	for i := range all {
		var err error
		all[i], _, err = sets.Intern(attrs.Context{External: true, AS4: true, Reachable: true},
			[]byte{0x40, 1, 1, 0, 0x40, 2, 6, 2, 1, 0, 0, 0xfd, 0xe9, 0x80, 4, 4, 0, 0, 0, byte(i)}, []byte{10, 0, 0, 1})
		if err != nil || all[i] == 0 {
			t.Fatal(err)
		}
	}
	turn := 0
	path := engine.Path{Peer: tor, External: true, Best: true}
	next := func() {
		turn++
		path.Set = all[turn%2]
		path.View = sets.View(path.Set)
	}
	next()
	paths := func(yield func(*engine.Path) bool) { yield(&path) }
	r, known := b.reader(), newRIB()
	for i := range 2 * batchSize {
		known.set(prefixOf(i), r.hops(paths))
	}
	for !known.take().Empty() {
	}
	got := testing.AllocsPerRun(10, func() {
		next()
		for i := range batchSize {
			known.set(prefixOf(i), r.hops(paths))
		}
		if c := known.take(); len(c.Put) != batchSize {
			t.Fatalf("%d prefixes are told", len(c.Put))
		}
	})
	t.Logf("%.0f allocations for %d prefixes that change", got, batchSize)
	if got > 100 {
		t.Errorf("%.0f allocations for %d prefixes that change", got, batchSize)
	}
}
