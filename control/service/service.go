// Package service decides which addresses of Services of Kubernetes a node announces.
//
// It is Calico's rule (confd, pkg/backends/calico/routes.go) with what kube-proxy does
// besides: the families of endpoints, internalTrafficPolicy, and endpoints that
// terminate and serve yet (KEP-1669). It is pure: what the datastore says goes in, with
// the time where that counts, and addresses come out.
package service

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/store"
)

// Ranges are those of which addresses may be announced, by what they are of a Service.
type Ranges struct {
	Cluster, External, LoadBalancer []netip.Prefix

	// Single says that load balancers' addresses are announced one by one
	// (serviceLoadBalancerAggregation Disabled).
	Single bool

	// NeedEndpoint says that no address is announced by itself for a Service of which
	// no endpoint serves, on any node.
	NeedEndpoint bool
}

// Equal reports whether two are the same.
func (r Ranges) Equal(q Ranges) bool {
	return r.Single == q.Single && r.NeedEndpoint == q.NeedEndpoint &&
		slices.Equal(r.Cluster, q.Cluster) && slices.Equal(r.External, q.External) && slices.Equal(r.LoadBalancer, q.LoadBalancer)
}

// All returns all ranges.
func (r Ranges) All() []netip.Prefix { return slices.Concat(r.Cluster, r.External, r.LoadBalancer) }

// Wide returns the ranges that every node announces as they are: not those of a single
// address, which is announced for the Services that have it.
func (r Ranges) Wide() []netip.Prefix {
	all := slices.Concat(r.Cluster, r.External)
	if !r.Single {
		all = append(all, r.LoadBalancer...)
	}
	return slices.DeleteFunc(all, netip.Prefix.IsSingleIP)
}

// rangeOf returns the narrowest range that has an address.
func rangeOf(ranges []netip.Prefix, a netip.Addr) (best netip.Prefix) {
	for _, p := range ranges {
		if p.Contains(a) && (!best.IsValid() || p.Bits() > best.Bits()) {
			best = p
		}
	}
	return best
}

// State is how an address is announced.
type State uint8

// The states.
const (
	None    State = iota
	Leaving       // the endpoints that serve it here terminate: other nodes are to be preferred
	Serving
)

// Announcement is an address that a node announces by itself.
type Announcement struct {
	State State
	// Elsewhere says that an endpoint of the Service is ready on another node too.
	Elsewhere bool
	// Joined says that one was when this node began to serve the address.
	Joined  bool
	Service store.Key
}

// better reports whether one counts before another of the same address, of another
// Service: the one that serves, then by name.
func (a Announcement) better(b Announcement) bool {
	if a.State != b.State {
		return a.State > b.State
	}
	return a.Service.String() < b.Service.String()
}

// serving says how the endpoints of a Service serve one family.
type serving struct {
	here, anywhere State
	elsewhere      bool // another node has a ready one
}

// decided is an address of a Service that is announced.
type decided struct {
	addr      netip.Addr
	state     State
	elsewhere bool
	joined    bool // it was served elsewhere before it was here
}

// service is a Service with its addresses read.
type service struct {
	cluster, external, balancer  []netip.Addr
	externalLocal, internalLocal bool
}

func serviceOf(s *store.Service) service {
	return service{addrs(s.ClusterIPs), addrs(s.ExternalIPs), addrs(s.LoadBalancerIPs), s.ExternalLocal, s.InternalLocal}
}

// addrs reads addresses; what is none is not announced.
func addrs(texts []string) []netip.Addr {
	var out []netip.Addr
	for _, t := range texts {
		if a, err := netip.ParseAddr(t); err == nil && a.Zone() == "" {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// decide returns the addresses of a Service that are announced, in order. at says how
// its endpoints serve each family.
func (s service) decide(r Ranges, at func(six bool) serving) []decided {
	var out []decided
	may := func(list []netip.Addr, in []netip.Prefix, local, single bool) {
		for _, a := range list {
			p := rangeOf(in, a)
			if !p.IsValid() {
				continue
			}
			e := at(a.Is6())
			now := None
			switch {
			case local:
				now = e.here
			case p.IsSingleIP() && !r.NeedEndpoint: // the range is not announced for itself
				now = Serving
			case (single || p.IsSingleIP()) && e.anywhere != None:
				now = Serving // by whichever node: none is better than another
			}
			if now != None {
				out = append(out, decided{addr: a, state: now, elsewhere: e.elsewhere})
			}
		}
	}
	// What comes from outside for a cluster address goes by the external policy too.
	may(s.cluster, r.Cluster, s.externalLocal || s.internalLocal, false)
	may(s.external, r.External, s.externalLocal, false)
	may(s.balancer, r.LoadBalancer, s.externalLocal, r.Single)
	slices.SortFunc(out, func(a, b decided) int { return a.addr.Compare(b.addr) })
	return out
}
