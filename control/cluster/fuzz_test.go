package cluster

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// FuzzNode: whatever another host writes into its Node, it is read as a node, and of its
// addresses only those count that can be some host's.
func FuzzNode(f *testing.F) {
	f.Add("198.51.100.7, 2001:db8::7", "10.1.0.13,,fe80::1,::ffff:10.0.0.1", `{"a":1}`, "10.1.0.12/24", "66:00:00:00:00:01", "192.168.2.1")
	f.Add("x", "10.0.0.1,10.0.0.1,fd00::1%eth0", "null", "ten", "66", "::")
	f.Fuzz(func(t *testing.T, public, sources, text, addr, mac, tunnel string) {
		n, _ := store.New(store.KindNode).(*store.Node)
		n.ObjectMeta = metav1.ObjectMeta{Name: "node2", Annotations: map[string]string{
			store.AnnotationTunnelAddress: public, store.AnnotationTunnelSources: sources, store.AnnotationIPv6IPIPTunnelAddr: tunnel,
			store.AnnotationBGPKeys: text, store.AnnotationDrain: text, store.AnnotationReflects: text, store.AnnotationReflectedBy: text, store.AnnotationAway: text, store.AnnotationProblems: text,
			store.AnnotationAccepts: text, store.AnnotationSends: text, store.AnnotationRefuses: text, store.AnnotationStays: text,
		}}
		n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: addr, IPv6Address: addr, IPv4IPIPTunnelAddr: tunnel, RouteReflectorClusterID: text}
		n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr, n.Spec.VXLANTunnelMACAddr = tunnel, tunnel, mac
		n.Spec.Addresses = []store.NodeAddress{{Address: addr}, {Address: tunnel}}
		n.Status.PodCIDRs = []string{addr, tunnel}
		key := store.ResourceKey(store.KindNode, "node2")
		ch := Decode("node1", store.Event{Key: key, Object: store.Object{Key: key, Revision: 5, Value: n}})
		node, ok := ch.Value.(*Node)
		if !ok {
			t.Fatalf("it is a %T: %v", ch.Value, ch.Err)
		}
		if len(node.Sources) > store.MaxTunnelSources {
			t.Errorf("%d sources", len(node.Sources))
		}
		for i, a := range node.Sources {
			if !a.IsGlobalUnicast() || a.Zone() != "" || a.Is4In6() || slices.Contains(node.Sources[:i], a) {
				t.Errorf("source %v", a)
			}
		}
		for _, a := range append(slices.Clone(node.Hosts), node.Inner...) {
			if !a.IsValid() || a.Zone() != "" {
				t.Errorf("address %v", a)
			}
		}
		for _, p := range node.PodCIDRs {
			if p != p.Masked() {
				t.Errorf("pods %v", p)
			}
		}
		store.SetTunnelSources(n, node.Sources)
		if diff := cmp.Diff(node.Sources, store.TunnelSources(n), cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("sources, written and read (-first +second):\n%s", diff)
		}
	})
}
