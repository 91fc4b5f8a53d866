package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strconv"
	"strings"

	"github.com/routerd/routerd/store"
)

// UnknownField is a field of a manifest that nothing here knows.
type UnknownField struct {
	err   *Error
	value []byte // its JSON
}

// CheckUnknown reports the unknown fields of a document that the stored object
// lacks or has otherwise: they are taken for slips of the pen. What a newer
// Calico wrote passes, so that the output of get can be applied again. stored
// is the object as stored, nil if there is none. The error is an [Errors].
func (d Document) CheckUnknown(stored []byte) error {
	if len(d.Unknown) == 0 {
		return nil
	}
	have, err := decodeAny(stored)
	if err != nil {
		have = nil
	}
	var errs Errors
	for _, u := range d.Unknown {
		want, err := decodeAny(u.value)
		old, ok := lookUp(have, u.err.Field)
		if err != nil || !ok || !reflect.DeepEqual(old, want) {
			errs = append(errs, u.err)
		}
	}
	return errs.err()
}

// KeepForeign returns raw, the JSON of an object of the kind, with those
// members of stored added that nothing here knows and raw lacks. A manifest
// written by hand does not name them, and that does not ask for their removal. In
// arrays it looks only where both have the same length.
func KeepForeign(kind store.Kind, raw, stored []byte) ([]byte, error) {
	given, err := decodeAny(raw)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	old, err := decodeAny(stored)
	if err != nil {
		return nil, fmt.Errorf("read the stored %s: %w", kind, err)
	}
	return json.Marshal(merge(kind, "", given, old))
}

// merge adds members of old to given. What members are known to a Go type is
// of no account here: store.Encode takes those from the value alone.
func merge(kind store.Kind, path string, given, old any) any {
	switch old := old.(type) {
	case map[string]any:
		members, ok := given.(map[string]any)
		if !ok {
			return given
		}
		out := maps.Clone(members)
		for name, v := range old {
			field := join(path, name)
			have, ok := members[name]
			switch {
			case ok:
				out[name] = merge(kind, field, have, v)
			case !newer(kind, field):
				out[name] = v
			}
		}
		return out
	case []any:
		items, ok := given.([]any)
		if !ok || len(items) != len(old) {
			return given
		}
		out := make([]any, len(items))
		for i := range items {
			out[i] = merge(kind, fmt.Sprintf("%s[%d]", path, i), items[i], old[i])
		}
		return out
	}
	return given
}

// decodeAny keeps numbers as they are written: a float64 would round large
// ones.
func decodeAny(raw []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	err := d.Decode(&v)
	return v, err
}

// lookUp finds a path such as spec.rules[2].name in decoded JSON.
func lookUp(v any, path string) (any, bool) {
	for part := range strings.SplitSeq(path, ".") {
		name, indices, _ := strings.Cut(part, "[")
		members, ok := v.(map[string]any)
		if !ok {
			return nil, false
		}
		if v, ok = members[name]; !ok {
			return nil, false
		}
		for index := range strings.SplitSeq(strings.TrimSuffix(indices, "]"), "][") {
			if index == "" {
				continue
			}
			items, ok := v.([]any)
			i, err := strconv.Atoi(index)
			if !ok || err != nil || i < 0 || i >= len(items) {
				return nil, false
			}
			v = items[i]
		}
	}
	return v, true
}
