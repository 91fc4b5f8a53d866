package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// cleaned runs the Job of configs/kubernetes/cleanup on a node until it succeeds or fails, and
// returns what it printed.
func cleaned(t *testing.T, c *cluster.Cluster, n *cluster.Node) (out string, succeeded bool) {
	t.Helper()
	text, err := os.ReadFile("../../../configs/kubernetes/cleanup/job.yaml")
	if err != nil {
		t.Fatal(err)
	}
	// It is to fail at once.
	manifest := strings.NewReplacer("THIS-NODE", n.Name, "backoffLimit: 4", "backoffLimit: 0").Replace(string(text))
	job := strings.TrimSpace(apply(t, c, manifest, "create", "-o", "name", "-f", "-"))
	t.Cleanup(func() { kubectl(t, c, "-n", "kube-system", "delete", "--ignore-not-found", job) })
	await.Until(t, "the Job ends", func() error {
		ends := kubectl(t, c, "-n", "kube-system", "get", job, "-o", `jsonpath={range .status.conditions[?(@.status=="True")]}{.type} {end}`)
		succeeded = slices.Contains(strings.Fields(ends), "Complete")
		if !succeeded && !slices.Contains(strings.Fields(ends), "Failed") {
			return errors.New(kubectl(t, c, "-n", "kube-system", "get", job, "-o", "jsonpath={.status}"))
		}
		return nil
	})
	return kubectl(t, c, "-n", "kube-system", "logs", job), succeeded
}

// TestCleanup: the Job that takes routerd off a node refuses while the daemon runs there, and while
// pods are attached; then nothing of routerd's is left there, and Kubernetes keeps no pods away. The
// daemon that comes back finds all that it needs.
func TestCleanup(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[len(c.Nodes)-1]
	pod := fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {name: cleaned}, spec: {nodeName: %s, terminationGracePeriodSeconds: 0, containers: [{name: c, image: %q, args: [pause]}]}}", n.Name, cluster.AgnhostImage)
	create(t, c, pod)
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/cleaned", "--timeout=60s")
	if out, ok := cleaned(t, c, n); ok || !strings.Contains(out, "another routerd runs in this network namespace") {
		t.Fatalf("while the daemon runs: %v\n%s", ok, out)
	}
	gone := func() {
		t.Helper()
		kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon=no")
		await.Until(t, "the daemon is gone", func() error {
			if pids := processes(t, "/etc/routerd/routerd.yaml", spaceOf(t, n)); len(pids) > 0 {
				return fmt.Errorf("it has process id %v", pids)
			}
			return nil
		})
	}
	back := func() { kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon-") }
	t.Cleanup(func() {
		back()
		kubectl(t, c, "uncordon", n.Name)
		kubectl(t, c, "wait", "--for=condition=Ready", "node/"+n.Name, "--timeout=120s")
		kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=120s")
	})
	gone()
	if out, ok := cleaned(t, c, n); ok || !strings.Contains(out, "workloads are attached, which would have no network (cali") {
		t.Fatalf("while a pod is attached: %v\n%s", ok, out)
	}
	back()
	daemonOn(t, n, 0)
	kubectl(t, c, "drain", n.Name, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
	gone()
	out, ok := cleaned(t, c, n)
	if !ok {
		t.Fatal(out)
	}
	t.Log(out)
	left := func() (left []string) {
		for _, look := range [][2]string{
			{"ip -o link", "cali"},
			{"ip route show table all", "proto 77"},
			{"ip rule", " 77"},
			{"ip nexthop", "proto 77"},
			{"nft list tables", "routerd"},
			{"find /etc/cni/net.d /opt/cni/bin /var/lib/routerd /run/routerd -mindepth 1", "routerd"},
			{"readlink -m /opt/cni/bin/loopback", "routerd-cni"},
		} {
			out, err := n.Output(context.WithoutCancel(t.Context()), strings.Fields(look[0])...)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out) {
				if strings.Contains(line, look[1]) {
					left = append(left, look[0]+": "+line)
				}
			}
		}
		return left
	}
	if left := left(); left != nil {
		t.Errorf("left on the node:\n%s", strings.Join(left, ""))
	}
	await.Until(t, "the Node says nothing of its network", func() error {
		says := kubectl(t, c, "get", "node", n.Name, "-o", `jsonpath={range .status.conditions[?(@.type=="NetworkUnavailable")]}{.reason}{end} {.spec.taints[?(@.key=="node.kubernetes.io/network-unavailable")].key}`)
		if says != " " {
			return fmt.Errorf("it says %q", says)
		}
		return nil
	})
	if out, ok := cleaned(t, c, n); !ok || !strings.Contains(out, "nothing of routerd's is on this host") {
		t.Errorf("the second time: %v\n%s", ok, out)
	}
	back()
	kubectl(t, c, "uncordon", n.Name)
	kubectl(t, c, "wait", "--for=condition=Ready", "node/"+n.Name, "--timeout=120s")
	apply(t, c, pod, "apply", "-f", "-")
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/cleaned", "--timeout=60s")
	refused(t, c)
}
