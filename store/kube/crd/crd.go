// Package crd makes the definitions of the custom resources in which a
// Kubernetes datastore keeps routerd's resources, out of the Go types that the
// code reads them into. The manifests in configs/kubernetes/crds are its output.
package crd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// Definition is a CustomResourceDefinition of apiextensions.k8s.io/v1, as much of
// it as is said here. The API's own Go type would bring the API server's modules
// along.
type Definition struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   Metadata `json:"metadata"`
	Spec       Spec     `json:"spec"`
}

// Metadata names a definition.
type Metadata struct {
	Name string `json:"name"`
}

// Spec says what a definition defines.
type Spec struct {
	Group    string    `json:"group"`
	Names    Names     `json:"names"`
	Scope    string    `json:"scope"`
	Versions []Version `json:"versions"`
}

// Names are what the objects are called.
type Names struct {
	Kind     string `json:"kind"`
	ListKind string `json:"listKind"`
	Plural   string `json:"plural"`
	Singular string `json:"singular"`
}

// Version is the one version of a definition.
type Version struct {
	Name             string           `json:"name"`
	Served           bool             `json:"served"`
	Storage          bool             `json:"storage"`
	Schema           Validation       `json:"schema"`
	SelectableFields []SelectableJSON `json:"selectableFields,omitempty"`
	Subresources     map[string]any   `json:"subresources,omitempty"`
}

// Validation holds the schema.
type Validation struct {
	OpenAPIV3Schema *Schema `json:"openAPIV3Schema"`
}

// SelectableJSON is a member by which lists and watches can be narrowed.
type SelectableJSON struct {
	JSONPath string `json:"jsonPath"`
}

// Definitions returns the definitions of a group, in the order of the kinds.
func Definitions(g convert.Group) ([]Definition, error) {
	var out []Definition
	for _, kind := range convert.CustomKinds() {
		d, err := definition(g, kind)
		if err != nil {
			return nil, fmt.Errorf("definition of %s: %w", kind, err)
		}
		out = append(out, d)
	}
	return out, nil
}

// Manifest returns the definitions of a group as one YAML file.
func Manifest(g convert.Group) ([]byte, error) {
	defs, err := Definitions(g)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# The custom resources of %s in which routerd and Calico keep their resources.\n# Made by store/kube/crd: go test ./store/kube/crd -update\n", g.APIVersion())
	for _, d := range defs {
		text, err := yaml.Marshal(d)
		if err != nil {
			return nil, fmt.Errorf("definition %s: %w", d.Metadata.Name, err)
		}
		b.WriteString("---\n")
		b.Write(text)
	}
	return b.Bytes(), nil
}

func definition(g convert.Group, kind store.Kind) (Definition, error) {
	r, ok := convert.Custom(g, kind)
	if !ok {
		return Definition{}, fmt.Errorf("%w: it has no custom resource", store.ErrInvalid)
	}
	spec, err := specSchema(g, kind)
	if err != nil {
		return Definition{}, err
	}
	root := &Schema{
		Type: "object",
		Properties: map[string]*Schema{
			"apiVersion": {Type: "string"},
			"kind":       {Type: "string"},
			"metadata":   {Type: "object"},
			"spec":       spec,
		},
	}
	if err := limit(kind, root); err != nil {
		return Definition{}, err
	}
	v := Version{Name: r.Version, Served: true, Storage: true, Schema: Validation{root}}
	if r.Status {
		root.Properties["status"] = anyObject()
		v.Subresources = map[string]any{"status": map[string]any{}}
	}
	// What a node watches of these is its own.
	switch kind {
	case store.KindIPAMBlock:
		v.SelectableFields = []SelectableJSON{{".spec.affinity"}}
	case store.KindIPAMAffinity:
		v.SelectableFields = []SelectableJSON{{".spec.node"}}
	}
	scope := "Cluster"
	if r.Namespaced {
		scope = "Namespaced"
	}
	return Definition{
		APIVersion: "apiextensions.k8s.io/v1",
		Kind:       "CustomResourceDefinition",
		Metadata:   Metadata{Name: r.Plural + "." + r.Group},
		Spec: Spec{
			Group: r.Group,
			Names: Names{
				Kind: r.APIKind, ListKind: r.APIKind + "List", Plural: r.Plural, Singular: strings.ToLower(r.APIKind),
			},
			Scope:    scope,
			Versions: []Version{v},
		},
	}, nil
}

// The specs of IPAM's records, which carry their keys in the API; [Schema] says
// all that is said of them.
type (
	blockSpec struct {
		CIDR                        string            `json:"cidr"`
		Affinity                    *string           `json:"affinity,omitempty"`
		AffinityClaimTime           *metav1.Time      `json:"affinityClaimTime,omitempty"`
		Allocations                 []*int            `json:"allocations"`
		Unallocated                 []int             `json:"unallocated"`
		Attributes                  []store.Attribute `json:"attributes"`
		SequenceNumber              uint64            `json:"sequenceNumber,omitempty"`
		SequenceNumberForAllocation map[string]uint64 `json:"sequenceNumberForAllocation,omitempty"`
		StrictAffinity              bool              `json:"strictAffinity,omitempty"`
		Deleted                     bool              `json:"deleted,omitempty"`
	}
	affinitySpec struct {
		CIDR    string `json:"cidr"`
		Node    string `json:"node"`
		State   string `json:"state"`
		Type    string `json:"type,omitempty"`
		Deleted bool   `json:"deleted,omitempty"`
	}
	affinitySpecV1 struct {
		CIDR    string `json:"cidr"`
		Node    string `json:"node"`
		State   string `json:"state"`
		Type    string `json:"type,omitempty"`
		Deleted string `json:"deleted,omitempty"`
	}
	handleSpec struct {
		HandleID string         `json:"handleID"`
		Block    map[string]int `json:"block"`
		Deleted  bool           `json:"deleted,omitempty"`
	}
	configSpec struct {
		StrictAffinity               bool   `json:"strictAffinity,omitempty"`
		AutoAllocateBlocks           bool   `json:"autoAllocateBlocks,omitempty"`
		MaxBlocksPerHost             int    `json:"maxBlocksPerHost,omitempty"`
		IPCooldownSeconds            *int   `json:"ipCooldownSeconds,omitempty"`
		KubeVirtVMAddressPersistence string `json:"kubeVirtVMAddressPersistence,omitempty"`
	}
)

func specSchema(g convert.Group, kind store.Kind) (*Schema, error) {
	switch kind {
	case store.KindIPAMBlock:
		return recordSchema[blockSpec](), nil
	case store.KindIPAMAffinity:
		if g == convert.V1 {
			return recordSchema[affinitySpecV1](), nil
		}
		return recordSchema[affinitySpec](), nil
	case store.KindIPAMHandle:
		return recordSchema[handleSpec](), nil
	case store.KindIPAMConfig:
		return recordSchema[configSpec](), nil
	}
	t := reflect.TypeOf(store.New(kind)).Elem()
	f, ok := t.FieldByName("Spec")
	if !ok {
		return nil, fmt.Errorf("%w: %s has no spec", store.ErrInvalid, t)
	}
	s := schemaOf(f.Type)
	defaults, err := defaultsOf(kind)
	if err != nil {
		return nil, err
	}
	for name, v := range defaults {
		if p := s.Properties[name]; p != nil {
			p.Default = v
		}
	}
	return s, nil
}

// recordSchema is the schema of a type whose members without omitempty are
// required.
func recordSchema[T any]() *Schema {
	s := schemaOf(reflect.TypeFor[T]())
	for f := range reflect.TypeFor[T]().Fields() {
		if name, rest, _ := strings.Cut(f.Tag.Get("json"), ","); rest != "omitempty" {
			s.Required = append(s.Required, name)
		}
	}
	return s
}

// defaultsOf lists what the clients of the datastore fill in where a manifest is
// silent, so that the server does it for kubectl. What depends on other members
// is left to the readers.
func defaultsOf(kind store.Kind) (map[string]json.RawMessage, error) {
	before, err := specMembers(store.New(kind))
	if err != nil {
		return nil, err
	}
	v := store.New(kind)
	store.SetDefaults(v)
	after, err := specMembers(v)
	if err != nil {
		return nil, err
	}
	delete(after, "types") // a policy's, which its rules say
	for name, was := range before {
		if bytes.Equal(after[name], was) {
			delete(after, name)
		}
	}
	return after, nil
}

func specMembers(v any) (map[string]json.RawMessage, error) {
	raw, err := json.Marshal(reflect.ValueOf(v).Elem().FieldByName("Spec").Interface())
	if err != nil {
		return nil, err
	}
	var members map[string]json.RawMessage
	return members, json.Unmarshal(raw, &members)
}
