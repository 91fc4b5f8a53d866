package operator

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
)

// TestStepsNameKubernetes: a verdict's steps name the object of Kubernetes that its user
// wrote, not what it was converted to.
func TestStepsNameKubernetes(t *testing.T) {
	t.Parallel()
	r := &filter.Ruleset{Policies: map[filter.PolicyID]filter.Policy{}}
	var v filter.Verdict
	var want, got []string
	for _, tt := range []struct {
		id   filter.PolicyID
		want string
	}{
		{filter.PolicyID{Kind: "NetworkPolicy", Namespace: "prod", Name: "knp.default.web"}, "Kubernetes NetworkPolicy(prod/web)"},
		{filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "kcnp.isolate"}, "Kubernetes ClusterNetworkPolicy(isolate)"},
		{filter.PolicyID{Kind: "Profile", Name: "kns.prod"}, "Kubernetes Namespace(prod)"},
		{filter.PolicyID{Kind: "Profile", Name: "ksa.prod.builder.two"}, "Kubernetes ServiceAccount(prod/builder.two)"},
		{filter.PolicyID{Kind: "NetworkPolicy", Namespace: "prod", Name: "web"}, "NetworkPolicy(prod/web)"},
		{filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "knp.default.web"}, "GlobalNetworkPolicy(knp.default.web)"},
	} {
		r.Policies[tt.id] = filter.Policy{ID: tt.id, Ingress: []filter.Rule{{Action: filter.Allow}}}
		v.Steps = append(v.Steps, filter.Step{Direction: filter.Ingress, Policy: tt.id, Action: filter.Allow, Reason: filter.ByRule})
		want = append(want, tt.want)
	}
	for _, s := range showSteps(r, v) {
		got = append(got, s.GetPolicy())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("policies (-want +got):\n%s", diff)
	}
}
