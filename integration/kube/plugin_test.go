package kube_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestKubectlPlugin: kubectl finds routerctl as its plugin, which goes to kubectl's cluster with
// the rights of kubectl's user.
func TestKubectlPlugin(t *testing.T) {
	open(t, convert.V3) // which leaves nothing behind
	bin := kubeBin()
	plugins := filepath.Join(abs(t, binDir(t)))
	if to, err := os.Readlink(filepath.Join(plugins, "kubectl-routerd")); err != nil || to != "routerctl" {
		t.Fatalf("make build left no plugin: it is a link to %q, %v", to, err)
	}
	run := func(config, stdin string, args ...string) (string, error) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "kubectl"), append([]string{"routerd"}, args...)...)
		cmd.Env = []string{"HOME=" + t.TempDir(), "KUBECONFIG=" + config, "PATH=" + plugins, "CALICO_API_GROUP=" + convert.V3.APIVersion()}
		cmd.Stdin = strings.NewReader(stdin)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
	admin, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	const pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: plugged}\nspec: {cidr: 10.99.0.0/24}\n"
	if out, err := run(admin, pool, "apply", "-f", "-"); err != nil {
		t.Fatalf("kubectl routerd apply: %v: %s", err, out)
	}
	if out, err := run(admin, "", "get", "ippools", "-o", "name"); err != nil || out != "ippool/plugged\n" {
		t.Errorf("kubectl routerd get ippools: %v: %q", err, out)
	}
	if out := kubectl(t, "get", "ippools.projectcalico.org", "-o", "name"); !strings.Contains(out, "/plugged\n") {
		t.Errorf("kubectl does not see the pool: %q", out)
	}
	node, err := server.Kubeconfig("", kube.NodeToken)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := run(node, "", "get", "ippools"); err == nil || !strings.Contains(out, "system:node:"+kube.Node) {
		t.Errorf("with the rights of a kubelet: %v: %q", err, out)
	}
	// The flag goes before the variable.
	if out, err := run(node, "", "delete", "ippool", "plugged", "--kubeconfig", admin); err != nil {
		t.Errorf("kubectl routerd delete --kubeconfig: %v: %s", err, out)
	}
}
