package attach

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

// TestCheckMTUs: an MTU that cannot work is named with both numbers and the
// field to change, per family.
func TestCheckMTUs(t *testing.T) {
	t.Parallel()
	v4 := dataplane.Host{Addr: netip.MustParsePrefix("10.1.0.11/24"), Uplink: "eth0", UplinkMTU: 1500}
	v6 := dataplane.Host{Addr: netip.MustParsePrefix("fd00::11/64"), Uplink: "eth1", UplinkMTU: 1300}
	with := func(h dataplane.Host, ipip, vxlan int) dataplane.Host {
		h.IPIPMTU, h.VXLANMTU = ipip, vxlan
		return h
	}
	for _, tt := range []struct {
		name string
		mtu  MTU
		host []dataplane.Host
		want []string // each part of one error
	}{
		{"computed", MTU{IPv4: 1450}, []dataplane.Host{v4}, nil},
		{"operator's fits", MTU{IPv4: 1450, Operator: 1450}, []dataplane.Host{v4}, nil},
		{"operator's is too large", MTU{IPv4: 1450, Operator: 1500}, []dataplane.Host{v4}, []string{"cni.mtu is 1500", "leave 1450", "1500 bytes that eth0"}},
		{"nothing known yet", MTU{Operator: 1500}, nil, nil},
		{"tunnels fit", MTU{IPv4: 1400}, []dataplane.Host{with(v4, 1480, 1450)}, nil},
		{"ipipMTU", MTU{IPv4: 1481}, []dataplane.Host{with(v4, 1481, 0)}, []string{"ipipMTU", "is 1481", "1480 or less", "takes 1500 with 20"}},
		{"vxlanMTU", MTU{IPv4: 1451}, []dataplane.Host{with(v4, 0, 1451)}, []string{"vxlanMTU of", "is 1451", "1450 or less"}},
		{"vxlanMTUV6", MTU{IPv6: 1300}, []dataplane.Host{with(v6, 0, 1290)}, []string{"vxlanMTUV6", "is 1290", "1230 or less"}},
		{"too small for IPv6", MTU{IPv6: 1230}, []dataplane.Host{v6}, []string{"leave 1230", "IPv6 needs 1280", "eth1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			errs := checkMTUs(tt.mtu, tt.host)
			if len(tt.want) == 0 {
				if len(errs) != 0 {
					t.Errorf("errors: %v, want none", errs)
				}
				return
			}
			if len(errs) != 1 {
				t.Fatalf("errors: %v, want one", errs)
			}
			for _, w := range tt.want {
				if !strings.Contains(errs[0].Error(), w) {
					t.Errorf("error %q does not say %q", errs[0], w)
				}
			}
		})
	}
}
