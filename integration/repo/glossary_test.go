package repo

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

var trim = flag.Bool("trim", false, "write testdata/glossary.txt anew: a line is only ever to go from it")

// unclean lists by package, or by document, the words of docs/glossary.md's last
// column that are still to be replaced there.
const unclean = "integration/repo/testdata/glossary.txt"

// banned is a word of which another language than the field's was made.
type banned struct {
	word  string
	names *regexp.Regexp // of names, as lower-case words with blanks between; nil: names may have it
	prose *regexp.Regexp // of comments and documents; nil: they may have it
	say   string

	exported bool // of names, exported ones alone; otherwise those of types and functions too

	in []string // packages, with those below, in which it has no other use; nil: all
}

// appliesTo reports whether a word is banned in a package or document.
func (w banned) appliesTo(unit string) bool {
	return w.in == nil || slices.ContainsFunc(w.in, func(p string) bool { return unit == p || strings.HasPrefix(unit, p+"/") })
}

func bannedWords() []banned {
	re := regexp.MustCompile
	reworded := []string{"control/bgp", "control/attach", "control/ipam", "control/kubecontrollers", "control/cluster", "dataplane/kernel"}
	return []banned{
		{"wish", re(`\bwish(es)?\b`), re(`\bwish(es|ed)?\b`), "desired state, want", false, nil},
		{"form", re(`\bforms?\b`), nil, "encapsulation, Encap", false, nil},
		{"tell", re(`\b(told|tells?)\b`), nil, "publish, notify, advertised", true, nil},
		{"life", re(`\b(earlier|last|this|previous|former) (life|lives)\b`), re(`\b(earlier|last|this|previous|former) (life|lives)\b`), "previous run, this process", false, nil},
		{"earlier run", re(`\b(earlier|last|former) runs?\b`), re(`\b(earlier|last|former) runs?\b`), "previous run", false, nil},
		{"take in", re(`\b(takes?|took|taken|taking) in\b`), re(`\b(takes?|took|taken|taking) in\b`), "apply, accept, decapsulate", false, nil},
		{"settled way", re(`\bsettled ways?\b`), re(`\bsettled ways?\b`), "forwarding path", false, nil},
		{"bereft", re(`\bbereft\b`), re(`\bbereft\b`), "isolated", false, nil},
		{"lent", re(`\blent\b`), re(`\blent\b`), "borrowed", false, nil},
		{"guests", re(`\bguests\b`), re(`\bguests\b`), "borrowed addresses", false, nil},
		{"mates", re(`\bmates\b`), re(`\bmates\b`), "mesh peers", false, nil},
		{"strangers", re(`\bstrangers?\b`), re(`\bstrangers?\b`), "foreign", false, nil},
		{"vicinity", re(`\bvicinity\b`), re(`\bvicinity\b`), "neighbour table", false, nil},
		{"office", re(`\boffices?\b`), re(`\boffices?\b`), "leader-election lease", false, nil},
		{"unlearn", re(`\bunlearn(s|ed)?\b`), re(`\bunlearn(s|ed|ing)?\b`), "invalidate", false, nil},
		{"told", nil, re(`\btold\b`), "advertised, sent, reported, notified", false, reworded},
		{"somebody", nil, re(`\b(somebody|nobody)\b`), "who it is: another program, no source, no peer", false, reworded},
		{"overtaken", re(`\bovertaken\b`), re(`\bovertaken\b`), "pre-empted", false, nil},
	}
}

// allowed are the contexts in which a banned word is the right one.
func allowed() *regexp.Regexp {
	return regexp.MustCompile(strings.Join([]string{
		`taken in advance`,        // reserves of addresses
		`routerd_stranger_routes`, // a metric's name is its users'
		`an[ -]office`,            // a place: its NAT gateway, its policy
		`from-office`,
		`(be|are) told (apart|from)`, // distinguished
		`takes in the file`,          // bytes
		`taken in a second`,
	}, "|"))
}

// TestGlossary keeps the words that docs/glossary.md has replaced out of exported
// names, comments and documents. What still has one is listed, and a line whose
// package is clean has to go.
func TestGlossary(t *testing.T) {
	t.Parallel()
	found := map[string]map[string][]string{} // package or document → word → where
	note := func(unit, word, where string) {
		if found[unit] == nil {
			found[unit] = map[string][]string{}
		}
		found[unit][word] = append(found[unit][word], where)
	}
	words, allowed := bannedWords(), allowed()
	for _, name := range sourceFiles(t) {
		unit := filepath.Dir(name)
		var names, prose []passage
		switch {
		case strings.HasSuffix(name, ".md") && name != "docs/glossary.md":
			unit, prose = name, paragraphs(read(t, name))
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go"):
			names, prose = goPassages(t, name)
		}
		for _, p := range []struct {
			pattern  func(banned) *regexp.Regexp
			passages []passage
		}{{func(w banned) *regexp.Regexp { return w.names }, names}, {func(w banned) *regexp.Regexp { return w.prose }, prose}} {
			for _, s := range p.passages {
				text := allowed.ReplaceAllString(s.text, "")
				for _, w := range words {
					pattern := p.pattern(w)
					if pattern == nil || w.exported && s.unexported || !w.appliesTo(unit) {
						continue
					}
					if m := pattern.FindString(text); m != "" {
						note(unit, w.word, fmt.Sprintf("%s:%d: %q: write of %s", name, s.line, m, w.say))
					}
				}
			}
		}
	}
	if *trim {
		writeUnclean(t, found)
		return
	}
	listed := map[string]map[string]bool{}
	for line := range strings.SplitSeq(read(t, unclean), "\n") {
		if unit, list, ok := strings.Cut(line, ": "); ok {
			listed[unit] = map[string]bool{}
			for w := range strings.SplitSeq(list, ", ") {
				listed[unit][w] = true
			}
		}
	}
	for _, unit := range slices.Sorted(maps.Keys(found)) {
		for _, w := range slices.Sorted(maps.Keys(found[unit])) {
			if !listed[unit][w] {
				t.Errorf("docs/glossary.md has another word:\n%s", strings.Join(found[unit][w], "\n"))
			}
		}
	}
	for _, unit := range slices.Sorted(maps.Keys(listed)) {
		for _, w := range slices.Sorted(maps.Keys(listed[unit])) {
			if found[unit][w] == nil {
				t.Errorf("%s: %s has no %q any more: take it out (go test ./integration/repo -run TestGlossary -trim)", unclean, unit, w)
			}
		}
	}
}

func writeUnclean(t *testing.T, found map[string]map[string][]string) {
	t.Helper()
	var b strings.Builder
	for _, unit := range slices.Sorted(maps.Keys(found)) {
		// A blank line between keeps two branches that trim neighbours apart.
		fmt.Fprintf(&b, "%s: %s\n\n", unit, strings.Join(slices.Sorted(maps.Keys(found[unit])), ", "))
	}
	if err := os.WriteFile(filepath.Join(root, unclean), []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// passage is a name as words, a comment or a paragraph, in lower case and one line.
type passage struct {
	line int
	text string

	unexported bool // name
}

// goPassages returns the exported names of a file that no tool made, those of its
// types and functions, and its comments.
func goPassages(t *testing.T, name string) (names, prose []passage) {
	t.Helper()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, filepath.Join(root, name), nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	if ast.IsGenerated(file) {
		return nil, nil
	}
	for _, c := range file.Comments {
		prose = append(prose, passage{line: set.Position(c.Pos()).Line, text: oneLine(c.Text())})
	}
	add := func(all bool, ids ...*ast.Ident) {
		for _, id := range ids {
			if all || id.IsExported() {
				names = append(names, passage{set.Position(id.Pos()).Line, splitName(id.Name), !id.IsExported()})
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			add(true, n.Name)
			return false // what is inside is the function's own
		case *ast.TypeSpec:
			add(true, n.Name)
		case *ast.ValueSpec:
			add(false, n.Names...)
		case *ast.Field: // of structs, and methods of interfaces
			add(false, n.Names...)
		}
		return true
	})
	return names, prose
}

// paragraphs returns a document's paragraphs, and each line of its tables and
// lists, without code.
func paragraphs(text string) []passage {
	var out []passage
	code := false
	start, lines := 0, []string{}
	flush := func() {
		if len(lines) > 0 {
			out = append(out, passage{line: start, text: oneLine(strings.Join(lines, " "))})
		}
		lines = lines[:0]
	}
	inline := regexp.MustCompile("`[^`]*`")
	for i, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(l), "```") {
			code = !code
			l = ""
		}
		if code || strings.TrimSpace(l) == "" {
			flush()
			continue
		}
		if strings.HasPrefix(l, "|") || strings.HasPrefix(strings.TrimSpace(l), "- ") {
			flush()
		}
		if len(lines) == 0 {
			start = i + 1
		}
		lines = append(lines, inline.ReplaceAllString(l, ""))
	}
	flush()
	return out
}

func oneLine(s string) string { return strings.ToLower(strings.Join(strings.Fields(s), " ")) }

// splitName turns NodeEncapsV4 into "node encaps v4".
func splitName(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte(' ')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// TestGlossaryFindsWords holds the search itself.
func TestGlossaryFindsWords(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "x.go"), `package x

// F takes
// in what its mates lent.
type nodeForms struct{ Told, told, kept int }

func (nodeForms) Format() {}
`)
	rel, err := filepath.Rel(root, dir)
	if err != nil {
		abs, err := filepath.Abs(root)
		if err != nil {
			t.Fatal(err)
		}
		if rel, err = filepath.Rel(abs, dir); err != nil {
			t.Fatal(err)
		}
	}
	names, prose := goPassages(t, filepath.Join(rel, "x.go"))
	var got []string
	for _, w := range bannedWords() {
		for _, p := range names {
			if w.names != nil && w.names.MatchString(p.text) {
				got = append(got, w.word)
			}
		}
		for _, p := range prose {
			if w.prose != nil && w.prose.MatchString(p.text) {
				got = append(got, w.word)
			}
		}
	}
	if want := []string{"form", "tell", "take in", "lent", "mates"}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if p := paragraphs("A wish\nhere.\n\n```\nwish\n```\n- one\n- `two`\n"); len(p) != 3 || p[0].text != "a wish here." || p[1].line != 7 {
		t.Errorf("paragraphs %+v", p)
	}
}
