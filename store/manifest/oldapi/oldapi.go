// Package oldapi says resources of Calico's API of before version 3, and Kubernetes' NetworkPolicies, as resources of
// projectcalico.org/v3, with the outcome of calicoctl's `convert` (projectcalico/libcalico-go, lib/upgrade/converters).
package oldapi

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/manifest"
)

// Kinds returns what can be converted.
func Kinds() []manifest.Foreign {
	return []manifest.Foreign{
		kind(APIVersion, "ipPool", convertPool),
		kind(APIVersion, "bgpPeer", convertPeer),
		kind(APIVersion, "node", convertNode),
		kind(APIVersion, "policy", convertPolicy),
		kind(APIVersion, "profile", convertProfile),
		kind(APIVersion, "hostEndpoint", convertHostEndpoint),
		kind(APIVersion, "workloadEndpoint", convertWorkloadEndpoint),
		kind("networking.k8s.io/v1", "NetworkPolicy", convertNetworkPolicy),
		kind("extensions/v1beta1", "NetworkPolicy", convertNetworkPolicy), // the same, until Kubernetes 1.16
	}
}

func kind[T any](version, name string, convert func(*T, *fields) any) manifest.Foreign {
	return manifest.Foreign{APIVersion: version, Kind: name, New: func() any { return new(T) }, Convert: func(object any) (any, error) {
		from, ok := object.(*T)
		if !ok {
			return nil, fmt.Errorf("convert %s: got %T", name, object)
		}
		var f fields
		to := convert(from, &f)
		if len(f.errs) > 0 {
			return nil, f.errs
		}
		return to, nil
	}}
}

// fields collects what is wrong with an object.
type fields struct{ errs store.FieldErrors }

func (f *fields) fail(field string, value any, format string, args ...any) {
	f.errs = append(f.errs, store.FieldError{Field: field, Value: value, Message: fmt.Sprintf(format, args...)})
}

// required reports that a field has no value.
func (f *fields) required(field, value string) {
	if value == "" {
		f.fail(field, nil, "required")
	}
}

func (f *fields) addr(field, value string) netip.Addr {
	a, err := netip.ParseAddr(value)
	if err != nil {
		f.fail(field, value, "want an address, such as 10.0.0.1")
	}
	return a
}

// network reads a network; one without a length is an address. Bits behind the length are left out, as Calico did.
func (f *fields) network(field, value string) netip.Prefix {
	if a, err := netip.ParseAddr(value); err == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	p, err := netip.ParsePrefix(value)
	if err != nil {
		f.fail(field, value, "want a network, such as 10.0.0.0/16")
	}
	return p.Masked()
}

func convertPool(p *pool, f *fields) any {
	f.required("metadata.cidr", p.Metadata.CIDR)
	if p.Metadata.CIDR == "" {
		return nil
	}
	cidr := f.network("metadata.cidr", p.Metadata.CIDR)
	out := v3.NewIPPool()
	out.Name = cidrName(cidr)
	out.Spec = v3.IPPoolSpec{CIDR: cidr.String(), IPIPMode: v3.IPIPModeNever, NATOutgoing: p.Spec.NATOutgoing, Disabled: p.Spec.Disabled, NodeSelector: "all()", BlockSize: 26}
	if cidr.Addr().Is6() {
		out.Spec.BlockSize = 122
	}
	if i := p.Spec.IPIP; i != nil {
		switch mode := strings.ToLower(i.Mode); {
		case mode != "" && mode != "always" && mode != "cross-subnet":
			f.fail("spec.ipip.mode", i.Mode, "want always or cross-subnet")
		case i.Enabled && mode == "cross-subnet":
			out.Spec.IPIPMode = v3.IPIPModeCrossSubnet
		case i.Enabled:
			out.Spec.IPIPMode = v3.IPIPModeAlways
		}
	}
	return out
}

func convertPeer(p *bgpPeer, f *fields) any {
	f.required("metadata.peerIP", p.Metadata.PeerIP)
	if p.Metadata.PeerIP == "" {
		return nil
	}
	addr := f.addr("metadata.peerIP", p.Metadata.PeerIP)
	out := v3.NewBGPPeer()
	out.Name = addrName(addr)
	out.Spec = v3.BGPPeerSpec{PeerIP: addr.String(), ASNumber: p.Spec.ASNumber}
	switch p.Metadata.Scope {
	case "global":
		if p.Metadata.Node != "" {
			f.fail("metadata.node", p.Metadata.Node, "a peer of scope global is no node's: leave it out, or make the scope node")
		}
	case "node":
		f.required("metadata.node", p.Metadata.Node)
		out.Spec.Node = plainName(p.Metadata.Node)
		out.Name = out.Spec.Node + "." + out.Name
	default:
		f.fail("metadata.scope", p.Metadata.Scope, "want global or node")
	}
	return out
}

func convertNode(n *node, f *fields) any {
	f.required("metadata.name", n.Metadata.Name)
	out, _ := store.New(store.KindNode).(*store.Node)
	out.Name = plainName(n.Metadata.Name)
	for _, o := range n.Spec.OrchRefs {
		out.Spec.OrchRefs = append(out.Spec.OrchRefs, store.OrchRef{NodeName: o.NodeName, Orchestrator: o.Orchestrator})
	}
	b := n.Spec.BGP
	if b == nil {
		return out
	}
	if b.IPv4Address == "" && b.IPv6Address == "" {
		f.fail("spec.bgp", nil, "want ipv4Address or ipv6Address, or no bgp at all")
	}
	out.Spec.BGP = &store.NodeBGPSpec{
		ASNumber: b.ASNumber, IPv4Address: hostNetwork(f, "spec.bgp.ipv4Address", b.IPv4Address), IPv6Address: hostNetwork(f, "spec.bgp.ipv6Address", b.IPv6Address),
		IPv4IPIPTunnelAddr: b.IPv4IPIPTunnelAddr,
	}
	return out
}

// hostNetwork is an address with its network's length; alone it is all of the network.
func hostNetwork(f *fields, field, value string) string {
	if value == "" {
		return ""
	}
	f.network(field, value)
	if a, err := netip.ParseAddr(value); err == nil {
		return netip.PrefixFrom(a, a.BitLen()).String()
	}
	return value
}

func convertPolicy(p *policy, f *fields) any {
	f.required("metadata.name", p.Metadata.Name)
	s := p.Spec
	out := v3.NewGlobalNetworkPolicy()
	out.Name, out.Annotations = undottedName(p.Metadata.Name), p.Metadata.Annotations
	out.Spec = v3.GlobalNetworkPolicySpec{
		Order: s.Order, Selector: selectorOf(s.Selector, ""), DoNotTrack: s.DoNotTrack, PreDNAT: s.PreDNAT,
		ApplyOnForward: s.DoNotTrack || s.PreDNAT, // such a policy always judged what is forwarded
		Ingress:        convertRules(f, "spec.ingress", s.Ingress), Egress: convertRules(f, "spec.egress", s.Egress),
	}
	for i, t := range s.Types {
		switch strings.ToLower(t) {
		case "ingress":
			out.Spec.Types = append(out.Spec.Types, v3.PolicyTypeIngress)
		case "egress":
			out.Spec.Types = append(out.Spec.Types, v3.PolicyTypeEgress)
		default:
			f.fail(fmt.Sprintf("spec.types[%d]", i), t, "want ingress or egress")
		}
	}
	if len(s.Types) > 0 {
		return out
	}
	if len(s.Ingress) > 0 || len(s.Egress) == 0 {
		out.Spec.Types = append(out.Spec.Types, v3.PolicyTypeIngress)
	}
	if len(s.Egress) > 0 {
		out.Spec.Types = append(out.Spec.Types, v3.PolicyTypeEgress)
	}
	return out
}

func convertProfile(p *profile, f *fields) any {
	f.required("metadata.name", p.Metadata.Name)
	out := v3.NewProfile()
	out.Name = profileName(p.Metadata.Name)
	labels := maps.Clone(p.Metadata.Labels)
	for i, t := range p.Metadata.Tags { // a tag is a label without a value
		if _, ok := labels[t]; ok {
			f.fail(fmt.Sprintf("metadata.tags[%d]", i), t, "there is a label of that name, and a tag becomes one: rename one of them")
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[t] = ""
	}
	out.Spec = v3.ProfileSpec{LabelsToApply: labels, Ingress: convertRules(f, "spec.ingress", p.Spec.Ingress), Egress: convertRules(f, "spec.egress", p.Spec.Egress)}
	return out
}

func convertHostEndpoint(h *hostEndpoint, f *fields) any {
	f.required("metadata.name", h.Metadata.Name)
	f.required("metadata.node", h.Metadata.Node)
	out := v3.NewHostEndpoint()
	node := plainName(h.Metadata.Node)
	out.Name, out.Labels = uniqueName(node+"."+h.Metadata.Name), h.Metadata.Labels
	out.Spec = v3.HostEndpointSpec{Node: node, InterfaceName: h.Spec.InterfaceName, Profiles: profileNames(h.Spec.Profiles)}
	var addrs []netip.Addr
	for i, ip := range h.Spec.ExpectedIPs {
		addrs = append(addrs, f.addr(fmt.Sprintf("spec.expectedIPs[%d]", i), ip))
	}
	for _, a := range byFamily(addrs, netip.Addr.Is4) {
		out.Spec.ExpectedIPs = append(out.Spec.ExpectedIPs, a.String())
	}
	for _, p := range h.Spec.Ports {
		out.Spec.Ports = append(out.Spec.Ports, v3.EndpointPort{Name: p.Name, Protocol: numorstring.ProtocolV3FromProtocolV1(p.Protocol), Port: p.Port})
	}
	return out
}

func convertWorkloadEndpoint(w *workloadEndpoint, f *fields) any {
	m, s := w.Metadata, w.Spec
	for _, r := range [][2]string{{"metadata.name", m.Name}, {"metadata.node", m.Node}, {"metadata.orchestrator", m.Orchestrator}, {"metadata.workload", m.Workload}} {
		f.required(r[0], r[1])
	}
	out, _ := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	out.Namespace, out.Labels = store.DefaultName, maps.Clone(m.Labels)
	if ns, ok := out.Labels[oldNamespace]; ok {
		out.Labels[store.LabelNamespace] = ns
		delete(out.Labels, oldNamespace)
	}
	out.Spec = store.WorkloadEndpointSpec{
		Orchestrator: uniqueName(m.Orchestrator), Node: plainName(m.Node), Endpoint: uniqueName(m.Name),
		Profiles: profileNames(s.Profiles), InterfaceName: s.InterfaceName, IPv4Gateway: s.IPv4Gateway, IPv6Gateway: s.IPv6Gateway,
	}
	switch m.Orchestrator {
	case "k8s":
		ns, pod, ok := strings.Cut(m.Workload, ".")
		if !ok {
			f.fail("metadata.workload", m.Workload, "want NAMESPACE.POD, as Calico's CNI plugin names pods")
		}
		out.Namespace, out.Spec.Pod, out.Spec.ContainerID = ns, pod, m.ActiveInstanceID
	case "cni":
		out.Spec.ContainerID = m.Workload
	case "libnetwork":
		out.Spec.Workload = "libnetwork"
	default:
		out.Spec.Workload = uniqueName(m.Workload)
	}
	var nets []netip.Prefix
	for i, n := range s.IPNetworks {
		nets = append(nets, f.network(fmt.Sprintf("spec.ipNetworks[%d]", i), n))
	}
	for _, n := range byFamily(nets, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
		out.Spec.IPNetworks = append(out.Spec.IPNetworks, n.String())
	}
	for i, n := range s.IPNATs {
		at := fmt.Sprintf("spec.ipNATs[%d].", i)
		out.Spec.IPNATs = append(out.Spec.IPNATs, store.IPNAT{InternalIP: f.addr(at+"internalIP", n.InternalIP).String(), ExternalIP: f.addr(at+"externalIP", n.ExternalIP).String()})
	}
	if s.MAC != "" {
		mac, err := net.ParseMAC(s.MAC)
		if err != nil {
			f.fail("spec.mac", s.MAC, "want a MAC address, such as ee:ee:ee:ee:ee:ee")
		}
		out.Spec.MAC = mac.String()
	}
	for _, p := range s.Ports {
		out.Spec.Ports = append(out.Spec.Ports, store.WorkloadEndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	if len(f.errs) == 0 {
		var err error
		if out.Name, err = store.WorkloadEndpointName(&out.Spec); err != nil {
			f.fail("metadata", nil, "no name can be made of it: %v", err)
		}
	}
	return out
}

func profileNames(names []string) []string {
	var out []string
	for _, n := range names {
		out = append(out, profileName(n))
	}
	return out
}

// byFamily puts what is of IPv4 first, as Calico kept it.
func byFamily[T any](list []T, is4 func(T) bool) []T {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b T) int {
		switch {
		case is4(a) == is4(b):
			return 0
		case is4(a):
			return -1
		}
		return 1
	})
	return list
}

func convertNetworkPolicy(p *networkingv1.NetworkPolicy, f *fields) any {
	f.required("metadata.name", p.Name)
	out := v3.NewNetworkPolicy()
	out.Name, out.Namespace = p.Name, p.Namespace
	out.Spec = convert.PolicySpec(&p.Spec)
	return out
}
