package runtimes_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

const conflist = "/etc/cni/net.d/10-routerd.conflist"

// kubectl runs kubectl as the administrator, with something to read.
func kubectl(t *testing.T, c *cluster.Cluster, stdin string, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(context.WithoutCancel(t.Context()), stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// on runs a program on a node.
func on(t *testing.T, n *cluster.Node, args ...string) string {
	t.Helper()
	out, err := n.Output(context.WithoutCancel(t.Context()), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// daemonOf are the flags of kubectl that choose the pod of a node's daemon.
func daemonOf(n *cluster.Node) []string {
	return []string{"-n", "kube-system", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName=" + n.Name}
}

// readiness is what Nodes say of whether they are ready, with the reason where they are not.
const readiness = `jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{"\n"}{end}`

// awaitReadiness waits until the Node says so, "True", or "False" for a reason, and returns what it says.
func awaitReadiness(t *testing.T, c *cluster.Cluster, n *cluster.Node, status, reason string) (got string) {
	t.Helper()
	await.Until(t, n.Name+" is ready: "+status, func() error {
		got = kubectl(t, c, "", "get", "node", n.Name, "-o", readiness)
		if !strings.HasPrefix(got, status+" ") || !strings.Contains(got, reason) {
			return fmt.Errorf("it says %q, want %q", got, reason)
		}
		return nil
	})
	return got
}

// asksAgain has the runtime ask STATUS: CRI-O does when it starts, until it is told once that the network is there.
func asksAgain(t *testing.T, n *cluster.Node) {
	t.Helper()
	if world.Config.Runtime == cluster.CRIO {
		restartRuntime(t, n)
	}
}

// restartRuntime starts the runtime of a node again, whose pods stay.
func restartRuntime(t *testing.T, n *cluster.Node) {
	t.Helper()
	n.StopRuntime(await.Context(t))
	if err := n.StartRuntime(await.Context(t)); err != nil {
		t.Fatal(err)
	}
}

// TestStatus: the Node of a daemon that does not answer, and of one that is gone, is not ready, and says why in
// the words of the plugin; it is ready again as soon as the daemon serves. The other Node stays ready.
func TestStatus(t *testing.T) {
	c := world.Up(t)
	other, n := c.Nodes[0], c.Nodes[1]
	if got := on(t, n, "cat", conflist); !strings.Contains(got, `"cniVersion": "1.1.0"`) {
		t.Fatalf("the runtime is not to ask STATUS:\n%s", got)
	}
	awaitReadiness(t, c, n, "True", "")

	_, id, ok := strings.Cut(kubectl(t, c, "", append([]string{"get", "pods", "-o", "jsonpath={.items[0].status.containerStatuses[0].containerID}"}, daemonOf(n)...)...), "//")
	if !ok {
		t.Fatalf("the daemon's container: %q", id)
	}
	if err := n.PauseContainer(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	resume := func() {
		if err := n.ResumeContainer(context.WithoutCancel(t.Context()), id); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			resume()
		}
	})
	asksAgain(t, n)
	t.Log(awaitReadiness(t, c, n, "False", "routerd on /run/routerd/cni.sock did not answer within 20s"))
	resume()
	awaitReadiness(t, c, n, "True", "")

	// Without its DaemonSet a pod is not made again.
	again := `{"apiVersion":"apps/v1","kind":"DaemonSet","metadata":{"name":"routerd","namespace":"kube-system","labels":{"app.kubernetes.io/name":"routerd"}},"spec":` +
		kubectl(t, c, "", "-n", "kube-system", "get", "daemonset", "routerd", "-o", "jsonpath={.spec}") + `}`
	kubectl(t, c, "", "-n", "kube-system", "delete", "daemonset", "routerd", "--cascade=orphan")
	t.Cleanup(func() { kubectl(t, c, again, "apply", "--server-side", "-f", "-") })
	kubectl(t, c, "", append([]string{"delete", "pod"}, daemonOf(n)...)...)
	asksAgain(t, n)
	t.Log(awaitReadiness(t, c, n, "False", "routerd does not answer on /run/routerd/cni.sock"))
	awaitReadiness(t, c, other, "True", "")
	kubectl(t, c, again, "apply", "--server-side", "-f", "-")
	awaitReadiness(t, c, n, "True", "")
}

// TestRestart: STATUS, whenever it is asked, has a daemon that is started again as one that serves, so that its Node is
// ready all the time: else all its pods would leave their Services.
func TestRestart(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[1]
	awaitReadiness(t, c, n, "True", "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var said bytes.Buffer
	watch := c.KubectlCommand(ctx, "get", "node", n.Name, "--watch", "-o", readiness)
	watch.Stdout = &said
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	list := networkOf(t, n)
	runtime := libcni.NewCNIConfigWithCacheDir(plugins, t.TempDir(), &nodeExec{node: n})
	asked, asking := make(chan error, 1), make(chan struct{})
	go func() {
		for {
			select {
			case <-asking:
				asked <- nil
				return
			case <-time.After(50 * time.Millisecond):
			}
			if err := runtime.GetStatusNetworkList(ctx, list); err != nil {
				asked <- err
				return
			}
		}
	}()
	const restarts = 2
	for range restarts {
		kubectl(t, c, "", append([]string{"delete", "pod"}, daemonOf(n)...)...)
		kubectl(t, c, "", "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=120s")
	}
	close(asking)
	if err := <-asked; err != nil {
		t.Errorf("STATUS over restarts: %v", err)
	}
	// The change that comes last is told last.
	kubectl(t, c, "", "annotate", "--overwrite", "node", n.Name, "restarted=now")
	awaitReadiness(t, c, n, "True", "")
	cancel()
	_ = watch.Wait() // it was ended
	if strings.Contains(said.String(), "False") || !strings.Contains(said.String(), "True") {
		t.Errorf("over %d restarts of its daemon the Node said\n%s", restarts, said.String())
	}
}
