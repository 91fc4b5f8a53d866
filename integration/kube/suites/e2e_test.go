package suites_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
	"github.com/routerd/routerd/store"
)

// report is what is read of the report of ginkgo, the runner of Kubernetes' own tests.
type report struct {
	SpecReports []spec
}

type spec struct {
	ContainerHierarchyTexts    []string
	LeafNodeType, LeafNodeText string
	State                      string
	RunTime                    time.Duration
	Failure                    struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

// name is what a focus is matched against.
func (s spec) name() string {
	return strings.Join(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), " ")
}

// e2e runs the cases of Kubernetes' own e2e.test whose name a regular expression
// matches, but those for which there is a reason not to; with -chosen those that part matches.
func e2e(t *testing.T, c *cluster.Cluster, focus, part string, exclude []excluded) {
	t.Helper()
	if part := some(part); part != "" {
		focus, exclude = part, nil
	}
	_, kubeBin := cluster.Programs(t)
	dir := t.ArtifactDir()
	config, err := c.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "report.json")
	cmd := exec.CommandContext(t.Context(), filepath.Join(kubeBin, "e2e.test"),
		"--kubeconfig="+config, "--kubectl-path="+filepath.Join(kubeBin, "kubectl"), "--provider=skeleton", fmt.Sprintf("--num-nodes=%d", len(c.Nodes)),
		"--minStartupPods=0", "--dump-logs-on-failure=false", "--disable-log-dump=true",
		"--ginkgo.focus="+focus, "--ginkgo.json-report="+file, "--ginkgo.no-color", "--ginkgo.v", "--ginkgo.timeout=4h", "--ginkgo.seed=1")
	for _, e := range exclude {
		cmd.Args = append(cmd.Args, "--ginkgo.skip="+e.cases)
	}
	cmd.Env = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")}
	ran := run(t, cmd, filepath.Join(dir, "e2e.log"))
	results, err := read(file, focus)
	if err != nil {
		t.Fatalf("%v: %v", ran, err)
	}
	judge(t, results, exclude)
	if ran != nil && !t.Failed() {
		t.Errorf("no case failed, but %v", ran)
	}
}

// read returns what became of the cases of a report that a focus matches, and of what
// else failed.
func read(file, focus string) (results []result, err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var reports []report
	if err := json.Unmarshal(raw, &reports); err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	matches, err := regexp.Compile(focus)
	if err != nil {
		return nil, err
	}
	for _, r := range reports {
		for _, s := range r.SpecReports {
			one := result{name: s.name(), state: s.State, took: s.RunTime, why: s.why()}
			switch {
			case s.LeafNodeType != "It":
				if s.State != "passed" && s.State != "skipped" {
					one.name = s.LeafNodeType // what is done before and after all cases
					results = append(results, one)
				}
			case matches.MatchString(one.name):
				results = append(results, one)
			}
		}
	}
	return results, nil
}

// why is what a case says of its failure, or why it skipped itself.
func (s spec) why() string {
	if s.Failure.Message == "" {
		return ""
	}
	return fmt.Sprintf("%s (%s:%d)", s.Failure.Message, filepath.Base(s.Failure.Location.FileName), s.Failure.Location.LineNumber)
}

// TestNetpol runs the cases of NetworkPolicy.
func TestNetpol(t *testing.T) {
	const part = `\[sig-network\] Netpol NetworkPolicy between server and client .*(default-deny-all|based on PodSelector and NamespaceSelector|allow egress access on one named port|enforce updated policy|enforce except clause|deny ingress access to updated pod)`
	e2e(t, world.Up(t), `\[sig-network\] Netpol`, part, []excluded{
		{`Feature:SCTPConnectivity`, "the kernel has no SCTP"},
	})
}

// TestServices runs the cases of Services.
func TestServices(t *testing.T) {
	const part = `\[sig-network\] Services .*(serve a basic endpoint from pods|create a functioning NodePort service|preserve source pod IP|internalTrafficPolicy=Local Pod to Pod)`
	exclude := []excluded{
		{`should be rejected for evicted pods`, "the kubelets do not watch how much pods write (localStorageCapacityIsolation), so none is evicted"},
		{`should create endpoints for unready pods`, "it asks pods through the API server, whose host has no route to them"},
		{`should allow creating a basic SCTP service`, "it lists the kernel's modules, and the kernel has none"},
		{`should work after restarting (kube-proxy|apiserver)`, "they are no pods here, and the case skips itself"},
	}
	if world.Config.Encapsulation != string(store.Direct) {
		exclude = append(exclude, excluded{
			`should implement NodePort and HealthCheckNodePort correctly`,
			"kube-proxy masquerades what a node sends to its own node port, in a tunnel by the tunnel's address; the case wants the node's, so it passes where the endpoint is in the same rack",
		})
	}
	e2e(t, world.Up(t), `\[sig-network\] Services`, part, exclude)
}
