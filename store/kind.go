package store

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// APIVersion is the apiVersion of every v3 resource.
const APIVersion = "projectcalico.org/v3"

// kindInfo says how a kind is called and made.
type kindInfo struct {
	kind       Kind
	plural     string // in etcd keys and on the command line
	aliases    []string
	namespaced bool
	record     bool         // of IPAM or of routerd itself: no manifest form
	of         reflect.Type // of the value that a pointer leads to
}

// kindTable says what is known of every kind, in the order in which manifests
// of several kinds are best applied. It is a variable only because Go has no
// constant tables: nothing writes it after the program's start, and every key
// of every watch event is looked up in it, so it is not made anew each time.
var kindTable = [...]kindInfo{
	{kind: KindClusterInformation, plural: "clusterinformations", aliases: []string{"clusterinformation", "clusterinfo", "clusterinfos"}, of: reflect.TypeFor[v3.ClusterInformation]()},
	{kind: KindTier, plural: "tiers", aliases: []string{"tier"}, of: reflect.TypeFor[v3.Tier]()},
	{kind: KindFelixConfiguration, plural: "felixconfigurations", aliases: []string{"felixconfiguration", "felixconfig", "felixconfigs"}, of: reflect.TypeFor[v3.FelixConfiguration]()},
	{kind: KindBGPConfiguration, plural: "bgpconfigurations", aliases: []string{"bgpconfiguration", "bgpconfig", "bgpconfigs"}, of: reflect.TypeFor[v3.BGPConfiguration]()},
	{kind: KindBGPFilter, plural: "bgpfilters", aliases: []string{"bgpfilter", "bgpf", "bgpfs", "bf", "bfs"}, of: reflect.TypeFor[v3.BGPFilter]()},
	{kind: KindIPPool, plural: "ippools", aliases: []string{"ippool", "ipp", "ipps", "pool", "pools"}, of: reflect.TypeFor[v3.IPPool]()},
	{kind: KindIPReservation, plural: "ipreservations", aliases: []string{"ipreservation", "reservation", "reservations"}, of: reflect.TypeFor[v3.IPReservation]()},
	{kind: KindNode, plural: "nodes", aliases: []string{"node", "no", "nos"}, of: reflect.TypeFor[Node]()},
	{kind: KindBGPPeer, plural: "bgppeers", aliases: []string{"bgppeer", "bgpp", "bgpps", "bp", "bps"}, of: reflect.TypeFor[v3.BGPPeer]()},
	{kind: KindProfile, plural: "profiles", aliases: []string{"profile", "pro", "pros", "profs"}, of: reflect.TypeFor[v3.Profile]()},
	{kind: KindWorkloadEndpoint, plural: "workloadendpoints", aliases: []string{"workloadendpoint", "wep", "weps"}, namespaced: true, of: reflect.TypeFor[WorkloadEndpoint]()},
	{kind: KindHostEndpoint, plural: "hostendpoints", aliases: []string{"hostendpoint", "hep", "heps"}, of: reflect.TypeFor[v3.HostEndpoint]()},
	{kind: KindNetworkSet, plural: "networksets", aliases: []string{"networkset", "netset", "netsets"}, namespaced: true, of: reflect.TypeFor[v3.NetworkSet]()},
	{kind: KindGlobalNetworkSet, plural: "globalnetworksets", aliases: []string{"globalnetworkset", "gns", "gnetsets"}, of: reflect.TypeFor[v3.GlobalNetworkSet]()},
	{kind: KindNetworkPolicy, plural: "networkpolicies", aliases: []string{"networkpolicy", "policy", "np", "policies", "pol", "pols"}, namespaced: true, of: reflect.TypeFor[v3.NetworkPolicy]()},
	{kind: KindGlobalNetworkPolicy, plural: "globalnetworkpolicies", aliases: []string{"globalnetworkpolicy", "gnp", "gnps"}, of: reflect.TypeFor[v3.GlobalNetworkPolicy]()},
	{kind: KindStagedNetworkPolicy, plural: "stagednetworkpolicies", aliases: []string{"stagednetworkpolicy", "snp", "snps", "stagedpolicy", "stagedpolicies", "spol", "spols"}, namespaced: true, of: reflect.TypeFor[v3.StagedNetworkPolicy]()},
	{kind: KindStagedGlobalNetworkPolicy, plural: "stagedglobalnetworkpolicies", aliases: []string{"stagedglobalnetworkpolicy", "sgnp", "sgnps"}, of: reflect.TypeFor[v3.StagedGlobalNetworkPolicy]()},
	{kind: KindStagedKubernetesNetworkPolicy, plural: "stagedkubernetesnetworkpolicies", aliases: []string{"stagedkubernetesnetworkpolicy", "sknp", "sknps", "stagedkubernetespolicy", "stagedkubernetespolicies", "skpol", "skpols"}, namespaced: true, of: reflect.TypeFor[v3.StagedKubernetesNetworkPolicy]()},
	{kind: KindIPAMConfiguration, plural: "ipamconfigurations", aliases: []string{"ipamconfiguration", "ipamconfig", "ipamconfigs"}, of: reflect.TypeFor[v3.IPAMConfiguration]()},
	{kind: KindKubeControllersConfiguration, plural: "kubecontrollersconfigurations", aliases: []string{"kubecontrollersconfiguration", "kubecontrollersconfig", "kubecontrollersconfigs", "kcconfig", "kcconfigs"}, of: reflect.TypeFor[v3.KubeControllersConfiguration]()},
	{kind: KindCalicoNodeStatus, plural: "caliconodestatuses", aliases: []string{"caliconodestatus", "nodestatus", "nodestatuses", "cns"}, of: reflect.TypeFor[v3.CalicoNodeStatus]()},
	{kind: KindBlockAffinity, plural: "blockaffinities", aliases: []string{"blockaffinity", "affinity", "affinities"}, of: reflect.TypeFor[v3.BlockAffinity]()},

	{kind: KindIPAMBlock, record: true, of: reflect.TypeFor[Block]()},
	{kind: KindIPAMAffinity, record: true, of: reflect.TypeFor[Affinity]()},
	{kind: KindIPAMHandle, record: true, of: reflect.TypeFor[Handle]()},
	{kind: KindIPAMConfig, record: true, of: reflect.TypeFor[IPAMConfig]()},
	{kind: KindSecret, record: true, of: reflect.TypeFor[Secret]()},
	{kind: KindIncarnation, record: true, of: reflect.TypeFor[Incarnation]()},
	{kind: KindChange, record: true, of: reflect.TypeFor[Change]()},
	{kind: KindUnconfirmed, record: true, of: reflect.TypeFor[Unconfirmed]()},
	{kind: KindService, record: true, namespaced: true, of: reflect.TypeFor[Service]()},
	{kind: KindEndpointSlice, record: true, namespaced: true, of: reflect.TypeFor[EndpointSlice]()},
	{kind: KindServiceCIDR, record: true, of: reflect.TypeFor[ServiceCIDR]()},
}

func infoOf(kind Kind) (*kindInfo, bool) {
	for i := range kindTable {
		if kindTable[i].kind == kind {
			return &kindTable[i], true
		}
	}
	return nil, false
}

func infoOfPlural(plural string) (*kindInfo, bool) {
	for i := range kindTable {
		if kindTable[i].plural == plural && plural != "" {
			return &kindTable[i], true
		}
	}
	return nil, false
}

// Kinds returns the v3 kinds that routerd knows, in the order in which
// manifests of several kinds are best applied. IPAM's records, secrets and
// incarnations are not among them: they have no manifest form.
func Kinds() []Kind {
	var kinds []Kind
	for i := range kindTable {
		if !kindTable[i].record {
			kinds = append(kinds, kindTable[i].kind)
		}
	}
	return kinds
}

// AllKinds returns the kinds of [Kinds], and after them those without a manifest
// form.
func AllKinds() []Kind {
	kinds := make([]Kind, len(kindTable))
	for i := range kindTable {
		kinds[i] = kindTable[i].kind
	}
	return kinds
}

// KindByName finds a v3 kind by any name that a user would type: the kind
// itself, its plural or one of calicoctl's short forms ("IPPool", "ippools",
// "pool"), in any case.
func KindByName(name string) (Kind, bool) {
	name = strings.ToLower(name)
	for i := range kindTable {
		info := &kindTable[i]
		if info.record {
			continue
		}
		if name == info.plural || name == strings.ToLower(string(info.kind)) || slices.Contains(info.aliases, name) {
			return info.kind, true
		}
	}
	return "", false
}

// Plural returns a v3 kind's plural, as in etcd keys and on the command line.
// It is empty for IPAM's records and unknown kinds.
func (k Kind) Plural() string {
	if info, ok := infoOf(k); ok {
		return info.plural
	}
	return ""
}

// Namespaced reports whether objects of the kind live in a namespace.
func (k Kind) Namespaced() bool {
	info, ok := infoOf(k)
	return ok && info.namespaced
}

// IPAM reports whether the kind is one of IPAM's records, which are no
// resources of the v3 API.
func (k Kind) IPAM() bool {
	switch k {
	case KindIPAMBlock, KindIPAMAffinity, KindIPAMHandle, KindIPAMConfig:
		return true
	}
	return false
}

// New returns a new zero value of a kind: the pointer that [Decode] would
// fill, with kind and apiVersion set for v3 kinds. It returns nil for an
// unknown kind.
func New(kind Kind) any {
	info, ok := infoOf(kind)
	if !ok {
		return nil
	}
	v := reflect.New(info.of).Interface()
	if r, ok := v.(resource); ok {
		setType(r, kind)
	}
	return v
}

// KindOf returns the kind of a value by its Go type, whatever its kind member
// says.
func KindOf(v any) (Kind, bool) {
	if t := reflect.TypeOf(v); t != nil && t.Kind() == reflect.Pointer {
		for i := range kindTable {
			if kindTable[i].of == t.Elem() {
				return kindTable[i].kind, true
			}
		}
	}
	return "", false
}

// resource is what all v3 values have in common, by embedding TypeMeta and
// ObjectMeta.
type resource interface {
	GetObjectKind() schema.ObjectKind
	metav1.ObjectMetaAccessor
}

func setType(r resource, kind Kind) {
	r.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(APIVersion, string(kind)))
}

// Meta returns the metadata of a v3 value, to read or to change, and nil for
// IPAM's records, which have none.
func Meta(v any) *metav1.ObjectMeta {
	r, ok := v.(resource)
	if !ok {
		return nil
	}
	m, ok := r.GetObjectMeta().(*metav1.ObjectMeta)
	if !ok {
		return nil
	}
	return m
}

// KeyOf returns the key under which a v3 value is stored, from its type and
// metadata. The error matches [ErrInvalid] and names the member that is
// missing or malformed. Records do not carry their keys; see [BlockKey] and
// its siblings.
func KeyOf(v any) (Key, error) {
	kind, ok := KindOf(v)
	meta := Meta(v)
	if !ok || meta == nil {
		return Key{}, fmt.Errorf("%w: a %T carries no key", ErrInvalid, v)
	}
	key := Key{Kind: kind, Name: meta.Name}
	if kind.Namespaced() {
		key.Namespace = meta.Namespace
	} else if meta.Namespace != "" {
		return Key{}, fmt.Errorf("%w: %s %q: metadata.namespace %q: the kind has no namespaces, leave it out", ErrInvalid, kind, meta.Name, meta.Namespace)
	}
	return key, checkKey(key)
}

// checkKey reports a key that has no place in the layout: the path of each key
// must lead back to it.
func checkKey(key Key) error {
	info, ok := infoOf(key.Kind)
	switch {
	case !ok:
		return fmt.Errorf("%w: unknown kind %q", ErrInvalid, key.Kind)
	case info.record:
		if got, ok := ParsePath(key.Path()); !ok || got != key {
			return fmt.Errorf("%w: %s is no key: want a canonical CIDR or a name without a slash", ErrInvalid, key)
		}
		return nil
	case key.Name == "":
		return fmt.Errorf("%w: %s: metadata.name is missing", ErrInvalid, key.Kind)
	case !utf8.ValidString(key.Name + key.Namespace):
		return fmt.Errorf("%w: %s %q: metadata.name is not UTF-8", ErrInvalid, key.Kind, key.Name)
	case strings.Contains(key.Name, "/"):
		return fmt.Errorf("%w: %s: metadata.name %q holds a slash", ErrInvalid, key.Kind, key.Name)
	case info.namespaced && key.Namespace == "":
		return fmt.Errorf("%w: %s %q: metadata.namespace is missing", ErrInvalid, key.Kind, key.Name)
	case !info.namespaced && key.Namespace != "":
		return fmt.Errorf("%w: %s: the kind has no namespaces", ErrInvalid, key)
	case strings.Contains(key.Namespace, "/"):
		return fmt.Errorf("%w: %s %q: metadata.namespace %q holds a slash", ErrInvalid, key.Kind, key.Name, key.Namespace)
	}
	return nil
}
