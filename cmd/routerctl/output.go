package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/template"

	"github.com/routerd/routerd/store"
)

// output is how get prints.
type output struct {
	format  string // table, wide, ps, yaml, json, name, columns or template
	columns []column
	text    *template.Template
}

// column is a column that the command line asks for: a heading of the table, or one
// of the user's own with a path into the object.
type column struct {
	head string
	path []string // nil: the heading is one of the table's
}

var outputs = []string{"table", "wide", "ps", "yaml", "json", "name", "custom-columns=…", "custom-columns-file=…", "go-template=…", "go-template-file=…"}

// parseOutput reads -o.
func parseOutput(s string) (output, error) {
	name, arg, has := strings.Cut(s, "=")
	if has && arg == "" || !has && (strings.HasPrefix(name, "custom-columns") || strings.HasPrefix(name, "go-template")) {
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
			c.path = strings.Split(path[1:], ".")
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
func (o output) heads(kind store.Kind, c columns) (heads []string, paths map[string][]string, err error) {
	switch o.format {
	case "wide":
		return c.wide, nil, nil
	case "columns":
	default:
		return c.head, nil, nil
	}
	paths = map[string][]string{}
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
func at(object []byte, path []string) string {
	var v any
	if json.Unmarshal(object, &v) != nil {
		return none
	}
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return none
		}
		v = m[name]
	}
	switch v := v.(type) {
	case nil:
		return none
	case string:
		return v
	}
	b, err := json.Marshal(v)
	if err != nil {
		return none
	}
	return string(b)
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
