package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReliabilityNamesTests: each test and file that the document names is
// there.
func TestReliabilityNamesTests(t *testing.T) {
	t.Parallel()
	const root = "../.."
	doc, err := os.ReadFile(filepath.Join(root, "docs/reliability.md"))
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	definition := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() && e.Name() != ".." && strings.HasPrefix(e.Name(), ".") {
			if err == nil {
				err = fs.SkipDir
			}
			return err
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		have[e.Name()] = true
		b, err := os.ReadFile(path)
		for _, m := range definition.FindAllStringSubmatch(string(b), -1) {
			have[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`\bTest[A-Z]\w+|\b\w+_test\.go`).FindAllString(string(doc), -1)
	if len(named) < 20 {
		t.Fatalf("the document names only %v", named)
	}
	for _, n := range named {
		if !have[n] {
			t.Errorf("docs/reliability.md names %s, which is not there", n)
		}
	}
}
