package operator

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
)

// TestPeersOf: the API has a peer's numbers of prefixes with its limit, and says
// when they are not known.
func TestPeersOf(t *testing.T) {
	t.Parallel()
	st := bgp.Status{Uncounted: errors.New("busy"), Peers: []bgp.PeerStatus{
		{
			Name: "tor", State: bgp.StateUp, Info: "Established", Counted: true, Received: 5, Accepted: 4, Advertised: 3, MaxPrefixes: 100,
			Counters: bgp.Counters{Families: []bgp.FamilyCounts{{Family: "ipv4", Received: 5, Accepted: 4, Advertised: 3}}},
		},
		{Name: "away", State: bgp.StateStart, Info: "connecting"},
	}}
	want := []*apiv1.BGPPeer{
		{
			Name: "tor", State: "up", Info: "Established; its prefixes could not be counted now: busy", Received: 5, Accepted: 4, Advertised: 3, Counted: true, MaxPrefixes: 100,
			Families: []*apiv1.BGPFamily{{Family: "ipv4", Received: 5, Accepted: 4, Advertised: 3}},
		},
		{Name: "away", State: "start", Info: "connecting"},
	}
	var got []*apiv1.BGPPeer
	for _, p := range peersOf(st) {
		got = append(got, p.proto)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
