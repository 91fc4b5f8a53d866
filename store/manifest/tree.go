package manifest

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

// value is a piece of a document, with the line on which it begins. YAML and
// JSON are both read into it: it keeps the order of members and repeated keys,
// which Go's maps would lose.
type value struct {
	kind    kind
	line    int
	text    string // of a scalar: the text itself, or the literal of a number or a boolean
	members []member
	items   []*value
}

type member struct {
	name  string
	line  int
	value *value
}

type kind uint8

const (
	null kind = iota
	text
	number
	boolean
	object
	array
)

func (k kind) String() string {
	return [...]string{"nothing", "text", "a number", "true or false", "an object", "a list"}[k]
}

// get returns the member of that name, or nil.
func (v *value) get(name string) *value {
	for _, m := range v.members {
		if m.name == name {
			return m.value
		}
	}
	return nil
}

// spell writes members by the names that are meant where they differ from those in
// case alone, as Calico's tools read them. It returns those that then are there twice.
func (v *value) spell(names []string) (twice []member) {
	for i, m := range v.members {
		at := slices.IndexFunc(names, func(name string) bool { return strings.EqualFold(name, m.name) })
		switch {
		case at < 0 || slices.Contains(names, m.name):
		case v.get(names[at]) != nil:
			twice = append(twice, m)
		default:
			v.members[i].name = names[at]
		}
	}
	return twice
}

// textOf returns the text of a member, or "" when there is none.
func (v *value) textOf(name string) string {
	if m := v.get(name); m != nil && m.kind == text {
		return m.text
	}
	return ""
}

// appendJSON writes v. Members that are null are left out: in a manifest,
// null is the same as absent.
func (v *value) appendJSON(b []byte) []byte {
	switch v.kind {
	case null:
		return append(b, "null"...)
	case text:
		return appendText(b, v.text)
	case number, boolean:
		return append(b, v.text...)
	case array:
		b = append(b, '[')
		for i, item := range v.items {
			if i > 0 {
				b = append(b, ',')
			}
			b = item.appendJSON(b)
		}
		return append(b, ']')
	case object:
		b = append(b, '{')
		first := true
		for _, m := range v.members {
			if m.value.kind == null {
				continue
			}
			if !first {
				b = append(b, ',')
			}
			first = false
			b = append(appendText(b, m.name), ':')
			b = m.value.appendJSON(b)
		}
		return append(b, '}')
	}
	panic("manifest: value of kind " + strconv.Itoa(int(v.kind)))
}

func appendText(b []byte, s string) []byte {
	q, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string can always be encoded
	}
	return append(b, q...)
}
