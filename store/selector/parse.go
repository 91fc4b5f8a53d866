package selector

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	maxLabel = 512 // characters of a label's name

	// Limits of nesting, so that a hostile expression cannot exhaust the
	// stack. Calico's fields hold at most 1,024 characters. The canonical form
	// has at most as many parentheses as the tree is high, so it is always
	// within the second limit when the tree is within the first.
	maxHeight = 1000
	maxParens = 2000
)

// parser reads an expression from left to right.
type parser struct {
	in    string
	pos   int
	depth int // open parentheses
}

func (p *parser) errorAt(pos int, format string, args ...any) error {
	return &SyntaxError{Selector: p.in, Offset: pos, Message: fmt.Sprintf(format, args...)}
}

func (p *parser) skipSpace() {
	for p.pos < len(p.in) && (p.in[p.pos] == ' ' || p.in[p.pos] == '\t') {
		p.pos++
	}
}

// accept consumes s if it comes next, after white space.
func (p *parser) accept(s string) bool {
	p.skipSpace()
	if !strings.HasPrefix(p.in[p.pos:], s) {
		return false
	}
	p.pos += len(s)
	return true
}

// acceptBoth consumes two words with or without white space between them, or
// nothing.
func (p *parser) acceptBoth(first, second string) bool {
	start := p.pos
	if p.accept(first) && p.accept(second) {
		return true
	}
	p.pos = start
	return false
}

// found describes what comes next, for errors.
func (p *parser) found() string {
	p.skipSpace()
	if p.pos == len(p.in) {
		return "the end"
	}
	if name := identifier(p.in[p.pos:]); name != "" {
		return fmt.Sprintf("%q", name)
	}
	r, _ := utf8.DecodeRuneInString(p.in[p.pos:])
	if r == '\n' || r == '\r' {
		return "a line break; write the selector on one line"
	}
	return fmt.Sprintf("%q", r)
}

func (p *parser) parse() (node, error) {
	p.skipSpace()
	if p.pos == len(p.in) {
		return all{}, nil
	}
	n, err := p.parseGroup(true)
	if err != nil {
		return nil, err
	}
	p.skipSpace()
	if p.pos < len(p.in) {
		return nil, p.errorAt(p.pos, "expected &&, || or the end, found %s%s", p.found(), hint(p.in[p.pos:]))
	}
	return n, nil
}

// hint names the cure of a common mistake at the beginning of rest.
func hint(rest string) string {
	switch word := identifier(rest); {
	case strings.EqualFold(word, "and"):
		return "; write && for and"
	case strings.EqualFold(word, "or"):
		return "; write || for or"
	case strings.HasPrefix(rest, ")"):
		return "; it has no opening parenthesis"
	}
	return ""
}

// parseGroup reads operands joined by || (or by &&, if or is false). One
// operand alone is no group.
func (p *parser) parseGroup(or bool) (node, error) {
	next, sep := p.parseUnary, "&&"
	if or {
		next, sep = func() (node, error) { return p.parseGroup(false) }, "||"
	}
	start := p.pos
	first, err := next()
	if err != nil {
		return nil, err
	}
	if !p.accept(sep) {
		return first, nil
	}
	g := &group{or: or, operands: []node{first}, tall: first.height() + 1}
	for {
		n, err := next()
		if err != nil {
			return nil, err
		}
		g.operands = append(g.operands, n)
		g.tall = max(g.tall, n.height()+1)
		if g.tall > maxHeight {
			return nil, p.errorAt(start, "groups are nested deeper than %d", maxHeight)
		}
		if !p.accept(sep) {
			return g, nil
		}
	}
}

func (p *parser) parseUnary() (node, error) {
	start, negate := p.pos, false
	for p.accept("!") {
		negate = !negate
	}
	n, err := p.parseTerm()
	if err != nil || !negate {
		return n, err
	}
	if inner, ok := n.(not); ok {
		return inner.operand, nil // as !!, which has no canonical form of its own
	}
	if n.height() >= maxHeight {
		return nil, p.errorAt(start, "groups are nested deeper than %d", maxHeight)
	}
	return not{n}, nil
}

func (p *parser) parseTerm() (node, error) {
	p.skipSpace()
	start := p.pos
	switch {
	case p.accept("("):
		if p.depth++; p.depth > maxParens {
			return nil, p.errorAt(start, "more than %d open parentheses", maxParens)
		}
		n, err := p.parseGroup(true)
		if err != nil {
			return nil, err
		}
		p.depth--
		if !p.accept(")") {
			return nil, p.errorAt(p.pos, "expected &&, || or a closing parenthesis, found %s%s", p.found(), hint(p.in[p.pos:]))
		}
		return n, nil
	case p.accept("all("):
		return all{}, p.closeCall("all")
	case p.accept("global("):
		return global{}, p.closeCall("global")
	case p.accept("has("):
		label, err := p.parseLabel("has(")
		if err != nil {
			return nil, err
		}
		return has{label}, p.closeCall("has")
	}
	return p.parseTest()
}

func (p *parser) closeCall(name string) error {
	if p.accept(")") {
		return nil
	}
	return p.errorAt(p.pos, "expected a closing parenthesis after %s(, found %s", name, p.found())
}

func (p *parser) parseLabel(after string) (string, error) {
	p.skipSpace()
	label := identifier(p.in[p.pos:])
	if label == "" {
		return "", p.errorAt(p.pos, "expected a label name after %s, found %s; names are made of letters, digits and _ . / -", after, p.found())
	}
	if len(label) > maxLabel {
		return "", p.errorAt(p.pos, "label name of %d characters; at most %d are allowed", len(label), maxLabel)
	}
	p.pos += len(label)
	return label, nil
}

// parseTest reads a label, an operator and what it is compared with. Words are
// operators only after a label, so that a label may be called "in".
func (p *parser) parseTest() (node, error) {
	if identifier(p.in[p.pos:]) == "" {
		cure := "a label and an operator, has(label), all() or a parenthesis"
		if p.pos < len(p.in) && (p.in[p.pos] == '"' || p.in[p.pos] == '\'') {
			cure = "the label before its operator and the string after it: label == 'value'"
		}
		return nil, p.errorAt(p.pos, "expected %s, found %s", cure, p.found())
	}
	label, err := p.parseLabel("the operator")
	if err != nil {
		return nil, err
	}
	p.skipSpace()
	start := p.pos
	switch {
	case p.accept("=="):
		return p.parseCompare(label, equal)
	case p.accept("!="):
		return p.parseCompare(label, notEqual)
	case p.accept("="):
		return nil, p.errorAt(start, "= is no operator; write == to compare")
	case p.accept("contains"):
		return p.parseCompare(label, contains)
	case p.acceptBoth("starts", "with"):
		return p.parseCompare(label, startsWith)
	case p.acceptBoth("ends", "with"):
		return p.parseCompare(label, endsWith)
	case p.acceptBoth("not", "in"):
		return p.parseMember(label, true)
	case p.accept("in"):
		return p.parseMember(label, false)
	}
	p.pos = start
	msg := fmt.Sprintf("expected an operator after label %q, found %s; operators are ==, !=, in, not in, contains, starts with, ends with", label, p.found())
	switch {
	case label == "has" && strings.HasPrefix(p.in[start:], "("):
		msg = "white space between has and its parenthesis; write has(label)"
	case label == "not":
		msg = "not is no operator here; write ! for not"
	}
	return nil, p.errorAt(start, "%s", msg)
}

func (p *parser) parseCompare(label string, op operator) (node, error) {
	v, err := p.parseString(string(op))
	if err != nil {
		return nil, err
	}
	return &compare{label: label, value: v, op: op}, nil
}

func (p *parser) parseString(after string) (string, error) {
	p.skipSpace()
	if p.pos == len(p.in) || (p.in[p.pos] != '"' && p.in[p.pos] != '\'') {
		return "", p.errorAt(p.pos, "expected a string in quotes after %s, found %s", after, p.found())
	}
	quote := p.in[p.pos : p.pos+1]
	n := strings.Index(p.in[p.pos+1:], quote)
	if n < 0 {
		return "", p.errorAt(p.pos, "the string has no closing %s", quote)
	}
	s := p.in[p.pos+1 : p.pos+1+n]
	p.pos += n + 2
	return s, nil
}

func (p *parser) parseMember(label string, negate bool) (node, error) {
	if !p.accept("{") {
		return nil, p.errorAt(p.pos, "expected a set such as {'a', 'b'}, found %s", p.found())
	}
	m := &member{label: label, negate: negate}
	for !p.accept("}") {
		v, err := p.parseString("{ or a comma")
		if err != nil {
			return nil, err
		}
		m.values = append(m.values, v)
		if !p.accept(",") {
			if !p.accept("}") {
				return nil, p.errorAt(p.pos, "expected a comma or a closing brace in the set, found %s", p.found())
			}
			break
		}
	}
	slices.Sort(m.values)
	m.values = slices.Compact(m.values)
	return m, nil
}

// identifier returns the label name that s begins with.
func identifier(s string) string {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' && c != '.' && c != '/' && c != '-' {
			return s[:i]
		}
	}
	return s
}
