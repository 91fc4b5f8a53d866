package store

import (
	"maps"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// nameRule is what metadata.name of a kind must be.
type nameRule uint8

const (
	nameSubdomain nameRule = iota // DNS-1123 subdomain
	nameLabel                     // one DNS-1123 label
	nameGiven                     // follows from the spec; the kind's own check is the stricter one
	namePolicy                    // one label or two
)

func nameRuleOf(v any) nameRule {
	switch v.(type) {
	case *v3.Tier:
		return nameLabel
	case *WorkloadEndpoint:
		return nameGiven
	case *v3.NetworkPolicy, *v3.GlobalNetworkPolicy, *v3.StagedNetworkPolicy, *v3.StagedGlobalNetworkPolicy:
		return namePolicy
	}
	return nameSubdomain
}

func (c *checker) meta(m *metav1.ObjectMeta, rule nameRule) {
	c.name(m.Name, rule)
	c.reject(m.GenerateName != "", "metadata.generateName", m.GenerateName, "is not supported; give a name in metadata.name")
	c.labels("metadata.labels", m.Labels)
	for _, k := range slices.Sorted(maps.Keys(m.Annotations)) {
		// Kubernetes judges annotations' keys without regard to case.
		c.reject(len(validation.IsQualifiedName(strings.ToLower(k))) > 0, "metadata.annotations", k, "is not a valid key: %s", qualifiedNameRule)
	}
}

func (c *checker) name(name string, rule nameRule) {
	const field = "metadata.name"
	switch {
	case rule == nameGiven:
	case name == "":
		c.add(field, nil, "required")
	case rule == namePolicy:
		c.policyName(field, name)
	case rule == nameLabel:
		c.reject(len(validation.IsDNS1123Label(name)) > 0, field, name, "must be at most 63 lower case letters, digits and '-', and begin and end with a letter or a digit")
	case len(validation.IsDNS1123Subdomain(name)) > 0:
		c.add(field, name, "must be at most 253 lower case letters, digits, '-' and '.', and each part between dots must begin and end with a letter or a digit")
	}
}

const (
	qualifiedNameRule = "use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit, after an optional DNS name and '/', such as example.com/rack"
	labelValueRule    = "use at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit, or nothing"
)

// labels applies Kubernetes' rules for labels.
func (c *checker) labels(field string, labels map[string]string) {
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		c.reject(len(validation.IsQualifiedName(k)) > 0, field, k, "is not a valid key: %s", qualifiedNameRule)
		c.reject(len(validation.IsValidLabelValue(labels[k])) > 0, field+"."+k, labels[k], "is not a valid value: %s", labelValueRule)
	}
}

// reference checks a reference to another object by its name.
func (c *checker) reference(field, name string) {
	c.reject(len(validation.IsDNS1123Subdomain(name)) > 0, field, name, "must be the name of an object: lower case letters, digits, '-' and '.'")
}
