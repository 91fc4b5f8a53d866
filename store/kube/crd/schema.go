package crd

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Schema is what a definition says of a value: an OpenAPI v3 schema in the
// structural form that the API wants.
type Schema struct {
	Type                 string             `json:"type,omitempty"`
	Format               string             `json:"format,omitempty"`
	Nullable             bool               `json:"nullable,omitempty"`
	Default              json.RawMessage    `json:"default,omitempty"`
	Enum                 []any              `json:"enum,omitempty"`
	Minimum              *int64             `json:"minimum,omitempty"`
	Maximum              *int64             `json:"maximum,omitempty"`
	MinItems             int                `json:"minItems,omitempty"`
	MaxItems             int                `json:"maxItems,omitempty"`
	MaxLength            int                `json:"maxLength,omitempty"`
	Pattern              string             `json:"pattern,omitempty"`
	Required             []string           `json:"required,omitempty"`
	AnyOf                []*Schema          `json:"anyOf,omitempty"`
	Items                *Schema            `json:"items,omitempty"`
	Properties           map[string]*Schema `json:"properties,omitempty"`
	AdditionalProperties *Schema            `json:"additionalProperties,omitempty"`
	IntOrString          bool               `json:"x-kubernetes-int-or-string,omitempty"`
	KeepUnknown          bool               `json:"x-kubernetes-preserve-unknown-fields,omitempty"`
	Rules                []Rule             `json:"x-kubernetes-validations,omitempty"`
}

// anyObject takes every object.
func anyObject() *Schema { return &Schema{Type: "object", KeepUnknown: true} }

// schemaOf returns the schema of a Go type as encoding/json writes it. Objects
// keep members that the type does not know: a newer Calico's are not lost.
func schemaOf(t reflect.Type) *Schema {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t {
	case reflect.TypeFor[json.RawMessage]():
		return &Schema{KeepUnknown: true}
	case reflect.TypeFor[metav1.Time]():
		return &Schema{Type: "string", Format: "date-time"}
	case reflect.TypeFor[metav1.Duration]():
		return &Schema{Type: "string"}
	case reflect.TypeFor[numorstring.ASNumber]():
		return intOrString(math.MaxUint32, `^[0-9]+([.][0-9]+)?$`)
	case reflect.TypeFor[numorstring.Port]():
		return intOrString(math.MaxUint16, `^([a-zA-Z0-9_.-]{1,128}|[0-9]+:[0-9]+)$`)
	case reflect.TypeFor[numorstring.Protocol](), reflect.TypeFor[numorstring.Uint8OrString]():
		return intOrString(math.MaxUint8, "")
	}
	if p := reflect.PointerTo(t); p.Implements(reflect.TypeFor[json.Marshaler]()) {
		return &Schema{KeepUnknown: true} // it writes its own form
	}
	switch t.Kind() {
	case reflect.Struct:
		s := anyObject()
		s.Properties = make(map[string]*Schema)
		addMembers(s.Properties, t)
		return s
	case reflect.Map:
		return &Schema{Type: "object", AdditionalProperties: schemaOf(t.Elem())}
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return &Schema{Type: "string", Format: "byte"}
		}
		items := schemaOf(t.Elem())
		items.Nullable = t.Elem().Kind() == reflect.Pointer
		return &Schema{Type: "array", Items: items}
	case reflect.String:
		return &Schema{Type: "string"}
	case reflect.Bool:
		return &Schema{Type: "boolean"}
	case reflect.Float32, reflect.Float64:
		return &Schema{Type: "number"}
	case reflect.Uint8:
		return (&Schema{Type: "integer", Format: "int32"}).between(0, math.MaxUint8)
	case reflect.Uint16:
		return (&Schema{Type: "integer", Format: "int32"}).between(0, math.MaxUint16)
	case reflect.Uint32:
		return (&Schema{Type: "integer", Format: "int64"}).between(0, math.MaxUint32)
	case reflect.Int32, reflect.Int16, reflect.Int8:
		return &Schema{Type: "integer", Format: "int32"}
	case reflect.Int, reflect.Int64, reflect.Uint, reflect.Uint64:
		return &Schema{Type: "integer", Format: "int64"}
	}
	return &Schema{KeepUnknown: true}
}

// intOrString is for what is written as a number up to highest or as a text, to
// which alone the pattern applies.
func intOrString(highest int64, pattern string) *Schema {
	s := &Schema{AnyOf: []*Schema{{Type: "integer"}, {Type: "string"}}, IntOrString: true, Pattern: pattern}
	return s.between(0, highest)
}

func addMembers(to map[string]*Schema, t reflect.Type) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case name == "" && f.Anonymous:
			addMembers(to, f.Type)
		case name == "":
			to[f.Name] = schemaOf(f.Type)
		default:
			to[name] = schemaOf(f.Type)
		}
	}
}
