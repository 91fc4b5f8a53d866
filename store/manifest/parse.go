package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Limits against input that would exhaust the memory. etcd takes no request
// above 1.5 MiB, so real manifests stay far below.
const (
	maxInput  = 16 << 20
	maxValues = 1 << 17 // after YAML's aliases are followed
	maxDepth  = 200
)

// root is one document of an input, or what is wrong with its syntax.
type root struct {
	number int // counted from 1
	value  *value
	errs   []syntaxError
}

type syntaxError struct {
	line    int
	message string
}

// parse splits an input into its documents. JSON is tried first where the
// input looks like it, because YAML refuses the tabs that JSON allows.
func parse(data []byte) []root {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	trimmed := bytes.TrimSpace(data)
	if len(trimmed) == 0 {
		return nil
	}
	if trimmed[0] != '{' && trimmed[0] != '[' {
		return parseYAML(data)
	}
	roots, err := parseJSON(data)
	if err == nil {
		return roots
	}
	// YAML's flow style looks like JSON and is not.
	if y := parseYAML(data); !slices.ContainsFunc(y, func(r root) bool { return len(r.errs) > 0 }) {
		return y
	}
	return append(roots, root{number: len(roots) + 1, errs: []syntaxError{*err}})
}

// parseJSON reads JSON values that follow one another.
func parseJSON(data []byte) ([]root, *syntaxError) {
	p := &jsonParser{data: data, dec: json.NewDecoder(bytes.NewReader(data))}
	p.dec.UseNumber()
	var roots []root
	for {
		p.errs = nil
		v, err := p.value(0)
		if errors.Is(err, io.EOF) {
			return roots, nil
		}
		if err != nil {
			return roots, &syntaxError{p.line(), "not JSON: " + err.Error()}
		}
		roots = append(roots, root{number: len(roots) + 1, value: v, errs: p.errs})
	}
}

type jsonParser struct {
	data []byte
	dec  *json.Decoder
	seen int // bytes whose lines are counted
	row  int
	errs []syntaxError
}

// line returns the line that the decoder has reached.
func (p *jsonParser) line() int {
	end := min(int(p.dec.InputOffset()), len(p.data))
	p.row += bytes.Count(p.data[p.seen:max(end, p.seen)], []byte("\n"))
	p.seen = max(end, p.seen)
	return p.row + 1
}

func (p *jsonParser) value(depth int) (*value, error) {
	t, err := p.dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, fmt.Errorf("nested deeper than %d levels", maxDepth)
	}
	v := &value{line: p.line()}
	switch t := t.(type) {
	case nil:
	case bool:
		v.kind, v.text = boolean, strconv.FormatBool(t)
	case json.Number:
		v.kind, v.text = number, t.String()
	case string:
		v.kind, v.text = text, t
	case json.Delim:
		if t == '[' {
			v.kind = array
			err = p.items(v, depth)
		} else {
			v.kind = object
			err = p.members(v, depth)
		}
	}
	return v, unexpectedEnd(err)
}

func (p *jsonParser) items(v *value, depth int) error {
	for p.dec.More() {
		item, err := p.value(depth + 1)
		if err != nil {
			return err
		}
		v.items = append(v.items, item)
	}
	_, err := p.dec.Token()
	return err
}

func (p *jsonParser) members(v *value, depth int) error {
	seen := map[string]bool{}
	for p.dec.More() {
		t, err := p.dec.Token()
		if err != nil {
			return err
		}
		name, _ := t.(string) // the decoder takes nothing else for a key
		line := p.line()
		m, err := p.value(depth + 1)
		if err != nil {
			return err
		}
		if seen[name] {
			p.errs = append(p.errs, syntaxError{line, fmt.Sprintf("key %q is given twice; keep one", name)})
			continue
		}
		seen[name] = true
		v.members = append(v.members, member{name, line, m})
	}
	_, err := p.dec.Token()
	return err
}

// unexpectedEnd keeps an input that ends in the middle of a value apart from
// one that ends after it.
func unexpectedEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("the input ends in the middle of a value")
	}
	return err
}

// parseYAML cuts the input at the lines that separate documents, so that a
// syntax error in one does not hide the others. Such a line cannot occur
// inside of a document (YAML 1.2, section 9.1.2).
func parseYAML(data []byte) []root {
	var roots []root
	var chunk []string
	first, number := 1, 0
	flush := func(next int) {
		if slices.ContainsFunc(chunk, hasContent) {
			number++
			roots = append(roots, parseYAMLDocument(strings.Join(chunk, "\n"), number, first))
		}
		chunk, first = nil, next
	}
	for i, l := range strings.Split(string(data), "\n") {
		l = strings.TrimSuffix(l, "\r")
		if rest, ok := separator(l); ok {
			flush(i + 1)
			l = rest
		}
		chunk = append(chunk, l)
	}
	flush(0)
	return roots
}

// separator reports whether a line separates documents, and returns what the
// new one has on it.
func separator(line string) (string, bool) {
	rest, ok := strings.CutPrefix(line, "---")
	if !ok {
		rest, ok = strings.CutPrefix(line, "...")
	}
	if !ok || rest != "" && rest[0] != ' ' && rest[0] != '\t' {
		return "", false
	}
	return strings.TrimLeft(rest, " \t"), true
}

func hasContent(line string) bool {
	line = strings.TrimSpace(line)
	return line != "" && line[0] != '#' && line[0] != '%'
}

func parseYAMLDocument(doc string, number, line int) root {
	r := root{number: number}
	var n yaml.Node
	if err := yaml.Unmarshal([]byte(doc), &n); err != nil {
		at, message := yamlError(err)
		r.errs = append(r.errs, syntaxError{at + line - 1, "not YAML: " + message})
		return r
	}
	if n.Kind != yaml.DocumentNode || len(n.Content) == 0 {
		r.value = &value{line: line}
		return r
	}
	p := &yamlParser{offset: line - 1, open: map[*yaml.Node]bool{}}
	r.value = p.value(n.Content[0], 0)
	r.errs = p.errs
	return r
}

// yamlError takes the line out of the library's message, where it counts from
// the beginning of the document and not of the file.
func yamlError(err error) (line int, message string) {
	message = strings.TrimPrefix(err.Error(), "yaml: ")
	m := regexp.MustCompile(`^(?s)(?:unmarshal errors:\s*)?line (\d+): (.*)$`).FindStringSubmatch(message)
	if m == nil {
		return 1, message
	}
	line, _ = strconv.Atoi(m[1])
	return max(line, 1), m[2]
}

type yamlParser struct {
	offset int // lines before this document
	count  int
	open   map[*yaml.Node]bool // anchors being followed
	errs   []syntaxError
}

func (p *yamlParser) fail(n *yaml.Node, format string, args ...any) *value {
	v := &value{line: n.Line + p.offset}
	p.errs = append(p.errs, syntaxError{v.line, fmt.Sprintf(format, args...)})
	return v
}

func (p *yamlParser) value(n *yaml.Node, depth int) *value {
	if p.count++; p.count > maxValues || depth > maxDepth {
		if len(p.errs) == 0 {
			p.fail(n, "too large: more than %d values or %d levels once aliases are followed", maxValues, maxDepth)
		}
		return &value{line: n.Line + p.offset}
	}
	v := &value{line: n.Line + p.offset}
	switch n.Kind {
	case yaml.AliasNode:
		if p.open[n.Alias] {
			return p.fail(n, "the alias *%s contains itself", n.Value)
		}
		p.open[n.Alias] = true
		defer delete(p.open, n.Alias)
		return p.value(n.Alias, depth+1)
	case yaml.SequenceNode:
		v.kind = array
		for _, item := range n.Content {
			v.items = append(v.items, p.value(item, depth+1))
		}
		return v
	case yaml.MappingNode:
		v.kind = object
		p.members(v, n, depth)
		return v
	}
	return p.scalar(n)
}

func (p *yamlParser) members(v *value, n *yaml.Node, depth int) {
	var merged []member
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, val := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode {
			p.fail(k, "a key must be plain text")
			continue
		}
		if k.ShortTag() == "!!merge" {
			merged = append(merged, p.merge(val, depth)...)
			continue
		}
		m := member{k.Value, k.Line + p.offset, p.value(val, depth+1)}
		if seen[m.name] {
			p.fail(k, "key %q is given twice; keep one", m.name)
			continue
		}
		seen[m.name] = true
		v.members = append(v.members, m)
	}
	// What is written out wins over what is merged, and earlier over later.
	for _, m := range merged {
		if !seen[m.name] {
			seen[m.name] = true
			v.members = append(v.members, m)
		}
	}
}

// merge returns the members that a "<<" key brings in.
func (p *yamlParser) merge(n *yaml.Node, depth int) []member {
	v := p.value(n, depth+1)
	switch v.kind {
	case object:
		return v.members
	case array:
		var all []member
		for _, item := range v.items {
			if item.kind != object {
				p.fail(n, "only objects can be merged with <<")
			}
			all = append(all, item.members...)
		}
		return all
	}
	p.fail(n, "only objects can be merged with <<")
	return nil
}

func (p *yamlParser) scalar(n *yaml.Node) *value {
	v := &value{line: n.Line + p.offset, text: n.Value}
	switch n.ShortTag() {
	case "!!null":
		v.text = ""
	case "!!str", "!!timestamp":
		v.kind = text
	case "!!bool":
		v.kind, v.text = boolean, strings.ToLower(n.Value)
	case "!!int":
		v.kind = number
		var i int64
		var u uint64
		switch {
		case n.Decode(&i) == nil:
			v.text = strconv.FormatInt(i, 10)
		case n.Decode(&u) == nil:
			v.text = strconv.FormatUint(u, 10)
		default:
			return p.fail(n, "%s is too large for a number", n.Value)
		}
	case "!!float":
		v.kind = number
		var f float64
		if err := n.Decode(&f); err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
			return p.fail(n, "%s is not a number that a manifest can hold", n.Value)
		}
		// The literal is kept where it can be: 1.10 is not 1.1 to one who
		// means an AS number.
		if !json.Valid([]byte(v.text)) {
			v.text = strconv.FormatFloat(f, 'g', -1, 64)
		}
	default:
		return p.fail(n, "the YAML tag %s is not supported", n.Tag)
	}
	return v
}
