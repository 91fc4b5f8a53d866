package kube_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// defineClusterPolicies installs the definition of ClusterNetworkPolicy with the peers of
// the experimental channel, until the test ends.
func defineClusterPolicies(t *testing.T) {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/network-policy-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	const name = "policy.networking.k8s.io_clusternetworkpolicies.yaml"
	kubectl(t, "apply", "--server-side", "-f", filepath.Join(strings.TrimSpace(string(dir)), "config/crd/experimental", name))
	t.Cleanup(func() { kubectl(t, "delete", "crd/clusternetworkpolicies.policy.networking.k8s.io") })
	kubectl(t, "wait", "--for=condition=Established", "--timeout=1m", "crd/clusternetworkpolicies.policy.networking.k8s.io")
}

// TestPolicyEvents: a policy that cannot be carried out says so where its users look, with
// the field and what is done in its place, and once it is mended says that.
func TestPolicyEvents(t *testing.T) {
	defineClusterPolicies(t)
	pods := 0
	top := lab.DefaultTopology(1)
	top.Pods = &pods
	bringUp(t, "n", top)
	const manifest = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: odd, namespace: default}
spec: {podSelector: {}, ingress: [{from: [{ipBlock: {cidr: %s}}]}]}
---
apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: odd}
spec: {tier: Admin, priority: 10, subject: {namespaces: {matchLabels: {none: such}}}, egress: [{action: Deny, to: [{%s}]}]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: odd}
spec: {tier: default, selector: %s}
---
apiVersion: projectcalico.org/v3
kind: KubeControllersConfiguration
metadata: {name: default}
spec: {controllers: {node: {hostEndpoint: {autoCreate: Enabled, createDefaultHostEndpoint: Disabled, templates: [%s]}}}}
`
	apply := func(cidr, peer, selector, template string) {
		t.Helper()
		kubectlWith(t, fmt.Sprintf(manifest, cidr, peer, selector, template), "apply", "-f", "-")
	}
	objects := []string{"networkpolicies.networking.k8s.io/odd", "clusternetworkpolicies.policy.networking.k8s.io/odd", "globalnetworkpolicies.projectcalico.org/odd", "kubecontrollersconfigurations.projectcalico.org/default"}
	t.Cleanup(func() { kubectl(t, append([]string{"delete", "--ignore-not-found"}, objects...)...) })
	say := func(what string, want ...string) {
		t.Helper()
		await.Until(t, what, func() error {
			for i, object := range objects {
				events := kubectl(t, "events", "--for", object)
				if !strings.Contains(events, want[i]) || strings.Count(events, "CarriedOut") != 1 {
					return fmt.Errorf("of %s is said: %s", object, events)
				}
			}
			return nil
		})
	}
	// Kubernetes before 1.36 takes ranges with leading zeros.
	apply("010.1.0.0/16", "domainNames: [example.com]", `"a == "`, "{generateName: a, interfaceSelector: eth(}")
	say("what cannot be carried out is said",
		`spec.ingress[0]: peer 0: ipBlock.cidr: "010.1.0.0/16" is no CIDR such as 10.1.0.0/16, without leading zeros; it stands for nobody`,
		"spec.egress[0]: peer 0: domainNames are not supported; it denies everything",
		"PolicyNotCarriedOut", "spec.controllers.node.hostEndpoint.templates[0].interfaceSelector")
	apply("10.1.0.0/16", "networks: [10.0.0.0/8]", `"a == 'b'"`, "")
	const mended = "everything in it is carried out"
	say("what is mended is said", mended, mended, mended, mended)
	forbidden(t)
}
