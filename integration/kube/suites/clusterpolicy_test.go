package suites_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// conformanceImage is the name by which network-policy-api's suite asks for agnhost.
const conformanceImage = "registry.k8s.io/e2e-test-images/agnhost:2.45"

// conformanceFiles are what that image has in the place of its own: every pod of the suite
// has servers of SCTP, and would never be ready where the kernel has none.
var conformanceFiles = []cluster.ImageFile{
	{Path: "agnhost", Text: `#!/bin/sh
if [ "$1" = porter ] && [ ! -e /proc/net/sctp ]; then
	exec sleep 2147483647
fi
exec /agnhost-2 "$@"
`},
}

// TestClusterNetworkPolicy runs the conformance suite of network-policy-api. The definition of
// its experimental channel, which has peers that are Nodes besides, is there before the daemons are: they look for one that comes
// later every 30 seconds, and the first case does not wait for that.
func TestClusterNetworkPolicy(t *testing.T) {
	c := world.Up(t)
	_, kubeBin := cluster.Programs(t)
	dir := t.ArtifactDir()
	config, err := c.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	// Both tiers and directions, what is decided by the order of policies, and names of ports.
	part := some(`^(CNPAdminTierIngressTCP|CNPBaselineTierEgressTCP|CNPAdminTierPriorityField|CNPAdminTierIntegration|CNPAdminTierEgressNamedPort)$`)
	cmd := exec.CommandContext(t.Context(), filepath.Join(kubeBin, "network-policy-api.test"),
		"-test.v", "-test.timeout=4h", "-test.run=^TestConformance$/"+part, "-supported-features=ClusterNetworkPolicyNamedPorts,ClusterNetworkPolicyEgressNodePeers")
	cmd.Env = []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + config}
	const sctp = "the kernel has no SCTP"
	exclude := []excluded{
		{`CNPAdminTierEgressSCTP`, sctp},
		{`CNPAdminTierIngressSCTP`, sctp},
		{`CNPBaselineTierEgressSCTP`, sctp},
		{`CNPBaselineTierIngressSCTP`, sctp},
		{`CNPAdminTierGress`, sctp + ", and each of its cases asks by TCP, UDP and SCTP"},
		{`CNPBaselineTierGress`, sctp + ", and each of its cases asks by TCP, UDP and SCTP"},
		{`CNPAdminTierEgressInlineCIDRPeers`, sctp + ", and each of its cases asks by TCP, UDP and SCTP"},
		{`CNPBaselineTierEgressInlineCIDRPeers`, sctp + ", and each of its cases asks by TCP, UDP and SCTP"},
		{`CNPAdminTierEgressNodePeers/Should_support_a_'deny-egress'_rule_policy_for_egress-node-peer`, sctp + ", and the case asks by TCP, UDP and SCTP"},
		{`CNPBaselineTierEgressNodePeers/Should_support_a_'deny-egress'_rule_policy_for_egress-node-peer`, sctp + ", and the case asks by TCP, UDP and SCTP"},
	}
	var results []result
	if part != "" {
		exclude = nil
	} else {
		var names []string
		for _, e := range exclude {
			names = append(names, "^TestConformance$/^"+strings.ReplaceAll(e.cases, "/", "$/^")+"$")
			results = append(results, result{name: e.cases, state: "skipped"})
		}
		cmd.Args = append(cmd.Args, "-test.skip="+strings.Join(names, "|"))
	}
	log := filepath.Join(dir, "conformance.log")
	ran := run(t, cmd, log)
	told, err := outcomes(log)
	if err != nil {
		t.Fatalf("%v: %v", ran, err)
	}
	judge(t, append(results, told...), exclude)
	if ran != nil || len(told) == 0 {
		t.Errorf("%d cases: %v", len(told), ran)
	}
}

// experimentalChannel is the file with the definition of ClusterNetworkPolicy, of the module of
// its types.
func experimentalChannel() (string, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/network-policy-api").Output()
	if err != nil {
		return "", fmt.Errorf("find the module of network-policy-api: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(dir)), "config/crd/experimental/policy.networking.k8s.io_clusternetworkpolicies.yaml"), nil
}

// outcome is a line of go test's about a case below a test of the suite.
var outcome = regexp.MustCompile(`^\s+--- (PASS|FAIL|SKIP): TestConformance/(\S+/\S+) \(([0-9.]+s)\)`)

// outcomes reads what became of the cases of a test program.
func outcomes(log string) (results []result, err error) {
	f, err := os.Open(log)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		m := outcome.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		took, err := time.ParseDuration(m[3])
		if err != nil {
			return nil, err
		}
		state := map[string]string{"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}[m[1]]
		results = append(results, result{name: m[2], state: state, took: took})
	}
	return results, lines.Err()
}
