package repo

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// packageStage runs .ci/package-stage of a tree and returns the names that it prints.
func packageStage(t *testing.T, tree, verb string) (names []string, out string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(tree, ".ci/package-stage"), verb)
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("package-stage %s: %v: %s", verb, err, b)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		names = append(names, f[len(f)-1])
	}
	return names, string(b)
}

// TestPackageStage: make test leaves the stage of the packages out only where nothing that it
// is about has changed since it passed, and sees that without a history.
func TestPackageStage(t *testing.T) {
	t.Parallel()
	tree := t.TempDir()
	inputs, sums := packageStage(t, root, "inputs")
	for _, want := range []string{
		"Makefile", ".ci/nfpm.mod", "cmd/routerd/leave.go", "cmd/routerd/main.go", "configs/iproute2/rt_protos.d/routerd.conf", "configs/networkd/routerd.conf",
		"configs/networkmanager/routerd.conf", "configs/nfpm.yaml", "configs/package/postinstall.sh", "configs/systemd/routerd.service", "control/systemd/ending.go",
		"integration/packages/packages_test.go", "integration/vm/systemd.go",
	} {
		if !slices.Contains(inputs, want) {
			t.Errorf("%s is not among what the stage is about: %q", want, inputs)
		}
	}
	for _, name := range append(inputs, ".ci/package-stage") {
		if err := os.MkdirAll(filepath.Join(tree, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(tree, name), read(t, name))
	}
	if err := os.Chmod(filepath.Join(tree, ".ci/package-stage"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", tree).CombinedOutput(); err != nil {
		t.Fatalf("git init: %v: %s", err, out)
	}
	changed := func(when string, want ...string) {
		t.Helper()
		got, _ := packageStage(t, tree, "changed")
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	changed("before it passed", inputs...)
	write(t, filepath.Join(tree, ".ci/package-passed"), sums)
	changed("after it passed")

	// Each of these alone.
	with := func(name, text string) {
		t.Helper()
		file := filepath.Join(tree, name)
		before, err := os.ReadFile(file)
		write(t, file, text)
		changed("with another "+name, name)
		if err != nil { // there was none
			err = os.Remove(file)
		} else {
			err = os.WriteFile(file, before, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	with("configs/nfpm.yaml", read(t, "configs/nfpm.yaml")+"#\n")
	with("configs/package/another.sh", "#!/bin/sh\n")
	makefile := read(t, "Makefile")
	for _, recipe := range []string{"\npackage: ", "\ntest-package: "} {
		at := strings.Index(makefile, recipe)
		if at < 0 {
			t.Fatalf("no recipe %q in the Makefile", recipe)
		}
		line := at + 1 + strings.Index(makefile[at+1:], "\n")
		with("Makefile", makefile[:line]+"\n\ttrue"+makefile[line:])
	}
	write(t, filepath.Join(tree, "Makefile"), makefile+"\nanother:\n\ttrue\n")
	changed("with another target of the Makefile")
	if err := os.Remove(filepath.Join(tree, "cmd/routerd/leave.go")); err != nil {
		t.Fatal(err)
	}
	changed("without one", "cmd/routerd/leave.go")
}
