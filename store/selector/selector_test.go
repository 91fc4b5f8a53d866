package selector_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store/selector"
)

func TestMatches(t *testing.T) {
	t.Parallel()
	labels := map[string]string{"a": "b", "env": "prod-eu", "in": "b", "has": "x", "not": "n", "empty": "", "p.io/x-y_z": "1"}
	for _, tc := range []struct {
		in   string
		want bool
	}{
		{"", true},
		{" \t ", true},
		{"all()", true},
		{"all( )", true},
		{"!all()", false},
		{"global()", true},
		{"has(a)", true},
		{"has( a )", true},
		{"has(zz)", false},
		{"has(empty)", true},
		{"empty == ''", true},
		{"a == 'b'", true},
		{`a=="b"`, true},
		{"a == 'c'", false},
		{"a != 'c'", true},
		{"a != 'b'", false},
		{"a in {'b'}", true},
		{"a in{'x','b',}", true},
		{"a in {}", false},
		{"a not in {}", true},
		{"a not in {'b', 'c'}", false},
		{"a notin {'c'}", true},
		{"env contains 'od-'", true},
		{"env contains'zz'", false},
		{"env starts with 'prod'", true},
		{"env startswith 'prod'", true},
		{"env starts\twith 'eu'", false},
		{"env ends with 'eu'", true},
		{"env endswith 'prod'", false},
		{"in in {'b'}", true},
		{"in not in {'b'}", false},
		{"has == 'x'", true},
		{"not == 'n'", true},
		{"p.io/x-y_z == '1'", true},

		// An absent label.
		{"zz == 'b'", false},
		{"zz != 'b'", true},
		{"zz in {'b'}", false},
		{"zz not in {'b'}", true},
		{"zz contains ''", false},
		{"zz starts with ''", false},
		{"zz ends with ''", false},
		{"!has(zz)", true},

		// Precedence.
		{"! a == 'b'", false},
		{"!! a == 'b'", true},
		{"!!!has(a)", false},
		{"has(a) || has(zz) && has(yy)", true},
		{"(has(a) || has(zz)) && has(yy)", false},
		{"has(zz) && has(a) || has(a)", true},
		{"!has(zz) && has(a)", true},
		{"!(has(zz) || has(a))", false},
	} {
		sel, err := selector.Parse(tc.in)
		if err != nil {
			t.Errorf("Parse(%q): %v", tc.in, err)
			continue
		}
		if got := sel.Matches(labels); got != tc.want {
			t.Errorf("%q (%s): got %v, want %v", tc.in, sel, got, tc.want)
		}
	}
}

func TestCanonical(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                  "all()",
		"all( )":                            "all()",
		"global(\t)":                        "global()",
		"a=='b'&&(c in {'z','y'}||!has(d))": `(a == "b" && (c in {"y", "z"} || !has(d)))`,
		`a == 'say "hi"'`:                   `a == 'say "hi"'`,
		`a == "it's"`:                       `a == "it's"`,
		"a in {'x','x', 'b',}":              `a in {"b", "x"}`,
		"a notin {}":                        "a not in {}",
		"((a == 'b'))":                      `a == "b"`,
		"!!a == 'b'":                        `a == "b"`,
		"!(a == 'b' || b endswith 'c')":     `!(a == "b" || b ends with "c")`,
		"a == '1' || b == '2' && c startswith '3'": `(a == "1" || (b == "2" && c starts with "3"))`,
		"!(!(has(a)))":                 "has(a)",
		"(has(a) && has(b)) && has(c)": "((has(a) && has(b)) && has(c))",
	} {
		sel, err := selector.Parse(in)
		if err != nil {
			t.Errorf("Parse(%q): %v", in, err)
			continue
		}
		if diff := cmp.Diff(want, sel.String()); diff != "" {
			t.Errorf("canonical form of %q (-want +got):\n%s", in, diff)
		}
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		in     string
		offset int
		says   string
	}{
		{"has (a)", 4, "write has(label)"},
		{"a = 'b'", 2, "write =="},
		{"a == b", 5, "string in quotes"},
		{"not has(a)", 4, "write !"},
		{"has(a) and has(b)", 7, "write &&"},
		{"has(a) or has(b)", 7, "write ||"},
		{"has(a) & has(b)", 7, "expected &&"},
		{"a == 'b", 5, "no closing '"},
		{"(a == 'b'", 9, "closing parenthesis"},
		{"a == 'b')", 8, "no opening parenthesis"},
		{"a", 1, "expected an operator"},
		{"a starts in {'b'}", 2, "expected an operator"},
		{"a not 'b'", 2, "expected an operator"},
		{"== 'b'", 0, "expected a label"},
		{"'a' == 'b'", 0, "label == 'value'"},
		{"has()", 4, "expected a label name"},
		{"has(a", 5, "closing parenthesis"},
		{"all(x)", 4, "closing parenthesis"},
		{"a in 'b'", 5, "expected a set"},
		{"a in {'b' 'c'}", 10, "comma"},
		{"a in {,}", 6, "string in quotes"},
		{"a in {'b'", 9, "closing brace"},
		{"a ==\n'b'", 4, "one line"},
		{"a == 'b' &&", 11, "found the end"},
		{"!", 1, "found the end"},
		{"()", 1, "expected a label"},
		{strings.Repeat("x", 513) + " == 'b'", 0, "at most 512"},
		{strings.Repeat("(", 100000), 2000, "open parentheses"},
		{strings.Repeat("(has(a) && ", 1001) + "has(b)" + strings.Repeat(")", 1001), 12, "nested deeper"},
	} {
		_, err := selector.Parse(tc.in)
		var se *selector.SyntaxError
		if !errors.As(err, &se) {
			t.Errorf("Parse(%.60q): got error %v, want a *SyntaxError", tc.in, err)
			continue
		}
		if se.Offset != tc.offset || !strings.Contains(se.Message, tc.says) {
			t.Errorf("Parse(%.60q): got offset %d, %q; want offset %d and %q", tc.in, se.Offset, se.Message, tc.offset, tc.says)
		}
	}
}

func TestSyntaxErrorCountsCharacters(t *testing.T) {
	t.Parallel()
	_, err := selector.Parse("a == 'é' and")
	if want := `selector "a == 'é' and", character 10: expected &&, || or the end, found "and"; write && for and`; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// inherited is a chain of label sets: the first that has a label decides its
// value.
type inherited []selector.Labels

func (in inherited) Get(name string) (string, bool) {
	for _, l := range in {
		if v, ok := l.Get(name); ok {
			return v, true
		}
	}
	return "", false
}

func TestInherited(t *testing.T) {
	t.Parallel()
	labels := inherited{selector.Map{"a": "own"}, selector.Map{"a": "lent", "b": "lent"}}
	for in, want := range map[string]bool{"a == 'own'": true, "a == 'lent'": false, "b == 'lent'": true, "has(c)": false} {
		sel, err := selector.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		if got := sel.MatchesLabels(labels); got != want {
			t.Errorf("%s: got %v, want %v", in, got, want)
		}
	}
	if !selector.All().Matches(nil) {
		t.Error("all() does not match an empty set")
	}
}

// expression is a random expression: as text with random spacing, and as a
// function that says what it means.
type expression struct {
	text string
	eval func(map[string]string) bool
}

func genExpression(depth int) *rapid.Generator[expression] {
	return rapid.Custom(func(t *rapid.T) expression {
		pick := func(label string, from ...string) string { return rapid.SampledFrom(from).Draw(t, label) }
		sp := func() string { return pick("space", "", " ", "\t ") }
		kinds := []string{"has", "cmp", "set", "all"}
		if depth > 0 {
			kinds = append(kinds, "and", "or", "not", "paren")
		}
		label := pick("label", "a", "b", "in", "has", "x/y")
		value := pick("value", "", "1", "12", `q"`, "it's")
		quote := "'"
		if strings.Contains(value, "'") || (!strings.Contains(value, `"`) && rapid.Bool().Draw(t, "double")) {
			quote = `"`
		}
		quoted := quote + value + quote
		switch kind := pick("kind", kinds...); kind {
		case "has":
			return expression{"has(" + sp() + label + sp() + ")", func(l map[string]string) bool { _, ok := l[label]; return ok }}
		case "all":
			return expression{"all(" + sp() + ")", func(map[string]string) bool { return true }}
		case "cmp":
			op := pick("op", "==", "!=", "contains", "starts with", "endswith")
			return expression{label + " " + op + sp() + quoted, func(l map[string]string) bool {
				v, ok := l[label]
				switch op {
				case "==":
					return ok && v == value
				case "!=":
					return !ok || v != value
				case "contains":
					return ok && strings.Contains(v, value)
				case "starts with":
					return ok && strings.HasPrefix(v, value)
				}
				return ok && strings.HasSuffix(v, value)
			}}
		case "set":
			op := pick("op", "in", "not in", "notin")
			return expression{label + " " + op + sp() + "{" + quoted + sp() + "," + sp() + "'1'" + pick("trailing", "", ",") + "}", func(l map[string]string) bool {
				v, ok := l[label]
				return (ok && slices.Contains([]string{value, "1"}, v)) == (op == "in")
			}}
		case "not":
			e := genExpression(depth-1).Draw(t, "operand")
			return expression{"!" + sp() + "(" + e.text + ")", func(l map[string]string) bool { return !e.eval(l) }}
		case "paren":
			e := genExpression(depth-1).Draw(t, "operand")
			return expression{"(" + sp() + e.text + sp() + ")", e.eval}
		default:
			x, y := genExpression(depth-1).Draw(t, "left"), genExpression(depth-1).Draw(t, "right")
			if kind == "and" {
				return expression{"(" + x.text + ")" + sp() + "&&" + sp() + "(" + y.text + ")", func(l map[string]string) bool { return x.eval(l) && y.eval(l) }}
			}
			return expression{x.text + sp() + "||" + sp() + y.text, func(l map[string]string) bool { return x.eval(l) || y.eval(l) }}
		}
	})
}

// TestAgainstMeaning holds parser and evaluation to an independent meaning,
// and the canonical form to be equivalent and a fixed point.
func TestAgainstMeaning(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := genExpression(4).Draw(t, "expression")
		labels := rapid.MapOf(rapid.SampledFrom([]string{"a", "b", "in", "has", "x/y"}), rapid.SampledFrom([]string{"", "1", "12", `q"`, "it's", "112"})).Draw(t, "labels")
		sel, err := selector.Parse(e.text)
		if err != nil {
			t.Fatalf("Parse: %v", err)
		}
		if got, want := sel.Matches(labels), e.eval(labels); got != want {
			t.Fatalf("%s on %v: got %v, want %v", e.text, labels, got, want)
		}
		again, err := selector.Parse(sel.String())
		if err != nil {
			t.Fatalf("parse the canonical form: %v", err)
		}
		if again.String() != sel.String() || again.Matches(labels) != sel.Matches(labels) {
			t.Fatalf("canonical form of %s is no fixed point: %s", sel, again)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "all()", "a == 'b'", "a in {'b',}", "!has(a) && (b not in {} || c startswith \"x\")", "a starts in {'b'}", "has (", "a=\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		sel, err := selector.Parse(s)
		if err != nil {
			if err.Error() == "" {
				t.Fatal("an error without a text")
			}
			return
		}
		again, err := selector.Parse(sel.String())
		if err != nil {
			t.Fatalf("canonical form %q of %q: %v", sel, s, err)
		}
		if again.String() != sel.String() {
			t.Fatalf("canonical form %q of %q becomes %q", sel, s, again)
		}
		for _, labels := range []map[string]string{nil, {"a": "b"}, {"a": "", "b": "x"}} {
			if sel.Matches(labels) != again.Matches(labels) {
				t.Fatalf("%q and its canonical form %q differ on %v", s, sel, labels)
			}
		}
	})
}

func BenchmarkMatches(b *testing.B) {
	sel, err := selector.Parse("a == 'b' && (rack in {'r1', 'r2', 'r3'} || !has(d))")
	if err != nil {
		b.Fatal(err)
	}
	labels := map[string]string{"a": "b", "rack": "r2"}
	b.ReportAllocs()
	for b.Loop() {
		if !sel.Matches(labels) {
			b.Fatal("no match")
		}
	}
}
