package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/template"

	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/util/jsonpath"

	"github.com/routerd/routerd/store"
)

// output is how get prints.
type output struct {
	format  string // table, wide, ps, yaml, json, name, columns, template or jsonpath
	columns []column
	text    *template.Template
	path    *jsonpath.JSONPath
}

// column is a column that the command line asks for: a heading of the table, or one
// of the user's own with a path into the object.
type column struct {
	head string
	path *jsonpath.JSONPath // nil: the heading is one of the table's
}

var outputs = []string{"table", "wide", "ps", "yaml", "json", "name", "custom-columns=…", "custom-columns-file=…", "go-template=…", "go-template-file=…", "jsonpath=…", "jsonpath-file=…"}

// parseOutput reads -o.
func parseOutput(s string) (output, error) {
	name, arg, has := strings.Cut(s, "=")
	needs := slices.ContainsFunc(outputs, func(o string) bool { return o == name+"=…" })
	if has && arg == "" || !has && needs {
		return output{}, usagef("--output %s: give an argument after =", name)
	}
	if file, ok := strings.CutSuffix(name, "-file"); ok && has {
		b, err := os.ReadFile(arg)
		if err != nil {
			return output{}, fmt.Errorf("--output %s: %w", name, err)
		}
		name, arg = file, strings.TrimSpace(string(b))
	}
	switch {
	case has && name == "custom-columns":
		cols, err := parseColumns(arg)
		return output{format: "columns", columns: cols}, err
	case has && name == "go-template":
		t, err := template.New("-o go-template").Funcs(template.FuncMap{"join": join}).Parse(arg)
		if err != nil {
			return output{}, usagef("--output: %v", err)
		}
		return output{format: "template", text: t}, nil
	case has && name == "jsonpath":
		// As kubectl has it: what an object lacks prints as nothing.
		path := jsonpath.New("-o jsonpath").AllowMissingKeys(true)
		if err := path.Parse(arg); err != nil {
			return output{}, usagef("--output jsonpath=%s: %v", arg, err)
		}
		return output{format: "jsonpath", path: path}, nil
	case !has && slices.Contains([]string{"table", "wide", "ps", "yaml", "json", "name"}, name):
		return output{format: name}, nil
	}
	return output{}, usagef("--output %q: must be one of %s", s, strings.Join(outputs, ", "))
}

// parseColumns reads "NAME,CIDR" and "POOL:.metadata.name,CIDR:.spec.cidr".
func parseColumns(s string) ([]column, error) {
	var out []column
	for part := range strings.SplitSeq(s, ",") {
		head, path, own := strings.Cut(part, ":")
		if head == "" || own && !strings.HasPrefix(path, ".") {
			return nil, usagef("--output custom-columns: %q: write a heading of `-o wide`, or HEADING:.path.to.field", part)
		}
		c := column{head: head}
		if own {
			c.path = jsonpath.New(head).AllowMissingKeys(true)
			if err := c.path.Parse("{" + path + "}"); err != nil {
				return nil, usagef("--output custom-columns: %q: %v", part, err)
			}
		}
		out = append(out, c)
	}
	return out, nil
}

// join is strings.Join for templates: what is printed of each of a list.
func join(list any, sep string) (string, error) {
	b, err := json.Marshal(list)
	if err != nil {
		return "", err
	}
	var all []any
	if err := json.Unmarshal(b, &all); err != nil {
		return "", fmt.Errorf("join: %T is no list", list)
	}
	texts := make([]string, len(all))
	for i, v := range all {
		texts[i] = fmt.Sprint(v)
	}
	return strings.Join(texts, sep), nil
}

// heads returns what is at the head of a kind's table, and for each column the path,
// nil where it is one of the table's own.
func (o output) heads(kind store.Kind, c columns) (heads []string, paths map[string]*jsonpath.JSONPath, err error) {
	switch o.format {
	case "wide":
		return c.wide, nil, nil
	case "columns":
	default:
		return c.head, nil, nil
	}
	paths = map[string]*jsonpath.JSONPath{}
	for _, col := range o.columns {
		if col.path == nil && !slices.Contains(c.wide, col.head) && !slices.Contains(c.head, col.head) {
			return nil, nil, usagef("--output custom-columns: %s have no column %q; there are %s; or write %s:.path.to.field",
				kind.Plural(), col.head, strings.Join(c.wide, ", "), col.head)
		}
		heads = append(heads, col.head)
		if col.path != nil {
			paths[col.head] = col.path
		}
	}
	return heads, paths, nil
}

// at returns what is at a path of an object, as a cell shows it.
func at(object []byte, path *jsonpath.JSONPath) string {
	var v any
	if kjson.Unmarshal(object, &v) != nil {
		return none
	}
	results, err := path.FindResults(v)
	if err != nil {
		return none
	}
	var texts []string
	for _, list := range results {
		for _, r := range list {
			switch v := r.Interface().(type) {
			case nil:
			case string:
				texts = append(texts, v)
			default:
				b, err := json.Marshal(v)
				if err != nil {
					return none
				}
				texts = append(texts, string(b))
			}
		}
	}
	if len(texts) == 0 {
		return none
	}
	return strings.Join(texts, ",")
}

// none stands for what is not there, as kubectl has it.
const none = "<none>"

// items is a list as templates see it.
type items struct {
	Kind, APIVersion string
	Items            []any
}

// render carries a template out on all that was found: a list of lists, or of
// objects where they were named, as calicoctl's are.
func (o output) render(w io.Writer, named bool, results []found) error {
	var data []any
	for _, f := range results {
		var values []any
		for _, obj := range f.objects {
			v := store.Clone(obj.Value)
			store.SetDefaults(v)
			values = append(values, v)
		}
		if named {
			data = append(data, values...)
		} else {
			data = append(data, items{string(f.kind) + "List", store.APIVersion, values})
		}
	}
	if err := o.text.Execute(w, data); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}

// renderPath carries a JSONPath out on what -o json prints.
func (o output) renderPath(w io.Writer, document json.RawMessage) error {
	var v any
	if err := kjson.Unmarshal(document, &v); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	if err := o.path.Execute(w, v); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}
