package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// processes returns those whose command line has a word, in a node's network namespace
// or, of pods, in any.
func processes(t *testing.T, word, space string) (pids []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil || !slices.Contains(strings.Split(string(raw), "\x00"), word) {
			continue
		}
		dir := filepath.Dir(f)
		if net, err := os.Readlink(filepath.Join(dir, "ns/net")); err != nil || space != "" && net != space {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// spaceOf is the network namespace of a node.
func spaceOf(t *testing.T, n *cluster.Node) string {
	t.Helper()
	out, err := n.Output(t.Context(), "readlink", "/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// daemonOn returns the process of the daemon on a node, which is to be another than one.
func daemonOn(t *testing.T, n *cluster.Node, but int) (pid int) {
	t.Helper()
	space := spaceOf(t, n)
	await.Until(t, "a daemon on "+n.Name, func() error {
		pids := processes(t, "/etc/routerd/routerd.yaml", space)
		if len(pids) != 1 || pids[0] == but {
			return fmt.Errorf("processes %d; it is to be one, and not %d", pids, but)
		}
		pid = pids[0]
		return nil
	})
	return pid
}

const (
	staticPort = "8099"
	static     = `
apiVersion: v1
kind: Pod
metadata: {name: static, namespace: default, labels: {app: static}}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{name: c, image: ` + cluster.AgnhostImage + `, args: [netexec, --http-port=` + staticPort + `, --udp-port=8098]}]
`
)

// staticPod waits for the process of the static pod, which is to be another than one,
// and until it answers who is on its node.
func staticPod(t *testing.T, n *cluster.Node, but int) (pid int) {
	t.Helper()
	_, kubeBin := cluster.Programs(t)
	await.Until(t, "the static pod answers", func() error {
		pids := processes(t, "--http-port="+staticPort, "")
		if len(pids) != 1 || pids[0] == but {
			return fmt.Errorf("processes %d; it is to be one, and not %d", pids, but)
		}
		pid = pids[0]
		out, err := n.Output(t.Context(), "nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", pid), "--", "ip", "-4", "-o", "addr", "show", "dev", "eth0")
		if err != nil {
			return err
		}
		f := strings.Fields(out)
		if len(f) < 4 {
			return fmt.Errorf("its address is %q", out)
		}
		addr, _, _ := strings.Cut(f[3], "/")
		_, err = n.Output(t.Context(), filepath.Join(kubeBin, "agnhost"), "connect", "--timeout=1s", addr+":"+staticPort)
		return err
	})
	return pid
}

// endSandbox kills all of a pod with a process, its pause program too, so that the
// kubelet has to make it anew.
func endSandbox(t *testing.T, pid int) {
	t.Helper()
	space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	all := append(processes(t, "2147483647", space), pid)
	if len(all) != 2 {
		t.Fatalf("the pod's processes are %d", all)
	}
	for _, pid := range all {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			t.Fatal(err)
		}
	}
}

// TestAPIAway: with no API server a static pod comes back that was killed, also by a
// daemon that was stopped meanwhile and started from its disk, and one that is taken away
// leaves nothing.
func TestAPIAway(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[0]
	devices := func() int {
		out, err := n.Output(t.Context(), "ip", "-br", "link")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(out, "cali")
	}
	before := devices()
	manifest := "/etc/kubernetes/manifests/static.yaml"
	if _, err := n.Output(t.Context(), "sh", "-c", "cat >"+manifest+".new <<'E'\n"+static+"E\nmv "+manifest+".new "+manifest); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := n.Output(context.WithoutCancel(t.Context()), "rm", "-f", manifest); err != nil {
			t.Error(err)
		}
	})
	first := staticPod(t, n, 0)
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/static-node1", "--timeout=60s")

	c.Kill()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), await.Patience)
		defer cancel()
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	begin := time.Now()
	endSandbox(t, first)
	second := staticPod(t, n, first)
	t.Logf("the pod is back %v after it was killed, with no API server", time.Since(begin).Round(time.Millisecond))

	daemon := daemonOn(t, n, 0)
	if err := unix.Kill(daemon, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	begin = time.Now()
	daemonOn(t, n, daemon)
	endSandbox(t, second)
	staticPod(t, n, second)
	t.Logf("the pod is back %v after the daemon was stopped and then the pod killed, with no API server", time.Since(begin).Round(time.Millisecond))

	if _, err := n.Output(t.Context(), "rm", manifest); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the pod leaves nothing", func() error {
		if got := devices(); got != before {
			return fmt.Errorf("%d devices of pods, %d before", got, before)
		}
		return nil
	})
}
