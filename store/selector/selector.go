// Package selector is Calico's label selector language: it parses an
// expression once and then evaluates it against sets of labels.
//
//	or    = and { "||" and }
//	and   = unary { "&&" unary }
//	unary = { "!" } ( "(" or ")" | "all()" | "global()" | "has(" label ")" | test )
//	test  = label ( "==" | "!=" ) string
//	      | label ( "contains" | "starts with" | "ends with" ) string
//	      | label ( "in" | "not in" ) "{" [ string { "," string } [ "," ] ] "}"
//
// White space is the space and the tab. An empty expression means all().
// With the label absent, != and not in are true, every other test is false.
package selector

import (
	"fmt"
	"unicode/utf8"
)

// Labels is a set of labels. It lets a caller evaluate a selector over labels
// that come from several places, such as an endpoint's own and those that its
// profiles give it, without merging them first.
type Labels interface {
	// Get returns the value of a label and whether it is there.
	Get(name string) (value string, ok bool)
}

// Map is a plain set of labels. A nil Map is an empty set.
type Map map[string]string

// Get implements [Labels].
func (m Map) Get(name string) (string, bool) {
	v, ok := m[name]
	return v, ok
}

// Selector is a parsed expression. It is immutable and safe for concurrent
// use. Selectors come from [Parse] or [All].
type Selector struct {
	root node
	text string
}

// All returns the selector that matches everything.
func All() *Selector { return &Selector{root: all{}, text: "all()"} }

// Parse reads an expression. Its errors are of type *[SyntaxError].
func Parse(s string) (*Selector, error) {
	p := parser{in: s}
	root, err := p.parse()
	if err != nil {
		return nil, err
	}
	return &Selector{root: root, text: string(root.appendTo(nil))}, nil
}

// Matches reports whether the selector is true of labels.
func (s *Selector) Matches(labels map[string]string) bool { return s.root.eval(Map(labels)) }

// MatchesLabels is [Selector.Matches] for any source of labels.
func (s *Selector) MatchesLabels(labels Labels) bool { return s.root.eval(labels) }

// String returns the canonical form: strings in double quotes (single ones if
// they hold a double quote), one space around operators, sets sorted and
// without repeats, every group of && or || in parentheses. Two selectors with
// the same canonical form are equivalent; Calico computes its identifiers of
// selectors from this form.
func (s *Selector) String() string { return s.text }

// SyntaxError says where an expression cannot be read and what to write
// instead.
type SyntaxError struct {
	Selector string // the whole expression
	Offset   int    // in bytes from its beginning
	Message  string // what is wrong there, and the cure
}

func (e *SyntaxError) Error() string {
	column := utf8.RuneCountInString(e.Selector[:min(e.Offset, len(e.Selector))]) + 1
	return fmt.Sprintf("selector %q, character %d: %s", e.Selector, column, e.Message)
}
