package cluster_test

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// upgraded has a pod on each node that answers requests, and one that sends them, which
// a policy allows to.
const upgraded = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: upgraded}
spec:
  selector: {matchLabels: {app: upgraded}}
  template:
    metadata: {labels: {app: upgraded}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: ` + cluster.AnswerImage + `
        args: [-udp=1081] # where no request comes from: pods ask, too
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: upgraded}
spec:
  podSelector: {matchLabels: {app: upgraded}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: upgraded}}}], ports: [{port: 1081, protocol: UDP}]}]
`

// inProcess returns what runs a function in the network namespace of a process.
func inProcess(pid int) func(func() error) error {
	return func(do func() error) error {
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // and it ends with the goroutine, in that namespace
			done <- func() error {
				fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd) //nolint:errcheck // it was only read
				if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
					return err
				}
				return do()
			}()
		}()
		return <-done
	}
}

// askers are pods of upgraded that send each other requests.
type askers struct {
	t   *testing.T
	all []*kube.Requests
}

// podAddrs are the addresses of the pods of upgraded, in the order of their nodes.
func podAddrs(t *testing.T, c *cluster.Cluster) []string {
	t.Helper()
	return strings.Fields(kubectl(t, c, "get", "pods", "-l", "app=upgraded", "--sort-by=.spec.nodeName", "-o", "jsonpath={.items[*].status.podIP}"))
}

// ask waits until the pods of upgraded are ready, and has each ask the next: one in its rack, or one in
// another. It returns when all were answered.
func ask(t *testing.T, c *cluster.Cluster) (a *askers, addrs []string) {
	t.Helper()
	kubectl(t, c, "rollout", "status", "daemonset/upgraded", "--timeout=90s")
	if addrs = podAddrs(t, c); len(addrs) != len(c.Nodes) {
		t.Fatalf("addresses of pods: %q", addrs)
	}
	a = &askers{t: t}
	for _, pid := range processes(t, "/answer", "") {
		in, own := inProcess(pid), -1
		err := in(func() error {
			all, err := net.InterfaceAddrs()
			own = slices.IndexFunc(addrs, func(addr string) bool {
				return slices.ContainsFunc(all, func(a net.Addr) bool { return strings.HasPrefix(a.String(), addr+"/") })
			})
			return err
		})
		if err != nil || own < 0 {
			t.Fatalf("process %d is in none of the pods %q, %v", pid, addrs, err)
		}
		a.all = append(a.all, kube.StartRequests(t.Context(), kube.RequestsConfig{
			To: netip.AddrPortFrom(netip.MustParseAddr(addrs[(own+1)%len(addrs)]), 1081), Rate: 100, In: in,
			Ask:  func(uint64) []byte { return []byte("?") },
			Read: func(uint64, []byte) (string, error) { return "pod", nil },
		}))
	}
	if len(a.all) != len(addrs) {
		t.Fatalf("%d pods ask, want %d", len(a.all), len(addrs))
	}
	a.answered("at first")
	return a, addrs
}

// answered waits until each had some answers more.
func (a *askers) answered(when string) {
	a.t.Helper()
	const more = 20
	before := make([]int, len(a.all))
	for i, r := range a.all {
		before[i] = r.Answered("pod")
	}
	await.Until(a.t, when, func() error {
		for i, r := range a.all {
			if n := r.Answered("pod") - before[i]; n < more {
				return fmt.Errorf("of pod %d %d requests were answered", i, n)
			}
		}
		return nil
	})
}

// end ends them. Requests that were lost fail the test.
func (a *askers) end() {
	a.t.Helper()
	for _, r := range a.all {
		result, err := r.End()
		if err != nil {
			a.t.Fatal(err)
		}
		if a.t.Log(result); len(result.Lost) > 0 {
			a.t.Errorf("lost: %q", result.Lost[:min(len(result.Lost), 20)])
		}
	}
}

// whole says of requests of daemons how often a watch that tells all there is of a resource was
// asked for since an earlier time.
func whole(all, before map[kube.Asked]int) (out []string) {
	for a, n := range all {
		if n -= before[a]; n > 0 && a.Whole && a.Verb == "watch" && a.Code == http.StatusOK {
			out = append(out, fmt.Sprintf("%s.%s %d", a.Resource, a.Group, n))
		}
	}
	slices.Sort(out)
	return out
}

// TestUpgrade: the daemons are replaced one after the other by those of another version,
// by those of the version before, and by the same, while pods send each other requests in
// and between racks. None is lost, and daemons go on from
// the state that those of the other version have left.
func TestUpgrade(t *testing.T) {
	c := world.Up(t)
	const name, image = "v9.9.9", "docker.io/library/routerd:next"
	next := filepath.Join(t.TempDir(), "routerd")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+name, "-o", next, "../../../cmd/routerd").CombinedOutput(); err != nil {
		t.Fatalf("build another version: %v\n%s", err, out)
	}
	if err := c.AddRouterd(t.Context(), image, next); err != nil {
		t.Fatal(err)
	}
	before := asked(t, c)
	create(t, c, upgraded)
	requests, _ := ask(t, c)
	var first map[kube.Asked]int
	for i, step := range []struct {
		what    string
		args    []string
		version string
	}{
		{"upgrade", []string{"set", "image", "daemonset/routerd", "routerd=" + image}, name},
		{"rollback", []string{"rollout", "undo", "daemonset/routerd"}, ""},
		{"restart", []string{"rollout", "restart", "daemonset/routerd"}, ""},
	} {
		kubectl(t, c, append([]string{"-n", "kube-system"}, step.args...)...)
		kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=180s")
		if got := kubectl(t, c, "-n", "kube-system", "exec", "daemonset/routerd", "--", "routerd", "--version"); strings.Contains(got, name) != (step.version != "") {
			t.Errorf("%s: the daemon is of version %s", step.what, got)
		}
		if i == 0 {
			// Watches are in the log when they have ended: so far those of the daemons from before.
			first = asked(t, c)
		}
	}
	requests.end()
	// These are the upgrade's and the rollback's, which have ended: two of each node, were
	// the state of another version of no use.
	if anew := whole(asked(t, c), first); len(anew) > 0 {
		t.Errorf("told anew: %q", anew)
	}
	refusedSince(t, c, before)
}
