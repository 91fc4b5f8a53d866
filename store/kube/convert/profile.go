package convert

import (
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	corev1 "k8s.io/api/core/v1"

	"github.com/routerd/routerd/store"
)

// nameLabel is, behind the prefix, the label with the name of the namespace or the
// service account itself.
const nameLabel = "projectcalico.org/name"

// namespaceProfileOf returns the profile that a namespace stands for. It allows
// everything: endpoints that no policy selects are not isolated.
func namespaceProfileOf(ns *corev1.Namespace) (store.Key, any, error) {
	p := newProfile(namespaceProfile + ns.Name)
	p.ObjectMeta = inherited(&ns.ObjectMeta, p.Name)
	p.Annotations = pluginAnnotations(ns.Annotations)
	p.Spec = v3.ProfileSpec{
		Ingress:       []v3.Rule{{Action: v3.Allow}},
		Egress:        []v3.Rule{{Action: v3.Allow}},
		LabelsToApply: prefixed(store.LabelPrefixNamespace, ns.Labels, ns.Name),
	}
	return store.ResourceKey(store.KindProfile, p.Name), p, nil
}

// accountProfileOf returns the profile that a service account stands for: labels
// alone.
func accountProfileOf(sa *corev1.ServiceAccount) (store.Key, any, error) {
	p := newProfile(AccountProfile(sa.Namespace, sa.Name))
	p.ObjectMeta = inherited(&sa.ObjectMeta, p.Name)
	p.Spec = v3.ProfileSpec{LabelsToApply: prefixed(store.LabelPrefixServiceAccount, sa.Labels, sa.Name)}
	return store.ResourceKey(store.KindProfile, p.Name), p, nil
}

// NamespaceProfile returns the name of a namespace's profile.
func NamespaceProfile(namespace string) string { return namespaceProfile + namespace }

// AccountProfile returns the name of a service account's profile.
func AccountProfile(namespace, account string) string {
	return accountProfile + namespace + "." + account
}

func newProfile(name string) *v3.Profile {
	p, _ := store.New(store.KindProfile).(*v3.Profile)
	p.Name = name
	return p
}

func prefixed(prefix string, labels map[string]string, name string) map[string]string {
	out := make(map[string]string, len(labels)+1)
	for k, v := range labels {
		out[prefix+k] = v
	}
	out[prefix+nameLabel] = name
	return out
}
