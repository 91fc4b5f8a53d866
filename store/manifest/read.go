package manifest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/routerd/routerd/store"
)

// Document is one object of a manifest, ready to be written: defaults filled
// in, checked by itself.
type Document struct {
	Source string // the name given to [Read]
	Number int    // of the document in the source, counted from 1
	Line   int    // on which the object begins, counted from 1

	// Object has Key, Value and Raw set. Raw is the stored form: with the
	// defaults, and with those fields that only newer versions of Calico know.
	// Its Revision is zero; a resourceVersion in the manifest is in Value's
	// metadata.
	Object store.Object

	// HasStatus says that the manifest itself gives a status. Otherwise an
	// update leaves the stored one alone.
	HasStatus bool

	// Unknown are the fields that neither this program nor the versions of
	// Calico that it knows have; see [Document.CheckUnknown].
	Unknown []UnknownField
}

// Where returns "file:line", for messages about the document.
func (d Document) Where() string { return fmt.Sprintf("%s:%d", d.Source, d.Line) }

// Read reads every object of a manifest: YAML or JSON, any number of
// documents, single objects, lists ("kind: List" and "kind: IPPoolList") and
// plain sequences of objects. name stands for the input in messages.
//
// Objects of a namespaced kind without namespace go into "default". Objects
// are given their defaults and checked with store.Validate. With any error, no
// document is returned; the error is an [Errors] with all there are, unless
// reading from r failed. Unknown fields alone are no error of Read, for what
// is stored may have them: check them with [Document.CheckUnknown].
func Read(name string, r io.Reader) ([]Document, error) { return ReadIn(store.DefaultName, name, r) }

// ReadIn is [Read] with another namespace for objects that give none.
func ReadIn(namespace, name string, r io.Reader) ([]Document, error) {
	return (&reader{source: name, namespace: namespace}).read(r)
}

func (r *reader) read(from io.Reader) ([]Document, error) {
	data, err := io.ReadAll(io.LimitReader(from, maxInput+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", r.source, err)
	}
	if len(data) > maxInput {
		return nil, Errors{{Source: r.source, Message: fmt.Sprintf("is larger than %d MiB; split it", maxInput>>20)}}
	}
	for _, root := range parse(data) {
		r.number = root.number
		for _, e := range root.errs {
			r.fail(e.line, "", "", "%s", e.message)
		}
		if len(root.errs) == 0 {
			r.item(root.value, "")
		}
	}
	if err := Unique(r.docs); err != nil {
		var errs Errors
		errors.As(err, &errs)
		r.errs = append(r.errs, errs...)
	}
	if err := r.errs.err(); err != nil {
		r.errs = append(r.errs, r.unknown...)
		err = r.errs
		slices.SortStableFunc(r.errs, func(a, b *Error) int {
			return cmp.Or(cmp.Compare(a.Document, b.Document), cmp.Compare(a.Line, b.Line))
		})
		return nil, err
	}
	return r.docs, nil
}

// Unique reports objects that docs, from one source or several, hold more than
// once. The error is an [Errors].
func Unique(docs []Document) error {
	var errs Errors
	first := map[store.Key]Document{}
	for _, d := range docs {
		k := d.Object.Key
		if f, ok := first[k]; ok {
			errs = append(errs, &Error{
				Source: d.Source, Line: d.Line, Document: d.Number, Object: k.String(),
				Message: fmt.Sprintf("is given twice, first at %s; keep one", f.Where()),
			})
			continue
		}
		first[k] = d
	}
	return errs.err()
}

type reader struct {
	source    string
	namespace string // of objects that give none
	number    int    // of the current document
	docs      []Document
	errs      Errors
	// unknown fields of all documents; errors when anything else is one.
	unknown Errors

	foreign   []Foreign // the kinds that are read; nil: the resources' own
	unchecked bool
}

func (r *reader) fail(line int, object, field, format string, args ...any) {
	r.errs = append(r.errs, r.newError(line, object, field, fmt.Sprintf(format, args...)))
}

func (r *reader) newError(line int, object, field, message string) *Error {
	return &Error{
		Source: r.source, Line: line, Document: r.number,
		Object: object, Field: field, Message: message,
	}
}

// item reads an object, a list or a sequence. An entry of a typed list may
// leave out its kind: listKind is it then.
func (r *reader) item(v *value, listKind store.Kind) {
	switch v.kind {
	case null:
		return
	case array:
		for _, item := range v.items {
			r.item(item, listKind)
		}
		return
	case object:
	default:
		r.fail(v.line, "", "", "must be an object with apiVersion, kind, metadata and spec; found %s", found(v))
		return
	}
	for _, twice := range v.spell([]string{"apiVersion", "kind", "metadata", "items"}) {
		r.fail(twice.line, "", twice.name, "is given twice, in another case; keep one")
	}
	name := v.textOf("kind")
	if name == "List" {
		r.list(v, "")
		return
	}
	if of, ok := strings.CutSuffix(name, "List"); ok && slices.Contains(store.Kinds(), store.Kind(of)) {
		r.list(v, store.Kind(of))
		return
	}
	if r.foreign != nil {
		r.foreignObject(v)
		return
	}
	r.object(v, listKind)
}

func (r *reader) list(v *value, of store.Kind) {
	name := v.textOf("kind")
	versions := []string{store.APIVersion}
	if of == "" {
		versions = []string{"v1", store.APIVersion}
	}
	r.apiVersion(v, name, versions)
	items := v.get("items")
	if items == nil || items.kind != array {
		r.fail(v.line, name, "items", "required: the list of objects")
		return
	}
	for _, m := range v.members {
		if !slices.Contains([]string{"apiVersion", "kind", "metadata", "items"}, m.name) {
			r.fail(m.line, name, m.name, "unknown field; a list has apiVersion, kind, metadata and items")
		}
	}
	for _, item := range items.items {
		if of != "" && item.kind == object {
			if k := item.textOf("kind"); k != "" && store.Kind(k) != of {
				r.fail(item.line, k, "kind", "must be %s; the list is a %s", of, name)
				continue
			}
		}
		r.item(item, of)
	}
}

func (r *reader) apiVersion(v *value, object string, allowed []string) bool {
	field := v.get("apiVersion")
	switch {
	case field == nil:
		r.fail(v.line, object, "apiVersion", "required: %s", strings.Join(allowed, " or "))
	case field.kind != text || !slices.Contains(allowed, field.text):
		r.fail(field.line, object, "apiVersion", "must be %s; found %s", strings.Join(allowed, " or "), found(field))
	default:
		return true
	}
	return false
}

// kindOf finds out which kind an object is of.
func (r *reader) kindOf(v *value, listKind store.Kind) (store.Kind, bool) {
	field := v.get("kind")
	if field == nil {
		if listKind != "" {
			return listKind, true
		}
		r.fail(v.line, "", "kind", "required: one of %s", kindNames())
		return "", false
	}
	if field.kind == text && slices.Contains(store.Kinds(), store.Kind(field.text)) {
		return store.Kind(field.text), true
	}
	hint := ""
	if k, ok := store.KindByName(field.text); ok {
		hint = fmt.Sprintf("; did you mean %s?", k)
	}
	r.fail(field.line, "", "kind", "%s is none of the kinds that can be written here: %s%s", found(field), kindNames(), hint)
	return "", false
}

func kindNames() string {
	var names []string
	for _, k := range store.Kinds() {
		names = append(names, string(k))
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

func (r *reader) object(v *value, listKind store.Kind) {
	kind, ok := r.kindOf(v, listKind)
	if !ok {
		return
	}
	label := string(kind)
	if m := v.get("metadata"); m != nil && m.textOf("name") != "" {
		label = fmt.Sprintf("%s(%s)", kind, m.textOf("name"))
	}
	if v.get("apiVersion") != nil || listKind == "" {
		ok = r.apiVersion(v, label, []string{store.APIVersion})
	}
	target := store.New(kind)
	t := reflect.TypeOf(target).Elem()
	c := &checker{kind: kind, root: t, lines: map[string]int{}}
	c.check("", t, v)
	var unknown []UnknownField
	for _, e := range c.errs {
		if e.unknown == nil {
			r.fail(e.line, label, e.field, "%s", e.message)
			ok = false
			continue
		}
		u := UnknownField{err: r.newError(e.line, label, e.field, e.message), value: e.unknown.appendJSON(nil)}
		unknown = append(unknown, u)
		r.unknown = append(r.unknown, u.err)
	}
	if ok {
		r.resource(v, label, target, c.lines, unknown)
	}
}

// resource turns an object of the right shape into a document.
func (r *reader) resource(v *value, label string, target any, lines map[string]int, unknown []UnknownField) {
	raw := v.appendJSON(nil)
	if err := json.Unmarshal(raw, target); err != nil {
		r.fail(v.line, label, "", "cannot be read: %v", err)
		return
	}
	kind, _ := store.KindOf(target)
	meta := store.Meta(target)
	if kind.Namespaced() && meta.Namespace == "" {
		meta.Namespace = r.namespace
	}
	if !kind.Namespaced() && meta.Namespace != "" {
		r.fail(lines["metadata.namespace"], label, "metadata.namespace", "%q: a %s belongs to no namespace; leave it out", meta.Namespace, kind)
		return
	}
	generateName(meta)
	store.SetDefaults(target)
	if err := errors.Join(store.Validate(target), newerRules(kind, meta.Name, v)); err != nil {
		r.invalid(v, label, err, lines)
		return
	}
	key, err := store.KeyOf(target)
	if err != nil {
		r.fail(v.line, label, "", "%v", err)
		return
	}
	stored, err := store.Encode(key, target, raw)
	if err != nil {
		r.fail(v.line, label, "", "%v", err)
		return
	}
	status := v.get("status")
	r.docs = append(r.docs, Document{
		Source: r.source, Number: r.number, Line: v.line,
		Object:    store.Object{Key: key, Value: target, Raw: stored},
		HasStatus: status != nil && status.kind != null,
		Unknown:   unknown,
	})
}

// generateName gives an object that asks for it a name of its own, as Kubernetes does.
func generateName(m *metav1.ObjectMeta) {
	const suffix, longest = 5, 63
	if m.Name == "" && m.GenerateName != "" {
		m.Name = m.GenerateName[:min(len(m.GenerateName), longest-suffix)] + rand.String(suffix)
	}
	m.GenerateName = ""
}

// invalid reports what validation found, with the lines of the fields.
func (r *reader) invalid(v *value, label string, err error, lines map[string]int) {
	var all store.FieldErrors
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var fields store.FieldErrors
		if errors.As(e, &fields) {
			all = append(all, fields...)
		}
	}
	for _, f := range all {
		line, message := v.line, f.Error()
		for path := f.Field; path != ""; path = parent(path) {
			if l, ok := lines[path]; ok {
				line = l
				break
			}
		}
		r.fail(line, label, f.Field, "%s", strings.TrimPrefix(message, f.Field+": "))
	}
}

// parent returns the path of the object or list that a field is in.
func parent(path string) string {
	return path[:max(0, strings.LastIndexAny(path, ".["))]
}

// newerRules checks the one newer field that has a rule which depends on the
// object's name.
func newerRules(kind store.Kind, name string, v *value) error {
	spec := v.get("spec")
	if kind != store.KindFelixConfiguration || spec == nil || spec.get("nodeSelector") == nil {
		return nil
	}
	if name == store.DefaultName || strings.HasPrefix(name, "node.") {
		return store.FieldErrors{{
			Field: "spec.nodeSelector", Value: spec.textOf("nodeSelector"),
			Message: fmt.Sprintf("cannot be given on the object %q, whose name says where it holds; use another name", name),
		}}
	}
	return nil
}
