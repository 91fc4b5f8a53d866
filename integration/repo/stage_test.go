package repo

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// stage runs .ci/stage of a tree for a stage and returns the names that it prints.
func stage(t *testing.T, tree, name, verb string) (names []string, out string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(tree, ".ci/stage"), name, verb)
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("stage %s %s: %v: %s", name, verb, err, b)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		names = append(names, f[len(f)-1])
	}
	return names, string(b)
}

// TestStage: make test leaves a stage out only where nothing that it is about has changed
// since it passed, and sees that without a history.
func TestStage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		stage   string
		inputs  []string // among others
		changes string   // one of them
		comes   string   // a file that is one of them when it comes
		goes    string
		recipes []string
		module  string // whose version in go.mod is an input; empty: none's is
	}{
		{
			stage: "package",
			inputs: []string{
				"Makefile", ".ci/nfpm.mod", "cmd/routerd/leave.go", "cmd/routerd/main.go", "configs/iproute2/rt_protos.d/routerd.conf", "configs/networkd/routerd.conf",
				"configs/networkmanager/routerd.conf", "configs/nfpm.yaml", "configs/package/postinstall.sh", "configs/systemd/routerd.service", "control/systemd/ending.go",
				"integration/packages/packages_test.go", "integration/vm/systemd.go",
			},
			changes: "configs/nfpm.yaml", comes: "configs/package/another.sh", goes: "cmd/routerd/leave.go",
			recipes: []string{"package", "test-package"},
		},
		{
			stage: "kernel",
			inputs: []string{
				"Makefile", "control/async/async.go", "dataplane/kernel/kernel_test.go", "dataplane/nft/testdata/small.golden", "go.mod", "integration/await/await.go", "integration/vm/init.sh",
			},
			changes: "dataplane/kernel/writer.go", comes: "dataplane/kernel/another.go", goes: "dataplane/vxlan/vxlan.go",
			recipes: []string{"test-vm-kernel"},
			module:  "\tgolang.org/x/sys v",
		},
		{
			stage: "kubernetes",
			inputs: []string{
				"Makefile", ".ci/containerd.mod", ".ci/coredns/go.mod", ".ci/kubernetes.mod", ".ci/network-policy-api.mod", "cni/conflist.go", "configs/image/Containerfile", "configs/kubernetes/base/admission.yaml",
				"control/collect/cluster.go", "control/kubecontrollers/keeper.go", "control/kubesync/kubesync.go", "control/netpolicy/netpolicy.go", "control/nodenetwork/nodenetwork.go",
				"control/nodestatus/reporter.go", "control/policyevents/policyevents.go", "control/service/service.go", "go.mod",
				"integration/kube/store_test.go", "integration/kube/suites/e2e_test.go", "integration/ownership/history.go", "store/kube/convert/netpol.go", "store/kube/watch.go",
			},
			changes: "store/kube/watch.go", comes: "configs/kubernetes/base/another.yaml", goes: "control/kubesync/decide.go",
			recipes: []string{"test-kubernetes", "kube-tools", "kube-runtime", "kube-suites"},
			module:  "\tk8s.io/api v",
		},
	} {
		t.Run(tt.stage, func(t *testing.T) {
			t.Parallel()
			tree := t.TempDir()
			inputs, sums := stage(t, root, tt.stage, "inputs")
			for _, want := range tt.inputs {
				if !slices.Contains(inputs, want) {
					t.Errorf("%s is not among what the stage is about: %q", want, inputs)
				}
			}
			for _, name := range append(inputs, ".ci/stage") {
				if err := os.MkdirAll(filepath.Join(tree, filepath.Dir(name)), 0o755); err != nil {
					t.Fatal(err)
				}
				write(t, filepath.Join(tree, name), read(t, name))
			}
			if err := os.Chmod(filepath.Join(tree, ".ci/stage"), 0o755); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", tree).CombinedOutput(); err != nil {
				t.Fatalf("git init: %v: %s", err, out)
			}
			changed := func(when string, want ...string) {
				t.Helper()
				got, _ := stage(t, tree, tt.stage, "changed")
				slices.Sort(want)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", when, diff)
				}
			}
			changed("before it passed", inputs...)
			write(t, filepath.Join(tree, ".ci/"+tt.stage+"-passed"), sums)
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
			with(tt.changes, read(t, tt.changes)+"#\n")
			with(tt.comes, "#\n")
			if tt.module != "" {
				mod := read(t, "go.mod")
				with("go.mod", strings.Replace(mod, tt.module, tt.module+"9", 1))
				write(t, filepath.Join(tree, "go.mod"), mod+"\nrequire example.org/another v1.0.0\n")
				changed("with another module")
			}
			makefile := read(t, "Makefile")
			for _, recipe := range tt.recipes {
				at := strings.Index(makefile, "\n"+recipe+": ")
				if at < 0 {
					t.Fatalf("no recipe %q in the Makefile", recipe)
				}
				line := at + 1 + strings.Index(makefile[at+1:], "\n")
				with("Makefile", makefile[:line]+"\n\ttrue"+makefile[line:])
			}
			write(t, filepath.Join(tree, "Makefile"), makefile+"\nanother:\n\ttrue\n")
			changed("with another target of the Makefile")
			if err := os.Remove(filepath.Join(tree, tt.goes)); err != nil {
				t.Fatal(err)
			}
			changed("without one", tt.goes)
		})
	}
}

// TestKernelStage: nothing that the packages of make test-vm-kernel are made of is missing
// from what the stage is about.
func TestKernelStage(t *testing.T) {
	t.Parallel()
	inputs, _ := stage(t, root, "kernel", "inputs")
	makefile, script := read(t, "Makefile"), read(t, ".ci/stage")
	list := regexp.MustCompile(`(?m)^VMPKGS := (.*)$`).FindStringSubmatch(makefile)
	modules := regexp.MustCompile(`(?m)^\s+kernel\) echo '(.*)' ;;$`).FindStringSubmatch(script)
	if list == nil || modules == nil {
		t.Fatalf("VMPKGS of the Makefile %q, modules of .ci/stage %q", list, modules)
	}
	module := regexp.MustCompile("^(" + modules[1] + ")")
	args := append([]string{"list", "-deps", "-test", "-f", "{{with .Module}}{{.Path}}{{end}} {{.Dir}}"}, strings.Fields(list[1])...)
	cmd := exec.CommandContext(t.Context(), "go", append(args, "./integration/vm/...")...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	base, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		path, dir, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch within, err := filepath.Rel(base, dir); {
		case path == "" || dir == "": // the standard library, or the main package of a test
		case path != "github.com/routerd/routerd":
			if !module.MatchString(path + " ") {
				t.Errorf("module %s is not among those of the stage", path)
			}
		case err != nil:
			t.Error(err)
		case !slices.ContainsFunc(inputs, func(in string) bool { return filepath.Dir(in) == within }):
			t.Errorf("package %s is not among what the stage is about", within)
		}
	}
}
