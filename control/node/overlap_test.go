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
			if diff := cmp.Diff(tt.want, Overlaps(u, netip.MustParsePrefix(tt.cidr), nil), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Errorf("overlaps (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOverlapsOtherPods: what flannel has on a host in the range that Kubernetes gave its Node, and
// routes to what it gave others, is in the way of nothing; the host's own network is, and
// so is a bridge elsewhere.
func TestOverlapsOtherPods(t *testing.T) {
	t.Parallel()
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	u := dataplane.Underlay{Links: []dataplane.UnderlayLink{{Name: "eth0"}, {Name: "eth1"}, {Name: "cni0", Type: "bridge"}, {Name: "flannel.1", Type: "vxlan"}, {Name: "br9", Type: "bridge"}}}
	for _, a := range []struct{ link, addr string }{
		{"eth0", "192.0.2.10/24"}, {"cni0", "10.244.1.1/24"}, {"flannel.1", "10.244.1.0/32"}, {"eth1", "10.244.1.9/24"}, {"br9", "10.244.9.1/24"}, {"cni0", "fd00:1::1/64"},
	} {
		u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: a.link, Prefix: netip.MustParsePrefix(a.addr)})
	}
	u.Routes = []dataplane.UnderlayRoute{
		{Prefix: netip.MustParsePrefix("10.244.2.0/24"), Gateway: netip.MustParseAddr("10.244.2.0"), Link: "flannel.1", Protocol: 3},
		{Prefix: netip.MustParsePrefix("10.244.0.0/16"), Gateway: netip.MustParseAddr("192.0.2.1"), Link: "eth0", Protocol: 4},
	}
	text := func(list []Overlap) (out []string) {
		for _, o := range list {
			s := o.With
			if o.OnLink {
				s += ", on link"
			}
			if o.OtherPods {
				s += ", other pods"
			}
			out = append(out, s)
		}
		return out
	}
	lan := "route 10.244.0.0/16 via 192.0.2.1 dev eth0 proto static"
	for _, tt := range []struct {
		pods []netip.Prefix
		want []string
	}{
		{nil, []string{
			"address 10.244.1.1/24 of device cni0, on link", "address 10.244.1.0/32 of device flannel.1, on link",
			"address 10.244.1.9/24 of device eth1, on link", "address 10.244.9.1/24 of device br9, on link",
			"route 10.244.2.0/24 via 10.244.2.0 dev flannel.1 proto boot", lan,
		}},
		{prefixes("10.244.1.0/24", "fd00:1::/64"), []string{
			"address 10.244.1.1/24 of device cni0, on link, other pods", "address 10.244.1.0/32 of device flannel.1, on link, other pods",
			"address 10.244.1.9/24 of device eth1, on link", "address 10.244.9.1/24 of device br9, on link",
			"route 10.244.2.0/24 via 10.244.2.0 dev flannel.1 proto boot, other pods", lan,
		}},
	} {
		if diff := cmp.Diff(tt.want, text(Overlaps(u, netip.MustParsePrefix("10.244.0.0/16"), tt.pods))); diff != "" {
			t.Errorf("with pod CIDRs %v (-want +got):\n%s", tt.pods, diff)
		}
	}
	want := prefixes("192.0.2.10/32", "192.0.2.0/32", "192.0.2.255/32", "10.244.1.1/32", "10.244.1.0/32", "10.244.1.255/32", "10.244.1.0/32",
		"10.244.1.9/32", "10.244.1.0/32", "10.244.1.255/32", "10.244.9.1/32", "10.244.9.0/32", "10.244.9.255/32", "fd00:1::1/128")
	if diff := cmp.Diff(want, HostAddresses(u), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("the host's addresses (-want +got):\n%s", diff)
	}
}
