package convert

import (
	"crypto/sha1" //nolint:gosec // a name, no secret: the one that Calico gives
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	corev1 "k8s.io/api/core/v1"

	"github.com/routerd/routerd/store"
)

// Annotations of pods.
const (
	podIPAnnotation       = store.AnnotationPrefixCNI + "podIP" // empty: the pod has its addresses no more
	podIPsAnnotation      = store.AnnotationPrefixCNI + "podIPs"
	containerIDAnnotation = store.AnnotationPrefixCNI + "containerID"
	floatingAnnotation    = store.AnnotationPrefixCNI + "floatingIPs"
	sourcesAnnotation     = store.AnnotationPrefixCNI + "allowedSourcePrefixes"
	awsIPsAnnotation      = "vpc.amazonaws.com/pod-ips"
)

const (
	orchestrator = "k8s"
	endpointName = "eth0"
)

// InterfaceName returns the name of the host's end of a pod's wire.
func InterfaceName(namespace, pod string) string {
	sum := sha1.Sum([]byte(namespace + "." + pod)) //nolint:gosec // see the import
	return store.WorkloadInterfacePrefix + hex.EncodeToString(sum[:])[:store.MaxInterfaceName-len(store.WorkloadInterfacePrefix)]
}

// endpointOf returns the endpoint that a pod stands for, nil for a pod that is on
// its host's network or on no host yet.
func endpointOf(pod *corev1.Pod) (store.Key, any, error) {
	w, _ := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	w.Spec = store.WorkloadEndpointSpec{
		Orchestrator:       orchestrator,
		Node:               pod.Spec.NodeName,
		Pod:                pod.Name,
		Endpoint:           endpointName,
		ContainerID:        pod.Annotations[containerIDAnnotation],
		ServiceAccountName: pod.Spec.ServiceAccountName,
		InterfaceName:      InterfaceName(pod.Namespace, pod.Name),
		Profiles:           []string{NamespaceProfile(pod.Namespace)},
		Ports:              namedPorts(pod),
	}
	if pod.Spec.HostNetwork || pod.Spec.NodeName == "" {
		return store.Key{Kind: store.KindWorkloadEndpoint, Namespace: pod.Namespace}, nil, nil
	}
	name, err := store.WorkloadEndpointName(&w.Spec)
	if err != nil {
		return store.Key{Kind: store.KindWorkloadEndpoint, Namespace: pod.Namespace}, nil, fmt.Errorf("pod %s: %w: %w", pod.Name, store.ErrDecode, err)
	}
	key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: pod.Namespace, Name: name}
	w.ObjectMeta = inherited(&pod.ObjectMeta, name)
	w.Namespace = pod.Namespace
	w.Labels = with(pod.Labels, store.LabelNamespace, pod.Namespace)
	w.Labels[store.LabelOrchestrator] = orchestrator
	w.Annotations = pluginAnnotations(pod.Annotations)
	if sa := pod.Spec.ServiceAccountName; sa != "" {
		w.Spec.Profiles = append(w.Spec.Profiles, AccountProfile(pod.Namespace, sa))
		if len(sa) < 63 { // what a label holds
			w.Labels[store.LabelServiceAccount] = sa
		}
	}
	addrs, err := podAddresses(pod)
	if err == nil && finished(pod) {
		addrs = nil
	}
	if err == nil {
		w.Spec.IPNATs, err = floatingAddresses(pod, addrs)
	}
	if err == nil {
		w.Spec.AllowSpoofedSourcePrefixes, err = sourcePrefixes(pod)
	}
	if err != nil {
		return key, nil, fmt.Errorf("pod %s: %w: %w", pod.Name, store.ErrDecode, err)
	}
	// As Calico does: limits that make no sense are none. The host says so.
	w.Spec.QoSControls, _ = store.QoSOf(pod.Annotations)
	for _, a := range addrs {
		w.Spec.IPNetworks = append(w.Spec.IPNetworks, a.String())
	}
	return key, w, nil
}

// pluginAnnotations returns of the annotations of a pod, or of its namespace, what the CNI plugin is
// to be told, which the host that attaches the pod reads from its endpoint, or its profile.
func pluginAnnotations(annotations map[string]string) map[string]string {
	var out map[string]string
	for k, v := range annotations {
		switch {
		case k == podIPAnnotation || k == podIPsAnnotation || k == containerIDAnnotation:
		case k == store.AnnotationConfigHash, k == store.AnnotationIngressBandwidth, k == store.AnnotationEgressBandwidth,
			strings.HasPrefix(k, store.AnnotationPrefixCNI), strings.HasPrefix(k, store.AnnotationPrefixQoS):
			out = with(out, k, v)
		}
	}
	return out
}

// finished reports whether a pod has its addresses no more: they may be
// another's by now.
func finished(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil {
		for _, name := range []string{podIPAnnotation, awsIPsAnnotation} {
			if ip, ok := pod.Annotations[name]; ok {
				if ip == "" {
					return true
				}
				break
			}
		}
	}
	return pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == "Completed"
}

// podAddresses returns a pod's addresses from where they are said first: its
// status, which kubelet writes late, and before it what the plugin wrote.
func podAddresses(pod *corev1.Pod) ([]netip.Prefix, error) {
	var texts []string
	from := "status.podIPs"
	switch a := pod.Annotations; {
	case len(pod.Status.PodIPs) > 0:
		for _, ip := range pod.Status.PodIPs {
			texts = append(texts, ip.IP)
		}
	case pod.Status.PodIP != "":
		texts, from = []string{pod.Status.PodIP}, "status.podIP"
	case a[podIPsAnnotation] != "":
		texts, from = strings.Split(a[podIPsAnnotation], ","), "annotation "+podIPsAnnotation
	case a[podIPAnnotation] != "":
		texts, from = []string{a[podIPAnnotation]}, "annotation "+podIPAnnotation
	case a[awsIPsAnnotation] != "":
		texts, from = strings.Split(a[awsIPsAnnotation], ","), "annotation "+awsIPsAnnotation
	}
	var out []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if a, aerr := netip.ParseAddr(text); aerr == nil {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %q: want an address", from, text)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// floatingAddresses returns the translations to the pod's address of the same
// family.
func floatingAddresses(pod *corev1.Pod, addrs []netip.Prefix) ([]store.IPNAT, error) {
	text, ok := pod.Annotations[floatingAnnotation]
	if !ok || len(addrs) == 0 {
		return nil, nil
	}
	var floating []string
	if err := json.Unmarshal([]byte(text), &floating); err != nil {
		return nil, fmt.Errorf("annotation %s: %q: want a JSON list of addresses: %w", floatingAnnotation, text, err)
	}
	var out []store.IPNAT
	for _, external := range floating {
		for _, a := range slices.Backward(addrs) {
			if a.Addr().Is6() == strings.Contains(external, ":") {
				out = append(out, store.IPNAT{InternalIP: a.Addr().String(), ExternalIP: external})
				break
			}
		}
	}
	return out, nil
}

func sourcePrefixes(pod *corev1.Pod) ([]string, error) {
	text := pod.Annotations[sourcesAnnotation]
	if text == "" {
		return nil, nil
	}
	var list []string
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("annotation %s: %q: want a JSON list of prefixes: %w", sourcesAnnotation, text, err)
	}
	for i, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %q: want a prefix such as 10.0.0.0/24", sourcesAnnotation, s)
		}
		list[i] = p.Masked().String()
	}
	return list, nil
}

// namedPorts returns the ports that rules can name, or that the host forwards.
func namedPorts(pod *corev1.Pod) []store.WorkloadEndpointPort {
	var out []store.WorkloadEndpointPort
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range list {
			for _, p := range list[i].Ports {
				if p.ContainerPort == 0 || p.HostPort == 0 && p.Name == "" {
					continue
				}
				protocol := "tcp"
				switch p.Protocol {
				case corev1.ProtocolUDP:
					protocol = "udp"
				case corev1.ProtocolSCTP:
					protocol = "sctp"
				case corev1.ProtocolTCP, "":
				default:
					continue // of none that rules know
				}
				out = append(out, store.WorkloadEndpointPort{
					Name: p.Name, Protocol: numorstring.ProtocolFromString(protocol),
					Port: uint16(p.ContainerPort), HostPort: uint16(p.HostPort), HostIP: p.HostIP,
				})
			}
		}
	}
	return out
}
