package vrouter

import (
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// The size that probes inside a tunnel find, and the one that is measured of
// the underlay, both bound what workloads send that way; the less counts.
func TestSizesThatWereMeasured(t *testing.T) {
	vx := dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, VNI: 4096, Port: 4789}
	other := dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: dataplane.IPv4}
	tab := newTestTable(testCluster(store.VXLAN)...)
	mtus := func() map[string]uint32 {
		tab.settle()
		handedOver(tab)
		out := map[string]uint32{}
		for _, o := range desiredOf(tab) {
			if r, ok := o.(dataplane.Route); ok && r.NextHop != 0 {
				out[r.Prefix.String()] = r.MTU
			}
		}
		return out
	}
	deliver := func(f dataplane.Encap, mtu int) {
		tab.encap.SetDelivery(dataplane.IPv4, map[string][]dataplane.Delivery{
			"node2": {{Encap: vx, Result: dataplane.Yes}},
			"node3": {{Encap: f, Result: dataplane.Yes, MTU: mtu}},
		})
	}
	for _, tt := range []struct {
		name   string
		encap  dataplane.Encap
		inside int
		reach  int
		want   uint32
	}{
		{"nothing less", vx, 0, 0, 0},
		{"less inside", vx, 1350, 0, 1350},
		{"less on the underlay too", vx, 1350, 1380, 1330},
		{"the underlay alone", vx, 0, 1380, 1330},
		{"more on the underlay", vx, 1350, 1460, 1350},
		{"another form", other, 1300, 0, 0},
		{"nonsense", vx, -5, 0, 0},
		{"all is well again", vx, 0, 0, 0},
	} {
		tab.encap.SetReach(dataplane.IPv4, map[string]dataplane.Reach{"node3": {MTU: tt.reach}})
		deliver(tt.encap, tt.inside)
		got := mtus()
		if got["192.168.3.0/26"] != tt.want || got["192.168.2.5/32"] != tt.want || got["192.168.2.0/26"] != 0 {
			t.Errorf("%s: %v, want %d for node3 alone", tt.name, got, tt.want)
		}
		deliver(tt.encap, tt.inside)
		tab.settle()
		if put, del := handedOver(tab); len(put)+len(del) != 0 {
			t.Errorf("%s: the same again changes %v, %v", tt.name, put, del)
		}
	}
}
