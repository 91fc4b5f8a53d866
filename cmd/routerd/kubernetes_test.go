package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// TestKubernetes: a daemon whose datastore is Kubernetes' API registers its host on the
// Node, says there that the network is available, and attaches a pod, of which it tells
// the API, with the limits of the pod's annotations. Killed, and started again while the API is away, it detaches the pod; the API
// is told when it is back. What a real API server says to it is tried in integration/kube.
func TestKubernetes(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	var listener net.Listener
	if err := h.ns.Do(func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	api := kubetest.New(t, listener)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(api.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	boot, err := bootid.Read()
	if err != nil {
		t.Fatal(err)
	}
	const node, pod = "/api/v1/nodes/node1", "/api/v1/namespaces/default/pods/web"
	for path, text := range map[string]string{
		node:                             fmt.Sprintf(`{"kind":"Node","apiVersion":"v1","status":{"addresses":[{"type":"InternalIP","address":"10.1.0.11"}],"nodeInfo":{"bootID":%q}}}`, boot),
		pod:                              `{"kind":"Pod","apiVersion":"v1","metadata":{"labels":{"app":"web"},"annotations":{"kubernetes.io/egress-bandwidth":"8M"}},"spec":{"nodeName":"node1","serviceAccountName":"default"},"status":{"phase":"Pending"}}`,
		"/api/v1/namespaces/kube-system": `{"kind":"Namespace","apiVersion":"v1"}`,
		"/api/v1/namespaces/default":     `{"kind":"Namespace","apiVersion":"v1"}`,
		"/api/v1/namespaces/default/serviceaccounts/default": `{"kind":"ServiceAccount","apiVersion":"v1"}`,
	} {
		if err := api.Create(path, text); err != nil {
			t.Fatal(err)
		}
	}
	h.config["datastore"] = map[string]any{"kind": "kubernetes", "kubernetes": map[string]any{"kubeconfig": kubeconfig}}
	h.config["address"] = map[string]any{"ipv4": "kubernetes-internal-ip"}
	says := func(what, path string, want ...string) {
		t.Helper()
		await.Until(t, what, func() error { return mentions(string(api.Get(path)), want...) })
	}
	r := h.start()
	r.ready()
	available := []string{`"projectcalico.org/IPv4Address":"10.1.0.11/24"`, `"reason":"RouterdIsUp","status":"False","type":"NetworkUnavailable"`}
	says("the host is on its Node", node, available...)

	at := &apiv1.Attachment{Network: "routerd", ContainerId: "c1", Ifname: "eth0"}
	web := &apiv1.Workload{Orchestrator: "k8s", Namespace: "default", Pod: "web"}
	web.Uid = uidOf(t, api.Get(pod))
	inside := netnstest.New(t)
	got, err := r.cni.Add(await.Context(t), &apiv1.AddRequest{Attachment: at, Workload: web, Netns: inside.Path, AssignIpv4: true})
	if err != nil {
		t.Fatal(err)
	}
	addr, _, _ := strings.Cut(got.GetAddresses()[0].GetCidr(), "/")
	says("the API has the pod's address", pod, `"cni.projectcalico.org/podIP":"`+addr+`/32"`, `"cni.projectcalico.org/containerID":"c1"`)

	const megabyte, seconds = 1 << 20, 2
	if n := stream(t, inside, h.ns, seconds*time.Second); n < megabyte/4 || n > (seconds+2)*megabyte {
		t.Errorf("with 8 Mbit/s a stream of %d s brought %d bytes", seconds, n)
	}

	r.kill(syscall.SIGKILL)
	api.SetAway(true)
	r = h.start()
	r.when("the workload is known from the disk", func(n *apiv1.NodeResponse) error {
		if n.GetWorkloads() != 1 {
			return fmt.Errorf("%d workloads", n.GetWorkloads())
		}
		return nil
	})
	if _, err := r.cni.Del(await.Context(t), &apiv1.DelRequest{Attachment: at, Workload: web}); err != nil {
		t.Fatal(err)
	}
	api.SetAway(false)
	says("the API is told that the pod has no address", pod, `"cni.projectcalico.org/podIP":""`)
	r.ready()
	if state := r.kill(syscall.SIGTERM); !state.Success() {
		t.Errorf("stopped, it ended with %s", state)
	}
}

// stream sends by TCP from one namespace to the host's address in another as fast as that
// goes, and returns how many bytes came in a time.
func stream(t *testing.T, from, to *netnstest.Netns, lasts time.Duration) (n int64) {
	t.Helper()
	var l net.Listener
	err := to.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "10.1.0.11:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var out net.Conn
	err = from.Do(func() (err error) {
		out, err = (&net.Dialer{}).DialContext(await.Context(t), "tcp4", l.Addr().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		for b := make([]byte, 1<<16); ; {
			if _, err := out.Write(b); err != nil {
				return // the test closes it
			}
		}
	})
	defer writer.Wait()
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := in.SetReadDeadline(time.Now().Add(lasts)); err != nil {
		t.Fatal(err)
	}
	n, _ = io.Copy(io.Discard, in) // the deadline ends it
	return n
}

func uidOf(t *testing.T, raw []byte) string {
	t.Helper()
	var o struct{ Metadata struct{ UID string } }
	if err := json.Unmarshal(raw, &o); err != nil {
		t.Fatal(err)
	}
	return o.Metadata.UID
}
