package bgp

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/bfd"
	"github.com/routerd/routerd/store"
)

// TestBFDSessions: a peer in one of the host's subnets, or on a link, is one hop away, others are several; who does not run or
// has no address on this side has none.
func TestBFDSessions(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr
	watched := store.BFD{Interval: 50 * time.Millisecond, Multiplier: 3}
	c := &Config{
		NextHop: addr("10.1.0.11"), NextHop6: addr("2001:db8::11"),
		Links: map[string][]netip.Prefix{"eth0": {netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("2001:db8::/64")}},
		Peers: []Peer{
			{Name: "unwatched", Addr: addr("10.1.0.1")},
			{Name: "near", Addr: addr("10.1.0.2"), Source: addr("10.1.0.11"), BFD: watched},
			{Name: "far", Addr: addr("10.2.0.2"), BFD: watched},
			{Name: "near6", Addr: addr("2001:db8::2"), BFD: watched},
			{Name: "refused", Addr: addr("10.1.0.3"), BFD: watched, Problem: "a reason"},
			{Name: "waiting", Interface: "eth1", Waiting: "its link", BFD: watched},
			{Name: "linked", Interface: "eth2", Addr: addr("fe80::2%eth2"), BFD: watched},
			{Name: "unlinked", Interface: "eth3", Addr: addr("fe80::2%eth3"), BFD: watched},
		},
	}
	links := map[string]Link{"eth2": {Addr: addr("fe80::1")}, "eth3": {}}
	timing := bfd.Timing{MinTx: 50 * time.Millisecond, MinRx: 50 * time.Millisecond, Multiplier: 3}
	key := func(local, remote string, multihop bool) bfd.Session {
		return bfd.Session{Key: bfd.Key{Local: addr(local), Remote: addr(remote), Multihop: multihop}, Timing: timing}
	}
	want := []bfd.Session{
		key("10.1.0.11", "10.1.0.2", false), key("10.1.0.11", "10.2.0.2", true),
		key("2001:db8::11", "2001:db8::2", false), key("fe80::1%eth2", "fe80::2%eth2", false),
	}
	if diff := cmp.Diff(want, bfdSessions(c, links), cmp.Comparer(func(a, b bfd.Session) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	if err := timing.Check(); err != nil {
		t.Error(err)
	}
}
