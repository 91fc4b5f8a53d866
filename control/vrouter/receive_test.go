package vrouter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// saying makes a node publish.
func saying(ev store.Event, f store.NodeEncaps) store.Event {
	f.Published = true
	store.SetNodeEncaps(ev.Object.Value.(*store.Node), f)
	return ev
}

// devices are the tunnels of a wish.
func devices(t *table) []string {
	var out []string
	for _, o := range desiredOf(t) {
		if l, ok := o.(dataplane.Link); ok {
			out = append(out, fmt.Sprintf("%s %s", l.Name, encapOfLink(l)))
		}
	}
	return out
}

// TestReceiver: which devices a host has follows from its pools and from what
// nodes say, with one exception: what it said itself it keeps, and that is not all that its
// record says.
func TestReceiver(t *testing.T) {
	self := func(f store.NodeEncaps) store.Event {
		return saying(nodeEvent("node1", "10.1.0.11/24", "192.168.1.0", "192.168.1.1"), f)
	}
	peer := func(f store.NodeEncaps) store.Event {
		return saying(nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"), f)
	}
	for _, tt := range []struct {
		name   string
		events []store.Event
		want   []string
	}{
		{"by its pools", []store.Event{self(store.NodeEncaps{})}, []string{"vxlan.calico vxlan/4096/4789"}},
		{
			"a peer still sends the old, which this host accepted lately",
			[]store.Event{self(store.NodeEncaps{Accepts: []string{"ipip", "vxlan/7/4789"}}), peer(store.NodeEncaps{Uses: []string{"ipip", "vxlan/7/4789"}})},
			[]string{"tunl0 ipip", "vxlan.calico vxlan/4096/4789", "vxlan.calico-2 vxlan/7/4789"},
		},
		{
			"a peer sends what neither pools ask for nor this host saw",
			[]store.Event{self(store.NodeEncaps{}), peer(store.NodeEncaps{Uses: []string{"ipip", "vxlan/7/4789"}, Sends: map[string]string{"pool": "VXLAN/8/5000"}})},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
		{
			"a peer could send it by its mode",
			[]store.Event{self(store.NodeEncaps{Uses: []string{"vxlan/7/4789"}}), peer(store.NodeEncaps{Sends: map[string]string{"pool": "VXLANCrossSubnet/7/4789"}})},
			[]string{"vxlan.calico vxlan/4096/4789", "vxlan.calico-2 vxlan/7/4789"},
		},
		{
			"the host itself sends it",
			[]store.Event{self(store.NodeEncaps{Uses: []string{"ipip"}})},
			[]string{"tunl0 ipip", "vxlan.calico vxlan/4096/4789"},
		},
		{
			"the host says that it takes it in",
			[]store.Event{self(store.NodeEncaps{Accepts: []string{"ipip"}})},
			[]string{"tunl0 ipip", "vxlan.calico vxlan/4096/4789"},
		},
		{
			"its record says what it did not write there",
			[]store.Event{self(store.NodeEncaps{Uses: []string{"ipip"}}), self(store.NodeEncaps{Accepts: []string{"vxlan/7/5000"}, Uses: []string{"ipip", "vxlan/77/5001"}, Sends: map[string]string{"pool": "VXLAN/8/5002"}})},
			[]string{"tunl0 ipip", "vxlan.calico vxlan/4096/4789"},
		},
		{
			"its record said so when it started, of a system port",
			[]store.Event{self(store.NodeEncaps{Accepts: []string{"vxlan/77/53"}, Uses: []string{"vxlan/77/53"}})},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
		{
			"a peer takes it in, which is nothing to this host",
			[]store.Event{self(store.NodeEncaps{}), peer(store.NodeEncaps{Accepts: []string{"ipip"}})},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
		{
			"a form of a family that the host has not, and one of a later version",
			[]store.Event{self(store.NodeEncaps{}), peer(store.NodeEncaps{Uses: []string{"ip6tnl", "geneve/1"}})},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
		{
			"a peer sends VXLAN at DNS's port",
			[]store.Event{self(store.NodeEncaps{}), peer(store.NodeEncaps{Uses: []string{"vxlan/4096/53"}, Sends: map[string]string{"pool": "VXLAN/7/1023", "six": "VXLAN/7/53"}})},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
		{
			"so do all, as FelixConfiguration asks for",
			[]store.Event{self(store.NodeEncaps{}), felixEvent(4096, 443), peer(store.NodeEncaps{Uses: []string{"vxlan/4096/443", "vxlan/4096/53"}})},
			[]string{"vxlan.calico vxlan/4096/443"},
		},
		{
			"the peer is gone",
			[]store.Event{self(store.NodeEncaps{}), peer(store.NodeEncaps{Uses: []string{"ipip"}}), gone(nodeEvent("node2", "", "", ""))},
			[]string{"vxlan.calico vxlan/4096/4789"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := newTestTable(append([]store.Event{poolEvent("pool", "192.168.0.0/16", store.VXLAN)}, tt.events...)...)
			if diff := cmp.Diff(tt.want, devices(tab)); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// TestSlots: a network keeps the device that it has, also from an earlier life,
// and more networks than there can be devices are refused, not mixed up.
func TestSlots(t *testing.T) {
	u := rack()
	u.Links = append(u.Links, dataplane.UnderlayLink{Index: 9, Name: "vxlan.calico-2", Type: "vxlan", MTU: 1450, Up: true, VNI: 4096, Port: 4789})
	tab := newTable("node1")
	tab.setUnderlay(u)
	for _, ev := range testCluster(store.VXLAN) {
		tab.take(ev)
	}
	tab.settle()
	if diff := cmp.Diff([]string{"vxlan.calico-2 vxlan/4096/4789"}, devices(tab)); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
	var uses []string
	for i := range 12 {
		uses = append(uses, fmt.Sprintf("vxlan/%d/4789", i+1))
	}
	accepts := store.NodeEncaps{Accepts: uses}
	tab.encap.Published(cluster.NewEncaps(accepts))
	tab.take(saying(nodeEvent("node1", "10.1.0.11/24", "192.168.1.0", "192.168.1.1"), accepts))
	tab.take(saying(nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"), store.NodeEncaps{Uses: uses}))
	tab.settle()
	got := devices(tab)
	if len(got) != 9 || !slices.Contains(got, "vxlan.calico-2 vxlan/4096/4789") {
		t.Errorf("%d devices: %v; want nine, and the one of before among them", len(got), got)
	}
	refused := 0
	for _, d := range tab.encap.Devices() {
		if d.Err != nil {
			refused++
		}
	}
	if refused != 4 {
		t.Errorf("%d are refused; want the four that have no room", refused)
	}
}

// TestStrictUplink: the source check of an uplink is loosened where plain
// packets are in use and it is strict, and nowhere else.
func TestStrictUplink(t *testing.T) {
	for _, tt := range []struct {
		encap    store.Encapsulation
		rpFilter int
		want     bool
	}{
		{store.Direct, 1, true},
		{store.VXLANCrossSubnet, 1, true},
		{store.VXLAN, 1, false},
		{store.Direct, 0, false},
		{store.Direct, 2, false},
	} {
		u := rack()
		u.Links[1].RPFilter = tt.rpFilter
		tab := newTable("node1")
		tab.setUnderlay(u)
		for _, ev := range testCluster(tt.encap) {
			tab.take(ev)
		}
		tab.settle()
		if got := slices.Contains(render(tab), "net/ipv4/conf/eth0/rp_filter=2"); got != tt.want {
			t.Errorf("%s with rp_filter %d: loosened %v, want %v", tt.encap, tt.rpFilter, got, tt.want)
		}
	}
}

// TestForwardingDevices: a form does not count before each device by which its
// packets come in forwards, whatever conf/default gave it.
func TestForwardingDevices(t *testing.T) {
	for _, tt := range []struct {
		encap store.Encapsulation
		want  map[string][]string
	}{
		{store.Direct, map[string][]string{"direct": {"eth0"}}},
		{store.IPIP, map[string][]string{"ipip": {"eth0", "tunl0"}, "ip6tnl": {"eth0", "tunl6.calico"}}},
		{store.VXLANCrossSubnet, map[string][]string{
			"direct": {"eth0"}, "vxlan/4096/4789": {"eth0", "vxlan.calico"}, "vxlan6/4096/4789": {"eth0", "vxlan-v6.calico"},
		}},
	} {
		tab := newTable("node1")
		tab.setUnderlay(sixRack())
		tab.take(dual("node1", "10.1.0.11/24", "fd01::11/64", "", ""))
		tab.take(poolEvent("four", "192.168.0.0/16", tt.encap))
		tab.take(poolEvent("six", "fd10::/48", tt.encap))
		tab.settle()
		got := map[string][]string{}
		for f, d := range tab.encap.Devices() {
			for _, k := range d.Keys {
				name := strings.TrimPrefix(k.String(), "sysctl net/ipv4/conf/")
				if device, ok := strings.CutSuffix(name, "/forwarding"); ok && name != k.String() {
					got[f.String()] = append(got[f.String()], device)
				}
			}
			slices.Sort(got[f.String()])
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.encap, diff)
		}
	}
}

// TestDeviceWithoutAddress: a device that is to get an address does not count
// before it has one; a host that gets none does not wait for it.
func TestDeviceWithoutAddress(t *testing.T) {
	awaits := func(change func(*v3.IPPoolSpec), node store.Event) bool {
		pool := poolEvent("pool", "192.168.0.0/16", store.VXLAN)
		change(&pool.Object.Value.(*v3.IPPool).Spec)
		tab := newTestTable(pool, node)
		return slices.Contains(tab.encap.Devices()[encapOf(t, "vxlan/4096/4789")].Keys, dataplane.Key(dataplane.AddressKey{Link: "vxlan.calico"}))
	}
	with, without := nodeEvent("node1", "10.1.0.11/24", "", "192.168.1.1"), nodeEvent("node1", "10.1.0.11/24", "", "")
	nothing := func(*v3.IPPoolSpec) {}
	for name, tt := range map[string]struct {
		got, want bool
	}{
		"it has one":                          {awaits(nothing, with), false},
		"it has none yet":                     {awaits(nothing, without), true},
		"the pool does not select it":         {awaits(func(s *v3.IPPoolSpec) { s.NodeSelector = "rack == 'two'" }, without), false},
		"the pool gives tunnels no addresses": {awaits(func(s *v3.IPPoolSpec) { s.AllowedUses = []v3.IPPoolAllowedUse{"Workload"} }, without), false},
		"the pool gives no more addresses":    {awaits(func(s *v3.IPPoolSpec) { s.Disabled = true }, without), false},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: waits for an address: %v, want %v", name, tt.got, tt.want)
		}
	}
}

// dual gives a node both families.
func dual(name, v4, v6, vtep4, vtep6 string) store.Event {
	ev := nodeEvent(name, v4, "", vtep4)
	n := ev.Object.Value.(*store.Node)
	n.Spec.BGP.IPv6Address, n.Spec.IPv6VXLANTunnelAddr = v6, vtep6
	return ev
}

func sixRack() dataplane.Underlay {
	u := rack()
	u.Links[1].AcceptRA = 2
	u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: "eth0", Prefix: netip.MustParsePrefix("fd01::11/64")})
	return u
}

// TestFamilies: workloads of each family over each family of the underlay.
func TestFamilies(t *testing.T) {
	pools := func(e store.Encapsulation) []store.Event {
		return []store.Event{
			poolEvent("four", "192.168.0.0/16", e), poolEvent("six", "fd10::/48", e),
			blockEvent("192.168.2.0/26", "node2", nil), blockEvent("fd10::2:0/122", "node2", nil),
		}
	}
	self := dual("node1", "10.1.0.11/24", "fd01::11/64", "192.168.1.1", "fd10::1:1")
	for _, tt := range []struct {
		name  string
		encap store.Encapsulation
		self  store.Event
		peer  store.Event
		want  []string
	}{
		{
			"dual stack", store.VXLAN, self, dual("node2", "10.1.0.12/24", "fd01::12/64", "192.168.2.1", "fd10::2:1"),
			[]string{"192.168.2.0/26 dev vxlan.calico", "fd10::2:0/122 dev vxlan-v6.calico"},
		},
		{
			"dual stack, near", store.VXLANCrossSubnet, self, dual("node2", "10.1.0.12/24", "fd01::12/64", "192.168.2.1", "fd10::2:1"),
			[]string{"192.168.2.0/26 dev eth0", "fd10::2:0/122 dev eth0"},
		},
		{
			"a peer with IPv4 only", store.VXLAN, self, dual("node2", "10.1.0.12/24", "", "192.168.2.1", "fd10::2:1"),
			[]string{"192.168.2.0/26 dev vxlan.calico", "fd10::2:0/122 dev vxlan.calico"},
		},
		{
			"a peer with IPv6 only", store.VXLAN, self, dual("node2", "", "fd01::12/64", "192.168.2.1", "fd10::2:1"),
			[]string{"192.168.2.0/26 dev vxlan-v6.calico", "fd10::2:0/122 dev vxlan-v6.calico"},
		},
		{
			"IPIP", store.IPIP, self, dual("node2", "10.1.0.12/24", "fd01::12/64", "", ""),
			[]string{"192.168.2.0/26 dev tunl0", "fd10::2:0/122 dev tunl6.calico"},
		},
		{
			"IPIP to a peer with IPv6 only", store.IPIP, self, dual("node2", "", "fd01::12/64", "", ""),
			[]string{"192.168.2.0/26 dev tunl6.calico", "fd10::2:0/122 dev tunl6.calico"},
		},
		{
			"IPIP to a peer with IPv4 only carries no IPv6", store.IPIP, self, dual("node2", "10.1.0.12/24", "", "", ""),
			[]string{"192.168.2.0/26 dev tunl0"},
		},
		{
			"direct to a peer with IPv6 only", store.Direct, self, dual("node2", "", "fd01::12/64", "", ""),
			[]string{"192.168.2.0/26 dev eth0", "fd10::2:0/122 dev eth0"},
		},
		{
			"no family in common", store.VXLAN, nodeEvent("node1", "10.1.0.11/24", "", "192.168.1.1"), dual("node2", "", "fd01::12/64", "192.168.2.1", "fd10::2:1"),
			nil,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := newTable("node1")
			tab.setUnderlay(sixRack())
			for _, ev := range append(pools(tt.encap), tt.self, tt.peer) {
				tab.take(ev)
			}
			tab.settle()
			var got []string
			for _, s := range render(tab) {
				if to, dev, ok := strings.Cut(s, " dev "); ok && strings.Contains(to, " via ") {
					got = append(got, strings.Fields(to)[0]+" dev "+dev)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestForwardingKeepsAdvertisements: before a host forwards IPv6, devices that
// have routes from router advertisements are told to go on listening; else the
// host would lose its default route.
func TestForwardingKeepsAdvertisements(t *testing.T) {
	u := sixRack()
	u.Links[1].AcceptRA = 1
	u.Links = append(u.Links, dataplane.UnderlayLink{Index: 3, Name: "eth1", MTU: 1500, Up: true, AcceptRA: 1}, dataplane.UnderlayLink{Index: 4, Name: "eth2", MTU: 1500, Up: true, AcceptRA: 1})
	u.Routes = append(u.Routes, dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("::/0"), Gateway: netip.MustParseAddr("fe80::1"), Link: "eth1", Protocol: 9})
	tab := newTable("node1")
	tab.setUnderlay(u)
	tab.take(dual("node1", "10.1.0.11/24", "fd01::11/64", "", ""))
	tab.take(poolEvent("six", "fd10::/48", store.Direct))
	sysctls := func() (out []string) {
		tab.settle()
		for _, s := range render(tab) {
			if strings.HasPrefix(s, "net/ipv6/") {
				out = append(out, s)
			}
		}
		return out
	}
	if diff := cmp.Diff([]string{"net/ipv6/conf/eth0/accept_ra=2", "net/ipv6/conf/eth1/accept_ra=2"}, sysctls()); diff != "" {
		t.Errorf("first (-want +got):\n%s", diff)
	}
	for i := range u.Links {
		u.Links[i].AcceptRA = 2
	}
	u.Links = slices.Clone(u.Links)
	tab.setUnderlay(u)
	if diff := cmp.Diff([]string{"net/ipv6/conf/all/forwarding=1"}, sysctls()); diff != "" {
		t.Errorf("then (-want +got):\n%s", diff)
	}
}
