package cluster_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// TestDaemonGone: the Node of a daemon that is gone says that it has no network, by whoever
// looks after the others, which keeps pods away; it says the opposite when the daemon is back.
// The other Nodes say it all the time.
func TestDaemonGone(t *testing.T) {
	c := world.Up(t)
	says := func(what string, want func(n *cluster.Node) string) {
		t.Helper()
		await.Until(t, what, func() error {
			for _, n := range c.Nodes {
				got := kubectl(t, c, "get", "node", n.Name, "-o", `jsonpath={range .status.conditions[?(@.type=="NetworkUnavailable")]}{.status} {.reason}{end} {.spec.taints[*].key}`)
				if want := want(n); got != want {
					return fmt.Errorf("%s says %q, want %q", n.Name, got, want)
				}
			}
			return nil
		})
	}
	const up, gone = "False RouterdIsUp ", "True RouterdIsGone node.kubernetes.io/network-unavailable"
	well := func(*cluster.Node) string { return up }
	says("all have their network", well)
	holder := ""
	await.Until(t, "somebody looks after the others", func() error {
		holder = kubectl(t, c, "-n", "kube-system", "get", "lease", "routerd-ipam-collector", "-o", "jsonpath={.spec.holderIdentity}")
		if holder == "" {
			return fmt.Errorf("nobody holds the lease")
		}
		return nil
	})
	other := c.Nodes[slices.IndexFunc(c.Nodes, func(n *cluster.Node) bool { return n.Name != holder })]

	// Without its DaemonSet a pod is not made again.
	again := `{"apiVersion":"apps/v1","kind":"DaemonSet","metadata":{"name":"routerd","namespace":"kube-system","labels":{"app.kubernetes.io/name":"routerd"}},"spec":` +
		kubectl(t, c, "-n", "kube-system", "get", "daemonset", "routerd", "-o", "jsonpath={.spec}") + `}`
	kubectl(t, c, "-n", "kube-system", "delete", "daemonset", "routerd", "--cascade=orphan")
	t.Cleanup(func() { apply(t, c, again, "apply", "--server-side", "-f", "-") })
	kubectl(t, c, "-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName="+other.Name)
	says("that of the daemon that is gone says so", func(n *cluster.Node) string {
		if n == other {
			return gone
		}
		return up
	})
	apply(t, c, again, "apply", "--server-side", "-f", "-")
	says("all have their network again", well)
	refused(t, c)
}
