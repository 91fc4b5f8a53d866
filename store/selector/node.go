package selector

import (
	"slices"
	"strings"
)

// node is a part of a parsed expression.
type node interface {
	eval(Labels) bool
	appendTo([]byte) []byte // the canonical form
	height() int            // of the tree below, 1 for a test
}

type (
	all    struct{}
	global struct{}
	has    struct{ label string }
	not    struct{ operand node }

	// group is operands joined by && or ||.
	group struct {
		or       bool
		operands []node
		tall     int
	}

	// compare is a label tested against one string.
	compare struct {
		label, value string
		op           operator
	}

	// member is a label tested against a set: sorted, without repeats.
	member struct {
		label  string
		negate bool
		values []string
	}
)

type operator string

const (
	equal      operator = "=="
	notEqual   operator = "!="
	contains   operator = "contains"
	startsWith operator = "starts with"
	endsWith   operator = "ends with"
)

func (all) eval(Labels) bool { return true }

// eval of global is true: the expression stands alone in the one field that
// takes it, where the reader asks for it by name.
func (global) eval(Labels) bool { return true }

func (n has) eval(l Labels) bool {
	_, ok := l.Get(n.label)
	return ok
}

func (n not) eval(l Labels) bool { return !n.operand.eval(l) }

func (n *group) eval(l Labels) bool {
	for _, o := range n.operands {
		if o.eval(l) == n.or {
			return n.or
		}
	}
	return !n.or
}

func (n *compare) eval(l Labels) bool {
	v, ok := l.Get(n.label)
	switch n.op {
	case equal:
		return ok && v == n.value
	case notEqual:
		return !ok || v != n.value
	case contains:
		return ok && strings.Contains(v, n.value)
	case startsWith:
		return ok && strings.HasPrefix(v, n.value)
	case endsWith:
		return ok && strings.HasSuffix(v, n.value)
	}
	panic("selector: unknown operator " + string(n.op))
}

func (n *member) eval(l Labels) bool {
	v, ok := l.Get(n.label)
	if !ok {
		return n.negate
	}
	_, found := slices.BinarySearch(n.values, v)
	return found != n.negate
}

func (all) height() int                 { return 1 }
func (global) height() int              { return 1 }
func (has) height() int                 { return 1 }
func (n not) height() int               { return n.operand.height() + 1 }
func (n *group) height() int            { return n.tall }
func (*compare) height() int            { return 1 }
func (*member) height() int             { return 1 }
func (all) appendTo(b []byte) []byte    { return append(b, "all()"...) }
func (global) appendTo(b []byte) []byte { return append(b, "global()"...) }

func (n has) appendTo(b []byte) []byte {
	b = append(b, "has("...)
	b = append(b, n.label...)
	return append(b, ')')
}

func (n not) appendTo(b []byte) []byte { return n.operand.appendTo(append(b, '!')) }

func (n *group) appendTo(b []byte) []byte {
	sep := " && "
	if n.or {
		sep = " || "
	}
	b = append(b, '(')
	for i, o := range n.operands {
		if i > 0 {
			b = append(b, sep...)
		}
		b = o.appendTo(b)
	}
	return append(b, ')')
}

func (n *compare) appendTo(b []byte) []byte {
	b = append(b, n.label...)
	b = append(b, ' ')
	b = append(b, n.op...)
	b = append(b, ' ')
	return appendQuoted(b, n.value)
}

func (n *member) appendTo(b []byte) []byte {
	b = append(b, n.label...)
	if n.negate {
		b = append(b, " not"...)
	}
	b = append(b, " in {"...)
	for i, v := range n.values {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = appendQuoted(b, v)
	}
	return append(b, '}')
}

func appendQuoted(b []byte, s string) []byte {
	quote := byte('"')
	if strings.Contains(s, `"`) {
		quote = '\''
	}
	b = append(b, quote)
	b = append(b, s...)
	return append(b, quote)
}
