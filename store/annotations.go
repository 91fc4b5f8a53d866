package store

import "errors"

// AnnotationIPv6IPIPTunnelAddr is where a Node resource has the address of its
// IPv6 IPIP tunnel (tunl6.calico). Calico's Node has no field for it.
const AnnotationIPv6IPIPTunnelAddr = "routerd.io/ipv6IPIPTunnelAddr"

// AnnotationKubeLabels says, on a Node resource and as JSON, which of its labels are those of
// Kubernetes' Node, so that these can be followed and are not written back. It is Calico's.
const AnnotationKubeLabels = "projectcalico.org/kube-labels"

// AnnotationAway says, on a Node resource that stands for a Node of Kubernetes, why the host or
// its daemon counts as gone there. It is read, and not written.
const AnnotationAway = "routerd.io/away"

// AnnotationHandleNode is, on an IPAMHandle in Kubernetes, the node whose daemon made it, and whose
// it is to write (configs/kubernetes, admission.yaml): neither its id nor what it counts says that.
// What is stored of the handle has it as a member of this name.
const AnnotationHandleNode = "routerd.io/node"

// Annotations of a pod that its endpoint has too.
const (
	// AnnotationPrefixCNI begins the names of those that are for the CNI plugin.
	AnnotationPrefixCNI = "cni.projectcalico.org/"

	// AnnotationPrefixQoS begins the names of those that limit the pod's traffic, and
	// the other two are Kubernetes' own.
	AnnotationPrefixQoS        = "qos.projectcalico.org/"
	AnnotationIngressBandwidth = "kubernetes.io/ingress-bandwidth"
	AnnotationEgressBandwidth  = "kubernetes.io/egress-bandwidth"

	// AnnotationDSCP, of a host endpoint too, is the code point that packets get which
	// leave the cluster.
	AnnotationDSCP = AnnotationPrefixQoS + "dscp"

	// AnnotationConfigHash is, on the object that stands for a static pod, the uid by
	// which kubelet and the runtime know that.
	AnnotationConfigHash = "kubernetes.io/config.hash"
)

// Annotations of a BGPPeer for what Calico's has no field for.
const (
	// AnnotationMaxPrefixes is the number of prefixes that the peer may announce;
	// with more the session is ended. Without it there is no limit. On the
	// BGPConfiguration named default it is that of the mesh, 10,000 without it, and
	// "off" takes it away.
	AnnotationMaxPrefixes = "routerd.io/maxPrefixes"

	// AnnotationHoldTime is the session's hold time (RFC 4271 section 4.2), such
	// as 30s; without it 90s, and what a route reflector proposes to its clients
	// 240s.
	AnnotationHoldTime = "routerd.io/holdTime"

	// AnnotationStaleTime is for how long routes are kept after the restart time
	// of a peer that does not come back, with less preference (RFC 9494), such as
	// 1h. Without it they go then.
	AnnotationStaleTime = "routerd.io/longLivedStaleTime"

	// AnnotationPeerInterface is the device on whose link the peer is: the
	// session runs over link-local addresses, and peerIP may be left out where
	// the link has one neighbour.
	AnnotationPeerInterface = "routerd.io/peerInterface"

	// AnnotationExtendedNextHop, "true", makes a session over IPv6 carry IPv4 too,
	// with IPv6 next hops (RFC 8950). Sessions with AnnotationPeerInterface do so
	// without it.
	AnnotationExtendedNextHop = "routerd.io/extendedNextHop"
)

// Annotations of the BGPConfiguration named default for what Calico's has no field for,
// "true" or "false".
const (
	// AnnotationServiceCIDRs has the ranges of Kubernetes' ServiceCIDRs announced as
	// those of serviceClusterIPs are, and beside them.
	AnnotationServiceCIDRs = "routerd.io/announceServiceCIDRs"

	// AnnotationServicesNeedEndpoints has no address announced by itself for a Service
	// of which no endpoint serves, on any node.
	AnnotationServicesNeedEndpoints = "routerd.io/servicesNeedEndpoints"
)

// parseSwitch reads an annotation that is "true" or "false".
func parseSwitch(s string) (bool, error) {
	if s != "true" && s != "false" {
		return false, errors.New(`want "true" or "false"`)
	}
	return s == "true", nil
}
