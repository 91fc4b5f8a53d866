package config

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Written says that a file has a value that is somebody's, in the way of another.
type Written struct {
	Key, Value string
}

func (w *Written) Error() string { return fmt.Sprintf("datastore.%s is %s there", w.Key, w.Value) }

// UseDatastore returns the text of a configuration file with the endpoints and
// certificates of an external etcd in it. All else stays as it is written, byte for
// byte, comments included. A key that says otherwise is a [Written] error, unless
// force is set. Text that already says it comes back as it is.
//
// It does not know all of YAML's forms: where the section stands in one that people
// do not write, it says which lines to write by hand.
func UseDatastore(text []byte, d Datastore, force bool) ([]byte, error) {
	want := map[string]any{"endpoints": asAny(d.Endpoints), "caFile": d.CAFile, "certFile": d.CertFile, "keyFile": d.KeyFile}
	old, err := sections(text)
	if err != nil {
		return nil, err
	}
	have, _ := old["datastore"].(map[string]any)
	taken := blocking(have, want)
	if len(taken) > 0 && !force {
		return nil, &taken[0]
	}
	// What is in the way is emptied.
	for _, w := range taken {
		if _, ok := want[w.Key]; !ok {
			want[w.Key] = ""
		}
	}
	byHand := func(why string) error {
		var b strings.Builder
		for _, k := range slices.Sorted(maps.Keys(want)) {
			fmt.Fprintf(&b, "\n  %s: %s", k, flow(want[k]))
		}
		return fmt.Errorf("%s: write it by hand:\ndatastore:%s", why, b.String())
	}
	out, err := writeSection(text, want)
	if err != nil {
		return nil, byHand(err.Error())
	}
	now, err := sections(out)
	if err != nil {
		return nil, byHand("the section cannot be added")
	}
	for k, v := range want {
		set(old, k, v)
	}
	if !reflect.DeepEqual(now, old) {
		return nil, byHand("the section cannot be added")
	}
	return out, nil
}

func asAny(list []string) (out []any) {
	for _, s := range list {
		out = append(out, s)
	}
	return out
}

// sections reads a file as viper does, except that its keys keep their case.
func sections(text []byte) (map[string]any, error) {
	all := map[string]any{}
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&all); err != nil && len(bytes.TrimSpace(stripComments(text))) > 0 {
		return nil, fmt.Errorf("it cannot be read: %w", err)
	}
	if all == nil {
		all = map[string]any{}
	}
	if err := d.Decode(new(any)); err == nil {
		return nil, errors.New("it has several documents, of which the first alone counts: leave one")
	}
	return all, nil
}

// stripComments leaves what a decoder could find something in.
func stripComments(text []byte) (out []byte) {
	for line := range bytes.Lines(text) {
		if l := bytes.TrimSpace(line); len(l) > 0 && l[0] != '#' && !bytes.Equal(l, []byte("---")) {
			out = append(out, line...)
		}
	}
	return out
}

// find returns the key of a map as it is written there: viper makes no difference
// between cases.
func find[V any](m map[string]V, key string) (string, bool) {
	for k := range m {
		if strings.EqualFold(k, key) {
			return k, true
		}
	}
	return key, false
}

func set(all map[string]any, key string, value any) {
	name, _ := find(all, "datastore")
	section, ok := all[name].(map[string]any)
	if !ok {
		section = map[string]any{}
		all[name] = section
	}
	if parent, child, nested := strings.Cut(key, "."); nested {
		p, _ := find(section, parent)
		if inner, ok := section[p].(map[string]any); ok {
			c, _ := find(inner, child)
			inner[c] = value
		}
		return
	}
	k, _ := find(section, key)
	section[k] = value
}

// blocking lists what of a section says otherwise than wanted, or would count beside
// it: kind, users, and an embedded datastore that serves others.
func blocking(have, want map[string]any) (list []Written) {
	look := func(key string, value any, allowed ...any) {
		empty := value == nil || value == "" || reflect.DeepEqual(value, []any{})
		if empty || slices.ContainsFunc(allowed, func(a any) bool { return reflect.DeepEqual(a, value) }) {
			return
		}
		list = append(list, Written{key, flow(value)})
	}
	at := func(m map[string]any, key string) any {
		k, _ := find(m, key)
		return m[k]
	}
	for _, k := range slices.Sorted(maps.Keys(want)) {
		look(k, at(have, k), want[k])
	}
	look("kind", at(have, "kind"), DatastoreEtcd)
	look("username", at(have, "username"))
	look("passwordFile", at(have, "passwordFile"))
	embedded, _ := at(have, "embedded").(map[string]any)
	look("embedded.listen", at(embedded, "listen"))
	return list
}

// flow writes a value on one line.
func flow(v any) string {
	n := new(yaml.Node)
	if n.Encode(v) != nil {
		return fmt.Sprint(v)
	}
	n.Style = yaml.FlowStyle
	b, err := yaml.Marshal(n)
	if err != nil {
		return fmt.Sprint(v)
	}
	return strings.TrimSpace(string(b))
}

// writeSection puts values into the section of the datastore, line by line.
func writeSection(text []byte, want map[string]any) ([]byte, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	keys := slices.Sorted(maps.Keys(want))
	section := func(indent string) (out []string) {
		for _, k := range keys {
			out = append(out, indent+k+": "+flow(want[k])+"\n")
		}
		return out
	}
	lines := slices.Collect(strings.Lines(string(text)))
	if n := len(lines); n > 0 && !strings.HasSuffix(lines[n-1], "\n") {
		lines[n-1] += "\n"
	}
	var root *yaml.Node
	if len(doc.Content) > 0 {
		root = doc.Content[0]
	}
	switch {
	case root == nil || root.Kind == yaml.ScalarNode && root.Tag == "!!null":
		return []byte(strings.Join(slices.Concat(lines, []string{"datastore:\n"}, section("  ")), "")), nil
	case root.Kind != yaml.MappingNode || root.Style&yaml.FlowStyle != 0:
		return nil, errors.New("the file does not have one key a line")
	}
	key, value := child(root, "datastore")
	switch {
	case key == nil:
		if n := len(lines); strings.TrimSpace(lines[n-1]) == "..." {
			return nil, errors.New("the file has an end mark")
		}
		return []byte(strings.Join(slices.Concat(lines, []string{"\ndatastore:\n"}, section(strings.Repeat(" ", root.Column+1))), "")), nil
	case value.Kind == yaml.ScalarNode && value.Tag == "!!null":
		if value.Value != "" { // null, or ~
			head, tail, ok := strings.Cut(lines[key.Line-1], ":")
			rest, found := strings.CutPrefix(strings.TrimLeft(tail, " \t"), value.Value)
			if !ok || !found || value.Line != key.Line {
				return nil, errors.New("the section of the datastore is not one key a line")
			}
			lines[key.Line-1] = head + ":" + rest
		}
		return []byte(strings.Join(slices.Insert(lines, key.Line, section(strings.Repeat(" ", key.Column+1))...), "")), nil
	case value.Kind != yaml.MappingNode || value.Style&yaml.FlowStyle != 0 || len(value.Content) == 0:
		return nil, errors.New("the section of the datastore is not one key a line")
	}
	indent := strings.Repeat(" ", value.Content[0].Column-1)
	var added []string
	for _, k := range keys {
		in, name := value, k
		if parent, inner, nested := strings.Cut(k, "."); nested {
			if _, in = child(value, parent); in == nil {
				continue
			}
			name = inner
		}
		at, old := child(in, name)
		if at == nil {
			added = append(added, indent+k+": "+flow(want[k])+"\n")
			continue
		}
		line := lines[at.Line-1]
		// A value is replaced with its line, whose comment stays.
		if last(old) != at.Line || in.Style&yaml.FlowStyle != 0 || old.Anchor != "" {
			return nil, fmt.Errorf("datastore.%s is not on one line", k)
		}
		comment := ""
		if c := at.LineComment + old.LineComment; c != "" {
			comment = " " + c
		}
		lines[at.Line-1] = line[:at.Column-1] + at.Value + ": " + flow(want[k]) + comment + "\n"
	}
	return []byte(strings.Join(slices.Insert(lines, key.Line, added...), "")), nil
}

func child(m *yaml.Node, name string) (key, value *yaml.Node) {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if strings.EqualFold(m.Content[i].Value, name) {
			return m.Content[i], m.Content[i+1]
		}
	}
	return nil, nil
}

// last returns the last line of a value, as far as its nodes tell: what they do not,
// such as a bracket on a line of its own, shows when the result is read again.
func last(n *yaml.Node) int {
	line := n.Line
	if n.Kind == yaml.ScalarNode && (n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 || strings.Contains(n.Value, "\n")) {
		line++
	}
	for _, c := range n.Content {
		line = max(line, last(c))
	}
	return line
}
