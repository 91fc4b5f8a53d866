package store

import "net/netip"

// ServiceCIDR is a range of which Services get their cluster addresses.
type ServiceCIDR struct {
	CIDRs []string `json:"cidrs,omitempty"`
}

// Service is what a Service of Kubernetes says that concerns who announces its
// addresses. Kubernetes' API has them; where the datastore is etcd they are brought there
// (package kubesync).
type Service struct {
	ClusterIPs      []string `json:"clusterIPs,omitempty"`
	ExternalIPs     []string `json:"externalIPs,omitempty"`
	LoadBalancerIPs []string `json:"loadBalancerIPs,omitempty"` // that nodes deliver themselves: ipMode VIP
	ExternalLocal   bool     `json:"externalLocal,omitempty"`   // externalTrafficPolicy Local
	InternalLocal   bool     `json:"internalLocal,omitempty"`   // internalTrafficPolicy Local
	NodePorts       []uint16 `json:"nodePorts,omitempty"`       // of every node
}

// EndpointSlice is where endpoints of a Service are.
type EndpointSlice struct {
	Service string                   `json:"service"` // in the slice's namespace
	IPv6    bool                     `json:"ipv6,omitempty"`
	Nodes   map[string]EndpointsHere `json:"nodes,omitempty"` // those with some that serve; "": the node is not said

	// Endpoints is who they are, for rules of policies that name the Service; nil: that is
	// not said, as where an earlier version wrote the slice.
	Endpoints *SliceEndpoints `json:"endpoints,omitempty"`
}

// SliceEndpoints are the endpoints of a slice, whatever their conditions: rules are about those
// that start and those that terminate too, as in Calico.
type SliceEndpoints struct {
	Addrs []netip.Addr `json:"addrs,omitempty"` // all that each has, sorted
	Ports []SlicePort  `json:"ports,omitempty"` // of each; those without a number are left out
}

// SlicePort is a port of the endpoints of a slice.
type SlicePort struct {
	Protocol string `json:"protocol"` // TCP, UDP or SCTP
	Port     uint16 `json:"port"`
}

// EndpointsHere says what endpoints there are on a node.
type EndpointsHere struct {
	Ready   bool `json:"ready,omitempty"`
	Leaving bool `json:"leaving,omitempty"` // one terminates and serves yet (KEP-1669)
}

// ServiceDetail is a Service with its ports and endpoints. Hosts do not follow these, for
// every pod that comes or goes changes some; they are read when an operator asks.
type ServiceDetail struct {
	Key Key
	Service
	Headless     bool   // without a cluster address: its name leads to its endpoints
	ExternalName string // that its name leads to, in place of endpoints
	Selector     string // of its pods, for people
	Ports        []ServicePort
	Endpoints    []ServiceEndpoint
}

// ServicePort is a port of a Service.
type ServicePort struct {
	Name     string // that the ports of its endpoints have too
	Protocol string // TCP, UDP or SCTP
	Port     uint16
	NodePort uint16 // of every node; 0: none
}

// ServiceEndpoint is an endpoint of a Service.
type ServiceEndpoint struct {
	Addr        netip.Addr
	Node        string // empty: it is not said
	Pod         string // NAMESPACE/NAME; empty: it is none
	Ready       bool
	Serving     bool              // it is ready, or would be if it did not terminate (KEP-1669)
	Terminating bool              // somebody deleted its pod
	Zones       []string          // for which it is, by its hints (KEP-2433)
	Ports       map[string]uint16 // by the name of the Service's port
}

// ServiceKey returns the key of a Service.
func ServiceKey(namespace, name string) Key {
	return Key{Kind: KindService, Namespace: namespace, Name: name}
}

// EndpointSliceKey returns the key of an EndpointSlice.
func EndpointSliceKey(namespace, name string) Key {
	return Key{Kind: KindEndpointSlice, Namespace: namespace, Name: name}
}

// ServiceCIDRKey returns the key of a ServiceCIDR.
func ServiceCIDRKey(name string) Key { return Key{Kind: KindServiceCIDR, Name: name} }
