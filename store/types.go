package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Node is a host. It is Calico's v3 Node, which the API module does not
// define. See Calico's data model for the fields' meaning.
type Node struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   NodeSpec   `json:"spec,omitempty"`
	Status NodeStatus `json:"status"`
}

// NodeSpec is the desired state of a [Node].
type NodeSpec struct {
	BGP                  *NodeBGPSpec       `json:"bgp,omitempty"`
	IPv4VXLANTunnelAddr  string             `json:"ipv4VXLANTunnelAddr,omitempty"`
	VXLANTunnelMACAddr   string             `json:"vxlanTunnelMACAddr,omitempty"`
	IPv6VXLANTunnelAddr  string             `json:"ipv6VXLANTunnelAddr,omitempty"`
	VXLANTunnelMACAddrV6 string             `json:"vxlanTunnelMACAddrV6,omitempty"`
	OrchRefs             []OrchRef          `json:"orchRefs,omitempty"`
	Wireguard            *NodeWireguardSpec `json:"wireguard,omitempty"`
	Addresses            []NodeAddress      `json:"addresses,omitempty"`
	Interfaces           []NodeInterface    `json:"interfaces,omitempty"`
}

// NodeBGPSpec is a node's place in BGP and on the underlay.
type NodeBGPSpec struct {
	ASNumber                *numorstring.ASNumber `json:"asNumber,omitempty"`
	IPv4Address             string                `json:"ipv4Address,omitempty"` // with the subnet's length
	IPv6Address             string                `json:"ipv6Address,omitempty"`
	IPv4IPIPTunnelAddr      string                `json:"ipv4IPIPTunnelAddr,omitempty"`
	RouteReflectorClusterID string                `json:"routeReflectorClusterID,omitempty"`
}

// OrchRef ties a node to the orchestrator's name for it.
type OrchRef struct {
	NodeName     string `json:"nodeName,omitempty"`
	Orchestrator string `json:"orchestrator"`
}

// NodeWireguardSpec holds the addresses of a node's WireGuard device.
type NodeWireguardSpec struct {
	InterfaceIPv4Address string `json:"interfaceIPv4Address,omitempty"`
	InterfaceIPv6Address string `json:"interfaceIPv6Address,omitempty"`
}

// NodeAddress is an address of a node. Type is CalicoNodeIP, InternalIP or
// ExternalIP.
type NodeAddress struct {
	Address string `json:"address"`
	Type    string `json:"type,omitempty"`
}

// NodeInterface is an interface that a node reported.
type NodeInterface struct {
	Name      string   `json:"name,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
}

// NodeStatus is the observed part of a [Node].
type NodeStatus struct {
	WireguardPublicKey   string             `json:"wireguardPublicKey,omitempty"`
	WireguardPublicKeyV6 string             `json:"wireguardPublicKeyV6,omitempty"`
	PodCIDRs             []string           `json:"podCIDRs,omitempty"`
	Conditions           []metav1.Condition `json:"conditions,omitempty"` // routerd's own addition
}

// WorkloadEndpoint is one interface of one workload. It is Calico's v3
// WorkloadEndpoint, which the API module does not define.
type WorkloadEndpoint struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec WorkloadEndpointSpec `json:"spec,omitempty"`
}

// WorkloadEndpointSpec describes the endpoint.
type WorkloadEndpointSpec struct {
	Orchestrator               string                 `json:"orchestrator,omitempty"`
	Workload                   string                 `json:"workload,omitempty"`
	Node                       string                 `json:"node,omitempty"`
	ContainerID                string                 `json:"containerID,omitempty"`
	Pod                        string                 `json:"pod,omitempty"`
	Endpoint                   string                 `json:"endpoint,omitempty"`
	ServiceAccountName         string                 `json:"serviceAccountName,omitempty"`
	IPNetworks                 []string               `json:"ipNetworks,omitempty"`
	IPNATs                     []IPNAT                `json:"ipNATs,omitempty"`
	IPv4Gateway                string                 `json:"ipv4Gateway,omitempty"`
	IPv6Gateway                string                 `json:"ipv6Gateway,omitempty"`
	Profiles                   []string               `json:"profiles,omitempty"`
	InterfaceName              string                 `json:"interfaceName,omitempty"`
	MAC                        string                 `json:"mac,omitempty"`
	Ports                      []WorkloadEndpointPort `json:"ports,omitempty"`
	AllowSpoofedSourcePrefixes []string               `json:"allowSpoofedSourcePrefixes,omitempty"`
	QoSControls                json.RawMessage        `json:"qosControls,omitempty"` // see [WorkloadEndpointSpec.QoS]; kept as it was written
}

// IPNAT is a floating address of an endpoint.
type IPNAT struct {
	InternalIP string `json:"internalIP"`
	ExternalIP string `json:"externalIP"`
}

// WorkloadEndpointPort names a port of an endpoint.
type WorkloadEndpointPort struct {
	Name     string               `json:"name,omitempty"`
	Protocol numorstring.Protocol `json:"protocol"`
	Port     uint16               `json:"port"`
	HostPort uint16               `json:"hostPort"`
	HostIP   string               `json:"hostIP"`
}

// Block is IPAM's record of one block of addresses.
type Block struct {
	CIDR                        string            `json:"cidr"`
	Affinity                    *string           `json:"affinity"` // "host:<node>", "virtual:load-balancer", or nil
	AffinityClaimTime           *metav1.Time      `json:"affinity_claim_time,omitempty"`
	Allocations                 []*int            `json:"allocations"` // ordinal → index in Attributes
	Unallocated                 []int             `json:"unallocated"` // queue: take from the front, return to the back
	Attributes                  []Attribute       `json:"attributes"`
	SequenceNumber              uint64            `json:"sequenceNumber"`
	SequenceNumberForAllocation map[string]uint64 `json:"sequenceNumberForAllocation"` // by ordinal
	Deleted                     bool              `json:"deleted"`                     // always false in etcd

	// HostAffinity is what very old blocks have instead of Affinity: a bare
	// node name. [Decode] turns it into Affinity and leaves it nil.
	HostAffinity *string `json:"hostAffinity,omitempty"`
}

// Attribute says whose an allocated address is.
type Attribute struct {
	HandleID            *string           `json:"handle_id,omitempty"`
	Secondary           map[string]string `json:"secondary,omitempty"`
	AlternateOwnerAttrs map[string]string `json:"alternateOwnerAttrs,omitempty"`
	ReleasedAt          *metav1.Time      `json:"releasedAt,omitempty"`
}

// Affinity states. An empty state counts as confirmed.
const (
	AffinityPending         = "pending"
	AffinityConfirmed       = "confirmed"
	AffinityPendingDeletion = "pendingDeletion"
)

// Affinity is the record that a node holds a block; the node and the CIDR are
// in the key.
type Affinity struct {
	State   string `json:"state"`
	Deleted bool   `json:"deleted"`
}

// Confirmed reports whether the block may be used and announced.
func (a *Affinity) Confirmed() bool { return a.State == AffinityConfirmed || a.State == "" }

// Handle counts the addresses that belong together, per block. Counts are
// hints; blocks are the truth.
type Handle struct {
	Block   map[string]int `json:"block"` // block CIDR → addresses
	Deleted bool           `json:"deleted"`
}

// IPAMConfig is what IPAM reads in etcd mode; the v3 kind IPAMConfiguration is
// stored but not read there. A present record without auto_allocate_blocks
// means false.
type IPAMConfig struct {
	StrictAffinity               bool   `json:"strict_affinity,omitempty"`
	AutoAllocateBlocks           bool   `json:"auto_allocate_blocks,omitempty"`
	MaxBlocksPerHost             int    `json:"maxBlocksPerHost,omitempty"`
	KubeVirtVMAddressPersistence string `json:"kubeVirtVMAddressPersistence,omitempty"`
	IPCooldownSeconds            *int   `json:"ipCooldownSeconds,omitempty"`
}

// Cooldown is how long a released address is not assigned again.
func (c *IPAMConfig) Cooldown() time.Duration {
	if c.IPCooldownSeconds == nil {
		return 0
	}
	return time.Duration(*c.IPCooldownSeconds) * time.Second
}

// Secret is a key that the hosts of a cluster share. It never prints itself.
type Secret struct {
	Key []byte `json:"key"`

	// Former is the key before, while some hosts may not have Key yet; "none" while some may
	// still do without any.
	Former []byte `json:"former,omitempty"`
}

// String keeps the key out of logs.
func (*Secret) String() string { return "(secret)" }

// GoString keeps the key out of logs.
func (*Secret) GoString() string { return "(secret)" }

// AnnotationTunnelAddress on a Node is the address that other hosts send
// tunnelled packets to where they cannot reach the node's own: the public
// address of a host behind 1:1 NAT. One address for each family at most,
// separated by commas.
const AnnotationTunnelAddress = "routerd.io/tunnelAddress"

// TunnelAddresses returns the valid addresses in a node's
// [AnnotationTunnelAddress], at most one of each family.
func TunnelAddresses(n *Node) []netip.Addr {
	addrs, _ := ParseTunnelAddresses(n.Annotations[AnnotationTunnelAddress])
	return addrs
}

// AnnotationTunnelSources on a Node is the addresses from which the host may send
// tunnelled packets besides the Node's own, in order, separated by commas: those that it
// has, of which the kernel chooses, and the one that it is about to register.
const AnnotationTunnelSources = "routerd.io/tunnelSources"

// MaxTunnelSources is how many addresses of [AnnotationTunnelSources] count.
const MaxTunnelSources = 32

// TunnelSources returns the valid addresses in a node's [AnnotationTunnelSources].
func TunnelSources(n *Node) []netip.Addr {
	var addrs []netip.Addr
	for part := range strings.SplitSeq(n.Annotations[AnnotationTunnelSources], ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		if err == nil && a.IsGlobalUnicast() && a.Zone() == "" && !a.Is4In6() && !slices.Contains(addrs, a) && len(addrs) < MaxTunnelSources {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// SetTunnelSources writes a node's [AnnotationTunnelSources]. It leaves a map that the
// node shares with others alone.
func SetTunnelSources(n *Node, addrs []netip.Addr) {
	a := maps.Clone(n.Annotations)
	if a == nil {
		a = map[string]string{}
	}
	if n.Annotations = a; len(addrs) == 0 {
		delete(a, AnnotationTunnelSources)
		return
	}
	text := make([]string, 0, len(addrs))
	for _, x := range addrs[:min(len(addrs), MaxTunnelSources)] {
		text = append(text, x.String())
	}
	a[AnnotationTunnelSources] = strings.Join(text, ",")
}

// ParseTunnelAddresses reads the value of [AnnotationTunnelAddress]. With an
// error it returns what is valid.
func ParseTunnelAddresses(s string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	var errs []error
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		a, err := netip.ParseAddr(part)
		switch {
		case err != nil || !a.IsGlobalUnicast() || a.Zone() != "" || a.Is4In6():
			errs = append(errs, fmt.Errorf("%q: want a unicast address, such as 198.51.100.7", part))
		case slices.ContainsFunc(addrs, func(b netip.Addr) bool { return a.Is4() == b.Is4() }):
			errs = append(errs, fmt.Errorf("%q: want one address of each family at most", part))
		default:
			addrs = append(addrs, a)
		}
	}
	return addrs, errors.Join(errs...)
}

// DefaultIPAMConfig is what holds when no record exists.
func DefaultIPAMConfig() IPAMConfig { return IPAMConfig{AutoAllocateBlocks: true} }

// Encapsulation is a pool's way of carrying packets: the pair of ipipMode and
// vxlanMode as one value.
type Encapsulation string

// The encapsulations.
const (
	Direct           Encapsulation = "Direct"
	IPIP             Encapsulation = "IPIP"
	VXLAN            Encapsulation = "VXLAN"
	IPIPCrossSubnet  Encapsulation = "IPIPCrossSubnet"
	VXLANCrossSubnet Encapsulation = "VXLANCrossSubnet"
)

// Encapsulations lists all of them.
func Encapsulations() []Encapsulation {
	return []Encapsulation{Direct, IPIP, VXLAN, IPIPCrossSubnet, VXLANCrossSubnet}
}

// ParseEncapsulation accepts the names that [Encapsulations] lists.
func ParseEncapsulation(s string) (Encapsulation, error) {
	for _, e := range Encapsulations() {
		if string(e) == s {
			return e, nil
		}
	}
	return "", fmt.Errorf("encapsulation %q: want one of %v", s, Encapsulations())
}

// EncapsulationOf returns the encapsulation of a pool.
func EncapsulationOf(p *v3.IPPool) Encapsulation {
	switch {
	case p.Spec.IPIPMode == v3.IPIPModeAlways:
		return IPIP
	case p.Spec.IPIPMode == v3.IPIPModeCrossSubnet:
		return IPIPCrossSubnet
	case p.Spec.VXLANMode == v3.VXLANModeAlways:
		return VXLAN
	case p.Spec.VXLANMode == v3.VXLANModeCrossSubnet:
		return VXLANCrossSubnet
	}
	return Direct
}

// SetEncapsulation sets a pool's two mode fields.
func SetEncapsulation(p *v3.IPPool, e Encapsulation) {
	p.Spec.IPIPMode, p.Spec.VXLANMode = v3.IPIPModeNever, v3.VXLANModeNever
	switch e {
	case IPIP:
		p.Spec.IPIPMode = v3.IPIPModeAlways
	case IPIPCrossSubnet:
		p.Spec.IPIPMode = v3.IPIPModeCrossSubnet
	case VXLAN:
		p.Spec.VXLANMode = v3.VXLANModeAlways
	case VXLANCrossSubnet:
		p.Spec.VXLANMode = v3.VXLANModeCrossSubnet
	case Direct:
	}
}
