// Package policytest makes clusters that are as large as control/policy has to
// be good for, for its benchmarks and for those that compare it with others.
package policytest

import (
	"fmt"
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// Node is the host for which a [Cluster]'s rules are calculated: its first.
const Node = "n1"

// Cluster returns what the datastore says of a cluster: endpoints on hosts of
// a hundred each, a hundred namespaces, fifty applications, and policies of
// which every one selects something on [Node], half of them in a namespace.
func Cluster(endpoints, policies int) []store.Event {
	const namespaces, apps, perHost = 100, 50, 100
	var list []store.Event
	put := func(o store.Object) { list = append(list, store.Event{Key: o.Key, Object: o}) }
	for i := range namespaces {
		p := &v3.Profile{Spec: v3.ProfileSpec{LabelsToApply: map[string]string{
			"pcns.projectcalico.org/name": fmt.Sprintf("ns%d", i), "pcns.env": fmt.Sprintf("env%d", i%3),
		}}}
		p.Name = fmt.Sprintf("kns.ns%d", i)
		put(store.Object{Key: store.ResourceKey(store.KindProfile, p.Name), Value: p})
	}
	for i := range endpoints {
		put(Endpoint(i, i%namespaces, i%apps, i/perHost))
	}
	tcp := numorstring.ProtocolFromString("TCP")
	for i := range policies {
		name := fmt.Sprintf("p%d", i)
		app := func(n int) string { return fmt.Sprintf("app == 'app%d'", n%apps) }
		in := []v3.Rule{
			{Action: v3.Allow, Protocol: &tcp, Source: v3.EntityRule{Selector: app(i + 1)}, Destination: v3.EntityRule{Ports: []numorstring.Port{numorstring.SinglePort(80), numorstring.NamedPort("http")}}},
			{Action: v3.Allow, Protocol: &tcp, Source: v3.EntityRule{NamespaceSelector: fmt.Sprintf("env == 'env%d'", i%3), Selector: app(i + 2)}},
			{Action: v3.Deny, Source: v3.EntityRule{Selector: fmt.Sprintf("tier in {'tier%d', 'none'} && has(version)", i%7)}},
		}
		if i%2 == 0 {
			p := &v3.NetworkPolicy{Spec: v3.NetworkPolicySpec{Selector: "has(tier)", Ingress: in, Types: []v3.PolicyType{"Ingress"}}}
			p.Name, p.Namespace = name, fmt.Sprintf("ns%d", i%namespaces)
			put(store.Object{Key: store.Key{Kind: store.KindNetworkPolicy, Namespace: p.Namespace, Name: name}, Value: p})
			continue
		}
		p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{Selector: app(i), Ingress: in, Types: []v3.PolicyType{"Ingress"}}}
		p.Name = name
		put(store.Object{Key: store.ResourceKey(store.KindGlobalNetworkPolicy, name), Value: p})
	}
	return list
}

// Endpoint returns the endpoint i, of a namespace and an application, on a host:
// 0 is [Node].
func Endpoint(i, ns, app, host int) store.Object {
	name := fmt.Sprintf("w%d", i)
	namespace := fmt.Sprintf("ns%d", ns)
	addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) //nolint:gosec // each takes its byte
	w := &store.WorkloadEndpoint{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{
			"app": fmt.Sprintf("app%d", app), "tier": fmt.Sprintf("tier%d", i%7), "version": fmt.Sprintf("v%d", i%5), "pod": name,
		}},
		Spec: store.WorkloadEndpointSpec{
			Orchestrator: "k8s", Node: fmt.Sprintf("n%d", host+1), InterfaceName: fmt.Sprintf("cali%d", i), Profiles: []string{"kns." + namespace},
			IPNetworks: []string{addr.String() + "/32", fmt.Sprintf("fd00::%x/128", i+1)},
			Ports:      []store.WorkloadEndpointPort{{Name: "http", Protocol: numorstring.ProtocolFromString("TCP"), Port: 8080}},
		},
	}
	return store.Object{Key: store.Key{Kind: store.KindWorkloadEndpoint, Namespace: namespace, Name: name}, Value: w}
}
