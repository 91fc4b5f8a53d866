package kubesync

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// orchestrator is Kubernetes, where a resource names the one that it is of.
const orchestrator = "k8s"

// kinds lists what is followed on both sides, in the order in which it is written: an
// endpoint comes after the profiles that it names.
func kinds() []store.Kind {
	return []store.Kind{
		store.KindProfile, store.KindNetworkPolicy, store.KindGlobalNetworkPolicy,
		store.KindServiceCIDR, store.KindService, store.KindEndpointSlice, store.KindNode, store.KindWorkloadEndpoint,
	}
}

// mirrored reports whether what an object says is Kubernetes' alone.
func mirrored(key store.Key) bool {
	switch key.Kind {
	case store.KindProfile:
		return strings.HasPrefix(key.Name, store.PrefixNamespace) || strings.HasPrefix(key.Name, store.PrefixServiceAccount)
	case store.KindNetworkPolicy:
		return strings.HasPrefix(key.Name, store.PrefixNetworkPolicy)
	case store.KindGlobalNetworkPolicy:
		return strings.HasPrefix(key.Name, store.PrefixClusterNetworkPolicy)
	case store.KindService, store.KindEndpointSlice, store.KindServiceCIDR:
		return true
	}
	return false
}

// decision is what is to become of an object in etcd.
type decision struct {
	value  any // to be written, if it is not so already; nil: nothing
	remove bool
}

// decide returns what is to become of an object of which Kubernetes says want, nil where it
// has none, and etcd cur, with Revision 0 where it has none.
func decide(key store.Key, want any, cur store.Object) decision {
	switch key.Kind {
	case store.KindNode:
		return decideNode(want, cur)
	case store.KindWorkloadEndpoint:
		return decideEndpoint(want, cur)
	}
	switch {
	case !mirrored(key):
		return decision{}
	case want == nil:
		return decision{remove: cur.Revision != 0}
	}
	return decision{value: withoutIdentity(want)}
}

// withoutIdentity returns a copy of a value that has the identity of no object: one of
// Kubernetes is another than that of etcd.
func withoutIdentity(value any) any {
	c := store.Clone(value)
	if m := store.Meta(c); m != nil {
		m.UID, m.ResourceVersion = "", ""
		m.CreationTimestamp.Reset()
	}
	return c
}

// decideEndpoint gives the endpoint of a pod what its pod says of it. It makes none and
// removes none: that is the business of the host that the pod is on.
func decideEndpoint(want any, cur store.Object) decision {
	pod, is := want.(*store.WorkloadEndpoint)
	have, there := cur.Value.(*store.WorkloadEndpoint)
	if !is || !there || have.Spec.Orchestrator != orchestrator {
		return decision{}
	}
	next := store.Clone(have).(*store.WorkloadEndpoint)
	next.Labels = maps.Clone(pod.Labels)
	next.Spec.ServiceAccountName, next.Spec.Profiles = pod.Spec.ServiceAccountName, slices.Clone(pod.Spec.Profiles)
	next.Spec.Ports, next.Spec.QoSControls = slices.Clone(pod.Spec.Ports), pod.Spec.QoSControls
	return decision{value: next}
}

// nodeRef returns which Node of Kubernetes a Node is: the one that it names, or else that
// of the same name.
func nodeRef(n *store.Node) (name string, says bool) {
	for _, r := range n.Spec.OrchRefs {
		if r.Orchestrator == orchestrator && r.NodeName != "" {
			return r.NodeName, true
		}
	}
	return n.Name, false
}

// decideNode gives a Node the labels of the one of Kubernetes that it is. Which those
// are an annotation notes, as Calico's controller has it, so that others stay and those
// that Kubernetes drops go. A Node that names none is a host without Kubernetes until
// there is one of its name.
func decideNode(want any, cur store.Object) decision {
	have, there := cur.Value.(*store.Node)
	if !there {
		return decision{}
	}
	name, says := nodeRef(have)
	kube, is := want.(*store.Node)
	if !is {
		return decision{remove: says}
	}
	text := kube.Annotations[store.AnnotationKubeLabels]
	was, now := labelsIn(have.Annotations[store.AnnotationKubeLabels]), labelsIn(text)
	next := store.Clone(have).(*store.Node)
	next.Labels = maps.Clone(have.Labels)
	if next.Labels == nil {
		next.Labels = make(map[string]string, len(now))
	}
	for label := range was {
		delete(next.Labels, label)
	}
	maps.Copy(next.Labels, now)
	if next.Annotations == nil {
		next.Annotations = make(map[string]string)
	}
	next.Annotations[store.AnnotationKubeLabels] = text
	if !says {
		next.Spec.OrchRefs = append(next.Spec.OrchRefs, store.OrchRef{NodeName: name, Orchestrator: orchestrator})
	}
	return decision{value: next}
}

// keepsLabels reports whether a KubeControllersConfiguration has Nodes keep the labels that they have.
func keepsLabels(v any) bool {
	k, ok := v.(*v3.KubeControllersConfiguration)
	return ok && k.Spec.Controllers.Node != nil && k.Spec.Controllers.Node.SyncLabels == v3.Disabled
}

// keepLabels gives what a Node is to be the labels that it has.
func keepLabels(next, have *store.Node) {
	next.Labels = maps.Clone(have.Labels)
	delete(next.Annotations, store.AnnotationKubeLabels)
	if text, ok := have.Annotations[store.AnnotationKubeLabels]; ok {
		next.Annotations[store.AnnotationKubeLabels] = text
	}
}

// labelsIn reads labels out of an annotation; none if it makes no sense.
func labelsIn(text string) map[string]string {
	var m map[string]string
	if json.Unmarshal([]byte(text), &m) != nil {
		return nil
	}
	return m
}
