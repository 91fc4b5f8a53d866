package kube_test

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/store/kube/convert"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "kb"

// metricsAddress is where each host shows its metrics.
const metricsAddress = "127.0.0.1:9199"

// cluster is a lab whose store is the API server.
type cluster struct {
	*lab.Lab
	t        *testing.T
	forwards map[string]*kube.Forward
}

func binDir(t *testing.T) string {
	t.Helper()
	dir := bring.BinDir()
	if _, err := os.Stat(filepath.Join(dir, "routerd")); err != nil {
		t.Fatalf("%v: run \"make build\" first, or say by ROUTERD_BIN where the programs are", err)
	}
	return dir
}

// bringUp brings up hosts on the API server, with a Node for each as its kubelet
// makes it.
func bringUp(t *testing.T, suffix string, top lab.Topology, podCIDRs ...string) *cluster {
	t.Helper()
	return bringUpSet(t, suffix, top, nil, podCIDRs...)
}

// bringUpSet is bringUp with settings of all hosts beside.
func bringUpSet(t *testing.T, suffix string, top lab.Topology, set map[string]any, podCIDRs ...string) *cluster {
	t.Helper()
	open(t, convert.V3)
	config, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	top.Kubeconfig, top.APIGroup = config, string(convert.V3)
	install(t)
	return bringUpWith(t, suffix, top, podCIDRs, func(file string) map[string]any {
		config := map[string]any{
			"health":    map[string]any{"listen": metricsAddress, "profiles": *profiles != ""},
			"ipam":      map[string]any{"usePodCIDR": len(podCIDRs) > 0},
			"address":   map[string]any{"ipv4": "kubernetes-internal-ip", "ipv6": "kubernetes-internal-ip"},
			"datastore": map[string]any{"kubernetes": map[string]any{"kubeconfig": file, "apiGroup": convert.V3.APIVersion()}},
			"cni":       map[string]any{"manage": true, "binDir": filepath.Join(t.TempDir(), "bin"), "confDir": filepath.Join(t.TempDir(), "net.d")},
		}
		maps.Copy(config, set)
		return config
	})
}

// bringUpWith brings up hosts, with a Node for each that has none yet, and a configuration of their own, by the file
// with which each reaches the API: with the rights that the manifests give it, on its node.
func bringUpWith(t *testing.T, suffix string, top lab.Topology, podCIDRs []string, configOf func(kubeconfig string) map[string]any) *cluster {
	t.Helper()
	return bringUpLab(t, suffix, lab.Options{Topology: top}, podCIDRs, configOf)
}

// bringUpLab is bringUpWith with options of the lab.
func bringUpLab(t *testing.T, suffix string, o lab.Options, podCIDRs []string, configOf func(kubeconfig string) map[string]any) *cluster {
	t.Helper()
	made := strings.Fields(kubectl(t, "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	top, err := o.Topology.Complete()
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range top.Nodes {
		podCIDR := ""
		if len(podCIDRs) > 0 {
			podCIDR = podCIDRs[i] // one for each host
		}
		if !slices.Contains(made, n.Name) {
			makeNode(t, n, podCIDR)
		}
		file, err := server.Kubeconfig("", token(t, n.Name))
		if err != nil {
			t.Fatal(err)
		}
		top.Nodes[i].Config = configOf(file)
	}
	c := &cluster{t: t, forwards: map[string]*kube.Forward{}}
	t.Cleanup(func() {
		for _, f := range c.forwards {
			f.Close()
		}
	})
	o.Topology, o.BinDir, o.NoPods = top, binDir(t), true
	o.Underlay = func(l *lab.Lab) error {
		for _, h := range l.Hosts() {
			f, err := server.Forward(l.Space(h))
			if err != nil {
				return err
			}
			c.forwards[h] = f
		}
		return nil
	}
	c.Lab = bring.UpWith(t, 2*time.Minute, labPrefix, suffix, o)
	return c
}

// makeNode makes the Node of a host as its kubelet does.
func makeNode(t *testing.T, n lab.Node, podCIDR string) {
	t.Helper()
	spec := "{}"
	if podCIDR != "" {
		spec = fmt.Sprintf(`{"podCIDR":%q,"podCIDRs":[%[1]q]}`, podCIDR)
	}
	create(t, "/api/v1/nodes", fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":%q,"labels":{"kubernetes.io/hostname":%[1]q,"topology.kubernetes.io/zone":%q}},"spec":%s}`, n.Name, n.Rack, spec))
	boot, err := bootid.Read()
	if err != nil {
		t.Fatal(err)
	}
	addresses := ""
	for _, a := range n.Addrs() {
		addresses += fmt.Sprintf(`{"type":"InternalIP","address":%q},`, a)
	}
	status := fmt.Sprintf(`{"status":{"addresses":[%s{"type":"Hostname","address":%q}],"nodeInfo":{"bootID":%q,"machineID":""}}}`, addresses, n.Name, boot)
	if _, err := server.Do(t.Context(), http.MethodPatch, "/api/v1/nodes/"+n.Name+"/status", "application/merge-patch+json", []byte(status)); err != nil {
		t.Fatal(err)
	}
}

// unavailable returns what the condition NetworkUnavailable of a Node says.
func (c *cluster) unavailable(node string) string {
	c.t.Helper()
	return kubectl(c.t, "get", "node", node, "-o", `jsonpath={range .status.conditions[?(@.type=="NetworkUnavailable")]}{.status} {.reason}{end}`)
}

// forbidden fails the test if a daemon asked for what its rights do not allow.
func forbidden(t *testing.T) {
	t.Helper()
	asked, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	for a, n := range asked {
		if a.Code == http.StatusForbidden || a.Code == http.StatusUnauthorized {
			t.Errorf("%d times refused: %+v", n, a)
		}
	}
}

// TestHosts: daemons with the rights of the manifests register their hosts on Nodes,
// and say there what is so.
func TestHosts(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods = &pods
	c := bringUp(t, "h", top)
	await.Until(t, "node1 is on its Node", func() error {
		raw := kubectl(t, "get", "node", "node1", "-o", "json")
		for _, want := range []string{`"projectcalico.org/IPv4Address": "10.1.0.11/24"`, `"projectcalico.org/IPv4VXLANTunnelAddr": "192.168.`, `"routerd.io/incarnation":`} {
			if !strings.Contains(raw, want) {
				return fmt.Errorf("it lacks %s:\n%s", want, raw)
			}
		}
		return nil
	})
	available := func(what string) {
		t.Helper()
		await.Until(t, what, func() error {
			if got := c.unavailable("node1"); got != "False RouterdIsUpOnHost" {
				return fmt.Errorf("NetworkUnavailable is %q", got)
			}
			return nil
		})
	}
	available("the network is available")
	// Somebody else says the opposite.
	if _, err := server.Do(t.Context(), http.MethodPatch, "/api/v1/nodes/node1/status", "application/strategic-merge-patch+json",
		[]byte(`{"status":{"conditions":[{"type":"NetworkUnavailable","status":"True","reason":"Cloud"}]}}`)); err != nil {
		t.Fatal(err)
	}
	available("the network is available again")

	// The plugin's files are there, and come back.
	conf := c.Topology().Nodes[0].Config["cni"].(map[string]any)
	files := []string{filepath.Join(conf["confDir"].(string), "10-routerd.conflist"), filepath.Join(conf["binDir"].(string), "routerd-cni"), filepath.Join(conf["binDir"].(string), "loopback")}
	there := func() error {
		for _, file := range files {
			if _, err := os.Lstat(file); err != nil {
				return err
			}
		}
		return nil
	}
	await.Until(t, "the plugin is in place", there)
	for _, file := range files {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	await.Until(t, "the plugin is in place again", there)

	c.asksHost()
	// A start goes on from what is on disk, and asks for the whole state of nothing.
	c.stop("node1")
	asked, _, _ := c.asked(nil)
	if err := c.Restart(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	available("the network is available after the restart")
	c.stop("node1")
	if _, _, whole := c.asked(asked); len(whole) > 0 {
		t.Errorf("it asked for %v", whole)
	}
	done := c.halfDone()
	if err := c.Restart(t.Context(), "node1"); err != nil {
		t.Fatal(err)
	}
	done()
	forbidden(t)
}
