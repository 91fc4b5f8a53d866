package kube_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// TestKubeControllers: with the rights of the manifests daemons make the host endpoints that a
// KubeControllersConfiguration asks for, each those of its own Node, and say what is in force;
// what was made for a Node that is gone goes, and what a user made stays.
func TestKubeControllers(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods = &pods
	bringUp(t, "k", top)
	left := func(name, node, labels string) string {
		return fmt.Sprintf(`
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: %s, labels: {%s}}
spec: {node: %s, interfaceName: none0}
---`, name, labels, node)
	}
	const made = "projectcalico.org/created-by: calico-kube-controllers"
	const config = `
apiVersion: projectcalico.org/v3
kind: KubeControllersConfiguration
metadata: {name: default}
spec: {controllers: {node: {leakGracePeriod: 20m, hostEndpoint: {autoCreate: %s, templates: [{generateName: up, interfaceSelector: "^%s$", nodeSelector: "kubernetes.io/hostname == 'node2'"}]}}}}
`
	t.Cleanup(func() {
		kubectl(t, "delete", "--ignore-not-found", "kubecontrollersconfigurations.projectcalico.org/default", "hostendpoints.projectcalico.org/mine")
	})
	apply := func(auto string) {
		t.Helper()
		kubectlWith(t, fmt.Sprintf(config, auto, "eth0"), "apply", "-f", "-")
	}
	has := func(want ...string) {
		t.Helper()
		await.Until(t, "the host endpoints are those that are asked for", func() error {
			got := strings.Fields(kubectl(t, "get", "hostendpoints.projectcalico.org", "-o", `jsonpath={range .items[*]}{.metadata.name}:{.spec.interfaceName}{"\n"}{end}`))
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("(-want +got):\n%s", diff)
			}
			return nil
		})
	}
	running := func(want string) {
		t.Helper()
		await.Until(t, "the status says what is in force", func() error {
			got := kubectl(t, "get", "kubecontrollersconfigurations.projectcalico.org/default", "-o", "jsonpath={.status.runningConfig.controllers.node.hostEndpoint.autoCreate} {.status.runningConfig.controllers.node.leakGracePeriod}")
			if got != want {
				return fmt.Errorf("it is %q, want %q", got, want)
			}
			return nil
		})
	}
	kubectlWith(t, left("gone-auto-hep", "gone", made)+left("node1-old-auto-hep", "node1", made)+left("mine", "node1", "a: b"), "apply", "-f", "-")
	apply("Enabled")
	has("mine:none0", "node1-auto-hep:*", "node2-auto-hep:*", "node2-up-"+"eth0"+"-auto-hep:"+"eth0")
	running("Enabled 20m0s")
	kubectl(t, "label", "node", "node1", "tried=yes")
	await.Until(t, "a host endpoint has the labels of its Node", func() error {
		if got := kubectl(t, "get", "hostendpoints.projectcalico.org/node1-auto-hep", "-o", "jsonpath={.metadata.labels.tried}"); got != "yes" {
			return fmt.Errorf("the label is %q", got)
		}
		return nil
	})
	apply("Disabled")
	has("mine:none0")
	running("Disabled 20m0s")
	forbidden(t)
}
