package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryCommandInScripts: each command is run by a script, but for those of the laboratory, which integration/lab and
// `make demo` run.
func TestEveryCommandInScripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/scripts/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts: %v, %v", files, err)
	}
	var all strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	for _, e := range examples() {
		if e.command == "routerctl" || len(e.lines) == 0 {
			continue
		}
		// In a script of its own, or among the everyday command lines.
		if ran := regexp.MustCompile(`(?m)^((! )?exec routerctl |\d+ \| )` + regexp.QuoteMeta(e.command) + `( |$)`); !ran.MatchString(all.String()) {
			t.Errorf("no script runs %q", e.command)
		}
	}
}
