package bgp

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// TestGather: one change alone is told at once, those that follow it together a
// moment later, a whole batch and a lost next hop without delay.
func TestGather(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRIB()
		tor := Hop{NextHop: netip.MustParseAddr("10.0.0.1"), PeerAddr: netip.MustParseAddr("10.0.0.1"), Peer: "tor"}
		told := 0
		add := func(n int) {
			for range n {
				told++
				var b [4]byte
				binary.BigEndian.PutUint32(b[:], 20<<24|uint32(told)<<8)
				r.add(netip.PrefixFrom(netip.AddrFrom4(b), 24), tor)
			}
		}
		next := func(what string, put int, after time.Duration) {
			t.Helper()
			start := time.Now()
			c, err := r.next(t.Context())
			if err != nil || len(c.Put) != put || time.Since(start) != after {
				t.Errorf("%s: %d prefixes after %v, %v; want %d after %v", what, len(c.Put), time.Since(start), err, put, after)
			}
		}
		add(1)
		next("the first", 1, 0)
		add(2)
		next("at once after it", 2, gather)
		<-time.After(2 * gather) // virtual
		add(1)
		next("after a pause", 1, 0)
		add(batchSize + 1)
		next("a whole batch", batchSize, 0)
		next("the rest", 1, gather)
		add(1)
		r.lose(tor.PeerAddr)
		next("with a next hop lost", 1, 0)
		add(1)
		go func() {
			<-time.After(gather / 2) // virtual
			r.recover(tor.PeerAddr)
			add(1)
			r.lose(tor.PeerAddr)
		}()
		next("lost while waiting for more", 2, gather/2)
	})
}
