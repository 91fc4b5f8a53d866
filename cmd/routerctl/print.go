package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// printObjects prints what was found as YAML, as JSON, or what a JSONPath picks of it.
func printObjects(w io.Writer, q query, results []found) error {
	raws, err := q.documents(results)
	if err != nil {
		return err
	}
	switch {
	case q.output.format == "yaml":
		return printYAML(w, raws)
	case len(raws) == 0:
		return nil
	case q.output.format == "jsonpath":
		all, err := oneList(raws)
		if err != nil {
			return err
		}
		return q.output.renderPath(w, all)
	}
	out := raws[0]
	if len(raws) > 1 {
		out = array(raws)
	}
	b, err := manifest.Indent(out)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// oneList returns what a JSONPath is carried out on: a document as it is, several in
// one list, as kubectl has them.
func oneList(raws []json.RawMessage) (json.RawMessage, error) {
	if len(raws) == 1 {
		return raws[0], nil
	}
	var items []json.RawMessage
	for _, raw := range raws {
		var list struct {
			Items []json.RawMessage `json:"items"`
		}
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, fmt.Errorf("--output: %w", err)
		}
		if list.Items == nil {
			list.Items = []json.RawMessage{raw}
		}
		items = append(items, list.Items...)
	}
	return json.RawMessage(`{"apiVersion":"v1","kind":"List","items":` + string(array(items)) + `}`), nil
}

func array(raws []json.RawMessage) json.RawMessage {
	parts := make([]string, len(raws))
	for i, r := range raws {
		parts[i] = string(r)
	}
	return json.RawMessage("[" + strings.Join(parts, ",") + "]")
}

// documents returns one object as itself, a kind as a list, and several kinds
// one after the other.
func (q *query) documents(results []found) ([]json.RawMessage, error) {
	var raws []json.RawMessage
	for _, f := range results {
		if q.export {
			f.objects = exported(f.objects)
		}
		var raw json.RawMessage
		var err error
		switch {
		case (len(q.names) == 1 || len(q.keys) == 1) && len(f.objects) == 1:
			raw, err = manifest.JSON(f.objects[0])
		case q.named() && len(f.objects) == 0:
			continue
		default:
			raw, err = manifest.List(f.kind, f.revision, f.objects)
		}
		if err != nil {
			return nil, err
		}
		raws = append(raws, raw)
	}
	return raws, nil
}

func printYAML(w io.Writer, raws []json.RawMessage) error {
	for i, raw := range raws {
		if i > 0 {
			fmt.Fprintln(w, "---")
		}
		b, err := manifest.YAML(raw)
		if err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// exported returns objects as they can be created in another cluster.
func exported(objects []store.Object) []store.Object {
	out := make([]store.Object, len(objects))
	for i, o := range objects {
		o.Value, o.Revision = store.Clone(o.Value), 0
		m := store.Meta(o.Value)
		*m = metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, Labels: m.Labels, Annotations: m.Annotations}
		out[i] = o
	}
	return out
}
