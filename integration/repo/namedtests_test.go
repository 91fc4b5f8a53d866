package repo

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestNamedTests: each test that the threat model and the table of faults name is there,
// so that none of their promises loses its test unseen. A test stands behind its package:
// `control/bgp` TestImport, TestNamed/sub; without one before it in its line, in any.
func TestNamedTests(t *testing.T) {
	t.Parallel()
	tests := map[string]string{} // the text of a package's tests
	for _, name := range sourceFiles(t) {
		if strings.HasSuffix(name, "_test.go") {
			text := read(t, name)
			tests[filepath.Dir(name)] += text
			tests[""] += text
		}
	}
	word := regexp.MustCompile("`([a-z0-9/-]+)`|\\b(Test[A-Z][A-Za-z0-9]*)(?:/([A-Za-z_]+))?")
	found := 0
	for _, page := range []string{"docs/security.md", "docs/reliability.md"} {
		for line := range strings.Lines(read(t, page)) {
			in := ""
			for _, m := range word.FindAllStringSubmatch(line, -1) {
				if m[2] == "" {
					if tests[m[1]] != "" {
						in = m[1]
					}
					continue
				}
				found++
				if !strings.Contains(tests[in], "func "+m[2]+"(t ") {
					t.Errorf("%s names %s of %q, which has none of that name", page, m[2], in)
				}
				if !hasSubtest(tests[in], in, m[3]) {
					t.Errorf("%s names %s/%s of %q, which has no subtest of that name", page, m[2], m[3], in)
				}
			}
		}
	}
	if found < 100 {
		t.Errorf("%d tests are named: the test tests nothing", found)
	}
}

// hasSubtest reports whether tests of a package name a subtest, or have a script of its name.
func hasSubtest(text, dir, name string) bool {
	if name == "" || strings.Contains(text, `"`+name+`"`) || strings.Contains(text, `"`+strings.ReplaceAll(name, "_", " ")+`"`) {
		return true
	}
	_, err := os.Stat(filepath.Join(root, dir, "testdata", "scripts", name+".txtar"))
	return err == nil
}
