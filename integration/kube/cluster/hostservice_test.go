package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// hostConfig is /etc/routerd/routerd.yaml of a node on which routerd is a service, as docs/guides/kubernetes.md
// has it, and hostEtcd what is said there besides where the datastore is an etcd.
const (
	hostConfig = `
nodeName: %s
datastore:
  kind: %s
  kubernetes: {kubeconfig: /etc/routerd/kubeconfig}
%saddress: {ipv4: kubernetes-internal-ip, ipv6: kubernetes-internal-ip}
bgp: {drainOnStop: 0s}
`
	hostEtcd = `  endpoints: [%q]
  caFile: /etc/routerd/ca.crt
  certFile: /etc/routerd/tls.crt
  keyFile: /etc/routerd/tls.key
kubernetes: {enabled: true}
`
)

// hostService is routerd as a service of a node.
type hostService struct {
	t    *testing.T
	c    *cluster.Cluster
	n    *cluster.Node
	stop func()
}

// install puts in place what the package and an administrator do, on a node that has nothing of routerd's.
func (s *hostService) install() {
	s.t.Helper()
	token := kubectl(s.t, s.c, "-n", "kube-system", "create", "token", "routerd", "--bound-object-kind=Node", "--bound-object-name="+s.n.Name)
	files := map[string]string{
		"routerd.yaml": fmt.Sprintf(hostConfig, s.n.Name, "kubernetes", ""),
		"kubeconfig":   s.c.KubeconfigText("", strings.TrimSpace(token)),
	}
	if world.Config.Datastore == cluster.Etcd {
		files["routerd.yaml"] = fmt.Sprintf(hostConfig, s.n.Name, "etcd", fmt.Sprintf(hostEtcd, s.c.EtcdURL()))
		for name, file := range s.c.EtcdFiles() {
			text, err := os.ReadFile(file)
			if err != nil {
				s.t.Fatal(err)
			}
			files[name] = string(text)
		}
	}
	// systemd makes the directories, and gives them to root alone.
	s.on("rm", "-rf", "/etc/routerd", "/run/routerd", "/var/lib/routerd")
	s.on("mkdir", "-m", "0700", "/etc/routerd", "/run/routerd", "/var/lib/routerd")
	for name, text := range files {
		write := s.n.Command(s.t.Context(), "sh", "-c", "cat >/etc/routerd/"+name)
		write.Stdin = strings.NewReader(text)
		if out, err := write.CombinedOutput(); err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
	}
	s.on(s.program(), "install-cni")
}

func (s *hostService) program() string {
	bin, _ := cluster.Programs(s.t)
	return filepath.Join(bin, "routerd")
}

// on runs a command on the node.
func (s *hostService) on(args ...string) string {
	s.t.Helper()
	out, err := s.n.Output(context.WithoutCancel(s.t.Context()), args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// start is systemctl start, and returns when the daemon is well.
func (s *hostService) start() {
	s.t.Helper()
	stop, err := s.n.Background("routerd", "sh", "-c", "umask 0077; exec "+s.program()+" run")
	if err != nil {
		s.t.Fatal(err)
	}
	s.stop = stop
	await.Until(s.t, "the service is well", func() error {
		_, err := s.n.Output(s.t.Context(), s.program(), "health")
		return err
	})
}

// pods has the DaemonSet leave the node, or come.
func (s *hostService) pods(come bool) {
	s.t.Helper()
	label := "routerd.io/daemon=no"
	if come {
		label = "routerd.io/daemon-"
	}
	kubectl(s.t, s.c, "label", "node", s.n.Name, label)
	if come {
		s.rolledOut()
		return
	}
	await.Until(s.t, "the DaemonSet has no pod on the node", func() error {
		if pod := s.pod(); pod != "" {
			return errors.New(pod)
		}
		return nil
	})
}

func (s *hostService) rolledOut() {
	s.t.Helper()
	await.Until(s.t, "the DaemonSet has a pod on the node, which is ready", func() error {
		if says := s.pod("-o", `jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}`); says != "True" {
			return fmt.Errorf("ready: %q", says)
		}
		return nil
	})
}

// pod asks for the DaemonSet's pod on the node.
func (s *hostService) pod(args ...string) string {
	s.t.Helper()
	if args == nil {
		args = []string{"-o", "jsonpath={.items[*].metadata.name}"}
	}
	return kubectl(s.t, s.c, append([]string{"-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName=" + s.n.Name}, args...)...)
}

// says waits until the Node says of its network that it is there, by a reason.
func (s *hostService) says(reason string) {
	s.t.Helper()
	await.Until(s.t, "the Node has its network", func() error {
		got := kubectl(s.t, s.c, "get", "node", s.n.Name, "-o", `jsonpath={range .status.conditions[?(@.type=="NetworkUnavailable")]}{.status} {.reason}{end} {.spec.taints[*].key}`)
		if want := "False " + reason + " "; got != want {
			return fmt.Errorf("it says %q, want %q", got, want)
		}
		return nil
	})
}

// podAfter is another pod on the node.
func (s *hostService) podAfter() string {
	return fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {name: after}, spec: {nodeName: %s, terminationGracePeriodSeconds: 0, containers: [{name: c, image: %q, args: [pause]}]}}", s.n.Name, cluster.AgnhostImage)
}

// endsClean waits until of the pod that had an address nothing is left.
func (s *hostService) endsClean(addr string) {
	s.t.Helper()
	await.Until(s.t, "its address has no route", func() error {
		if out := s.on("ip", "route", "show", addr); out != "" {
			return errors.New(out)
		}
		return nil
	})
	s.devicesOfPods()
	s.sound()
}

// devicesOfPods waits until the node has as many devices of pods as pods.
func (s *hostService) devicesOfPods() {
	s.t.Helper()
	await.Until(s.t, "no pod that is gone has a device", func() error {
		want, err := s.c.Kubectl(s.t.Context(), "", "get", "pods", "-A", "--field-selector", "spec.nodeName="+s.n.Name+",spec.hostNetwork=false", "-o", "name")
		if err != nil {
			return err
		}
		if devices := strings.Count("\n"+s.on("ip", "-br", "link"), "\ncali"); devices != strings.Count(want, "pod/") {
			return fmt.Errorf("%d devices of the pods\n%s", devices, want)
		}
		return nil
	})
}

// sound waits until the check of IPAM's records finds nothing.
func (s *hostService) sound() {
	s.t.Helper()
	await.Until(s.t, "ipam check finds nothing", func() error {
		if out, err := s.c.Routerctl(s.t.Context(), "ipam", "check").CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// TestHostServiceBecomesDaemonSet: a node on which routerd is a service of the host, and where pods run, is
// taken over by the DaemonSet, goes back and comes again by the commands of the guide. Pods keep their
// addresses and lose no request; of the two daemons one runs, also where both are started.
func TestHostServiceBecomesDaemonSet(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[len(c.Nodes)-1]
	s := &hostService{t: t, c: c, n: n, stop: func() {}}
	t.Cleanup(func() {
		s.stop()
		kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon-")
		kubectl(t, c, "uncordon", n.Name)
		s.on("rm", "-rf", "/etc/routerd")
		kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=120s")
		kubectl(t, c, "wait", "--for=condition=Ready", "node/"+n.Name, "--timeout=120s")
	})
	before := asked(t, c)
	// Nothing of the service's is to be what a pod has left.
	kubectl(t, c, "drain", n.Name, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
	s.devicesOfPods() // a pod is gone from the API before its kubelet has ended it
	s.pods(false)
	if out, ok := cleaned(t, c, n); !ok {
		t.Fatal(out)
	}
	s.install()
	s.start()
	kubectl(t, c, "uncordon", n.Name)
	kubectl(t, c, "wait", "--for=condition=Ready", "node/"+n.Name, "--timeout=120s")
	s.says("RouterdIsUpOnHost")

	create(t, c, upgraded)
	requests, addrs := ask(t, c)
	old := addrs[len(addrs)-1] // of the pod on the node, which is the last one
	// A pod of the DaemonSet beside the service ends at once, and says why.
	kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon-")
	await.Until(t, "the pod says what is in its way", func() error {
		if out := s.pod("-o", "jsonpath={.items[*].status.containerStatuses[*].lastState.terminated.exitCode}"); out != "1" {
			return fmt.Errorf("its last end: %q", out)
		}
		return nil
	})
	if out := kubectl(t, c, "-n", "kube-system", "logs", s.pod()); !strings.Contains(out, "another routerd runs") || !strings.Contains(out, "systemctl disable --now routerd") {
		t.Errorf("the pod beside the service says\n%s", out)
	}
	s.pods(false)
	s.says("RouterdIsUpOnHost")

	s.stop()
	s.pods(true)
	s.says("RouterdIsUp")
	requests.answered("after the DaemonSet came")
	// The service beside the pod likewise.
	if out, err := n.Output(t.Context(), s.program(), "run"); err == nil || !strings.Contains(err.Error(), "another routerd runs") {
		t.Errorf("the service beside the pod: %s, %v", out, err)
	}
	s.pods(false)
	s.start()
	s.says("RouterdIsUpOnHost")
	requests.answered("after the service came back")
	s.stop()
	s.pods(true)
	requests.answered("at last")
	requests.end()
	if got := podAddrs(t, c); !slices.Equal(got, addrs) {
		t.Errorf("pods have the addresses %q, and had %q", got, addrs)
	}

	// A new pod starts, and one that the service attached leaves nothing.
	create(t, c, s.podAfter())
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/after", "--timeout=60s")
	if got := kubectl(t, c, "get", "pod", "after", "-o", "jsonpath={.status.podIP}"); slices.Contains(addrs, got) {
		t.Errorf("the new pod has %s, which is another's", got)
	}
	if out := s.on("ip", "route", "show", old); !strings.Contains(out, "cali") {
		t.Fatalf("route to %s: %q", old, out)
	}
	kubectl(t, c, "delete", "daemonset", "upgraded")
	s.endsClean(old)
	refusedSince(t, c, before)
}

// TestAnotherStateDir: the daemon that comes to a node has another state directory than the one before, or it was
// lost. It takes over the pods that run, which the API knows, and their kubelet can end them.
func TestAnotherStateDir(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[len(c.Nodes)-1]
	s := &hostService{t: t, c: c, n: n}
	before := asked(t, c)
	create(t, c, upgraded)
	requests, addrs := ask(t, c)
	t.Cleanup(func() { kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon-") })
	s.pods(false)
	s.on("sh", "-c", "rm -r /var/lib/routerd/*")
	s.pods(true)
	s.says("RouterdIsUp")
	old := addrs[len(addrs)-1]
	await.Until(t, "the pod has its route", func() error {
		if out := s.on("ip", "route", "show", old, "proto", "77"); !strings.Contains(out, "cali") {
			return errors.New(s.on("ip", "route"))
		}
		return nil
	})
	if out := kubectl(t, c, "-n", "kube-system", "logs", s.pod()); !strings.Contains(out, "workloads of which stateDir has no record are taken over") {
		t.Errorf("the daemon says\n%s", out)
	}
	requests.answered("after it was taken over")
	for _, r := range requests.all {
		result, err := r.End()
		if err != nil {
			t.Fatal(err)
		}
		t.Log(result)
	}
	kubectl(t, c, "delete", "daemonset", "upgraded")
	s.endsClean(old)
	refusedSince(t, c, before)
}
