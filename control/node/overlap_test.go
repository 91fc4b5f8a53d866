package node

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/dataplane"
)

func TestOverlaps(t *testing.T) {
	u := manyLinks()
	u.Routes = append(u.Routes,
		dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("172.16.0.0/12"), Gateway: netip.MustParseAddr("10.1.0.9"), Link: "eth0", Protocol: 4},
		dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("192.168.1.0/26"), Link: "cali1234", Protocol: 3},
		dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("192.0.2.0/24"), Gateway: netip.MustParseAddr("10.1.0.8"), Link: "eth0", Protocol: 77},
	)
	u.Dropping = []dataplane.UnderlayRoute{{Type: "blackhole", Prefix: netip.MustParsePrefix("198.18.1.0/26"), Protocol: 12}}
	tests := []struct {
		cidr string
		want []Overlap
	}{
		{"192.168.0.0/16", nil}, // vxlan.calico and a workload's device are ours
		{"203.0.113.0/24", nil}, // the default route covers everything
		{"127.0.0.0/16", nil},   // validation's business
		{"10.5.0.0/16", []Overlap{{With: "address 10.5.0.1/24 of device eth1", OnLink: true, Addr: netip.MustParseAddr("10.5.0.1")}}},
		{"10.5.0.128/25", []Overlap{{With: "address 10.5.0.1/24 of device eth1", OnLink: true, Addr: netip.MustParseAddr("10.5.0.1")}}},
		{"172.20.0.0/16", []Overlap{{With: "route 172.16.0.0/12 via 10.1.0.9 dev eth0 proto static"}}},
		{"172.17.0.0/24", []Overlap{
			{With: "address 172.17.0.1/16 of device docker0", OnLink: true, Addr: netip.MustParseAddr("172.17.0.1")},
			{With: "route 172.16.0.0/12 via 10.1.0.9 dev eth0 proto static"},
		}},
		{"192.0.2.0/25", []Overlap{{With: "route 192.0.2.0/24 via 10.1.0.8 dev eth0 proto 77"}}},
		{"198.18.0.0/16", []Overlap{{With: "blackhole route 198.18.1.0/26 proto bird"}}},
		{"198.18.1.0/26", nil}, // less specific than any block
		{"198.18.1.0/28", nil},
		{"fd00::/48", []Overlap{{With: "address fd00::1/64 of device eth1", OnLink: true, Addr: netip.MustParseAddr("fd00::1")}}},
	}
	for _, tt := range tests {
		t.Run(tt.cidr, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, Overlaps(u, netip.MustParsePrefix(tt.cidr)), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Errorf("overlaps (-want +got):\n%s", diff)
			}
		})
	}
}
