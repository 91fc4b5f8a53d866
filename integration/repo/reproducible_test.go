package repo

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReproducible: the smallest of the programs, for an architecture that is not this machine's, is the same bytes from two
// copies of the tree, and nothing in it says where it was made. It is made with the Makefile's own flags. That what is compiled
// anew is the same too, `make test-reproducible` says, of the packages with all programs.
func TestReproducible(t *testing.T) {
	t.Parallel()
	const pkg = "./cmd/routerd-cni"
	tmp := t.TempDir()
	run := func(dir string, env []string, args ...string) string {
		t.Helper()
		c := exec.CommandContext(t.Context(), args[0], args[1:]...)
		c.Dir, c.Env = dir, append(os.Environ(), env...)
		var stderr bytes.Buffer
		c.Stderr = &stderr
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, stderr.String())
		}
		return strings.TrimSpace(string(out))
	}
	flags := strings.Split(run(root, nil, "make", "-s", "--no-print-directory", "VERSION=v1.2.3", "--eval", "flags: ; @printf '%s\\n' '$(GOFLAGS)' '$(CGO_ENABLED)' '$(LDFLAGS)'", "flags"), "\n")
	if len(flags) != 3 {
		t.Fatalf("the Makefile's flags: %q", flags)
	}
	env := []string{"GOARCH=arm64", "GOFLAGS=" + flags[0], "CGO_ENABLED=" + flags[1]}
	other := filepath.Join(tmp, "another", "place")
	copyPackages(t, strings.Fields(run(root, env, "go", "list", "-deps", "-f", "{{with .Module}}{{if .Main}}{{$.Dir}}{{end}}{{end}}", pkg)), other)

	build := func(dir string, env []string, to string) []byte {
		t.Helper()
		to = filepath.Join(tmp, to)
		run(dir, env, "go", "build", "-buildvcs=false", "-ldflags", flags[2], "-o", to, pkg) // the copy is no repository
		b, err := os.ReadFile(to)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	one, two := build(root, env, "one"), build(other, env, "two")
	if !bytes.Equal(one, two) {
		t.Error("two builds for arm64 are not the same bytes")
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, place := range append(strings.Split(run(root, nil, "go", "env", "GOROOT", "GOMODCACHE", "GOCACHE"), "\n"), here, tmp) {
		if bytes.Contains(one, []byte(place)) || bytes.Contains(two, []byte(place)) {
			t.Errorf("the program has %s in it", place)
		}
	}
}

// copyPackages copies directories of the tree, without those in them, and what says what they need.
func copyPackages(t *testing.T, dirs []string, to string) {
	t.Helper()
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	files := []string{filepath.Join(here, "go.mod"), filepath.Join(here, "go.sum")}
	for _, d := range dirs {
		more, err := filepath.Glob(filepath.Join(d, "*.go"))
		if err != nil || len(more) == 0 {
			t.Fatalf("files of %s: %v", d, err)
		}
		files = append(files, more...)
	}
	for _, f := range files {
		rel, err := filepath.Rel(here, f)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(f)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(filepath.Join(to, rel)), 0o755), os.WriteFile(filepath.Join(to, rel), b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}
