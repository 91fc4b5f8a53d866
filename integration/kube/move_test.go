package kube_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store/kube/convert"
)

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
	had := map[string]lab.Pod{}
	for _, where := range all {
		had[where] = c.run(where)
	}
	var flows []*traffic.Flow
	for _, from := range all {
		for _, to := range all {
			if from == to {
				continue
			}
			c.reach("pods reach each other", from, to, false)
			f, err := c.Flow(t.Context(), from, to, 100, traffic.Options{})
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, f)
		}
	}

	admin, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	routerctl := func(env []string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(binDir(t), "routerctl"), args...)
		cmd.Env = append([]string{"HOME=" + t.TempDir()}, env...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("routerctl %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	inEtcd, inAPI := []string{"ROUTERD_SOCKET=" + lab.Socket(c.Name(), "node1")}, []string{"DATASTORE_TYPE=kubernetes", "KUBECONFIG=" + admin, "CALICO_API_GROUP=" + convert.V3.APIVersion()}
	file := filepath.Join(t.TempDir(), "cluster.jsonl")
	routerctl(inEtcd, "datastore", "lock")
	t.Log(routerctl(inEtcd, "datastore", "export", "-o", file))
	t.Log(routerctl(inAPI, "datastore", "import", "-f", file, "--dry-run"))
	t.Log(routerctl(inAPI, "datastore", "import", "-f", file))
	// But for Nodes, which are in part the kubelets'.
	if out := routerctl(inAPI, "datastore", "import", "-f", file, "--replace"); !strings.Contains(out, "Imported: 3 objects written") {
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
	routerctl(inAPI, "datastore", "unlock")
	for _, h := range hosts {
		if err := c.WaitReady(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	for _, where := range all {
		await.Until(t, "the API has the addresses that pods had", func() error {
			if got, want := c.pod(had[where].Name).Metadata.Annotations["cni.projectcalico.org/podIPs"], had[where].Addrs[0].String()+"/32"; got != want {
				return fmt.Errorf("%s has %q, want %q", where, got, want)
			}
			return nil
		})
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
	for _, f := range flows {
		if r := f.Stop(); r.Lost() > 0 || r.Received == 0 {
			t.Error(r)
		}
	}
	await.Until(t, "ipam check finds nothing", func() error {
		cmd := exec.CommandContext(t.Context(), filepath.Join(binDir(t), "routerctl"), "ipam", "check")
		cmd.Env = append([]string{"HOME=" + t.TempDir()}, inAPI...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	forbidden(t)
}
