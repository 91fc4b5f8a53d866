package convert

import (
	"fmt"
	"net/netip"

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
