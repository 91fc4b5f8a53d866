package policy_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// kubernetes is a cluster as its users write it.
type kubernetes struct {
	namespaces map[string]map[string]string // the labels of each
	nodes      []*corev1.Node
	pods       []*corev1.Pod
	policies   []*networkingv1.NetworkPolicy
	cluster    []*v1alpha2.ClusterNetworkPolicy
}

// allowed says whether a connection is allowed as the specifications of
// NetworkPolicy (k8s.io/api/networking/v1) and ClusterNetworkPolicy
// (network-policy-api v0.2.0) read: by what is isolated of the pods at both ends.
// It knows nothing of Calico's model.
func (k *kubernetes) allowed(f filter.Packet) bool {
	src, dst := k.pod(f.Src), k.pod(f.Dst)
	if src != nil && src.Spec.NodeName == thisNode && !k.verdict(src, f, f.Dst, true) {
		return false
	}
	return dst == nil || dst.Spec.NodeName != thisNode || k.verdict(dst, f, f.Src, false)
}

func (k *kubernetes) pod(a netip.Addr) *corev1.Pod {
	for _, p := range k.pods {
		for _, ip := range p.Status.PodIPs {
			if ip.IP == a.String() {
				return p
			}
		}
	}
	return nil
}

// verdict judges one direction of a pod: the tier Admin, the NetworkPolicies, the
// tier Baseline, and what is decided by none of them is allowed.
func (k *kubernetes) verdict(pod *corev1.Pod, f filter.Packet, far netip.Addr, egress bool) bool {
	switch k.tier(v1alpha2.AdminTier, pod, f, far, egress) {
	case v1alpha2.ClusterNetworkPolicyRuleActionAccept:
		return true
	case v1alpha2.ClusterNetworkPolicyRuleActionDeny:
		return false
	}
	isolated := false
	for _, np := range k.policies {
		if np.Namespace != pod.Namespace || !selects(&np.Spec.PodSelector, pod.Labels) {
			continue
		}
		is := !egress // the default: Ingress, and Egress if it has such rules
		if len(np.Spec.PolicyTypes) > 0 {
			is = slices.Contains(np.Spec.PolicyTypes, map[bool]networkingv1.PolicyType{false: "Ingress", true: "Egress"}[egress])
		} else if egress {
			is = len(np.Spec.Egress) > 0
		}
		if !is {
			continue
		}
		isolated = true
		for _, r := range np.Spec.Ingress {
			if !egress && k.peers(r.From, np.Namespace, far) && k.ports(r.Ports, f) {
				return true
			}
		}
		for _, r := range np.Spec.Egress {
			if egress && k.peers(r.To, np.Namespace, far) && k.ports(r.Ports, f) {
				return true
			}
		}
	}
	return !isolated && k.tier(v1alpha2.BaselineTier, pod, f, far, egress) != v1alpha2.ClusterNetworkPolicyRuleActionDeny
}

func selects(s *metav1.LabelSelector, of map[string]string) bool {
	sel, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && sel.Matches(labels.Set(of))
}

func (k *kubernetes) peers(peers []networkingv1.NetworkPolicyPeer, namespace string, far netip.Addr) bool {
	return len(peers) == 0 || slices.ContainsFunc(peers, func(p networkingv1.NetworkPolicyPeer) bool {
		if p.IPBlock != nil {
			return holdsAddr(p.IPBlock.CIDR, far) && !slices.ContainsFunc(p.IPBlock.Except, func(e string) bool { return holdsAddr(e, far) })
		}
		pod := k.pod(far)
		switch {
		case pod == nil, p.PodSelector != nil && !selects(p.PodSelector, pod.Labels):
			return false
		case p.NamespaceSelector == nil:
			return pod.Namespace == namespace
		}
		return selects(p.NamespaceSelector, k.namespaces[pod.Namespace])
	})
}

func holdsAddr(cidr string, a netip.Addr) bool { return netip.MustParsePrefix(cidr).Contains(a) }

func (k *kubernetes) ports(ports []networkingv1.NetworkPolicyPort, f filter.Packet) bool {
	return len(ports) == 0 || slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool {
		protocol := corev1.ProtocolTCP
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		switch {
		case numberOf(protocol) != f.Protocol:
			return false
		case p.Port == nil:
			return true
		case p.Port.Type == intstr.String:
			return k.named(p.Port.StrVal, f)
		case p.EndPort != nil:
			return int(f.DstPort) >= int(p.Port.IntVal) && int(f.DstPort) <= int(*p.EndPort)
		}
		return int(f.DstPort) == int(p.Port.IntVal)
	})
}

func numberOf(p corev1.Protocol) uint8 {
	return map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}[p]
}

// named reports whether the pod that is the destination calls its port so.
func (k *kubernetes) named(name string, f filter.Packet) bool {
	pod := k.pod(f.Dst)
	return pod != nil && slices.ContainsFunc(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool {
		return p.Name == name && p.ContainerPort == int32(f.DstPort) && numberOf(p.Protocol) == f.Protocol
	})
}

// tier returns what the policies of a tier decide; "" if they pass on or say
// nothing.
func (k *kubernetes) tier(tier v1alpha2.Tier, pod *corev1.Pod, f filter.Packet, far netip.Addr, egress bool) v1alpha2.ClusterNetworkPolicyRuleAction {
	list := slices.Clone(k.cluster)
	slices.SortFunc(list, func(a, b *v1alpha2.ClusterNetworkPolicy) int { return int(a.Spec.Priority - b.Spec.Priority) })
	for _, cnp := range list {
		if cnp.Spec.Tier != tier || !k.isPod(cnp.Spec.Subject.Namespaces, cnp.Spec.Subject.Pods, pod) {
			continue
		}
		type rule struct {
			action    v1alpha2.ClusterNetworkPolicyRuleAction
			peers     []v1alpha2.ClusterNetworkPolicyEgressPeer
			protocols []v1alpha2.ClusterNetworkPolicyProtocol
		}
		var rules []rule
		for _, r := range cnp.Spec.Egress {
			if egress {
				rules = append(rules, rule{r.Action, r.To, r.Protocols})
			}
		}
		for _, r := range cnp.Spec.Ingress {
			if !egress {
				var peers []v1alpha2.ClusterNetworkPolicyEgressPeer
				for _, p := range r.From {
					peers = append(peers, v1alpha2.ClusterNetworkPolicyEgressPeer{Namespaces: p.Namespaces, Pods: p.Pods})
				}
				rules = append(rules, rule{r.Action, peers, r.Protocols})
			}
		}
		for _, r := range rules {
			unknown := slices.ContainsFunc(r.peers, func(p v1alpha2.ClusterNetworkPolicyEgressPeer) bool {
				return p.Namespaces == nil && p.Pods == nil && p.Networks == nil && p.Nodes == nil
			}) || slices.ContainsFunc(r.protocols, func(p v1alpha2.ClusterNetworkPolicyProtocol) bool {
				return p == v1alpha2.ClusterNetworkPolicyProtocol{}
			})
			action := r.action
			switch {
			case unknown && action == v1alpha2.ClusterNetworkPolicyRuleActionAccept:
				continue
			case unknown:
				action = v1alpha2.ClusterNetworkPolicyRuleActionDeny
			case !slices.ContainsFunc(r.peers, func(p v1alpha2.ClusterNetworkPolicyEgressPeer) bool { return k.isPeer(p, far) }):
				continue
			case len(r.protocols) > 0 && !slices.ContainsFunc(r.protocols, func(p v1alpha2.ClusterNetworkPolicyProtocol) bool { return k.isProtocol(p, f) }):
				continue
			}
			if action == v1alpha2.ClusterNetworkPolicyRuleActionPass {
				return ""
			}
			return action
		}
	}
	return ""
}

func (k *kubernetes) isPod(namespaces *metav1.LabelSelector, pods *v1alpha2.NamespacedPod, pod *corev1.Pod) bool {
	if pod == nil {
		return false
	}
	of := k.namespaces[pod.Namespace]
	return namespaces != nil && selects(namespaces, of) || pods != nil && selects(&pods.NamespaceSelector, of) && selects(&pods.PodSelector, pod.Labels)
}

func (k *kubernetes) isNode(nodes *metav1.LabelSelector, far netip.Addr) bool {
	return nodes != nil && slices.ContainsFunc(k.nodes, func(n *corev1.Node) bool {
		return selects(nodes, n.Labels) && slices.ContainsFunc(n.Status.Addresses, func(a corev1.NodeAddress) bool { return a.Address == far.String() })
	})
}

func (k *kubernetes) isPeer(p v1alpha2.ClusterNetworkPolicyEgressPeer, far netip.Addr) bool {
	return k.isPod(p.Namespaces, p.Pods, k.pod(far)) || k.isNode(p.Nodes, far) ||
		slices.ContainsFunc(p.Networks, func(n v1alpha2.CIDR) bool { return holdsAddr(string(n), far) })
}

func (k *kubernetes) isProtocol(p v1alpha2.ClusterNetworkPolicyProtocol, f filter.Packet) bool {
	is := func(protocol uint8, port *v1alpha2.Port) bool {
		at := int32(f.DstPort)
		return f.Protocol == protocol && (port.Number == at || port.Range != nil && port.Range.Start <= at && at <= port.Range.End)
	}
	return p.TCP != nil && is(6, p.TCP.DestinationPort) || p.UDP != nil && is(17, p.UDP.DestinationPort) ||
		p.SCTP != nil && is(132, p.SCTP.DestinationPort) || p.DestinationNamedPort != "" && k.named(p.DestinationNamedPort, f)
}

// objects returns what the datastore holds of the cluster, as routerd reads it.
func (k *kubernetes) objects(t fataler) (out []store.Object) {
	read := func(kind store.Kind, apiKind string, o any) {
		raw, err := json.Marshal(o)
		if err != nil {
			t.Fatalf("%v", err)
		}
		for _, s := range convert.Sources(convert.V3, kind) {
			if s.Resource.APIKind != apiKind || s.Custom() {
				continue
			}
			got, err := s.Read(raw)
			if err != nil {
				t.Fatalf("%s: %v", raw, err)
			}
			v, err := store.Decode(got.Key, got.Raw)
			if err != nil {
				t.Fatalf("%s: %v", got.Raw, err)
			}
			out = append(out, store.Object{Key: got.Key, Value: v, Raw: got.Raw, Revision: got.Revision})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.namespaces)) {
		read(store.KindProfile, "Namespace", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "1", Labels: k.namespaces[name]}})
		read(store.KindProfile, "ServiceAccount", &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: name, ResourceVersion: "1"}})
	}
	for _, n := range k.nodes {
		read(store.KindNode, "Node", n)
	}
	for _, p := range k.pods {
		read(store.KindWorkloadEndpoint, "Pod", p)
	}
	for _, p := range k.policies {
		read(store.KindNetworkPolicy, "NetworkPolicy", p)
	}
	for _, p := range k.cluster {
		read(store.KindGlobalNetworkPolicy, "ClusterNetworkPolicy", p)
	}
	return out
}

func drawLabelSelector(t *rapid.T) metav1.LabelSelector {
	s := metav1.LabelSelector{}
	for range pick(t, "terms", 0, 1, 1, 2) {
		key, values := pick(t, "key", "a", "b"), []string{pick(t, "value", "x", "y", "")}
		switch op := pick(t, "operator", "", metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist); op {
		case "":
			s.MatchLabels = map[string]string{key: values[0]}
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn:
			s.MatchExpressions = append(s.MatchExpressions, metav1.LabelSelectorRequirement{Key: key, Operator: op, Values: append(values, "z")})
		default:
			s.MatchExpressions = append(s.MatchExpressions, metav1.LabelSelectorRequirement{Key: key, Operator: op})
		}
	}
	return s
}

func drawPodLabels(t *rapid.T) map[string]string {
	out := map[string]string{}
	for _, key := range []string{"a", "b"} {
		if v := pick(t, "label", "x", "y", "", "none"); v != "none" {
			out[key] = v
		}
	}
	return out
}

func drawKubernetes(t *rapid.T) *kubernetes {
	k := &kubernetes{namespaces: map[string]map[string]string{}}
	for _, ns := range []string{"ns1", "ns2"} {
		k.namespaces[ns] = drawPodLabels(t)
		k.namespaces[ns]["kubernetes.io/metadata.name"] = ns
	}
	for i := 1; i <= 4; i++ {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprint("p", i), Namespace: pick(t, "namespace", "ns1", "ns2"), Labels: drawPodLabels(t), ResourceVersion: "1",
		}}
		p.Spec.NodeName, p.Spec.ServiceAccountName = pick(t, "node", thisNode, thisNode, "n2"), "default"
		p.Spec.Containers = []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{
			{Name: "http", ContainerPort: pick(t, "http", int32(80), 81), Protocol: corev1.ProtocolTCP},
			{Name: pick(t, "name", "dns", "http"), ContainerPort: 81, Protocol: pick(t, "of", corev1.ProtocolUDP, corev1.ProtocolSCTP)},
		}}}
		p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprint("10.0.0.", i)}, {IP: fmt.Sprint("fd00::", i)}}
		k.pods = append(k.pods, p)
	}
	for i := 1; i <= 2; i++ {
		k.nodes = append(k.nodes, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i), Labels: drawPodLabels(t), ResourceVersion: "1"},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeHostName, Address: fmt.Sprint("n", i)},
				{Type: corev1.NodeInternalIP, Address: fmt.Sprint("192.0.2.", i)},
				{Type: corev1.NodeExternalIP, Address: fmt.Sprint("2001:db8:2::", i)},
			}},
		})
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "policies") {
		k.policies = append(k.policies, drawNetworkPolicy(t, i))
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "cluster policies") {
		k.cluster = append(k.cluster, drawClusterPolicy(t, i))
	}
	return k
}

func drawNetworkPolicy(t *rapid.T, i int) *networkingv1.NetworkPolicy {
	np := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("np", i), Namespace: pick(t, "namespace", "ns1", "ns2"), ResourceVersion: "1"}}
	np.Spec.PodSelector = drawLabelSelector(t)
	np.Spec.PolicyTypes = pick(t, "types", nil, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	peers := func() (out []networkingv1.NetworkPolicyPeer) {
		for range rapid.IntRange(0, 2).Draw(t, "peers") {
			p := networkingv1.NetworkPolicyPeer{}
			switch pick(t, "peer", 0, 1, 2, 3) {
			case 0:
				p.IPBlock = pick(t, "block", &networkingv1.IPBlock{CIDR: "10.0.0.0/30", Except: []string{"10.0.0.2/32"}}, &networkingv1.IPBlock{CIDR: "fd00::/64", Except: []string{"fd00::1/128"}}, &networkingv1.IPBlock{CIDR: "0.0.0.0/0"})
			case 1:
				p.PodSelector = new(drawLabelSelector(t))
			case 2:
				p.NamespaceSelector = new(drawLabelSelector(t))
			case 3:
				p.PodSelector, p.NamespaceSelector = new(drawLabelSelector(t)), new(drawLabelSelector(t))
			}
			out = append(out, p)
		}
		return out
	}
	ports := func() (out []networkingv1.NetworkPolicyPort) {
		for range pick(t, "ports", 0, 0, 1, 2) {
			p := networkingv1.NetworkPolicyPort{Protocol: pick(t, "protocol", nil, new(corev1.ProtocolTCP), new(corev1.ProtocolUDP), new(corev1.ProtocolSCTP))}
			switch pick(t, "port", 0, 1, 2, 3) {
			case 1:
				p.Port = new(intstr.FromInt32(pick(t, "number", int32(80), 81)))
			case 2:
				p.Port, p.EndPort = new(intstr.FromInt32(79)), new(pick(t, "end", int32(80), 82))
			case 3:
				p.Port = new(intstr.FromString(pick(t, "name", "http", "dns")))
			}
			out = append(out, p)
		}
		return out
	}
	for range rapid.IntRange(0, 2).Draw(t, "ingress") {
		np.Spec.Ingress = append(np.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: peers(), Ports: ports()})
	}
	for range rapid.IntRange(0, 2).Draw(t, "egress") {
		np.Spec.Egress = append(np.Spec.Egress, networkingv1.NetworkPolicyEgressRule{To: peers(), Ports: ports()})
	}
	return np
}

func drawClusterPolicy(t *rapid.T, i int) *v1alpha2.ClusterNetworkPolicy {
	cnp := &v1alpha2.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("cnp", 9-i), ResourceVersion: "1"}}
	cnp.Spec.Tier = pick(t, "tier", v1alpha2.AdminTier, v1alpha2.BaselineTier)
	cnp.Spec.Priority = int32(i) * 10 // which of two with the same comes first, nobody promises
	who := func() (namespaces *metav1.LabelSelector, pods *v1alpha2.NamespacedPod) {
		if maybe(t, "by namespace") {
			return new(drawLabelSelector(t)), nil
		}
		return nil, &v1alpha2.NamespacedPod{NamespaceSelector: drawLabelSelector(t), PodSelector: drawLabelSelector(t)}
	}
	action := func() v1alpha2.ClusterNetworkPolicyRuleAction {
		return pick(t, "action", v1alpha2.ClusterNetworkPolicyRuleActionAccept, v1alpha2.ClusterNetworkPolicyRuleActionDeny, v1alpha2.ClusterNetworkPolicyRuleActionPass)
	}
	protocols := func(named bool) (out []v1alpha2.ClusterNetworkPolicyProtocol) {
		for range pick(t, "protocols", 0, 0, 1, 2) {
			port := &v1alpha2.Port{Number: pick(t, "port", int32(80), 81)}
			if maybe(t, "range") {
				port = &v1alpha2.Port{Range: &v1alpha2.PortRange{Start: 79, End: pick(t, "end", int32(80), 81)}}
			}
			p := v1alpha2.ClusterNetworkPolicyProtocol{}
			switch pick(t, "protocol", 0, 0, 1, 1, 2, 3, 3, 4) {
			case 0:
				p.TCP = &v1alpha2.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}
			case 1:
				p.UDP = &v1alpha2.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}
			case 2:
				p.SCTP = &v1alpha2.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}
			case 3:
				if !named {
					continue
				}
				p.DestinationNamedPort = pick(t, "name", "http", "dns")
			case 4: // a field that nobody knows here
			}
			out = append(out, p)
		}
		return out
	}
	cnp.Spec.Subject.Namespaces, cnp.Spec.Subject.Pods = who()
	for range rapid.IntRange(0, 2).Draw(t, "ingress") {
		r := v1alpha2.ClusterNetworkPolicyIngressRule{Action: action(), Protocols: protocols(true)}
		for range rapid.IntRange(1, 2).Draw(t, "from") {
			p := v1alpha2.ClusterNetworkPolicyIngressPeer{}
			if pick(t, "known", 0, 1, 1, 1, 1, 1) == 1 {
				p.Namespaces, p.Pods = who()
			}
			r.From = append(r.From, p)
		}
		cnp.Spec.Ingress = append(cnp.Spec.Ingress, r)
	}
	for range rapid.IntRange(0, 2).Draw(t, "egress") {
		r := v1alpha2.ClusterNetworkPolicyEgressRule{Action: action()}
		networks := false
		for range rapid.IntRange(1, 2).Draw(t, "to") {
			p := v1alpha2.ClusterNetworkPolicyEgressPeer{}
			switch pick(t, "peer", 0, 1, 1, 1, 2, 2, 3, 3) {
			case 1:
				p.Namespaces, p.Pods = who()
			case 2:
				networks = true
				p.Networks = pick(t, "networks", []v1alpha2.CIDR{"10.0.0.0/31", "fd00::/64"}, []v1alpha2.CIDR{"0.0.0.0/0"}, []v1alpha2.CIDR{"fd00::2/127"})
			case 3:
				networks = true
				p.Nodes = new(drawLabelSelector(t))
			}
			r.To = append(r.To, p)
		}
		r.Protocols = protocols(!networks)
		cnp.Spec.Egress = append(cnp.Spec.Egress, r)
	}
	return cnp
}

// TestKubernetesPolicies compares what the specifications of Kubernetes' policies
// say of a connection with what is decided of it after they went through the
// datastore, in both directions and both families; also where Nodes come, or get their labels, later.
func TestKubernetesPolicies(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		k := drawKubernetes(t)
		c, mirror := newMirror(policy.Config{})
		late := *k
		late.nodes = nil
		for _, n := range k.nodes[:rapid.IntRange(0, len(k.nodes)).Draw(t, "nodes at first")] {
			n := n.DeepCopy()
			n.Labels = drawPodLabels(t)
			late.nodes = append(late.nodes, n)
		}
		c.Update(store.Batch{Events: events(late.objects(t)), Synced: true})
		step(t, c, mirror)
		c.Update(store.Batch{Events: events((&kubernetes{nodes: k.nodes}).objects(t))})
		step(t, c, mirror)
		k.flows(t, []uint8{6, 17, 132, 1}, func(f filter.Flow) {
			got := mirror.Judge(f)
			if want := k.allowed(f.Packet); got.Allowed != want {
				t.Fatalf("%+v: allowed is %v, the specification says %v; %+v\n%s", f, got.Allowed, want, got.Steps, k)
			}
		})
	})
	if *cyclonus != "" {
		byAnother(t, *cyclonus)
	}
}

// flows calls f with connections between pods, and between them, Nodes and an address outside, that
// this host judges, in both families.
func (k *kubernetes) flows(t *rapid.T, protocols []uint8, f func(filter.Flow)) {
	for _, family := range []int{4, 6} {
		addr := func(i int) netip.Addr {
			if i >= 5 {
				return netip.MustParseAddr(map[int]string{4: "192.0.2.", 6: "2001:db8:2::"}[family] + fmt.Sprint(i-4))
			}
			if i == 0 {
				return map[int]netip.Addr{4: netip.MustParseAddr("203.0.113.7"), 6: netip.MustParseAddr("2001:db8::7")}[family]
			}
			return netip.MustParseAddr(map[int]string{4: "10.0.0.", 6: "fd00::"}[family] + fmt.Sprint(i))
		}
		iface := func(i int) string {
			if i == 0 || i >= 5 || k.pods[i-1].Spec.NodeName != thisNode {
				return "eth0"
			}
			return convert.InterfaceName(k.pods[i-1].Namespace, k.pods[i-1].Name)
		}
		for src := range 5 {
			for dst := range 7 {
				if src == dst || iface(src) == "eth0" && iface(dst) == "eth0" {
					continue
				}
				for _, protocol := range protocols {
					p := filter.Packet{Src: addr(src), Dst: addr(dst), Protocol: protocol}
					switch {
					case protocol != 1:
						p.SrcPort, p.DstPort = 40000, pick(t, "port", uint16(80), 81, 82)
					case family == 6:
						p.Protocol, p.ICMPType = 58, 128
					default:
						p.ICMPType = 8
					}
					f(filter.Flow{In: iface(src), Out: iface(dst), Packet: p})
				}
			}
		}
	}
}

// String writes a cluster down for who has to look into a difference.
func (k *kubernetes) String() string {
	var b strings.Builder
	for _, list := range []any{k.namespaces, k.nodes, k.pods, k.policies, k.cluster} {
		text, _ := json.Marshal(list) //nolint:errchkjson // for a message alone
		b.Write(append(text, '\n'))
	}
	return b.String()
}

// TestKubernetesProblems: what of an object of Kubernetes cannot be carried out is
// among the problems with its field, and less is allowed for it, never more.
func TestKubernetesProblems(t *testing.T) {
	t.Parallel()
	clusterPolicy := func(action v1alpha2.ClusterNetworkPolicyRuleAction) *kubernetes {
		return &kubernetes{cluster: []*v1alpha2.ClusterNetworkPolicy{{
			ObjectMeta: metav1.ObjectMeta{Name: "future", ResourceVersion: "1"},
			Spec: v1alpha2.ClusterNetworkPolicySpec{
				Tier: v1alpha2.AdminTier, Subject: v1alpha2.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}},
				Ingress: []v1alpha2.ClusterNetworkPolicyIngressRule{{Action: action, From: []v1alpha2.ClusterNetworkPolicyIngressPeer{{}}}},
			},
		}}}
	}
	namespaced := func(spec networkingv1.NetworkPolicySpec) *kubernetes {
		return &kubernetes{policies: []*networkingv1.NetworkPolicy{{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", ResourceVersion: "1"}, Spec: spec}}}
	}
	low, end := intstr.FromInt32(90), int32(80)
	for _, tt := range []struct {
		name     string
		k        *kubernetes
		key, why string
	}{
		{"a peer of a later version", clusterPolicy(v1alpha2.ClusterNetworkPolicyRuleActionPass), "kcnp.future", "spec.ingress[0]: peer 0: it has no field that is known here; it denies everything"},
		{"an action of a later version", clusterPolicy("Log"), "kcnp.future", `spec.ingress[0].action: "Log" is not known here; it denies everything`},
		{
			"a range with leading zeros", namespaced(networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{}}, {IPBlock: &networkingv1.IPBlock{CIDR: "010.1.0.0/16"}},
			}}}}), "knp.default.web", `spec.ingress[0]: peer 1: ipBlock.cidr: "010.1.0.0/16" is no CIDR such as 10.1.0.0/16, without leading zeros; it stands for nobody`,
		},
		{
			"an exception with leading zeros", namespaced(networkingv1.NetworkPolicySpec{Egress: []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{
				{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8", Except: []string{"10.01.0.0/16"}}},
			}}}}), "knp.default.web", `spec.egress[0]: peer 0: ipBlock.except: "10.01.0.0/16" is no CIDR`,
		},
		{
			"a range of ports that ends before it begins", namespaced(networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: &low, EndPort: &end}}}}}),
			"knp.default.web", `spec.ingress[0].ports: "90:80" is no port; the rule allows nothing`,
		},
	} {
		c, _ := newMirror(policy.Config{})
		c.Update(store.Batch{Events: events(tt.k.objects(t)), Synced: true})
		got := c.Problems()
		if len(got) != 1 || got[0].Key.Name != tt.key || !strings.Contains(got[0].Reason, tt.why) {
			t.Errorf("%s: %+v", tt.name, got)
		}
	}
}
