package selector

import (
	"slices"
)

// Has returns the selector has(label).
func Has(label string) *Selector { return of(has{label}) }

// Equal returns the selector label == 'value'.
func Equal(label, value string) *Selector {
	return of(&compare{label: label, value: value, op: equal})
}

// In returns the selector label in {values}.
func In(label string, values []string) *Selector {
	values = slices.Clone(values)
	slices.Sort(values)
	return of(&member{label: label, values: slices.Compact(values)})
}

// Not returns the selector that matches what s does not.
func Not(s *Selector) *Selector {
	if inner, ok := s.root.(not); ok {
		return of(inner.operand)
	}
	return of(not{s.root})
}

// And returns the selector that matches what all of the operands match:
// everything, when there are none. Operands that match everything leave no
// trace in its canonical form.
func And(operands ...*Selector) *Selector {
	g := &group{}
	for _, s := range operands {
		switch n := s.root.(type) {
		case all:
		case *group:
			if !n.or {
				g.operands = append(g.operands, n.operands...)
				continue
			}
			g.operands = append(g.operands, n)
		default:
			g.operands = append(g.operands, n)
		}
	}
	switch len(g.operands) {
	case 0:
		return All()
	case 1:
		return of(g.operands[0])
	}
	for _, n := range g.operands {
		g.tall = max(g.tall, n.height()+1)
	}
	return of(g)
}

// Prefixed returns the selector with prefix in front of every label, and with
// has(everything) in place of every all(). It turns a selector over the labels
// of namespaces, say, into one over endpoints that carry these labels with a
// prefix.
func (s *Selector) Prefixed(prefix, everything string) *Selector {
	return of(prefixed(s.root, prefix, everything))
}

func prefixed(n node, prefix, everything string) node {
	switch n := n.(type) {
	case all:
		return has{everything}
	case has:
		return has{prefix + n.label}
	case not:
		return not{prefixed(n.operand, prefix, everything)}
	case *group:
		g := &group{or: n.or, tall: n.tall}
		for _, o := range n.operands {
			g.operands = append(g.operands, prefixed(o, prefix, everything))
		}
		return g
	case *compare:
		return &compare{label: prefix + n.label, value: n.value, op: n.op}
	case *member:
		return &member{label: prefix + n.label, negate: n.negate, values: n.values}
	}
	return n
}

func of(n node) *Selector { return &Selector{root: n, text: string(n.appendTo(nil))} }

// Condition is a test that an index of labels can answer: the label has the
// value or, with Any, is there at all.
type Condition struct {
	Label string
	Value string
	Any   bool // Value is empty
}

// Covers returns lists of conditions, each of which is a cover: every set of
// labels that the selector matches fulfils at least one condition of it. So
// an index that knows who fulfils a condition need try the selector only on
// those who fulfil one of the cheapest list. A list without conditions says
// that the selector matches nothing, no lists that nothing is known.
func (s *Selector) Covers() [][]Condition { return covers(s.root) }

func covers(n node) [][]Condition {
	switch n := n.(type) {
	case has:
		return [][]Condition{{{Label: n.label, Any: true}}}
	case *compare:
		switch n.op {
		case equal:
			return [][]Condition{{{Label: n.label, Value: n.value}}}
		case contains, startsWith, endsWith:
			return [][]Condition{{{Label: n.label, Any: true}}}
		case notEqual:
		}
	case *member:
		if n.negate {
			return nil
		}
		list := make([]Condition, len(n.values))
		for i, v := range n.values {
			list[i] = Condition{Label: n.label, Value: v}
		}
		return [][]Condition{list}
	case *group:
		if n.or {
			return coverAll(n.operands)
		}
		var lists [][]Condition
		for _, o := range n.operands {
			lists = append(lists, covers(o)...)
		}
		return lists
	}
	return nil
}

// coverAll returns one cover of what any of the operands matches. Of an
// operand that has several it takes the one that looks narrowest.
func coverAll(operands []node) [][]Condition {
	var union []Condition
	for _, o := range operands {
		lists := covers(o)
		if len(lists) == 0 {
			return nil
		}
		best := slices.MinFunc(lists, func(a, b []Condition) int { return width(a) - width(b) })
		union = append(union, best...)
	}
	return [][]Condition{union}
}

// width guesses how much fulfils a list of conditions.
func width(list []Condition) int {
	const presence = 100 // a label's presence says less than its value
	w := 0
	for _, c := range list {
		if c.Any {
			w += presence
		} else {
			w++
		}
	}
	return w
}
