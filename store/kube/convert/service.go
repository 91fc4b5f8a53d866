package convert

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/routerd/routerd/store"
)

// serviceCIDROf returns the ranges of a ServiceCIDR.
func serviceCIDROf(s *networkingv1.ServiceCIDR) (store.Key, any, error) {
	key := store.ServiceCIDRKey(s.Name)
	for _, cidr := range s.Spec.CIDRs {
		if _, err := netip.ParsePrefix(cidr); err != nil {
			return key, nil, fmt.Errorf("%w: spec.cidrs: %q: want a prefix such as 10.96.0.0/16", store.ErrDecode, cidr)
		}
	}
	return key, &store.ServiceCIDR{CIDRs: s.Spec.CIDRs}, nil
}

// serviceOf returns what a Service says of the addresses that may be announced. One
// without a cluster address has none: nobody carries its traffic (headless ones, and
// those of type ExternalName, which another one may become).
func serviceOf(s *corev1.Service) (store.Key, any, error) {
	key := store.ServiceKey(s.Namespace, s.Name)
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 && s.Spec.ClusterIP != "" {
		ips = []string{s.Spec.ClusterIP}
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName || len(ips) == 0 || ips[0] == corev1.ClusterIPNone {
		return key, &store.Service{}, nil
	}
	out := &store.Service{
		ClusterIPs: ips, ExternalIPs: s.Spec.ExternalIPs,
		ExternalLocal: s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		InternalLocal: s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out.NodePorts = append(out.NodePorts, uint16(p.NodePort)) //nolint:gosec // the API server bounds it
		}
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		// What is in front of the nodes sends to others of their addresses (KEP-1860).
		if in.IP != "" && (in.IPMode == nil || *in.IPMode != corev1.LoadBalancerIPModeProxy) {
			out.LoadBalancerIPs = append(out.LoadBalancerIPs, in.IP)
		}
	}
	for _, list := range []struct {
		field string
		ips   []string
	}{{"spec.clusterIPs", out.ClusterIPs}, {"spec.externalIPs", out.ExternalIPs}, {"status.loadBalancer.ingress", out.LoadBalancerIPs}} {
		for _, ip := range list.ips {
			if _, err := netip.ParseAddr(ip); err != nil {
				return key, nil, fmt.Errorf("%w: %s: %q: want an address", store.ErrDecode, list.field, ip)
			}
		}
	}
	return key, out, nil
}

// endpointSliceOf returns on which nodes endpoints of a Service serve, as kube-proxy
// reads their conditions: ready is what is not said, serving is as ready. One that is of
// no Service has none.
func endpointSliceOf(s *discoveryv1.EndpointSlice) (store.Key, any, error) {
	key := store.EndpointSliceKey(s.Namespace, s.Name)
	service := s.Labels[discoveryv1.LabelServiceName]
	if service == "" || s.AddressType == discoveryv1.AddressTypeFQDN {
		return key, &store.EndpointSlice{}, nil
	}
	out := &store.EndpointSlice{Service: service, IPv6: s.AddressType == discoveryv1.AddressTypeIPv6}
	out.Endpoints = sliceEndpointsOf(s)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		ready := e.Conditions.Ready == nil || *e.Conditions.Ready
		serving := ready
		if e.Conditions.Serving != nil {
			serving = *e.Conditions.Serving
		}
		leaving := serving && e.Conditions.Terminating != nil && *e.Conditions.Terminating
		if !ready && !leaving {
			continue
		}
		node := ""
		if e.NodeName != nil {
			node = *e.NodeName
		}
		if out.Nodes == nil {
			out.Nodes = make(map[string]store.EndpointsHere)
		}
		here := out.Nodes[node]
		out.Nodes[node] = store.EndpointsHere{Ready: here.Ready || ready, Leaving: here.Leaving || leaving && !ready}
	}
	return key, out, nil
}

// sliceEndpointsOf returns who the endpoints of a slice are, as Felix has them for rules that
// name a Service: whatever their conditions, by all of their addresses. A port without a number
// stands for none, and an address that is none is left out.
func sliceEndpointsOf(s *discoveryv1.EndpointSlice) *store.SliceEndpoints {
	out := new(store.SliceEndpoints)
	for _, p := range s.Ports {
		if p.Port != nil {
			out.Ports = append(out.Ports, store.SlicePort{Protocol: cmp.Or(string(deref(p.Protocol)), "TCP"), Port: uint16(*p.Port)}) //nolint:gosec // the API server bounds it
		}
	}
	for i := range s.Endpoints {
		for _, text := range s.Endpoints[i].Addresses {
			if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
				out.Addrs = append(out.Addrs, a.Unmap())
			}
		}
	}
	slices.SortFunc(out.Addrs, netip.Addr.Compare)
	out.Addrs = slices.Compact(out.Addrs)
	return out
}

// ServiceDetail returns a Service with its ports and endpoints, of the objects of the
// API. What cannot be read of an endpoint is left out, as kube-proxy does.
func ServiceDetail(rawService []byte, rawSlices []json.RawMessage) (store.ServiceDetail, error) {
	var s corev1.Service
	if err := json.Unmarshal(rawService, &s); err != nil {
		return store.ServiceDetail{}, fmt.Errorf("%w: Service: %w", store.ErrDecode, err)
	}
	key, value, err := serviceOf(&s)
	if err != nil {
		return store.ServiceDetail{}, err
	}
	out := store.ServiceDetail{Key: key, Headless: s.Spec.ClusterIP == corev1.ClusterIPNone}
	var selector []string
	for k, v := range s.Spec.Selector {
		selector = append(selector, k+"="+v)
	}
	slices.Sort(selector)
	out.Selector = strings.Join(selector, ",")
	if v, ok := value.(*store.Service); ok {
		out.Service = *v
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		out.ExternalName = s.Spec.ExternalName
	}
	for _, p := range s.Spec.Ports {
		out.Ports = append(out.Ports, store.ServicePort{Name: p.Name, Protocol: cmp.Or(string(p.Protocol), "TCP"), Port: uint16(p.Port), NodePort: uint16(p.NodePort)}) //nolint:gosec // the API server bounds both
	}
	for _, raw := range rawSlices {
		var slice discoveryv1.EndpointSlice
		if err := json.Unmarshal(raw, &slice); err != nil {
			return out, fmt.Errorf("%w: EndpointSlice: %w", store.ErrDecode, err)
		}
		out.Endpoints = append(out.Endpoints, endpointsOf(&slice)...)
	}
	slices.SortFunc(out.Endpoints, func(a, b store.ServiceEndpoint) int { return a.Addr.Compare(b.Addr) })
	return out, nil
}

// endpointsOf returns the endpoints of a slice, by their first address: the others mean
// the same (discovery.k8s.io/v1, Endpoint.addresses).
func endpointsOf(s *discoveryv1.EndpointSlice) []store.ServiceEndpoint {
	ports := map[string]uint16{}
	for _, p := range s.Ports {
		if p.Port != nil {
			ports[deref(p.Name)] = uint16(*p.Port) //nolint:gosec // the API server bounds it
		}
	}
	var out []store.ServiceEndpoint
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if len(e.Addresses) == 0 {
			continue
		}
		a, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			continue
		}
		c := e.Conditions
		x := store.ServiceEndpoint{Addr: a, Node: deref(e.NodeName), Ready: c.Ready == nil || *c.Ready, Terminating: deref(c.Terminating), Ports: ports}
		x.Serving = x.Ready
		if c.Serving != nil {
			x.Serving = *c.Serving
		}
		if t := e.TargetRef; t != nil && t.Kind == "Pod" {
			x.Pod = t.Namespace + "/" + t.Name
		}
		if e.Hints != nil {
			for _, z := range e.Hints.ForZones {
				x.Zones = append(x.Zones, z.Name)
			}
		}
		out = append(out, x)
	}
	return out
}

// deref returns what a pointer leads to; the zero value if it is nil.
func deref[T any](p *T) T {
	var zero T
	if p == nil {
		return zero
	}
	return *p
}
