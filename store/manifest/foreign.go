package manifest

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/routerd/routerd/store"
)

// Foreign is a kind of another API whose objects can be said as resources.
type Foreign struct {
	APIVersion string
	Kind       string // in any case
	New        func() any
	// Convert returns the resource that an object stands for. Its error is a [store.FieldErrors] about the object's own fields.
	Convert func(object any) (any, error)
}

// ReadForeign reads manifests of other APIs as [Read] reads those of the resources' own, and returns the resources that their
// objects stand for. Unknown fields are errors: what they ask for would be lost. Unless unchecked is set, the resources are
// checked with store.Validate.
func ReadForeign(name string, r io.Reader, kinds []Foreign, unchecked bool) ([]Document, error) {
	return (&reader{source: name, namespace: store.DefaultName, foreign: kinds, unchecked: unchecked}).read(r)
}

// foreignObject reads an object of another API.
func (r *reader) foreignObject(v *value) {
	version, kind := v.textOf("apiVersion"), v.textOf("kind")
	if version == store.APIVersion {
		r.fail(v.line, kind, "apiVersion", "%q: it is what others are converted to; leave it out", version)
		return
	}
	var versions []string
	for _, f := range r.foreign {
		if f.APIVersion == version && strings.EqualFold(f.Kind, kind) {
			r.foreignKind(v, f)
			return
		}
		if !slices.Contains(versions, f.APIVersion) {
			versions = append(versions, f.APIVersion)
		}
	}
	if !slices.Contains(versions, version) {
		r.apiVersion(v, kind, versions)
		return
	}
	var kinds []string
	for _, f := range r.foreign {
		if f.APIVersion == version {
			kinds = append(kinds, f.Kind)
		}
	}
	line, what := v.line, "nothing"
	if k := v.get("kind"); k != nil {
		line, what = k.line, found(k)
	}
	r.fail(line, "", "kind", "must be one of %s with apiVersion %s; found %s", strings.Join(kinds, ", "), version, what)
}

func (r *reader) foreignKind(v *value, f Foreign) {
	label := f.Kind
	if m := v.get("metadata"); m != nil {
		for _, name := range []string{"name", "cidr", "peerIP"} {
			if text := m.textOf(name); text != "" {
				label = f.Kind + "(" + text + ")"
				break
			}
		}
	}
	from := f.New()
	t := reflect.TypeOf(from).Elem()
	c := &checker{root: t, lines: map[string]int{}}
	c.check("", t, v)
	for _, e := range c.errs {
		r.fail(e.line, label, e.field, "%s", e.message)
	}
	if len(c.errs) > 0 {
		return
	}
	if err := json.Unmarshal(v.appendJSON(nil), from); err != nil {
		r.fail(v.line, label, "", "cannot be read: %v", err)
		return
	}
	target, err := f.Convert(from)
	if err != nil {
		r.invalid(v, label, errors.Join(err), c.lines)
		return
	}
	r.converted(v, label, target)
}

// converted makes a resource a document. What is wrong with it is said of its own fields, whose names another API need not have.
func (r *reader) converted(v *value, label string, target any) {
	kind, _ := store.KindOf(target)
	meta := store.Meta(target)
	if kind.Namespaced() && meta.Namespace == "" {
		meta.Namespace = r.namespace
	}
	store.SetDefaults(target)
	if err := store.Validate(target); err != nil && !r.unchecked {
		r.fail(v.line, label, "", "becomes %s(%s), in which %v", kind, meta.Name, err)
		return
	}
	key, err := store.KeyOf(target)
	if err != nil {
		r.fail(v.line, label, "", "%v", err)
		return
	}
	raw, err := store.Encode(key, target, nil)
	if err != nil {
		r.fail(v.line, label, "", "%v", err)
		return
	}
	r.docs = append(r.docs, Document{Source: r.source, Number: r.number, Line: v.line, Object: store.Object{Key: key, Value: target, Raw: raw}})
}
