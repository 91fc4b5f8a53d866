package vrouter

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// routesOf are the routes of a wish.
func routesOf(tab *table) []string {
	return slices.DeleteFunc(render(tab), func(s string) bool {
		first, _, _ := strings.Cut(strings.TrimPrefix(s, "blackhole "), " ")
		return !strings.Contains(first, "/") || strings.HasPrefix(s, "net/") || strings.Contains(s, "/32 dev")
	})
}

// TestHostileStore: what nobody should have written does not take the host off
// its network, nor what is right beside it.
func TestHostileStore(t *testing.T) {
	usual := routesOf(newTestTable(testCluster(store.VXLAN)...))
	for name, tt := range map[string]struct {
		events []store.Event
		want   []string // beside the usual routes
	}{
		"a block of everything, on this host": {events: []store.Event{blockEvent("0.0.0.0/0", "node1", nil), blockEvent("10.0.0.0/8", "node1", nil)}},
		"a block of everything, elsewhere":    {events: []store.Event{poolEvent("all", "0.0.0.0/0", store.VXLAN), blockEvent("0.0.0.0/0", "node2", nil)}},
		"a block outside all pools":           {events: []store.Event{blockEvent("172.16.0.0/26", "node2", nil)}},
		"a block of a node that does not exist": {
			events: []store.Event{blockEvent("192.168.9.0/26", "../../etc/passwd\x00\n", nil)},
		},
		"a block in which this host's address lies": {
			events: []store.Event{poolEvent("under", "10.0.0.0/8", store.IPIP), blockEvent("10.1.0.0/26", "node1", nil)},
		},
		"a block in which another node's address lies": {
			// Packets to the tunnel's end would enter the tunnel.
			events: []store.Event{poolEvent("under", "10.0.0.0/8", store.IPIP), blockEvent("10.2.0.0/26", "node3", nil)},
		},
		"a borrowed address that is a node's": {
			events: []store.Event{poolEvent("under", "10.0.0.0/8", store.IPIP), blockEvent("10.2.0.0/26", "", map[int]string{11: "node2"})},
		},
		"a block of which every address is borrowed": {
			events: []store.Event{blockEvent("192.168.8.0/30", "node2", map[int]string{0: "node3", 1: "node3", 2: "node3", 3: "node3"})},
			want: []string{
				"192.168.8.0/30 via 192.168.2.1 dev vxlan.calico", "192.168.8.0/32 via 192.168.3.1 dev vxlan.calico",
				"192.168.8.1/32 via 192.168.3.1 dev vxlan.calico", "192.168.8.2/32 via 192.168.3.1 dev vxlan.calico",
				"192.168.8.3/32 via 192.168.3.1 dev vxlan.calico",
			},
		},
		"IPv6 objects without the tunnel addresses that they take": {
			events: []store.Event{poolEvent("six", "fd00:10::/64", store.VXLAN), blockEvent("fd00:10::40/122", "node2", nil)},
		},
		"a node without anything": {events: []store.Event{nodeEvent("node9", "", "", ""), nodeEvent("node8", "not an address", "x", "y")}},
	} {
		t.Run(name, func(t *testing.T) {
			want := slices.Concat(usual, tt.want)
			slices.Sort(want)
			got := routesOf(newTestTable(append(testCluster(store.VXLAN), tt.events...)...))
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestCoveredNodeIsExplained: a prefix that is left out because a node's
// address lies in it says so, and comes when the node moves away.
func TestCoveredNodeIsExplained(t *testing.T) {
	tab := newTestTable(append(testCluster(store.VXLAN), poolEvent("under", "10.0.0.0/8", store.IPIP), blockEvent("10.2.0.0/26", "node2", nil))...)
	p := blockEvent("10.2.0.0/26", "", nil).Key.CIDR()
	cs := tab.rib.Explain(p)
	if len(cs) != 1 || cs[0].Best || !strings.Contains(cs[0].Reason, "10.2.0.11") || !strings.Contains(cs[0].Reason, "node3") {
		t.Fatalf("candidates %+v; want one, refused because of node3's 10.2.0.11", cs)
	}
	put, _ := changes(tab, func() { tab.take(nodeEvent("node3", "10.3.0.11/24", "", "192.168.3.1")) })
	if !slices.Contains(put, "route") || !slices.Contains(routesOf(tab), "10.2.0.0/26 via 10.1.0.12 dev tunl0") {
		t.Errorf("node3 moved away: put %v, routes %v", put, routesOf(tab))
	}
	_, del := changes(tab, func() { tab.take(nodeEvent("node4", "10.2.0.9/24", "", "")) })
	if !slices.Contains(del, "route") {
		t.Errorf("node4 moved in: deleted %v", del)
	}
}

// TestAddressThatIsNone: of a prefix that is left out because its node's address is none is said
// which member says what; it comes when the address does.
func TestAddressThatIsNone(t *testing.T) {
	tab := newTestTable(append(testCluster(store.VXLAN), nodeEvent("node8", "ten", "", "192.168.8.1"), blockEvent("192.168.8.0/26", "node8", nil))...)
	explained := func() (reasons []string) {
		for _, c := range tab.rib.Explain(blockEvent("192.168.8.0/26", "", nil).Key.CIDR()) {
			reasons = append(reasons, c.Reason)
		}
		return reasons
	}
	if got := explained(); len(got) != 1 || !strings.Contains(got[0], `spec.bgp.ipv4Address "ten": want an IPv4 address`) {
		t.Errorf("explained by %q", got)
	}
	if put, _ := changes(tab, func() { tab.take(nodeEvent("node8", "10.8.0.11/24", "", "192.168.8.1")) }); !slices.Contains(put, "route") {
		t.Errorf("with an address: put %v", put)
	}
	if got := explained(); len(got) != 1 || strings.Contains(got[0], "ten") {
		t.Errorf("with an address explained by %q", got)
	}
}

// TestPoolsGone: without any pool nothing can be reached by the store, but
// this host's own blocks stay closed, and workloads' routes are not the core's.
func TestPoolsGone(t *testing.T) {
	tab := newTestTable(testCluster(store.VXLAN)...)
	before := routesOf(tab)
	tab.take(gone(poolEvent("pool", "192.168.0.0/16", store.VXLAN)))
	tab.settle()
	if diff := cmp.Diff([]string{"blackhole 192.168.1.0/26"}, routesOf(tab)); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
	tab.take(poolEvent("pool", "192.168.0.0/16", store.VXLAN))
	tab.settle()
	if diff := cmp.Diff(before, routesOf(tab)); diff != "" {
		t.Errorf("routes after the pool is back (-before +after):\n%s", diff)
	}
}

// TestHostileMTU: a setting with which no packet gets through is not taken.
func TestHostileMTU(t *testing.T) {
	for _, mtu := range []int{-1, 1, 67, 1 << 20} {
		felix := &v3.FelixConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
		felix.Spec.VXLANMTU, felix.Spec.IPIPMTU = &mtu, &mtu
		key := store.ResourceKey(store.KindFelixConfiguration, "default")
		ev := store.Event{Key: key, Object: store.Object{Key: key, Value: felix}}
		for e, want := range map[store.Encapsulation]int{store.VXLAN: 1450, store.IPIP: 1480} {
			if got := newTestTable(append(testCluster(e), ev)...).encap.MTU(dataplane.IPv4); got != want {
				t.Errorf("%s with MTU %d: %d, want %d", e, mtu, got, want)
			}
		}
	}
}
