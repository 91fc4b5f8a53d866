package cluster_test

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

const proxyless = `
apiVersion: v1
kind: Pod
metadata: {name: proxyless}
spec: {nodeName: %s, terminationGracePeriodSeconds: 0, automountServiceAccountToken: false, containers: [{name: c, image: ` + cluster.AgnhostImage + `, args: [pause]}]}
`

// TestProxyGone: on a node without kube-proxy and its rules a daemon that was killed comes
// back and attaches pods. It reaches the API server by the endpoints that are on its disk,
// since the address of the Service is nowhere.
func TestProxyGone(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[0]
	_, kubeBin := cluster.Programs(t)
	service := kubectl(t, c, "get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}")
	reached := func() error {
		_, err := n.Output(t.Context(), filepath.Join(kubeBin, "agnhost"), "connect", "--timeout=2s", service)
		return err
	}
	await.Until(t, "kube-proxy carries the address of the API server", reached)
	t.Cleanup(func() {
		if err := n.StartProxy(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	if err := n.StopProxy(ctx); err != nil {
		t.Fatal(err)
	}
	if reached() == nil {
		t.Fatalf("%s is reached without kube-proxy", service)
	}
	ready := func() string {
		return kubectl(t, c, "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName="+n.Name,
			"-o", `jsonpath={.items[0].status.containerStatuses[0].ready} {.items[0].status.containerStatuses[0].containerID}`)
	}
	var container string
	if _, err := fmt.Sscanf(ready(), "true %s", &container); err != nil {
		t.Fatalf("the daemon at first: %q", ready())
	}
	daemon := daemonOn(t, n, 0)
	if err := unix.Kill(daemon, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	daemonOn(t, n, daemon)
	create(t, c, fmt.Sprintf(proxyless, n.Name))
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/proxyless", "--timeout=120s")
	await.Until(t, "the next daemon is ready", func() error {
		next := ""
		if _, err := fmt.Sscanf(ready(), "true %s", &next); err != nil || next == container {
			return fmt.Errorf("it says %q, and was %s", ready(), container)
		}
		return nil
	})
	if reached() == nil {
		t.Errorf("%s is reached without kube-proxy", service)
	}
}
