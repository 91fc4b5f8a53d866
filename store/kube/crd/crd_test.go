package crd

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

var update = flag.Bool("update", false, "write the manifests")

// TestManifests: the manifests in configs are what the types say.
func TestManifests(t *testing.T) {
	t.Parallel()
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		want, err := Manifest(g)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join("../../../configs/kubernetes/crds", string(g)+".yaml")
		if *update {
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s is not what the types say: go test ./store/kube/crd -update (-want +got):\n%s", file, diff)
		}
	}
}

// TestDefinitions holds what readers of the API lean on.
func TestDefinitions(t *testing.T) {
	t.Parallel()
	defs, err := Definitions(convert.V1)
	if err != nil {
		t.Fatal(err)
	}
	byName := make(map[string]Definition)
	for _, d := range defs {
		byName[d.Metadata.Name] = d
	}
	if len(byName) != 22 {
		t.Errorf("there are %d definitions", len(byName))
	}
	block := byName["ipamblocks.crd.projectcalico.org"].Spec.Versions[0]
	if len(block.SelectableFields) != 1 || block.SelectableFields[0].JSONPath != ".spec.affinity" {
		t.Errorf("blocks are selected by %v", block.SelectableFields)
	}
	spec := block.Schema.OpenAPIV3Schema.Properties["spec"]
	if items := spec.Properties["allocations"].Items; items.Type != "integer" || !items.Nullable || !spec.KeepUnknown {
		t.Errorf("allocations are of %+v", items)
	}
	if diff := cmp.Diff([]string{"cidr", "allocations", "unallocated", "attributes"}, spec.Required); diff != "" {
		t.Error(diff)
	}
	pool := byName["ippools.crd.projectcalico.org"].Spec.Versions[0]
	if got := pool.Schema.OpenAPIV3Schema.Properties["spec"].Properties["nodeSelector"].Default; string(got) != `"all()"` {
		t.Errorf("a pool's nodeSelector defaults to %s", got)
	}
	if pool.Subresources["status"] == nil {
		t.Error("a pool's status is no subresource")
	}
	if np := byName["networkpolicies.crd.projectcalico.org"]; np.Spec.Scope != "Namespaced" || np.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["types"].Default != nil {
		t.Errorf("a policy: %s", np.Spec.Scope)
	}
	if deleted := byName["blockaffinities.crd.projectcalico.org"].Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["deleted"]; deleted.Type != "string" {
		t.Errorf("an affinity's mark is a %s", deleted.Type)
	}
}

// TestRules: the definitions of both groups judge alike, and leave IPAM's records, which
// daemons write, to these.
func TestRules(t *testing.T) {
	t.Parallel()
	for _, kind := range convert.CustomKinds() {
		var schemas []*Schema
		for _, g := range []convert.Group{convert.V1, convert.V3} {
			d, err := definition(g, kind)
			if err != nil {
				t.Fatal(err)
			}
			schemas = append(schemas, d.Spec.Versions[0].Schema.OpenAPIV3Schema)
		}
		if diff := cmp.Diff(schemas[0], schemas[1]); diff != "" && kind != store.KindIPAMAffinity {
			t.Errorf("%s (-v1 +v3):\n%s", kind, diff)
		}
		if judges := judges(schemas[0]); judges == kind.IPAM() && kind != store.KindIPAMConfig {
			t.Errorf("%s has rules: %t", kind, judges)
		}
	}
}

// judges reports whether a schema says more of values than of what type they are.
func judges(s *Schema) bool {
	if s == nil {
		return false
	}
	found := len(s.Rules) > 0 || s.Enum != nil || s.Pattern != "" || s.Maximum != nil || s.MaxLength > 0 || s.AnyOf != nil
	for _, p := range s.Properties {
		found = found || judges(p)
	}
	return found || judges(s.Items)
}

// TestRulesNameFields: a rule about a field that is not there is an error of whoever
// writes it, and so is a limit of one.
func TestRulesNameFields(t *testing.T) {
	t.Parallel()
	l := &limits{root: &Schema{Properties: map[string]*Schema{"spec": {Type: "object"}}}}
	l.at("spec").ruleFor(".order", "true", "is no order")
	l.at("spec.list[].cidr").cidr("")
	if errs := append(l.errs, l.root.check("")...); len(errs) != 2 {
		t.Errorf("the errors are %v", errs)
	}
}
