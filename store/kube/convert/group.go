package convert

import (
	"github.com/routerd/routerd/store"
)

// Group is one of the two API groups in which Calico's custom resources are.
type Group string

// The groups. A cluster has one of them: V1 where Calico's own API server or its
// clients make the v3 resources, V3 where the resources are the v3 ones already.
const (
	V1 Group = "crd.projectcalico.org"
	V3 Group = "projectcalico.org"
)

// Version is the one version of a group.
func (g Group) Version() string {
	if g == V3 {
		return "v3"
	}
	return "v1"
}

// APIVersion is the group with its version, as in objects.
func (g Group) APIVersion() string { return string(g) + "/" + g.Version() }

// Choose returns the group that Calico's clients choose: the one that is set
// (the value of CALICO_API_GROUP), else V3 only where a cluster has that and not
// V1. A cluster that has neither yet gets V3: install is set then.
func Choose(setting string, hasV1, hasV3 bool) Group {
	switch Group(setting) {
	case V1, "crd.projectcalico.org/v1":
		return V1
	case V3, "projectcalico.org/v3":
		return V3
	}
	if hasV1 {
		return V1
	}
	return V3
}

// KnownGroup reports whether [Choose] knows a setting; an empty one leaves the choice
// to what the cluster has.
func KnownGroup(setting string) bool {
	switch Group(setting) {
	case "", V1, V3, "crd.projectcalico.org/v1", "projectcalico.org/v3":
		return true
	}
	return false
}

// Resource is one collection of objects of the API.
type Resource struct {
	Group      string // empty: the core group
	Version    string
	Plural     string
	APIKind    string // of its objects
	Namespaced bool
	Status     bool // it has a status of its own, which writes of the object do not touch
}

// Path is where the objects are below the server's root, in a namespace unless
// that is empty.
func (r Resource) Path(namespace string) string {
	p := "/apis/" + r.Group + "/" + r.Version
	if r.Group == "" {
		p = "/api/" + r.Version
	}
	if r.Namespaced && namespace != "" {
		p += "/namespaces/" + namespace
	}
	return p + "/" + r.Plural
}

// APIVersion is what the objects call themselves.
func (r Resource) APIVersion() string {
	if r.Group == "" {
		return r.Version
	}
	return r.Group + "/" + r.Version
}

// String names the resource as kubectl does.
func (r Resource) String() string {
	if r.Group == "" {
		return r.Plural
	}
	return r.Plural + "." + r.Group
}

// The resources of Kubernetes itself that stand for resources of ours.
func nodes() Resource { return Resource{Version: "v1", Plural: "nodes", APIKind: "Node", Status: true} }

func pods() Resource {
	return Resource{Version: "v1", Plural: "pods", APIKind: "Pod", Namespaced: true, Status: true}
}

func namespaces() Resource {
	return Resource{Version: "v1", Plural: "namespaces", APIKind: "Namespace"}
}

func serviceAccounts() Resource {
	return Resource{Version: "v1", Plural: "serviceaccounts", APIKind: "ServiceAccount", Namespaced: true}
}

func services() Resource {
	return Resource{Version: "v1", Plural: "services", APIKind: "Service", Namespaced: true, Status: true}
}

// EndpointSlices is where endpoints of Services are.
func EndpointSlices() Resource {
	return Resource{Group: "discovery.k8s.io", Version: "v1", Plural: "endpointslices", APIKind: "EndpointSlice", Namespaced: true}
}

func serviceCIDRs() Resource {
	return Resource{Group: "networking.k8s.io", Version: "v1", Plural: "servicecidrs", APIKind: "ServiceCIDR", Status: true}
}

func networkPolicies() Resource {
	return Resource{Group: "networking.k8s.io", Version: "v1", Plural: "networkpolicies", APIKind: "NetworkPolicy", Namespaced: true}
}

func clusterNetworkPolicies() Resource {
	return Resource{Group: "policy.networking.k8s.io", Version: "v1alpha2", Plural: "clusternetworkpolicies", APIKind: "ClusterNetworkPolicy", Status: true}
}

// Custom returns the custom resource that holds a kind in a group. It reports
// false for kinds that have none.
func Custom(g Group, kind store.Kind) (Resource, bool) {
	r := Resource{Group: string(g), Version: g.Version(), APIKind: string(kind)}
	switch kind {
	case store.KindIPAMBlock:
		r.Plural = "ipamblocks"
	case store.KindIPAMAffinity:
		r.Plural, r.APIKind = "blockaffinities", "BlockAffinity"
	case store.KindIPAMHandle:
		r.Plural = "ipamhandles"
	case store.KindIPAMConfig:
		if r.Plural = "ipamconfigs"; g == V3 {
			r.Plural, r.APIKind = "ipamconfigurations", "IPAMConfiguration"
		}
	case store.KindNode, store.KindWorkloadEndpoint, store.KindProfile, store.KindSecret, store.KindIncarnation,
		store.KindIPAMConfiguration, store.KindBlockAffinity: // IPAM's own records are these there
		return Resource{}, false
	default:
		if r.Plural = kind.Plural(); r.Plural == "" {
			return Resource{}, false
		}
		r.Namespaced = kind.Namespaced()
		switch kind {
		case store.KindIPPool, store.KindTier, store.KindKubeControllersConfiguration, store.KindCalicoNodeStatus:
			r.Status = true
		}
	}
	return r, true
}

// CustomKinds lists the kinds that have a custom resource.
func CustomKinds() []store.Kind {
	var kinds []store.Kind
	for _, k := range append(store.Kinds(), store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle, store.KindIPAMConfig) {
		if _, ok := Custom(V1, k); ok {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// Source is a resource of the API whose objects are objects of one kind of ours.
type Source struct {
	Kind     store.Kind
	Resource Resource
	custom   bool
	group    Group
}

// Custom reports whether the objects are custom resources, which can be made and
// deleted as ours.
func (s Source) Custom() bool { return s.custom }

// Sources lists where the objects of a kind come from: most from one resource,
// profiles and policies from two. It is empty for kinds that this
// datastore does not hold.
func Sources(g Group, kind store.Kind) []Source {
	native := func(resources ...Resource) []Source {
		var out []Source
		for _, r := range resources {
			out = append(out, Source{Kind: kind, Resource: r, group: g})
		}
		return out
	}
	switch kind {
	case store.KindNode, store.KindIncarnation:
		return native(nodes())
	case store.KindWorkloadEndpoint:
		return native(pods())
	case store.KindProfile:
		return native(namespaces(), serviceAccounts())
	case store.KindService:
		return native(services())
	case store.KindEndpointSlice:
		return native(EndpointSlices())
	case store.KindServiceCIDR:
		return native(serviceCIDRs())
	}
	r, ok := Custom(g, kind)
	if !ok {
		return nil
	}
	out := []Source{{Kind: kind, Resource: r, custom: true, group: g}}
	switch kind {
	case store.KindNetworkPolicy:
		out = append(out, native(networkPolicies())...)
	case store.KindGlobalNetworkPolicy:
		out = append(out, native(clusterNetworkPolicies())...)
	}
	return out
}

// SourceOf returns where the object of a key is, and its name there. It reports
// false for keys that this datastore cannot hold.
func SourceOf(g Group, key store.Key) (s Source, namespace, name string, ok bool) {
	for _, s := range Sources(g, key.Kind) {
		if namespace, name, ok := s.locate(key); ok {
			return s, namespace, name, true
		}
	}
	return Source{}, "", "", false
}

// Owns reports whether an object of that key, if there is one, comes from s.
func (s Source) Owns(key store.Key) bool {
	if key.Kind != s.Kind {
		return false
	}
	_, _, ok := s.locate(key)
	return ok
}
