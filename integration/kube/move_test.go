package kube_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/kube/convert"
)

// runWithFlows runs pods, and has each send to every other one a hundred packets a second.
func (c *cluster) runWithFlows(all []string) (had map[string]lab.Pod, flows []*traffic.Flow) {
	c.t.Helper()
	had = map[string]lab.Pod{}
	for _, where := range all {
		had[where] = c.run(where)
	}
	for _, from := range all {
		for _, to := range all {
			if from == to {
				continue
			}
			c.reach("pods reach each other", from, to, false)
			f, err := c.Flow(c.t.Context(), from, to, 100, traffic.Options{})
			if err != nil {
				c.t.Fatal(err)
			}
			flows = append(flows, f)
		}
	}
	return had, flows
}

// nothingLost ends flows.
func nothingLost(t *testing.T, flows []*traffic.Flow) {
	t.Helper()
	for _, f := range flows {
		if r := f.Stop(); r.Lost() > 0 || r.Received == 0 {
			t.Error(r)
		}
	}
}

// asAdmin is the environment in which routerctl speaks to the API.
func asAdmin(t *testing.T) []string {
	t.Helper()
	return asAdminOf(t, convert.V3)
}

// asAdminOf is asAdmin for a group.
func asAdminOf(t *testing.T, g convert.Group) []string {
	t.Helper()
	admin, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	return []string{"DATASTORE_TYPE=kubernetes", "KUBECONFIG=" + admin, "CALICO_API_GROUP=" + g.APIVersion()}
}

// tryRouterctl runs routerctl in an environment.
func tryRouterctl(t *testing.T, env []string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(binDir(t), "routerctl"), args...)
	cmd.Env = append([]string{"HOME=" + t.TempDir()}, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("routerctl %v: %w: %s", args, err, out)
	}
	return string(out), err
}

func routerctl(t *testing.T, env []string, args ...string) string {
	t.Helper()
	out, err := tryRouterctl(t, env, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ipamSound waits until the check of IPAM's records finds nothing.
func ipamSound(t *testing.T, env []string) {
	t.Helper()
	await.Until(t, "ipam check finds nothing", func() error {
		_, err := tryRouterctl(t, env, "ipam", "check")
		return err
	})
}

// TestMove: a cluster of Kubernetes moves from etcd to the API as its datastore, host by host,
// by the commands of the guide; the pods that run lose no packet, keep their addresses, and
// give them back there; new ones get others.
func TestMove(t *testing.T) {
	open(t, convert.V3)
	install(t)
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods = &pods
	configs := map[string]map[string]any{}
	c := bringUpWith(t, "m", top, nil, func(file string) map[string]any {
		config := map[string]any{
			"kubernetes": map[string]any{"enabled": true},
			"datastore":  map[string]any{"kubernetes": map[string]any{"kubeconfig": file}},
		}
		configs[fmt.Sprintf("node%d", len(configs)+1)] = config
		return config
	})
	all := []string{"node1/a", "node2/b", "node3/c"}
	had, flows := c.runWithFlows(all)

	inEtcd, inAPI := []string{"ROUTERD_SOCKET=" + lab.Socket(c.Name(), "node1")}, asAdmin(t)
	file := filepath.Join(t.TempDir(), "cluster.jsonl")
	routerctl(t, inEtcd, "datastore", "lock")
	t.Log(routerctl(t, inEtcd, "datastore", "export", "-o", file))
	t.Log(routerctl(t, inAPI, "datastore", "import", "-f", file, "--dry-run"))
	t.Log(routerctl(t, inAPI, "datastore", "import", "-f", file))
	// But for Nodes, which are in part the kubelets'.
	if out := routerctl(t, inAPI, "datastore", "import", "-f", file, "--replace"); !strings.Contains(out, "Imported: 3 objects written") {
		t.Errorf("imported once more: %s", out)
	}
	hosts := c.Hosts()
	for i := range hosts { // the first one's etcd goes with it
		h := hosts[len(hosts)-1-i]
		delete(configs[h], "kubernetes")
		datastore := configs[h]["datastore"].(map[string]any)
		datastore["kind"] = "kubernetes"
		datastore["kubernetes"].(map[string]any)["apiGroup"] = convert.V3.APIVersion()
		for _, ofEtcd := range []string{"embedded", "endpoints", "caFile", "certFile", "keyFile"} {
			datastore[ofEtcd] = nil
		}
		if err := c.Restart(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	routerctl(t, inAPI, "datastore", "unlock")
	for _, h := range hosts {
		if err := c.WaitReady(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	for _, where := range all {
		c.hasAddress(had[where])
	}
	for _, where := range []string{"node1/d", "node2/e"} {
		p := c.run(where)
		for _, old := range had {
			if p.Addrs[0] == old.Addrs[0] {
				t.Errorf("%s got %s, which is another's", where, p.Addrs[0])
			}
		}
		c.reach("a new pod reaches one that moved", where, "node3/c", false)
	}
	nothingLost(t, flows)
	ipamSound(t, inAPI)
	forbidden(t)
}

// TestMoveBack: the same cluster moves from the API to an etcd, which is another program's.
func TestMoveBack(t *testing.T) {
	open(t, convert.V3)
	install(t)
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods = &pods
	var err error
	if top.Kubeconfig, err = server.Kubeconfig("", kube.Token); err != nil { // the lab's own
		t.Fatal(err)
	}
	configs := map[string]map[string]any{}
	c := bringUpWith(t, "b", top, nil, func(file string) map[string]any {
		config := map[string]any{"datastore": map[string]any{"kubernetes": map[string]any{"kubeconfig": file, "apiGroup": convert.V3.APIVersion()}}}
		configs[fmt.Sprintf("node%d", len(configs)+1)] = config
		return config
	})
	all := []string{"node1/a", "node2/b", "node3/c"}
	had, flows := c.runWithFlows(all)
	for _, where := range all {
		c.hasAddress(had[where])
	}

	dir := t.TempDir()
	etcd, err := embedded.Start(await.Context(t), embedded.Config{Dir: filepath.Join(dir, "etcd"), Socket: filepath.Join(dir, "etcd.sock"), Listen: netip.MustParseAddrPort("127.0.0.1:0")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	ca, cert, key := embedded.ClientFiles(etcd.PKIDir())
	url := "https://" + etcd.Listen().String()
	for _, h := range c.Hosts() {
		f, err := kube.NewForward(c.Space(h), etcd.Listen().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(f.Close)
	}
	inEtcd, inAPI := []string{"ETCD_ENDPOINTS=" + url, "ETCD_CA_CERT_FILE=" + ca, "ETCD_CERT_FILE=" + cert, "ETCD_KEY_FILE=" + key}, asAdmin(t)

	file := filepath.Join(t.TempDir(), "cluster.jsonl")
	routerctl(t, inAPI, "datastore", "lock")
	t.Log(routerctl(t, inAPI, "datastore", "export", "-o", file))
	t.Log(routerctl(t, inEtcd, "datastore", "import", "-f", file))
	for _, h := range c.Hosts() {
		configs[h]["kubernetes"] = map[string]any{"enabled": true}
		datastore := configs[h]["datastore"].(map[string]any)
		datastore["kind"], datastore["endpoints"] = "etcd", []any{url}
		datastore["caFile"], datastore["certFile"], datastore["keyFile"] = ca, cert, key
		delete(datastore["kubernetes"].(map[string]any), "apiGroup")
		if err := c.Restart(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	routerctl(t, inEtcd, "datastore", "unlock")
	for _, h := range c.Hosts() {
		if err := c.WaitReady(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	for _, where := range []string{"node1/d", "node2/e"} {
		p := c.run(where)
		for _, old := range had {
			if p.Addrs[0] == old.Addrs[0] {
				t.Errorf("%s got %s, which is another's", where, p.Addrs[0])
			}
		}
		c.reach("a new pod reaches one that moved", where, "node3/c", false)
	}
	nothingLost(t, flows)
	ipamSound(t, inEtcd)
	for _, where := range append(all, "node1/d", "node2/e") {
		p, err := c.Pod(where[:5], where[6:])
		if err != nil {
			t.Fatal(err)
		}
		await.Until(t, "etcd has the pod's endpoint, which is written after ADD has answered", func() error {
			ends, err := tryRouterctl(t, inEtcd, "get", "workloadendpoints", "-A", "-o", "wide")
			if err == nil && !strings.Contains(ends, p.Addrs[0].String()+"/32") {
				err = fmt.Errorf("none with %s of %s:\n%s", p.Addrs[0], where, ends)
			}
			return err
		})
	}

	// What moved is given back there.
	if err := c.DetachPod(t.Context(), "node3/c"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "its endpoint is gone from etcd", func() error {
		out, err := tryRouterctl(t, inEtcd, "get", "workloadendpoints", "-A", "-o", "wide")
		if err == nil && strings.Contains(out, had["node3/c"].Addrs[0].String()+"/32") {
			err = errors.New(out)
		}
		return err
	})
	ipamSound(t, inEtcd)
	forbidden(t)
}

// hasAddress waits until the API has a pod's address.
func (c *cluster) hasAddress(p lab.Pod) {
	c.t.Helper()
	await.Until(c.t, "the API has the pod's address", func() error {
		if got, want := c.pod(p.Name).Metadata.Annotations["cni.projectcalico.org/podIPs"], p.Addrs[0].String()+"/32"; got != want {
			return fmt.Errorf("%s has %q, want %q", p.Name, got, want)
		}
		return nil
	})
}
