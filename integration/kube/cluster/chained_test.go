package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// chainedConflist comes before the one that the daemon keeps.
const chainedConflist = "/etc/cni/net.d/05-chained.conflist"

// hostPort is the node's that [chainedPod] has.
const hostPort = "18080"

func chainedPod(node string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: chained
  labels: {app: chained}
  annotations: {kubernetes.io/ingress-bandwidth: 40M, kubernetes.io/egress-bandwidth: 24M}
spec:
  nodeName: %s
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: %s
    args: [netexec, --http-port=8080]
    ports: [{containerPort: 8080, hostPort: %s}]
    readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
`, node, cluster.AgnhostImage, hostPort)
}

const noneToChained = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: none-to-chained}
spec: {podSelector: {matchLabels: {app: chained}}, policyTypes: [Ingress]}
`

// TestChained: a pod of a configuration that chains portmap and bandwidth to routerd's plugin is
// reached by the node's port from outside, from the node and from another one, as policy allows; it
// has the limits that it asks for; and of a pod that ends nothing is left on the node.
func TestChained(t *testing.T) {
	c := world.Up(t)
	n, other := c.Nodes[0], c.Nodes[1]
	on := func(n *cluster.Node, args ...string) string {
		t.Helper()
		out, err := n.Output(context.WithoutCancel(t.Context()), args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	var conf map[string]any
	if err := json.Unmarshal([]byte(on(n, "cat", "/etc/cni/net.d/10-routerd.conflist")), &conf); err != nil {
		t.Fatal(err)
	}
	ours, ok := conf["plugins"].([]any)
	if !ok {
		t.Fatalf("routerd's conflist: %v", conf)
	}
	conf["plugins"] = append(ours,
		map[string]any{"type": "portmap", "snat": true, "capabilities": map[string]bool{"portMappings": true}},
		map[string]any{"type": "bandwidth", "capabilities": map[string]bool{"bandwidth": true}})
	raw, err := json.Marshal(conf)
	if err != nil {
		t.Fatal(err)
	}
	// What portmap leaves of itself is there whatever pods there are: chains that lead to those of pods.
	on(n, "cp", "/usr/lib/cni/portmap", "/usr/lib/cni/bandwidth", "/opt/cni/bin/")
	write := n.Command(t.Context(), "sh", "-c", "cat >/etc/cni/net.d/chained.new && mv /etc/cni/net.d/chained.new "+chainedConflist)
	write.Stdin = strings.NewReader(string(raw))
	if out, err := write.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { on(n, "rm", "-f", chainedConflist) })

	// The runtime reads the directory when it is told that it changed, and says nothing.
	t.Cleanup(func() {
		kubectl(t, c, "delete", "--ignore-not-found", "pod", "chained", "--now")
		kubectl(t, c, "delete", "--ignore-not-found", "networkpolicy", "none-to-chained")
	})
	qdiscs := func() string { return on(n, "tc", "qdisc", "show") }
	await.Until(t, "the runtime uses the configuration", func() error {
		apply(t, c, chainedPod(n.Name), "apply", "-f", "-")
		kubectl(t, c, "wait", "--for=condition=Ready", "pod/chained", "--timeout=60s")
		if !strings.Contains(qdiscs(), "tbf") {
			kubectl(t, c, "delete", "pod", "chained", "--now")
			return errors.New("nothing limits the pod")
		}
		return nil
	})
	for _, want := range []string{"rate 40Mbit", "rate 24Mbit"} {
		if got := qdiscs(); !strings.Contains(got, want) {
			t.Errorf("no %s on the node:\n%s", want, got)
		}
	}

	address := kubectl(t, c, "get", "node", n.Name, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`)
	at := net.JoinHostPort(strings.Fields(address)[0], hostPort)
	client := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	outside := func() error {
		resp, err := client.Get("http://" + at + "/clientip")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		seen, err := io.ReadAll(resp.Body)
		if err == nil && !strings.HasPrefix(string(seen), "10.199.") && !strings.HasPrefix(string(seen), "[fd00:10:199:") {
			err = fmt.Errorf("the pod sees the client as %q", seen)
		}
		return err
	}
	_, kubeBin := cluster.Programs(t)
	agnhost := filepath.Join(kubeBin, "agnhost")
	connects := func(n *cluster.Node, at string) func() error {
		return func() error {
			_, err := n.Output(t.Context(), agnhost, "connect", "--timeout=3s", at)
			return err
		}
	}
	ways := map[string]func() error{"from outside": outside, "from the node": connects(n, at), "from another node": connects(other, at)}
	reached := func() {
		t.Helper()
		for what, way := range ways {
			await.Until(t, "the pod is reached by the node's port "+what, way)
		}
	}
	reached()
	apply(t, c, noneToChained, "apply", "-f", "-")
	for _, what := range []string{"from outside", "from another node"} {
		await.Until(t, "policy keeps away who comes by the node's port "+what, func() error {
			if ways[what]() == nil {
				return errors.New("the pod is reached")
			}
			return nil
		})
	}
	kubectl(t, c, "delete", "networkpolicy", "none-to-chained")
	reached()

	// The daemon that begins anew leaves what is not its own.
	daemon := daemonOn(t, n, 0)
	kubectl(t, c, "-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName="+n.Name)
	daemonOn(t, n, daemon)
	kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=60s")
	reached()

	podAddress := kubectl(t, c, "get", "pod", "chained", "-o", "jsonpath={.status.podIP}")
	kubectl(t, c, "delete", "pod", "chained", "--now")
	await.Until(t, "nothing of the pod is left", func() error {
		var left []string
		for _, look := range []struct{ of, what string }{
			{on(n, "sh", "-c", "iptables-save; ip6tables-save; nft list ruleset"), podAddress},
			{on(n, "sh", "-c", "iptables-save; ip6tables-save"), "CNI-DN-"},
			{on(n, "sh", "-c", "iptables-save; ip6tables-save"), hostPort},
			{on(n, "ip", "link", "show", "type", "ifb"), "mtu"},
			{qdiscs(), "tbf"},
			{qdiscs(), "ingress"},
			{on(n, "ip", "route", "show", podAddress), podAddress},
		} {
			if strings.Contains(look.of, look.what) {
				left = append(left, fmt.Sprintf("%q in\n%s", look.what, look.of))
			}
		}
		if left != nil {
			return errors.New(strings.Join(left, "\n"))
		}
		return nil
	})
	if err := outside(); err == nil {
		t.Error("the node's port leads somewhere")
	}
	refused(t, c)
}
