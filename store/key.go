package store

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode/utf8"
)

// Kind names a kind of object, as `kind:` does in a manifest.
type Kind string

// The kinds that routerd reads or writes. IPAM's records and routerd's own
// secrets, incarnations and changes, at the end, are not resources of the v3 API and
// have no manifest form.
const (
	KindNode               Kind = "Node"
	KindIPPool             Kind = "IPPool"
	KindIPReservation      Kind = "IPReservation"
	KindBGPPeer            Kind = "BGPPeer"
	KindBGPConfiguration   Kind = "BGPConfiguration"
	KindBGPFilter          Kind = "BGPFilter"
	KindFelixConfiguration Kind = "FelixConfiguration"
	KindClusterInformation Kind = "ClusterInformation"
	KindTier               Kind = "Tier"
	KindProfile            Kind = "Profile"
	KindWorkloadEndpoint   Kind = "WorkloadEndpoint"
	KindHostEndpoint       Kind = "HostEndpoint"
	KindNetworkSet         Kind = "NetworkSet"
	KindGlobalNetworkSet   Kind = "GlobalNetworkSet"

	KindNetworkPolicy                 Kind = "NetworkPolicy"
	KindGlobalNetworkPolicy           Kind = "GlobalNetworkPolicy"
	KindStagedNetworkPolicy           Kind = "StagedNetworkPolicy"
	KindStagedGlobalNetworkPolicy     Kind = "StagedGlobalNetworkPolicy"
	KindStagedKubernetesNetworkPolicy Kind = "StagedKubernetesNetworkPolicy"

	KindIPAMConfiguration            Kind = "IPAMConfiguration" // stored for others: IPAM reads IPAMConfig
	KindKubeControllersConfiguration Kind = "KubeControllersConfiguration"
	KindCalicoNodeStatus             Kind = "CalicoNodeStatus"
	// KindBlockAffinity is how an affinity is shown; stored are KindIPAMAffinity's.
	KindBlockAffinity Kind = "BlockAffinity"

	KindIPAMBlock    Kind = "IPAMBlock"
	KindIPAMAffinity Kind = "IPAMAffinity"
	KindIPAMHandle   Kind = "IPAMHandle"
	KindIPAMConfig   Kind = "IPAMConfig"

	KindSecret      Kind = "Secret"
	KindIncarnation Kind = "Incarnation"
	KindChange      Kind = "Change"
	KindUnconfirmed Kind = "Unconfirmed"

	KindService       Kind = "Service" // these three of Kubernetes
	KindEndpointSlice Kind = "EndpointSlice"
	KindServiceCIDR   Kind = "ServiceCIDR"
)

// Key identifies an object. Keys are comparable.
//
// For the v3 kinds Name is metadata.name and Namespace metadata.namespace
// (empty for cluster-scoped kinds). For IPAM's records see [BlockKey],
// [AffinityKey], [HandleKey] and [IPAMConfigKey].
type Key struct {
	Kind      Kind
	Namespace string
	Name      string
}

// ResourceKey returns the key of a cluster-scoped v3 resource.
func ResourceKey(kind Kind, name string) Key { return Key{Kind: kind, Name: name} }

// BlockKey returns the key of the IPAM block with this CIDR.
func BlockKey(cidr netip.Prefix) Key { return Key{Kind: KindIPAMBlock, Name: cidr.String()} }

// AffinityKey returns the key of the record that node holds the block cidr.
func AffinityKey(node string, cidr netip.Prefix) Key {
	return Key{Kind: KindIPAMAffinity, Namespace: node, Name: cidr.String()}
}

// HandleKey returns the key of an IPAM handle.
func HandleKey(id string) Key { return Key{Kind: KindIPAMHandle, Name: id} }

// IPAMConfigKey returns the key of IPAM's settings.
func IPAMConfigKey() Key { return Key{Kind: KindIPAMConfig, Name: "default"} }

// SecretKey returns the key of a secret that the hosts of a cluster share.
func SecretKey(name string) Key { return Key{Kind: KindSecret, Name: name} }

// IncarnationKey returns the key of the record of which machine holds a node's
// name.
func IncarnationKey(node string) Key { return Key{Kind: KindIncarnation, Name: node} }

func (k Key) String() string {
	if k.Namespace == "" {
		return fmt.Sprintf("%s(%s)", k.Kind, k.Name)
	}
	return fmt.Sprintf("%s(%s/%s)", k.Kind, k.Namespace, k.Name)
}

// CIDR returns the prefix that the key of a block or of an affinity names.
// It is invalid for other kinds.
func (k Key) CIDR() netip.Prefix {
	if k.Kind != KindIPAMBlock && k.Kind != KindIPAMAffinity {
		return netip.Prefix{}
	}
	p, err := netip.ParsePrefix(k.Name)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// Roots of the etcd layout. Nothing is escaped: the character rules of names
// forbid the slash, and CIDRs have theirs replaced by a dash.
const (
	RootPath     = "/calico/"
	resourceRoot = "/calico/resources/v3/projectcalico.org/"
	ipamRoot     = "/calico/ipam/v2/"
	blockRoot    = ipamRoot + "assignment/"
	hostRoot     = ipamRoot + "host/"
	handleRoot   = ipamRoot + "handle/"
	configPath   = ipamRoot + "config"

	// What no tool of Calico's is to see is not below its root.
	OwnRootPath     = "/routerd/"
	secretRoot      = "/routerd/v1/secrets/"
	incarnationRoot = "/routerd/v1/incarnations/"
	changeRoot      = "/routerd/v1/changes/"
	unconfirmedRoot = "/routerd/v1/unconfirmed/"
	serviceRoot     = "/routerd/v1/services/"
	sliceRoot       = "/routerd/v1/endpointslices/"
	serviceCIDRRoot = "/routerd/v1/servicecidrs/"
)

func family(p netip.Prefix) string {
	if p.Addr().Is4() {
		return "ipv4"
	}
	return "ipv6"
}

func dashed(p netip.Prefix) string { return strings.ReplaceAll(p.String(), "/", "-") }

// Path returns the etcd key of k. It is empty when k names an unknown kind or
// a block without a valid CIDR.
func (k Key) Path() string {
	switch k.Kind {
	case KindIPAMBlock:
		p := k.CIDR()
		if !p.IsValid() {
			return ""
		}
		return blockRoot + family(p) + "/block/" + dashed(p)
	case KindIPAMAffinity:
		p := k.CIDR()
		if !p.IsValid() {
			return ""
		}
		return hostRoot + k.Namespace + "/" + family(p) + "/block/" + dashed(p)
	case KindIPAMHandle:
		return handleRoot + k.Name
	case KindIPAMConfig:
		return configPath
	case KindSecret:
		return secretRoot + k.Name
	case KindIncarnation:
		return incarnationRoot + k.Name
	case KindChange:
		return changeRoot + k.Name
	case KindUnconfirmed:
		return unconfirmedRoot + k.Name
	case KindService:
		return serviceRoot + k.Namespace + "/" + k.Name
	case KindEndpointSlice:
		return sliceRoot + k.Namespace + "/" + k.Name
	case KindServiceCIDR:
		return serviceCIDRRoot + k.Name
	}
	info, ok := infoOf(k.Kind)
	if !ok {
		return ""
	}
	if info.namespaced {
		return resourceRoot + info.plural + "/" + k.Namespace + "/" + k.Name
	}
	return resourceRoot + info.plural + "/" + k.Name
}

// PathPrefix returns what the etcd keys of all objects of a kind begin with,
// within a namespace (a node, for affinities) unless that is empty.
func PathPrefix(kind Kind, namespace string) string {
	switch kind {
	case KindIPAMBlock:
		return blockRoot
	case KindIPAMAffinity:
		return inNamespace(hostRoot, namespace)
	case KindIPAMHandle:
		return handleRoot
	case KindIPAMConfig:
		return configPath
	case KindSecret:
		return secretRoot
	case KindIncarnation:
		return incarnationRoot
	case KindChange:
		return changeRoot
	case KindUnconfirmed:
		return unconfirmedRoot
	case KindService:
		return inNamespace(serviceRoot, namespace)
	case KindEndpointSlice:
		return inNamespace(sliceRoot, namespace)
	case KindServiceCIDR:
		return serviceCIDRRoot
	}
	info, ok := infoOf(kind)
	if !ok {
		return ""
	}
	if !info.namespaced {
		namespace = ""
	}
	return inNamespace(resourceRoot+info.plural+"/", namespace)
}

// inNamespace returns what keys below a root begin with, within a namespace unless that
// is empty.
func inNamespace(root, namespace string) string {
	if namespace == "" {
		return root
	}
	return root + namespace + "/"
}

// ParsePath is the inverse of [Key.Path]. It reports false for keys of kinds
// that routerd does not know, which belong to others and are left alone, and
// for text that is not UTF-8, which no name in JSON can be.
func ParsePath(path string) (Key, bool) {
	switch {
	case !utf8.ValidString(path):
		return Key{}, false
	case strings.HasPrefix(path, resourceRoot):
		parts := strings.Split(path[len(resourceRoot):], "/")
		info, ok := infoOfPlural(parts[0])
		if !ok {
			return Key{}, false
		}
		if info.namespaced && len(parts) == 3 && parts[1] != "" && parts[2] != "" {
			return Key{info.kind, parts[1], parts[2]}, true
		}
		if !info.namespaced && len(parts) == 2 && parts[1] != "" {
			return Key{info.kind, "", parts[1]}, true
		}
		return Key{}, false
	case strings.HasPrefix(path, blockRoot):
		p, ok := parseBlockTail(path[len(blockRoot):])
		return BlockKey(p), ok
	case strings.HasPrefix(path, hostRoot):
		node, tail, ok := strings.Cut(path[len(hostRoot):], "/")
		if !ok || node == "" {
			return Key{}, false
		}
		p, ok := parseBlockTail(tail)
		return AffinityKey(node, p), ok
	case strings.HasPrefix(path, handleRoot):
		id := path[len(handleRoot):]
		return HandleKey(id), id != ""
	case path == configPath:
		return IPAMConfigKey(), true
	case strings.HasPrefix(path, serviceRoot):
		namespace, name, ok := parseNamespaced(path[len(serviceRoot):])
		return ServiceKey(namespace, name), ok
	case strings.HasPrefix(path, sliceRoot):
		namespace, name, ok := parseNamespaced(path[len(sliceRoot):])
		return EndpointSliceKey(namespace, name), ok
	}
	return parseOwn(path)
}

// parseOwn reads the path of one of routerd's own kinds: a root and a name.
func parseOwn(path string) (Key, bool) {
	for _, own := range [...]struct {
		root string
		key  func(string) Key
	}{{secretRoot, SecretKey}, {incarnationRoot, IncarnationKey}, {changeRoot, ChangeKey}, {unconfirmedRoot, UnconfirmedKey}, {serviceCIDRRoot, ServiceCIDRKey}} {
		if name, ok := strings.CutPrefix(path, own.root); ok {
			return own.key(name), name != "" && !strings.Contains(name, "/")
		}
	}
	return Key{}, false
}

// parseNamespaced reads "namespace/name".
func parseNamespaced(s string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(s, "/")
	return namespace, name, ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}

// parseBlockTail reads "ipv4/block/192.168.0.0-26".
func parseBlockTail(s string) (netip.Prefix, bool) {
	parts := strings.Split(s, "/")
	if len(parts) != 3 || parts[1] != "block" {
		return netip.Prefix{}, false
	}
	i := strings.LastIndexByte(parts[2], '-')
	if i < 0 {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(parts[2][:i] + "/" + parts[2][i+1:])
	// Only the canonical spelling is ours: another one would name a key that
	// Path never gives.
	if err != nil || p != p.Masked() || family(p) != parts[0] || dashed(p) != parts[2] {
		return netip.Prefix{}, false
	}
	return p, true
}
