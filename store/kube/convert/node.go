package convert

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strconv"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// Annotations of Nodes. All but the last are Calico's. [store.AnnotationKubeLabels], [store.AnnotationProblems] and
// [store.AnnotationAway] are on the resource alone.
const (
	address4              = "projectcalico.org/IPv4Address"
	address6              = "projectcalico.org/IPv6Address"
	labelsAnnotation      = "projectcalico.org/labels"      // JSON: those of the resource that the Node has not itself
	annotationsAnnotation = "projectcalico.org/annotations" // JSON
	asAnnotation          = "projectcalico.org/ASNumber"
	interfacesAnnotation  = "projectcalico.org/Interfaces" // JSON

	conditionsAnnotation = "routerd.io/conditions" // JSON
)

// nodeField is a member of a Node that an annotation holds as text.
type nodeField struct {
	annotation string
	valid      func(string) bool
	get        func(*store.Node) string
	set        func(*store.Node, string)
}

func nodeFields() []nodeField {
	bgp := func(n *store.Node) *store.NodeBGPSpec {
		if n.Spec.BGP == nil {
			return &store.NodeBGPSpec{}
		}
		return n.Spec.BGP
	}
	newBGP := func(n *store.Node) *store.NodeBGPSpec {
		if n.Spec.BGP == nil {
			n.Spec.BGP = &store.NodeBGPSpec{}
		}
		return n.Spec.BGP
	}
	wireguard := func(n *store.Node) *store.NodeWireguardSpec {
		if n.Spec.Wireguard == nil {
			return &store.NodeWireguardSpec{}
		}
		return n.Spec.Wireguard
	}
	newWireguard := func(n *store.Node) *store.NodeWireguardSpec {
		if n.Spec.Wireguard == nil {
			n.Spec.Wireguard = &store.NodeWireguardSpec{}
		}
		return n.Spec.Wireguard
	}
	anything := func(string) bool { return true }
	const p = "projectcalico.org/"
	return []nodeField{
		{address4, isPrefix4, func(n *store.Node) string { return bgp(n).IPv4Address }, func(n *store.Node, s string) { newBGP(n).IPv4Address = s }},
		{address6, isPrefix6, func(n *store.Node) string { return bgp(n).IPv6Address }, func(n *store.Node, s string) { newBGP(n).IPv6Address = s }},
		{p + "RouteReflectorClusterID", isAddr4, func(n *store.Node) string { return bgp(n).RouteReflectorClusterID }, func(n *store.Node, s string) { newBGP(n).RouteReflectorClusterID = s }},
		{p + "IPv4IPIPTunnelAddr", isAddr4, func(n *store.Node) string { return bgp(n).IPv4IPIPTunnelAddr }, func(n *store.Node, s string) { newBGP(n).IPv4IPIPTunnelAddr = s }},
		{p + "IPv4VXLANTunnelAddr", isAddr4, func(n *store.Node) string { return n.Spec.IPv4VXLANTunnelAddr }, func(n *store.Node, s string) { n.Spec.IPv4VXLANTunnelAddr = s }},
		{p + "VXLANTunnelMACAddr", isMAC, func(n *store.Node) string { return n.Spec.VXLANTunnelMACAddr }, func(n *store.Node, s string) { n.Spec.VXLANTunnelMACAddr = s }},
		{p + "IPv6VXLANTunnelAddr", isAddr6, func(n *store.Node) string { return n.Spec.IPv6VXLANTunnelAddr }, func(n *store.Node, s string) { n.Spec.IPv6VXLANTunnelAddr = s }},
		{p + "VXLANTunnelMACAddrV6", isMAC, func(n *store.Node) string { return n.Spec.VXLANTunnelMACAddrV6 }, func(n *store.Node, s string) { n.Spec.VXLANTunnelMACAddrV6 = s }},
		{p + "IPv4WireguardInterfaceAddr", isAddr4, func(n *store.Node) string { return wireguard(n).InterfaceIPv4Address }, func(n *store.Node, s string) { newWireguard(n).InterfaceIPv4Address = s }},
		{p + "IPv6WireguardInterfaceAddr", isAddr6, func(n *store.Node) string { return wireguard(n).InterfaceIPv6Address }, func(n *store.Node, s string) { newWireguard(n).InterfaceIPv6Address = s }},
		{p + "WireguardPublicKey", anything, func(n *store.Node) string { return n.Status.WireguardPublicKey }, func(n *store.Node, s string) { n.Status.WireguardPublicKey = s }},
		{p + "WireguardPublicKeyV6", anything, func(n *store.Node) string { return n.Status.WireguardPublicKeyV6 }, func(n *store.Node, s string) { n.Status.WireguardPublicKeyV6 = s }},
	}
}

func isPrefix4(s string) bool {
	p, err := netip.ParsePrefix(s)
	a, aerr := netip.ParseAddr(s)
	return err == nil && p.Addr().Is4() || aerr == nil && a.Is4()
}

func isPrefix6(s string) bool {
	p, err := netip.ParsePrefix(s)
	a, aerr := netip.ParseAddr(s)
	return err == nil && p.Addr().Is6() || aerr == nil && a.Is6()
}

func isAddr4(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is4()
}

func isAddr6(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6()
}

func isMAC(s string) bool {
	_, err := net.ParseMAC(s)
	return err == nil
}

// nodeOf returns the resource that a Node stands for. Annotations that make no
// sense count as not there, as for Calico: one of them must not hide a host.
func nodeOf(node *corev1.Node) (store.Key, any, error) {
	key := store.ResourceKey(store.KindNode, node.Name)
	n, _ := store.New(store.KindNode).(*store.Node)
	n.ObjectMeta = inherited(&node.ObjectMeta, node.Name)
	n.Labels = mapOf(node.Annotations[labelsAnnotation])
	n.Annotations = mapOf(node.Annotations[annotationsAnnotation])
	n.Labels = merged(n.Labels, node.Labels) // the Node's own win
	own, err := json.Marshal(node.Labels)
	if err != nil {
		return key, nil, fmt.Errorf("%w: %w", store.ErrDecode, err)
	}
	n.Annotations = with(n.Annotations, store.AnnotationKubeLabels, string(own))
	delete(n.Annotations, store.AnnotationAway)
	if why := awayOf(node); why != "" {
		n.Annotations[store.AnnotationAway] = why
	}

	var problems []string
	for _, f := range nodeFields() {
		switch v := node.Annotations[f.annotation]; {
		case v == "":
		case f.valid(v):
			f.set(n, v)
		case f.annotation == address4 || f.annotation == address6: // without which a node is not reached
			problems = append(problems, fmt.Sprintf("annotation %s: %q: want an address as %s; it counts as not there", f.annotation, v, map[string]string{address4: "10.0.0.1/24", address6: "fd00::1/64"}[f.annotation]))
		}
	}
	note(&n.ObjectMeta, problems)
	if as, err := numorstring.ASNumberFromString(node.Annotations[asAnnotation]); err == nil {
		if n.Spec.BGP == nil {
			n.Spec.BGP = &store.NodeBGPSpec{}
		}
		n.Spec.BGP.ASNumber = &as
	}
	n.Spec.OrchRefs = []store.OrchRef{{NodeName: node.Name, Orchestrator: orchestrator}}
	n.Spec.Interfaces = listOf[store.NodeInterface](node.Annotations[interfacesAnnotation])
	n.Spec.Addresses = nodeAddresses(n, node)
	n.Status.PodCIDRs = node.Spec.PodCIDRs
	n.Status.Conditions = listOf[metav1.Condition](node.Annotations[conditionsAnnotation])
	return key, n, nil
}

// DaemonGone is the reason of a Node's condition NetworkUnavailable by which another host says that the
// node's daemon is gone.
const DaemonGone = "RouterdIsGone"

// neverSaid is the reason of a Node's condition Ready that the node controller writes for a Node
// without a kubelet, as hosts have that are no nodes of Kubernetes.
const neverSaid = "NodeStatusNeverUpdated"

// awayOf says why a host or its daemon counts as gone; empty: it is there, as far as is known.
func awayOf(node *corev1.Node) string {
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown && c.Reason != neverSaid:
			return "its kubelet is not heard from"
		case c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue && c.Reason == DaemonGone:
			return "its daemon has no pod that is ready"
		}
	}
	return ""
}

func nodeAddresses(n *store.Node, node *corev1.Node) []store.NodeAddress {
	var out []store.NodeAddress
	if bgp := n.Spec.BGP; bgp != nil {
		for _, a := range []string{bgp.IPv4Address, bgp.IPv6Address} {
			if a != "" {
				out = append(out, store.NodeAddress{Address: a, Type: "CalicoNodeIP"})
			}
		}
	}
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			out = append(out, store.NodeAddress{Address: a.Address, Type: string(a.Type)})
		}
	}
	return out
}

func mapOf(text string) map[string]string {
	var m map[string]string
	if json.Unmarshal([]byte(text), &m) != nil {
		return nil
	}
	return m
}

func listOf[T any](text string) []T {
	var list []T
	if json.Unmarshal([]byte(text), &list) != nil {
		return nil
	}
	return list
}

// NodePatch returns the merge patch of a Node that writes a resource to it, on
// condition that it is at rev; 0: in any case. It changes annotations alone, which
// may be written through the Node's status.
func NodePatch(n *store.Node, rev store.Revision) ([]byte, error) {
	annotations := map[string]any{} // nil: to be removed
	for _, f := range nodeFields() {
		annotations[f.annotation] = orAbsent(f.get(n))
	}
	annotations[asAnnotation] = nil
	if bgp := n.Spec.BGP; bgp != nil && bgp.ASNumber != nil {
		annotations[asAnnotation] = bgp.ASNumber.String()
	}
	// A label that the Node has itself is not stored beside it.
	labels, own := maps.Clone(n.Labels), mapOf(n.Annotations[store.AnnotationKubeLabels])
	maps.DeleteFunc(labels, func(k, _ string) bool { _, is := own[k]; return is })
	notes := maps.Clone(n.Annotations)
	delete(notes, store.AnnotationKubeLabels)
	delete(notes, store.AnnotationProblems)
	delete(notes, store.AnnotationAway)
	for name, v := range map[string]struct {
		value any
		empty bool
	}{
		labelsAnnotation:      {labels, len(labels) == 0},
		annotationsAnnotation: {notes, len(notes) == 0},
		interfacesAnnotation:  {n.Spec.Interfaces, len(n.Spec.Interfaces) == 0},
		conditionsAnnotation:  {n.Status.Conditions, len(n.Status.Conditions) == 0},
	} {
		annotations[name] = nil
		if v.empty {
			continue
		}
		text, err := json.Marshal(v.value)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w: %w", n.Name, store.ErrInvalid, err)
		}
		annotations[name] = string(text)
	}
	metadata := map[string]any{"annotations": annotations}
	if rev != 0 {
		metadata["resourceVersion"] = strconv.FormatInt(int64(rev), 10)
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}

func orAbsent(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// IncarnationAnnotation of a Node is who had its name last.
const IncarnationAnnotation = "routerd.io/incarnation"

// incarnationOf returns who had the name of a Node last.
func incarnationOf(node *corev1.Node) (store.Key, any, error) {
	key := store.IncarnationKey(node.Name)
	text, ok := node.Annotations[IncarnationAnnotation]
	if !ok {
		return key, nil, nil
	}
	v, err := store.Decode(key, []byte(text))
	return key, v, err
}
