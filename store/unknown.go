package store

import (
	"bytes"
	"encoding"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// allKnown reports whether the type of a kind knows every member of raw. It
// is several times faster than keepUnknown, and nearly always true.
func allKnown(kind Kind, raw []byte) bool {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	return d.Decode(New(kind)) == nil
}

// keepUnknown returns what value with those members of old added that t, the
// Go type which value was encoded from, does not know. It returns value itself
// when there is nothing to add.
func keepUnknown(t reflect.Type, value, old json.RawMessage) (json.RawMessage, error) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	value, old = bytes.TrimSpace(value), bytes.TrimSpace(old)
	if opaque(t) || len(value) == 0 || len(old) == 0 || value[0] != old[0] {
		return value, nil
	}
	switch {
	case t.Kind() == reflect.Struct && value[0] == '{':
		return keepMembers(membersOf(t), value, old)
	case t.Kind() == reflect.Map && value[0] == '{' && holdsStructs(t.Elem()):
		var values map[string]json.RawMessage
		if err := json.Unmarshal(value, &values); err != nil {
			return nil, err
		}
		types := make(map[string]reflect.Type, len(values))
		for name := range values {
			types[name] = t.Elem()
		}
		return keepEntries(types, value, old)
	case t.Kind() == reflect.Slice && value[0] == '[' && holdsStructs(t.Elem()):
		return keepElements(t.Elem(), value, old)
	}
	return value, nil
}

// opaque reports whether values of t write their own JSON, so that nothing can
// be said about its members.
func opaque(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[json.Marshaler]()) || p.Implements(reflect.TypeFor[encoding.TextMarshaler]())
}

// holdsStructs reports whether objects with unknown members can lie in values
// of type t. It spares the large flat arrays of blocks a second reading.
func holdsStructs(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	return t.Kind() == reflect.Struct && !opaque(t)
}

// membersOf returns the members that encoding/json knows of a struct type, by
// lower-case name: it reads them in any case.
func membersOf(t reflect.Type) map[string]reflect.Type {
	members := make(map[string]reflect.Type)
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" || !f.IsExported() || name == "-" {
			continue // an inlined struct is no member; its fields follow by themselves
		}
		if hiddenBelow(t, f) {
			continue
		}
		if name == "" {
			name = f.Name
		}
		members[strings.ToLower(name)] = f.Type
	}
	return members
}

// hiddenBelow reports whether f is promoted from an embedded struct that has a
// name of its own in JSON: metadata's fields are not the object's.
func hiddenBelow(t reflect.Type, f reflect.StructField) bool {
	for i := 1; i < len(f.Index); i++ {
		name, _, _ := strings.Cut(t.FieldByIndex(f.Index[:i]).Tag.Get("json"), ",")
		if name != "" {
			return true
		}
	}
	return false
}

// keepMembers is keepUnknown for a struct.
func keepMembers(known map[string]reflect.Type, value, old json.RawMessage) (json.RawMessage, error) {
	var olds map[string]json.RawMessage
	if err := json.Unmarshal(old, &olds); err != nil {
		return nil, err
	}
	nested := make(map[string]reflect.Type)
	var unknown []string
	for _, name := range slices.Sorted(maps.Keys(olds)) {
		t, ok := known[strings.ToLower(name)]
		switch {
		case !ok:
			unknown = append(unknown, name)
		case holdsStructs(t):
			nested[name] = t
		}
	}
	value, err := keepEntries(nested, value, old)
	if err != nil || len(unknown) == 0 {
		return value, err
	}
	members, err := split(value)
	if err != nil {
		return nil, err
	}
	for _, name := range unknown {
		if slices.ContainsFunc(members, func(m member) bool { return m.name == name }) {
			continue // the encoder wrote it without its being in the type
		}
		var b bytes.Buffer
		if err := json.Compact(&b, olds[name]); err != nil {
			return nil, err
		}
		members = append(members, member{name, b.Bytes()})
	}
	return join(members)
}

// keepEntries carries keepUnknown into those members of an object that have a
// type here and are in both value and old. The order of value's members stays.
func keepEntries(types map[string]reflect.Type, value, old json.RawMessage) (json.RawMessage, error) {
	if len(types) == 0 {
		return value, nil
	}
	var olds map[string]json.RawMessage
	if err := json.Unmarshal(old, &olds); err != nil {
		return nil, err
	}
	members, err := split(value)
	if err != nil {
		return nil, err
	}
	changed := false
	for i, m := range members {
		t, ok := types[m.name]
		if _, both := olds[m.name]; !ok || !both {
			continue
		}
		kept, err := keepUnknown(t, m.value, olds[m.name])
		if err != nil {
			return nil, err
		}
		changed = changed || !bytes.Equal(kept, m.value)
		members[i].value = kept
	}
	if !changed {
		return value, nil
	}
	return join(members)
}

// keepElements is keepUnknown for an array, element by element.
func keepElements(t reflect.Type, value, old json.RawMessage) (json.RawMessage, error) {
	var values, olds []json.RawMessage
	if err := json.Unmarshal(value, &values); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(old, &olds); err != nil {
		return nil, err
	}
	if len(values) != len(olds) {
		return value, nil
	}
	changed := false
	for i := range values {
		kept, err := keepUnknown(t, values[i], olds[i])
		if err != nil {
			return nil, err
		}
		changed = changed || !bytes.Equal(kept, values[i])
		values[i] = kept
	}
	if !changed {
		return value, nil
	}
	return json.Marshal(values)
}

// member is one member of a JSON object, in its place.
type member struct {
	name  string
	value json.RawMessage
}

// split returns the members of an object in their order, which a map would
// lose.
func split(object json.RawMessage) ([]member, error) {
	d := json.NewDecoder(bytes.NewReader(object))
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	var members []member
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, err
		}
		m := member{name: name.(string)} // the decoder gives only strings in this place
		if err := d.Decode(&m.value); err != nil {
			return nil, err
		}
		members = append(members, m)
	}
	return members, nil
}

// join is the inverse of split.
func join(members []member) (json.RawMessage, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range members {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(m.name)
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(m.value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
