package store

import (
	"encoding/json"
	"maps"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What the names of resources begin with that stand for objects of Kubernetes,
// which are changed in their place.
const (
	PrefixNamespace            = "kns."
	PrefixServiceAccount       = "ksa."
	PrefixNetworkPolicy        = "knp.default."
	PrefixClusterNetworkPolicy = "kcnp."
)

// What the names of labels begin with that a namespace and a service account lend to
// endpoints through their profiles. Nobody else may set them.
const (
	LabelPrefixNamespace      = "pcns."
	LabelPrefixServiceAccount = "pcsa."
)

// KubernetesName returns how an object of Kubernetes is called that a policy or a
// profile stands for: "Kubernetes NetworkPolicy(prod/web)". It reports false for
// one that stands for itself.
func (k Key) KubernetesName() (string, bool) {
	for _, p := range []struct {
		kind         Kind
		prefix, name string
	}{
		{KindNetworkPolicy, PrefixNetworkPolicy, "NetworkPolicy"},
		{KindGlobalNetworkPolicy, PrefixClusterNetworkPolicy, "ClusterNetworkPolicy"},
		{KindProfile, PrefixNamespace, "Namespace"},
		{KindProfile, PrefixServiceAccount, "ServiceAccount"},
	} {
		name, ok := strings.CutPrefix(k.Name, p.prefix)
		if k.Kind != p.kind || !ok || name == "" {
			continue
		}
		if p.prefix == PrefixServiceAccount { // a namespace has no dot in its name
			name = strings.Replace(name, ".", "/", 1)
		}
		return "Kubernetes " + Key{Kind: Kind(p.name), Namespace: k.Namespace, Name: name}.String(), true
	}
	return "", false
}

// LabelTier is the label by which policies of a tier can be listed. The store
// keeps it equal to spec.tier.
const LabelTier = "projectcalico.org/tier"

// The tiers of Kubernetes' ClusterNetworkPolicies, around the default one. They
// pass on what their policies do not decide.
const (
	TierKubeAdmin    = "kube-admin"
	TierKubeBaseline = "kube-baseline"
)

// Annotations of a rule whose destination are Nodes, which Calico's model cannot say: those that a
// ClusterNetworkPolicy names by their labels. Without them the rule fails closed: one that allows matches
// nothing, any other denies more.
const (
	// RuleNodes is a selector of Nodes, all of whose addresses are meant.
	RuleNodes = "routerd.io/nodes"
	// RuleAction is the action of such a rule where it is not the one that it has, which is Deny.
	RuleAction = "routerd.io/action"
)

// AnnotationProblems says of a policy or a Node that stands for an object of Kubernetes
// which of its rules or annotations cannot be carried out as they are, and what is done in
// their place.
const AnnotationProblems = "routerd.io/problems"

// AnnotationMetadata holds, in what is stored of a policy, the name that its
// user gave it. It belongs to the store: readers do not see it. Objects of
// before Calico v3.32 lack it.
const AnnotationMetadata = "projectcalico.org/metadata"

// tiered reports whether objects of the kind stand in a tier.
func tiered(kind Kind) bool {
	switch kind {
	case KindNetworkPolicy, KindGlobalNetworkPolicy, KindStagedNetworkPolicy, KindStagedGlobalNetworkPolicy:
		return true
	}
	return false
}

// hasUserName reports whether a stored policy says what its user called it.
func hasUserName(raw []byte) bool {
	var o struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	return json.Unmarshal(raw, &o) == nil && o.Metadata.Annotations[AnnotationMetadata] != ""
}

// annotatePolicy returns the annotations as they are stored. An object of an
// older Calico keeps its form: with the annotation its old name, which has the
// tier in front, would become the one that users see.
func annotatePolicy(name string, annotations map[string]string, oldRaw []byte) map[string]string {
	if len(oldRaw) > 0 && strings.Contains(name, ".") && !hasUserName(oldRaw) {
		return annotations
	}
	value, err := json.Marshal(struct {
		Name string `json:"name"`
	}{name})
	if err != nil {
		return annotations // no string makes Marshal fail
	}
	stored := maps.Clone(annotations)
	if stored == nil {
		stored = make(map[string]string, 1)
	}
	stored[AnnotationMetadata] = string(value)
	return stored
}

func dropPolicyAnnotation(m *metav1.ObjectMeta) {
	delete(m.Annotations, AnnotationMetadata)
	if len(m.Annotations) == 0 {
		m.Annotations = nil
	}
}

// PolicyName returns the name by which a policy is shown and sorted. That is
// its key's name, except for objects that a Calico of before v3.32 stored:
// their names have the tier and a dot in front, which users never wrote.
func PolicyName(o Object, tier string) string {
	short, ok := strings.CutPrefix(o.Key.Name, tier+".")
	if !ok || short == "" || len(o.Raw) == 0 || hasUserName(o.Raw) {
		return o.Key.Name
	}
	return short
}

// PolicyTypes returns the directions that a policy is about: those that it
// states, or what Calico's clients infer from its rules where it states none.
func PolicyTypes(stated []v3.PolicyType, ingress, egress []v3.Rule) []v3.PolicyType {
	switch {
	case len(stated) > 0:
		return stated
	case len(egress) == 0:
		return []v3.PolicyType{v3.PolicyTypeIngress}
	case len(ingress) == 0:
		return []v3.PolicyType{v3.PolicyTypeEgress}
	}
	return []v3.PolicyType{v3.PolicyTypeIngress, v3.PolicyTypeEgress}
}

// defaultPolicy fills in a policy's tier, with its label, and its types.
func defaultPolicy(m *metav1.ObjectMeta, tier *string, types *[]v3.PolicyType, ingress, egress []v3.Rule) {
	*types = PolicyTypes(*types, ingress, egress)
	setIfEmpty(tier, DefaultName)
	if m.Labels == nil {
		m.Labels = make(map[string]string, 1)
	}
	m.Labels[LabelTier] = *tier
}
