package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unique"

	"github.com/routerd/routerd/store"
)

// Client is who sends to a Service, as the proxy of Services sees it that takes the packet.
type Client struct {
	Node    string // that proxy's; empty: it is not known
	Zone    string // of that node
	Outside bool   // it is no workload and no host of the cluster
}

// Choice is which endpoints of a Service a packet may be sent to.
type Choice struct {
	Policy string // which one counts, and what it says
	Local  bool   // it leaves the endpoints of the client's node
	Source bool   // the endpoint sees the client's address, also of a client outside
	Of     []Candidate
}

// Candidate is an endpoint of the family of the Service's address.
type Candidate struct {
	store.ServiceEndpoint
	Port uint16
	Not  string // why no packet is sent to it; empty: it may be chosen
}

// Chosen returns those that may be chosen: one is taken at random.
func (c Choice) Chosen() []Candidate {
	return slices.DeleteFunc(slices.Clone(c.Of), func(e Candidate) bool { return e.Not != "" })
}

// PortOf returns the port of a Service that a packet is for; 0: the only one that it has.
func PortOf(d store.ServiceDetail, protocol string, port uint16) (store.ServicePort, error) {
	var fit []store.ServicePort
	var all []string
	for _, p := range d.Ports {
		if (port == 0 || p.Port == port) && (protocol == "" || strings.EqualFold(p.Protocol, protocol)) {
			fit = append(fit, p)
		}
		all = append(all, fmt.Sprintf("%d/%s", p.Port, strings.ToLower(p.Protocol)))
	}
	switch {
	case len(fit) == 1 || len(fit) > 1 && port != 0: // of two protocols TCP is the first
		i := max(0, slices.IndexFunc(fit, func(p store.ServicePort) bool { return p.Protocol == "TCP" }))
		return fit[i], nil
	case len(all) == 0:
		return store.ServicePort{}, fmt.Errorf("Service %s/%s has no ports", d.Key.Namespace, d.Key.Name)
	case len(fit) > 1:
		return store.ServicePort{}, fmt.Errorf("Service %s/%s has the ports %s: name one by --port", d.Key.Namespace, d.Key.Name, strings.Join(all, ", "))
	}
	return store.ServicePort{}, fmt.Errorf("Service %s/%s has no such port: it has %s", d.Key.Namespace, d.Key.Name, strings.Join(all, ", "))
}

// NodePortOf returns the port of a Service that has a port of every node; ok is false if none has it. Of two protocols TCP is
// the first.
func NodePortOf(d store.ServiceDetail, protocol string, port uint16) (out store.ServicePort, ok bool) {
	for _, p := range d.Ports {
		if p.NodePort == port && port != 0 && (protocol == "" || strings.EqualFold(p.Protocol, protocol)) && (!ok || p.Protocol == "TCP") {
			out, ok = p, true
		}
	}
	return out, ok
}

// Choose says to which endpoints of a Service a packet is sent that is for one of its
// addresses, as kube-proxy does (pkg/proxy/topology.go, CategorizeEndpoints): those that
// are ready, else those that terminate and serve yet (KEP-1669); with a policy Local those
// of the node alone; else those for the node's zone, if hints are complete (KEP-2433).
// A client inside of the cluster that sends to an address of outside goes by the policy
// Cluster, whatever externalTrafficPolicy says.
func Choose(d store.ServiceDetail, to netip.Addr, port store.ServicePort, from Client) Choice {
	out := policyFor(d, to, from)
	for _, e := range d.Endpoints {
		if e.Addr.Is4() == to.Is4() {
			out.Of = append(out.Of, Candidate{ServiceEndpoint: e, Port: e.Ports[port.Name]})
		}
	}
	here := func(e Candidate) bool { return !out.Local || e.Node == from.Node && from.Node != "" }
	ready := slices.ContainsFunc(out.Of, func(e Candidate) bool { return here(e) && e.Ready && e.Port != 0 })
	zoned := !out.Local && !d.Headless && hinted(out.Of, from.Zone)
	for i, e := range out.Of {
		switch {
		case e.Port == 0:
			out.Of[i].Not = "it has no port " + port.Name
		case !e.Ready && (!e.Serving || !e.Terminating):
			out.Of[i].Not = "it is not ready"
		case !here(e):
			out.Of[i].Not = fmt.Sprintf("it is on %s, and %s", orUnknown(e.Node), out.Policy)
		case !e.Ready && ready:
			out.Of[i].Not = "it terminates, and others are ready"
		case zoned && ready && !slices.Contains(e.Zones, from.Zone):
			out.Of[i].Not = fmt.Sprintf("its hints are for zone %s, and %s is in %s", strings.Join(e.Zones, ", "), from.Node, from.Zone)
		}
	}
	return out
}

func orUnknown(node string) string {
	if node == "" {
		return "a node that its EndpointSlice does not name"
	}
	return node
}

// policyFor says which policy counts for an address.
func policyFor(d store.ServiceDetail, to netip.Addr, from Client) Choice {
	is := func(list []string) bool { return slices.Contains(addrs(list), to) }
	switch {
	case d.Headless:
		return Choice{Policy: "it has no cluster address: its name leads to its endpoints", Source: true}
	case is(d.ClusterIPs) && d.InternalLocal:
		return Choice{Policy: "internalTrafficPolicy is Local", Local: true, Source: !from.Outside}
	case is(d.ClusterIPs):
		return Choice{Policy: "internalTrafficPolicy is Cluster", Source: !from.Outside}
	case !from.Outside && d.ExternalLocal:
		return Choice{Policy: "externalTrafficPolicy Local does not count inside of the cluster", Source: true}
	case d.ExternalLocal:
		return Choice{Policy: "externalTrafficPolicy is Local", Local: true, Source: true}
	}
	return Choice{Policy: "externalTrafficPolicy is Cluster"} // the proxy masquerades whoever sends, for the endpoint may be elsewhere
}

// hinted reports whether hints count: every endpoint that is ready has some, and some are
// for the zone.
func hinted(list []Candidate, zone string) bool {
	some := false
	for _, e := range list {
		if !e.Ready || e.Port == 0 {
			continue
		}
		if len(e.Zones) == 0 {
			return false
		}
		some = some || slices.Contains(e.Zones, zone)
	}
	return some && zone != ""
}

// Reach is how a node announces an address of a Service.
type Reach struct {
	Prefix  netip.Prefix // the address, or the range that holds it; invalid: neither
	Leaving bool         // others are to be preferred
	Why     string       // why not, or not the address by itself
}

// Reach says how a node announces an address of a Service.
func (t *Table) Reach(node string, of store.Key, a netip.Addr) Reach {
	e := t.services[nameOf(of)]
	if e == nil || !e.there {
		return Reach{Why: "the Service has not come here yet"}
	}
	for _, d := range t.decide(e, unique.Make(node)) {
		if d.addr == a {
			return Reach{Prefix: netip.PrefixFrom(a, a.BitLen()), Leaving: d.state == Leaving}
		}
	}
	in, field, local := t.ranges.External, "serviceExternalIPs", e.externalLocal
	switch {
	case slices.Contains(e.cluster, a):
		in, field, local = t.ranges.Cluster, "serviceClusterIPs", e.externalLocal || e.internalLocal
	case slices.Contains(e.balancer, a):
		in, field = t.ranges.LoadBalancer, "serviceLoadBalancerIPs"
	}
	out := Reach{Why: "no endpoint of it serves"}
	if local {
		out.Why = "none of its endpoints that serve is on this node, and its traffic policy is Local"
	}
	if !rangeOf(in, a).IsValid() {
		return Reach{Why: fmt.Sprintf("%s of BGPConfiguration default has no range with %s", field, a)}
	}
	var wide netip.Prefix
	for _, p := range t.ranges.Wide() {
		if p.Contains(a) && (!wide.IsValid() || p.Bits() > wide.Bits()) {
			wide = p
		}
	}
	out.Prefix = wide
	if wide.IsValid() && !local {
		out.Why = "" // its range is all that is announced of it
	}
	return out
}
