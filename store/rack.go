package store

// Labels of Nodes that say which hosts are close to each other.
const (
	LabelRack = "rack"
	LabelZone = "topology.kubernetes.io/zone" // Kubernetes' well-known label
)

// GroupOf returns to which group a Node with these labels belongs, by the values of one of them. A Node
// without the label rack is in the rack of its zone's name.
func GroupOf(labels map[string]string, by string) string {
	v := labels[by]
	if v == "" && by == LabelRack {
		v = labels[LabelZone]
	}
	return v
}
