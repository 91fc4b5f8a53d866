package operator

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
)

// TestDescribe: what a step does to rules is said of each thing once, and of nothing else.
func TestDescribe(t *testing.T) {
	id := filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "web"}
	path := filter.Path{Tiers: []filter.Tier{{Name: "default", Policies: []filter.PolicyRef{{ID: id}}, End: filter.Deny}}}
	member := func(s string) filter.Member { return filter.Member{Prefix: netip.MustParsePrefix(s)} }
	before := filter.NewRuleset()
	before.Sets["s-a"] = filter.Set{ID: "s-a", Origin: "a == 'b'"}
	before.Sets["s-b"] = filter.Set{ID: "s-b", Origin: "gone"}
	before.Policies[id] = filter.Policy{ID: id, Ingress: []filter.Rule{{Action: filter.Allow}}}
	before.Endpoints["cali1"] = filter.Endpoint{Interface: "cali1", Name: "WorkloadEndpoint(ns/one)", Ingress: path}
	before.Endpoints["cali2"] = filter.Endpoint{Interface: "cali2", Name: "WorkloadEndpoint(ns/two)"}
	d := &filter.Delta{
		PutSets:      []filter.Set{{ID: "s-c", Origin: "new"}},
		Members:      []filter.MemberChange{{Set: "s-c", Add: []filter.Member{member("10.0.0.2/32"), member("10.0.0.1/32")}}, {Set: "s-a", Add: []filter.Member{member("10.0.0.3/32")}, Del: []filter.Member{member("10.0.0.4/32")}}},
		PutPolicies:  []filter.Policy{{ID: id, Ingress: []filter.Rule{{Action: filter.Deny, Source: filter.Side{Set: "s-c"}}}}},
		PutEndpoints: []filter.Endpoint{{Interface: "cali1", Name: "WorkloadEndpoint(ns/one)", Ingress: path}, {Interface: "cali2", Name: "WorkloadEndpoint(ns/two)", Ingress: path}},
		DelSets:      []filter.SetID{"s-b"},
		Settings:     &filter.Settings{Reject: true},
	}
	var got []string
	for _, o := range describe(before, d) {
		got = append(got, o.GetKind()+" "+o.GetName()+": "+o.GetWas()+" → "+o.GetWill())
	}
	want := []string{
		"endpoint cali2: cali2 WorkloadEndpoint(ns/two); normal ingress: Deny; normal egress: Deny → cali2 WorkloadEndpoint(ns/two); normal ingress: GlobalNetworkPolicy(web), tier default ends in Deny, Deny; normal egress: Deny",
		"policy GlobalNetworkPolicy(web): GlobalNetworkPolicy(web); ingress 0 Allow everything → GlobalNetworkPolicy(web); ingress 0 Deny from (new)",
		"set s-a: s-a (a == 'b') → takes 10.0.0.3/32, loses 10.0.0.4/32",
		"set s-b: s-b (gone) → ",
		"set s-c:  → s-c (new): 10.0.0.1/32 10.0.0.2/32",
		"setting Reject: Reject false → Reject true",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
