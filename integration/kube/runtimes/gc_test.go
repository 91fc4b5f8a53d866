package runtimes_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

var plugins = []string{"/opt/cni/bin"}

// nodeExec executes plugins on a node.
type nodeExec struct {
	version.PluginDecoder
	node *cluster.Node
}

func (e *nodeExec) FindInPath(plugin string, paths []string) (string, error) {
	return filepath.Join(paths[0], plugin), nil
}

func (e *nodeExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	cmd := e.node.Command(ctx, path)
	cmd.Env = append(cmd.Env, slices.DeleteFunc(slices.Clone(env), func(v string) bool { return !strings.HasPrefix(v, "CNI_") })...)
	cmd.Stdin = bytes.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w: %s%s", err, out.String(), errOut.String())
	}
	return out.Bytes(), nil
}

// networkOf is the network of a node's containers.
func networkOf(t *testing.T, n *cluster.Node) *libcni.NetworkConfigList {
	t.Helper()
	list, err := libcni.ConfListFromBytes([]byte(on(t, n, "cat", conflist)))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

const served = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: served}
spec:
  selector: {matchLabels: {app: served}}
  template:
    metadata: {labels: {app: served}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: ` + cluster.AgnhostImage + `
        args: [netexec, --http-port=8080, --udp-port=8081]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
`

// collect sends GC with what containerd has, which sends none itself.
func collect(t *testing.T, n *cluster.Node, runtime *libcni.CNIConfig, list *libcni.NetworkConfigList) {
	t.Helper()
	args := &libcni.GCArgs{}
	for id := range strings.FieldsSeq(on(t, n, "ctr", "--namespace", "k8s.io", "containers", "list", "--quiet", `labels."io.cri-containerd.kind"==sandbox`)) {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: id, IfName: "eth0"})
	}
	if len(args.ValidAttachments) < 2 {
		t.Fatalf("sandboxes of the runtime: %v", args.ValidAttachments)
	}
	if err := runtime.GCNetworkList(t.Context(), list, args); err != nil {
		t.Fatal(err)
	}
}

// TestGC: of what containers had that the runtime no longer knows nothing is left once it says which
// it has, as CRI-O does when it starts, whether or not it remembers the others' attachments; its pods keep what they have.
func TestGC(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[0]
	t.Cleanup(func() { kubectl(t, c, served, "delete", "--ignore-not-found", "--wait", "-f", "-") })
	kubectl(t, c, served, "apply", "-f", "-")
	kubectl(t, c, "", "rollout", "status", "daemonset/served", "--timeout=90s")
	list := networkOf(t, n)
	// What the runtime remembers is of the same library in its usual place.
	runtime := libcni.NewCNIConfigWithCacheDir(plugins, n.Path("/var/lib/cni"), &nodeExec{node: n})
	forgotten := libcni.NewCNIConfigWithCacheDir(plugins, t.TempDir(), &nodeExec{node: n})

	stale := map[string]netip.Addr{}
	for id, by := range map[string]*libcni.CNIConfig{"stale-remembered": runtime, "stale-forgotten": forgotten} {
		on(t, n, "ip", "netns", "add", id)
		t.Cleanup(func() { on(t, n, "ip", "netns", "del", id) })
		result, err := by.AddNetworkList(t.Context(), list, &libcni.RuntimeConf{ContainerID: id, NetNS: "/run/netns/" + id, IfName: "eth0"})
		if err != nil {
			t.Fatal(err)
		}
		got, err := current.NewResultFromResult(result)
		if err != nil || len(got.IPs) == 0 {
			t.Fatalf("ADD of %s: %v, %v", id, result, err)
		}
		addr, _ := netip.AddrFromSlice(got.IPs[0].Address.IP)
		stale[id] = addr.Unmap()
		on(t, n, "ping", "-c", "1", "-W", "5", stale[id].String())
	}
	// holder is who has an address by the datastore, in routerctl's words.
	holder := func(addr netip.Addr) (string, error) {
		out, err := c.Routerctl(t.Context(), "ipam", "show", "--ip="+addr.String()).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return string(out), err
	}
	pod := strings.Fields(kubectl(t, c, "", "get", "pods", "-l", "app=served", "--field-selector", "spec.nodeName="+n.Name, "-o", "jsonpath={.items[*].metadata.name} {.items[*].status.podIP}"))
	if len(pod) != 2 {
		t.Fatalf("the pod and its address: %q", pod)
	}
	podAddr := netip.MustParseAddr(pod[1])
	has := func(id string, addr netip.Addr) func() error {
		return func() error {
			who, err := holder(addr)
			if err == nil && !strings.Contains(who, id) {
				err = fmt.Errorf("%s is not of %s: %s", addr, id, who)
			}
			return err
		}
	}
	// It is told in its own time: until then an address is of the node's reserve.
	await.Until(t, "the datastore knows the pod's address", has(pod[0], podAddr))
	for id, addr := range stale {
		await.Until(t, "the datastore knows whose "+addr.String()+" is", has(id, addr))
	}

	restartRuntime(t, n)
	awaitReadiness(t, c, n, "True", "")
	if world.Config.Runtime != cluster.CRIO {
		collect(t, n, runtime, list)
	}
	for id, addr := range stale {
		await.Until(t, addr.String()+" is free", func() error {
			who, err := holder(addr)
			if err == nil && strings.Contains(who, id) {
				err = fmt.Errorf("it is not: %s", who)
			}
			return err
		})
		if left := on(t, n, "ip", "route", "show", addr.String()); left != "" {
			t.Errorf("%s is routed: %s", id, left)
		}
		if left := on(t, n, "ip", "-n", id, "-o", "link", "show"); strings.Contains(left, "eth0") {
			t.Errorf("%s has its wire: %s", id, left)
		}
	}
	if err := has(pod[0], podAddr)(); err != nil {
		t.Error(err)
	}
	_, kubeBin := cluster.Programs(t)
	on(t, n, filepath.Join(kubeBin, "agnhost"), "connect", "--timeout=5s", netip.AddrPortFrom(podAddr, 8080).String())
}
