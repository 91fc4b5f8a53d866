package repo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// root is the repository's root as seen from this package.
const root = "../.."

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// command runs a program in the root and returns what it prints.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, stderr.String())
	}
	return string(out)
}

// sourceFiles returns the files that belong to the repository: what git has,
// and what it would take.
func sourceFiles(t *testing.T) []string {
	t.Helper()
	list := command(t, "git", "ls-files", "--cached", "--others", "--exclude-standard")
	return slices.DeleteFunc(strings.Split(strings.TrimSpace(list), "\n"), func(name string) bool {
		_, err := os.Stat(filepath.Join(root, name))
		return err != nil // deleted and not committed yet
	})
}

func TestDependencies(t *testing.T) {
	t.Parallel()
	const module = "github.com/routerd/routerd/"
	// They stand on the standard library alone, and every room may use them.
	leaves := []string{module + "control/async", module + "control/atomicfile"}
	for _, c := range []struct {
		pkg    string
		not    []string // import paths, each with all below it
		reason string
	}{
		{
			"./cmd/routerd-cni",
			[]string{
				"github.com/osrg/gobgp", "go.etcd.io", "k8s.io", "sigs.k8s.io", "github.com/projectcalico",
				"github.com/spf13", "github.com/prometheus", "go.uber.org", "net/http/pprof",
				module + "store", module + "dataplane", module + "control/bgp", module + "control/attach",
			},
			"a runtime starts the plugin for every pod, and initialising a big binary takes longer than the rest of ADD",
		},
		{
			"./control/async",
			[]string{module, "golang.org", "google.golang.org"},
			"every room may use it, so it uses none",
		},
		{
			"./control/atomicfile",
			[]string{module, "golang.org", "google.golang.org"},
			"every room may use it, so it uses none",
		},
		{
			"./control/nexthop",
			[]string{module, "golang.org", "google.golang.org"},
			"BGP and the core share it and know nothing of each other",
		},
		{
			"./dataplane/...",
			[]string{module + "store", module + "control", module + "cni", "go.etcd.io", "github.com/osrg/gobgp", "k8s.io", "github.com/projectcalico"},
			"nothing below the core reads the store or knows where a wish comes from",
		},
		{
			"./dataplane",
			[]string{module, "github.com/vishvananda", "github.com/mdlayher", "golang.org/x/sys"},
			"the vocabulary stands on the standard library alone",
		},
		{
			"./store",
			[]string{module + "dataplane", module + "control", "go.etcd.io", "github.com/osrg/gobgp"},
			"the store's types do not know what is built on them, nor which backend holds them",
		},
		{
			"./control/cluster",
			[]string{module + "store/etcd", module + "store/memory", "go.etcd.io", "google.golang.org/grpc", module + "dataplane/kernel", module + "control/vrouter", module + "control/ipam"},
			"the copy of the cluster is the same whichever datastore is behind it, and knows none of its readers",
		},
		{
			"./control/encap",
			[]string{module + "control/rib", module + "control/vrouter", module + "control/bgp", "os/exec"},
			"how packets travel between hosts does not depend on the routes that lead there",
		},
		{
			"./control/vrouter",
			[]string{"go.etcd.io", "github.com/osrg/gobgp", "github.com/vishvananda", "github.com/mdlayher", "os/exec"},
			"the core decides and does no I/O",
		},
		{
			"./control/policy/...",
			[]string{"go.etcd.io", "github.com/osrg/gobgp", "github.com/vishvananda", "github.com/mdlayher", "google.golang.org/grpc", module + "dataplane/kernel"},
			"the calculator says what policies mean and does no I/O",
		},
		{
			"./control/policy/reference",
			[]string{module + "control"},
			"an oracle that shares code with what it judges finds nothing",
		},
		{
			"./control/bgp",
			[]string{module + "dataplane/kernel", module + "control/vrouter", "go.etcd.io"},
			"BGP hands paths to the core and never to the kernel",
		},
		{
			"./control/probe",
			[]string{"go.etcd.io", "github.com/vishvananda", module + "dataplane/kernel", module + "control/vrouter", module + "control/node"},
			"probes measure what they are asked to, and want settings of a sink; who decides by them is not their business",
		},
		{
			"./cmd/routerd",
			[]string{"github.com/osrg/gobgp/v4/pkg/server"},
			"BGP is our own engine on GoBGP's codec; its server is a peer in tests",
		},
		{
			"./cmd/routerctl",
			[]string{"github.com/osrg/gobgp"},
			"the CLI talks to daemons; it is none",
		},
	} {
		t.Run(strings.Trim(c.pkg, "./"), func(t *testing.T) {
			t.Parallel()
			// One line a package: the importer, then what it imports directly.
			out := command(t, "go", "list", "-deps", "-f", "{{.ImportPath}} {{join .Imports \" \"}}", c.pkg)
			roots := strings.Fields(command(t, "go", "list", c.pkg))
			for line := range strings.Lines(out) {
				fields := strings.Fields(line)
				if slices.Contains(leaves, fields[0]) {
					continue
				}
				for _, no := range c.not {
					no = strings.TrimSuffix(no, "/")
					if slices.Contains(roots, fields[0]) || fields[0] != no && !strings.HasPrefix(fields[0], no+"/") {
						continue
					}
					t.Errorf("%s needs %s, which it must not: %s (imported by %v)", c.pkg, fields[0], c.reason, importers(out, fields[0]))
				}
			}
		})
	}
}

// importers returns the packages that import pkg directly.
func importers(list, pkg string) []string {
	var found []string
	for line := range strings.Lines(list) {
		fields := strings.Fields(line)
		if slices.Contains(fields[1:], pkg) {
			found = append(found, fields[0])
		}
	}
	return found
}

func TestReadmeStartsWithTwoCommands(t *testing.T) {
	t.Parallel()
	readme := read(t, "README.md")
	var commands []string
	inShell := false
	for line := range strings.Lines(readme) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "```"):
			inShell = line == "```sh" || line == "```console"
		case inShell && line != "" && !strings.HasPrefix(line, "#"):
			command, _, _ := strings.Cut(strings.TrimPrefix(line, "$ "), "#")
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	if len(commands) < 2 || commands[0] != "make demo" || commands[1] != "make test" {
		t.Errorf("the first commands of README.md are %q: want make demo and make test", commands)
	}
	targets := makeTargets(t)
	for _, c := range commands {
		if f := strings.Fields(c); f[0] == "make" && len(f) > 1 && !slices.Contains(targets, f[1]) {
			t.Errorf("README.md says %q, and the Makefile has no such target", c)
		}
	}
}

// makeTargets returns the targets that make help shows.
func makeTargets(t *testing.T) []string {
	t.Helper()
	var targets []string
	for line := range strings.Lines(command(t, "make", "--no-print-directory", "help")) {
		if f := strings.Fields(line); strings.HasPrefix(line, "  ") && len(f) > 1 {
			targets = append(targets, f[0])
		}
	}
	return targets
}

func TestMakefile(t *testing.T) {
	t.Parallel()
	targets := makeTargets(t)
	for _, want := range []string{
		"bench", "build", "check", "clean", "demo", "deps", "fuzz", "generate", "generate-check", "help", "image",
		"install", "lint", "test", "test-integration", "test-unit", "test-vm", "tidy-check", "vuln",
	} {
		if !slices.Contains(targets, want) {
			t.Errorf("make help does not show %s", want)
		}
	}
	// A dry run finds variables and rules that do not hold together. SKIP_VM
	// has rules of its own.
	command(t, "make", "--dry-run", "test", "lint", "install", "DESTDIR=/nonexistent")
	if out := command(t, "make", "--dry-run", "test-vm", "SKIP_VM=1"); !strings.Contains(out, "NOT tested") {
		t.Errorf("make test-vm SKIP_VM=1 does not say what is not tested: %s", out)
	}
}

// Scripts that others call must be programs.
func TestScriptsAreExecutable(t *testing.T) {
	t.Parallel()
	for _, name := range sourceFiles(t) {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		packed := strings.HasPrefix(name, "integration/vm/") // into the machine, with its mode there
		if !bytes.HasPrefix(b, []byte("#!")) || packed {
			continue
		}
		st, err := os.Stat(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode()&0o111 == 0 {
			t.Errorf("%s begins with #! and is not executable", name)
		}
		if interpreter, _, _ := strings.Cut(string(b), "\n"); strings.Contains(interpreter, "sh") {
			command(t, "bash", "-n", name)
		}
	}
}

// What works on the machine where it was written and nowhere else.
func TestNothingPointsAtOneMachine(t *testing.T) {
	t.Parallel()
	// In two halves, so that this file is not found.
	bad := regexp.MustCompile(strings.Join([]string{
		`/wo` + `rk/(main|shared)`,
		`proxy\.golang` + `\.org`, `sum\.golang` + `\.org`, `deb\.debian` + `\.org`, `pypi` + `\.org`, `npmjs` + `\.(org|com)`,
		`/root/` + `(go|\.)`,
	}, "|"))
	for _, name := range sourceFiles(t) {
		if filepath.Base(name) == "go.sum" || filepath.Ext(name) == ".sum" {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.IndexByte(b[:min(len(b), 8000)], 0) >= 0 {
			continue // a binary, as git tells them
		}
		for _, at := range bad.FindAllIndex(b, -1) {
			t.Errorf("%s:%d: %q works on one machine only", name, 1+bytes.Count(b[:at[0]], []byte("\n")), b[at[0]:at[1]])
		}
	}
}

// A file that grows beyond this has a second subject, and a name for it.
func TestFilesAreShort(t *testing.T) {
	t.Parallel()
	const most = 800
	for _, name := range sourceFiles(t) {
		if filepath.Ext(name) != ".go" || strings.HasSuffix(name, ".pb.go") {
			continue
		}
		if n := strings.Count(read(t, name), "\n"); n > most {
			t.Errorf("%s has %d lines, more than %d", name, n, most)
		}
	}
}

// A document that names a file of the repository is wrong once that is gone.
func TestLinksInDocumentsLeadSomewhere(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)
	for _, name := range sourceFiles(t) {
		if filepath.Ext(name) != ".md" {
			continue
		}
		for _, m := range link.FindAllStringSubmatch(read(t, name), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(name), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", name, m[1], err)
			}
		}
	}
}

// Each page about an encapsulation answers the same questions, in the same
// order, and the list of runbooks names every page.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	list := read(t, "docs/runbooks/README.md")
	heading := regexp.MustCompile(`(?m)^## (.*)$`)
	want := []string{"When", "Packet and MTU", "Configuration", "In the kernel", "Verify", "Break and repair", "Limits"}
	for _, name := range sourceFiles(t) {
		dir, page := filepath.Split(name)
		if dir != "docs/runbooks/" || page == "README.md" {
			continue
		}
		if !strings.Contains(list, "]("+page+")") {
			t.Errorf("docs/runbooks/README.md does not name %s", page)
		}
		if !slices.Contains([]string{"direct.md", "ipip.md", "vxlan.md", "ipip-cross-subnet.md", "vxlan-cross-subnet.md"}, page) {
			continue
		}
		var got []string
		for _, m := range heading.FindAllStringSubmatch(read(t, name), -1) {
			got = append(got, m[1])
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("headings of %s (-want +got):\n%s", name, diff)
		}
	}
}

func TestGeneratedCodeNamesItsSource(t *testing.T) {
	t.Parallel()
	var protos, generated []string
	for _, name := range sourceFiles(t) {
		switch {
		case strings.HasSuffix(name, ".proto"):
			base := strings.TrimSuffix(name, ".proto")
			protos = append(protos, base+".pb.go", base+"_grpc.pb.go")
			if !strings.Contains(read(t, "Makefile"), name) {
				t.Errorf("make generate does not know %s", name)
			}
		case strings.HasSuffix(name, ".pb.go"):
			generated = append(generated, name)
		}
	}
	slices.Sort(protos)
	slices.Sort(generated)
	if diff := cmp.Diff(protos, generated); diff != "" {
		t.Errorf("generated files (-want +got):\n%s", diff)
	}
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
