package operator

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
)

// TestPeersOf: the API has a peer's numbers of prefixes with its limit.
func TestPeersOf(t *testing.T) {
	t.Parallel()
	st := bgp.Status{Peers: []bgp.PeerStatus{
		{
			Name: "tor", State: bgp.StateUp, Info: "Established", Counted: true, Received: 5, Accepted: 4, Advertised: 3, MaxPrefixes: 100,
			Counters: bgp.Counters{Families: []bgp.FamilyCounts{{Family: "ipv4", Received: 5, Accepted: 4, Advertised: 3}}},
		},
		{Name: "away", State: bgp.StateStart, Info: "connecting"},
		{Name: "lab", State: bgp.StateListening, Range: netip.MustParsePrefix("10.9.0.0/24"), Limit: 5, Info: "1 of 5 neighbours"},
		{Name: "lab", State: bgp.StateStart, Range: netip.MustParsePrefix("10.9.0.0/24"), Addr: netip.MustParseAddr("10.9.0.7"), Port: 179, Info: "connecting"},
	}}
	want := []*apiv1.BGPPeer{
		{
			Name: "tor", State: "up", Info: "Established", Received: 5, Accepted: 4, Advertised: 3, Counted: true, MaxPrefixes: 100,
			Families: []*apiv1.BGPFamily{{Family: "ipv4", Received: 5, Accepted: 4, Advertised: 3}},
		},
		{Name: "away", State: "start", Info: "connecting"},
		{Name: "lab", State: "listening", Address: "10.9.0.0/24", Info: "1 of 5 neighbours"},
		{Name: "lab", State: "start", Address: "10.9.0.7", Info: "connecting"},
	}
	var got []*apiv1.BGPPeer
	for i, p := range peersOf(st) {
		got = append(got, p.proto)
		if p.up != (i == 0 || i == 2) || p.called != (i == 3) {
			t.Errorf("%s counts as up: %t, as one that comes and goes: %t", p.proto.GetAddress(), p.up, p.called)
		}
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
