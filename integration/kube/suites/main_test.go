// Package suites_test runs the suites by which others judge a cluster's network,
// unchanged, on the cluster that integration/kube/cluster brings up.
package suites_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/kube/cluster"
)

var (
	world  cluster.World
	only   = flag.String("only", "", "run the cases that this regular expression matches, whether or not there is a reason not to")
	chosen = flag.Bool("chosen", false, "run a chosen part of each suite: minutes in the place of an hour")
)

// some returns what a regular expression of cases has to match: of a suite all, "", those of
// the flag -only, or its chosen part.
func some(part string) string {
	switch {
	case *only != "":
		return *only
	case *chosen:
		return part
	}
	return ""
}

func TestMain(m *testing.M) {
	code, err := runContained(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func runContained(m *testing.M) (code int, err error) {
	definition, err := experimentalChannel()
	if err != nil {
		return 1, err
	}
	world.Config = cluster.Config{
		Nodes: 3, DNS: true, Manifests: "../../../configs/kubernetes",
		Definitions: []string{definition},
		Images:      map[string][]cluster.ImageFile{conformanceImage: conformanceFiles},
	}
	world.Config.Flags(flag.CommandLine)
	flag.Parse()
	return world.Main(m)
}

// excluded is why cases are not run.
type excluded struct {
	cases string // a regular expression
	why   string
}

// result is what became of a case.
type result struct {
	name, state, why string
	took             time.Duration
}

// judge fails the test for each case that failed, each that was not run without a reason,
// and each reason that is none any more, and writes down what became of all.
func judge(t *testing.T, results []result, exclude []excluded) {
	t.Helper()
	count := map[string]int{}
	applied := map[string]bool{}
	var table strings.Builder
	for _, r := range results {
		count[r.state]++
		switch r.state {
		case "passed":
		case "skipped":
			for _, e := range exclude {
				if regexp.MustCompile(e.cases).MatchString(r.name) {
					applied[e.cases], r.why = true, e.why
				}
			}
			if r.why == "" {
				t.Errorf("%s: not run, and nobody says why", r.name)
			}
		default:
			t.Errorf("%s: %s: %s", r.name, r.state, r.why)
		}
		fmt.Fprintf(&table, "| %s | %s | %.0f s | %s |\n", r.name, r.state, r.took.Seconds(), strings.ReplaceAll(r.why, "\n", " "))
	}
	for _, e := range exclude {
		if !applied[e.cases] {
			t.Errorf("no case is left out by %q", e.cases)
		}
	}
	t.Logf("%d cases: %v\n%s", len(results), count, table.String())
}

// run runs a program with what it writes in a file.
func run(t *testing.T, cmd *exec.Cmd, log string) error {
	t.Helper()
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	return cmd.Run()
}
