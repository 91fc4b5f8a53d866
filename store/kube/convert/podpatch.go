package convert

import (
	"encoding/json"
	"strings"

	"github.com/routerd/routerd/store"
)

// Pod reports whether the objects are pods, of which only what the CNI plugin found
// out is written.
func (s Source) Pod() bool { return s.Resource.APIKind == "Pod" && !s.custom }

// PodPatch returns the merge patch of a pod that writes what its endpoint says of
// its addresses and its container, which other hosts read before the kubelet has
// written the pod's status. With a uid in the endpoint it is for that pod alone.
func PodPatch(w *store.WorkloadEndpoint) ([]byte, error) {
	first := ""
	if len(w.Spec.IPNetworks) > 0 {
		first = w.Spec.IPNetworks[0]
	}
	metadata := map[string]any{"annotations": map[string]string{
		podIPAnnotation: first, podIPsAnnotation: strings.Join(w.Spec.IPNetworks, ","), containerIDAnnotation: w.Spec.ContainerID,
	}}
	if w.UID != "" {
		metadata["uid"] = w.UID
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}

// PodEndPatch returns the JSON patch (RFC 6902) of a pod that says that it has its
// addresses no more, on condition that its container is this one, if one is named.
func PodEndPatch(container string) ([]byte, error) {
	path := func(annotation string) string {
		return "/metadata/annotations/" + strings.ReplaceAll(annotation, "/", "~1")
	}
	type op struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value string `json:"value"`
	}
	var ops []op
	if container != "" {
		ops = append(ops, op{"test", path(containerIDAnnotation), container})
	}
	return json.Marshal(append(ops, op{"add", path(podIPAnnotation), ""}, op{"add", path(podIPsAnnotation), ""}))
}
