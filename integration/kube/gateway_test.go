package kube_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/guides"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestHostWithoutKubernetes: a host without a kubelet joins by what the guide says, and reaches
// pods of others, which reach it and what it runs itself.
func TestHostWithoutKubernetes(t *testing.T) {
	open(t, convert.V3)
	install(t)
	admin, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	t.Cleanup(func() { kubectl(t, "delete", "node", "gw1", "--ignore-not-found") }) // other tests have hosts of its address
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", guides.Commands(t, "guides/kubernetes.md", "echo '{apiVersion: v1, kind: Node"))
	cmd.Dir = dir
	cmd.Env = []string{"HOME=" + dir, "KUBECONFIG=" + admin, "PATH=" + abs(t, kubeBin()) + ":" + os.Getenv("PATH")}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the guide's commands: %v: %s", err, out)
	}
	file := filepath.Join(dir, "kubeconfig")
	config, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const there = "/etc/routerd/token"
	if !bytes.Contains(config, []byte(there)) {
		t.Fatalf("the kubeconfig does not name %s: %s", there, config)
	}
	if err := os.WriteFile(file, bytes.ReplaceAll(config, []byte(there), []byte(filepath.Join(dir, "token"))), 0o600); err != nil {
		t.Fatal(err)
	}

	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods = &pods
	top.Nodes[1].Name, top.Kubeconfig, top.APIGroup = "gw1", admin, string(convert.V3)
	hosts := 0
	c := bringUpWith(t, "g", top, nil, func(kubeconfig string) map[string]any {
		if hosts++; hosts == 2 {
			kubeconfig = file
		}
		return map[string]any{"datastore": map[string]any{"kubernetes": map[string]any{"kubeconfig": kubeconfig, "apiGroup": convert.V3.APIVersion()}}}
	})
	p := c.run("node1/a")
	c.reach("the host reaches a pod", "gw1", "node1/a", false)
	c.reach("a pod reaches the host", "node1/a", "gw1", false)
	await.Until(t, "a workload of its own", func() error {
		_, err := c.AttachPod(t.Context(), "gw1/own")
		return err
	})
	c.reach("a workload of its own reaches a pod", "gw1/own", "node1/a", false)
	await.Until(t, "the pod's block is routed", func() error {
		out, err := c.Output(t.Context(), "gw1", "ip", "route", "get", p.Addrs[0].String())
		if err == nil && !strings.Contains(out, "via 10.1.0.11") {
			err = fmt.Errorf("by %s", out)
		}
		return err
	})
	forbidden(t)
}
