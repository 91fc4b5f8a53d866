package operator

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/probe"
)

// TestSuspects: those from whom no answer comes are asked once each, and no more than a few.
func TestSuspects(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr
	e := &examination{facts: doctor.Facts{
		Nodes: map[netip.Addr]string{addr("10.2.0.11"): "node3", addr("10.2.0.12"): "node4"},
		Node: &apiv1.NodeResponse{Peers: []*apiv1.BGPPeer{
			{Address: "10.1.0.1", Name: "tor", State: "start"},
			{Address: "10.1.0.2", Name: "tor2", State: "up"},
			{Address: "10.2.0.11", Name: "mesh", State: "start"},
			{Address: "10.2.0.12", Name: "mesh", State: "start"},
			{Address: "10.3.0.0/24", Name: "range", State: "listening"},
			{Address: "fd00::1", Name: "tor6", State: "start"},
		}},
	}}
	got := e.suspects([]probe.Echo{
		{Node: "node3", Addr: addr("10.2.0.11"), Device: "vxlan.calico"},
		{Node: "node3", Addr: addr("10.2.0.11"), Device: "tunl0"},
		{Node: "node6", Addr: addr("fd00::6")},
		{Node: "node2", Addr: addr("10.1.0.12"), Finding: probe.Finding{Answered: true}},
		{Node: "node5", Addr: addr("10.1.0.15"), Finding: probe.Finding{Refused: true}},
		{Node: "node7", Addr: addr("10.1.0.17"), Err: errors.New("no device")},
	})
	want := []doctor.Barred{{Node: "node3", Addr: addr("10.2.0.11")}, {Node: "tor", Addr: addr("10.1.0.1")}, {Node: "node4", Addr: addr("10.2.0.12")}}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var many []probe.Echo
	for a := addr("10.9.0.1"); len(many) < 2*heardMost; a = a.Next() {
		many = append(many, probe.Echo{Node: "far", Addr: a})
	}
	if got := e.suspects(many); len(got) != heardMost {
		t.Errorf("%d are asked, want %d", len(got), heardMost)
	}
}
