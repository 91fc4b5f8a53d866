package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

// JSON returns a stored object in the form in which calicoctl prints it: what
// is stored, with the defaults filled in that an older writer may have left
// out, and with its revision as metadata.resourceVersion. [Read] takes it
// back.
func JSON(o store.Object) (json.RawMessage, error) {
	v := store.Clone(o.Value)
	store.SetDefaults(v)
	raw, err := store.Encode(o.Key, v, o.Raw)
	if err != nil {
		return nil, fmt.Errorf("print %s: %w", o.Key, err)
	}
	if o.Revision == 0 && !bytes.Contains(raw, []byte(store.AnnotationMetadata)) {
		return raw, nil
	}
	return shown(raw, o)
}

// shown returns what is stored with the revision, and without the annotation that is
// the store's own.
func shown(raw []byte, o store.Object) (json.RawMessage, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil, fmt.Errorf("print %s: %w", o.Key, err)
	}
	var meta map[string]json.RawMessage
	if err := json.Unmarshal(members["metadata"], &meta); err != nil {
		return nil, fmt.Errorf("print %s: metadata: %w", o.Key, err)
	}
	var annotations map[string]string
	if raw := meta["annotations"]; raw != nil {
		if err := json.Unmarshal(raw, &annotations); err != nil {
			return nil, fmt.Errorf("print %s: metadata.annotations: %w", o.Key, err)
		}
	}
	var err error
	if _, ok := annotations[store.AnnotationMetadata]; ok {
		delete(annotations, store.AnnotationMetadata)
		if meta["annotations"], err = Plain(annotations); err != nil {
			return nil, fmt.Errorf("print %s: metadata.annotations: %w", o.Key, err)
		}
		if len(annotations) == 0 {
			delete(meta, "annotations")
		}
	}
	if o.Revision != 0 {
		meta["resourceVersion"] = json.RawMessage(strconv.Quote(strconv.FormatInt(int64(o.Revision), 10)))
	}
	if members["metadata"], err = Plain(meta); err != nil {
		return nil, fmt.Errorf("print %s: metadata: %w", o.Key, err)
	}
	return Plain(members)
}

// List returns objects of one kind as calicoctl prints a list: an IPPoolList,
// for instance. revision is the one at which they were read.
func List(kind store.Kind, revision store.Revision, objects []store.Object) (json.RawMessage, error) {
	items := make([]json.RawMessage, 0, len(objects))
	for _, o := range objects {
		raw, err := JSON(o)
		if err != nil {
			return nil, err
		}
		items = append(items, raw)
	}
	return Plain(map[string]any{
		"apiVersion": store.APIVersion,
		"kind":       string(kind) + "List",
		"metadata":   map[string]string{"resourceVersion": strconv.FormatInt(int64(revision), 10)},
		"items":      items,
	})
}

// Indent returns JSON with line breaks, as calicoctl prints it.
func Indent(raw json.RawMessage) ([]byte, error) {
	var b bytes.Buffer
	if err := json.Indent(&b, bytes.TrimSpace(raw), "", "  "); err != nil {
		return nil, err
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

// YAML returns JSON as YAML, with the members in alphabetical order.
//
// JSON is read as YAML on the way, which is not quite so: a pair of \u for one character
// is none there, and what is not printable must not stand as it is.
func YAML(raw json.RawMessage) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	plain, err := Plain(v)
	if err != nil {
		return nil, err
	}
	escaped := make([]byte, 0, len(plain))
	for _, r := range string(plain) {
		if r > unicode.MaxASCII && !unicode.IsPrint(r) || r == 0x7f {
			escaped = fmt.Appendf(escaped, `\U%08x`, r)
			continue
		}
		escaped = utf8.AppendRune(escaped, r)
	}
	return yaml.JSONToYAML(escaped)
}

// Plain encodes without turning the && of a selector into \u0026\u0026, which
// is for a machine's eyes.
func Plain(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSpace(b.Bytes()), nil
}
