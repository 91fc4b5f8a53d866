package selector

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestBuild(t *testing.T) {
	t.Parallel()
	parsed := func(s string) *Selector {
		p, err := Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, tt := range []struct {
		got  *Selector
		want string
	}{
		{Has("a"), "has(a)"},
		{Equal("a", "b"), `a == "b"`},
		{In("a", []string{"z", "b", "z"}), `a in {"b", "z"}`},
		{In("a", nil), `a in {}`},
		{Not(Has("a")), "!has(a)"},
		{Not(Not(Has("a"))), "has(a)"},
		{And(), "all()"},
		{And(All(), All()), "all()"},
		{And(All(), Has("a")), "has(a)"},
		{And(parsed("a == 'b' && has(c)"), Has("d"), parsed("e == 'f' || has(g)")), `(a == "b" && has(c) && has(d) && (e == "f" || has(g)))`},
		{parsed("all()").Prefixed("p.", "ns"), "has(ns)"},
		{parsed("!has(a) || b in {'c'} && (d != 'e' || x contains 'y')").Prefixed("p.", "ns"), `(!has(p.a) || (p.b in {"c"} && (p.d != "e" || p.x contains "y")))`},
	} {
		if got := tt.got.String(); got != tt.want {
			t.Errorf("got %s, want %s", got, tt.want)
		}
		// What is built is what would have been parsed.
		if diff := cmp.Diff(tt.want, parsed(tt.want).String()); diff != "" {
			t.Errorf("(-want +parsed):\n%s", diff)
		}
	}
}

func TestCovers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ selector, want string }{
		{"all()", "[]"},
		{"a == 'b'", "[[a=b]]"},
		{"a in {'b', 'c'}", "[[a=b a=c]]"},
		{"a in {}", "[[]]"},
		{"has(a) && b == 'c'", "[[a] [b=c]]"},
		{"a == 'b' || has(c)", "[[a=b c]]"},
		{"(has(a) && b == 'c') || d == 'e'", "[[b=c d=e]]"},
		{"a == 'b' || a != 'c'", "[]"},
		{"!has(a)", "[]"},
		{"!has(a) && b starts with 'x'", "[[b]]"},
	} {
		s, err := Parse(tt.selector)
		if err != nil {
			t.Fatal(err)
		}
		lists := []string{}
		for _, list := range s.Covers() {
			words := []string{}
			for _, c := range list {
				if c.Any {
					words = append(words, c.Label)
				} else {
					words = append(words, c.Label+"="+c.Value)
				}
			}
			lists = append(lists, fmt.Sprint(words))
		}
		if got := fmt.Sprint(lists); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.selector, got, tt.want)
		}
	}
}

// drawSelector makes selectors over the labels a, b and c with the values x
// and y.
func drawSelector(t *rapid.T, depth int) string {
	label := rapid.SampledFrom([]string{"a", "b", "c"})
	value := rapid.SampledFrom([]string{"'x'", "'y'"})
	top := 8
	if depth == 0 {
		top = 6
	}
	switch rapid.IntRange(0, top).Draw(t, "form") {
	case 0:
		return "has(" + label.Draw(t, "label") + ")"
	case 1:
		return label.Draw(t, "label") + " == " + value.Draw(t, "value")
	case 2:
		return label.Draw(t, "label") + " != " + value.Draw(t, "value")
	case 3:
		return label.Draw(t, "label") + " in {" + strings.Join(rapid.SliceOfN(value, 0, 2).Draw(t, "values"), ",") + "}"
	case 4:
		return label.Draw(t, "label") + " not in {" + value.Draw(t, "value") + "}"
	case 5:
		return "all()"
	case 6:
		return label.Draw(t, "label") + " contains " + value.Draw(t, "value")
	case 7:
		return "!(" + drawSelector(t, depth-1) + ")"
	}
	op := rapid.SampledFrom([]string{" && ", " || "}).Draw(t, "op")
	return "(" + drawSelector(t, depth-1) + op + drawSelector(t, depth-1) + ")"
}

// What a selector matches fulfils a condition of each of its covers, and it
// means the same with prefixes in front of the labels on both sides.
func TestCoversAndPrefixesHold(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := drawSelector(t, 3)
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		labels := rapid.MapOf(rapid.SampledFrom([]string{"a", "b", "c"}), rapid.SampledFrom([]string{"x", "y", "z"})).Draw(t, "labels")
		matches := s.Matches(labels)
		for _, list := range s.Covers() {
			ok := slices.ContainsFunc(list, func(c Condition) bool {
				v, there := labels[c.Label]
				return there && (c.Any || v == c.Value)
			})
			if matches && !ok {
				t.Fatalf("%s matches %v, which fulfils nothing of %v", text, labels, list)
			}
		}
		long := map[string]string{"here": ""}
		for k, v := range labels {
			long["p."+k] = v
		}
		if p := s.Prefixed("p.", "here"); p.Matches(long) != matches {
			t.Fatalf("%s is %v of %v, %s is not of %v", text, matches, labels, p, long)
		}
		if Not(s).Matches(labels) == matches || And(s, Has("a")).Matches(labels) != (matches && labels["a"] != "") {
			t.Fatalf("Not or And of %s is wrong for %v", text, labels)
		}
	})
}
