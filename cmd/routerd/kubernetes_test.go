package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// TestKubernetes: a daemon whose datastore is Kubernetes' API registers its host on the
// Node, says there that the network is available, and attaches a pod, of which it tells
// the API, with the limits of the pod's annotations. Killed, and started again while the API is away, it detaches the pod; the API
// is told when it is back. What a real API server says to it is tried in integration/kube.
func TestKubernetes(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	api, kubeconfig := kubernetesAPI(t, h)
	boot, err := bootid.Read()
	if err != nil {
		t.Fatal(err)
	}
	const node, pod = "/api/v1/nodes/node1", "/api/v1/namespaces/default/pods/web"
	createAll(t, api, map[string]string{
		node:                             fmt.Sprintf(`{"kind":"Node","apiVersion":"v1","status":{"addresses":[{"type":"InternalIP","address":"10.1.0.11"}],"nodeInfo":{"bootID":%q}}}`, boot),
		pod:                              `{"kind":"Pod","apiVersion":"v1","metadata":{"labels":{"app":"web"},"annotations":{"kubernetes.io/egress-bandwidth":"8M"}},"spec":{"nodeName":"node1","serviceAccountName":"default"},"status":{"phase":"Pending"}}`,
		"/api/v1/namespaces/kube-system": `{"kind":"Namespace","apiVersion":"v1"}`,
		"/api/v1/namespaces/default":     `{"kind":"Namespace","apiVersion":"v1"}`,
		"/api/v1/namespaces/default/serviceaccounts/default": `{"kind":"ServiceAccount","apiVersion":"v1"}`,
	})
	h.config["datastore"] = map[string]any{"kind": "kubernetes", "kubernetes": map[string]any{"kubeconfig": kubeconfig}}
	h.config["address"] = map[string]any{"ipv4": "kubernetes-internal-ip"}
	says := func(what, path string, want ...string) {
		t.Helper()
		await.Until(t, what, func() error { return mentions(string(api.Get(path)), want...) })
	}
	r := h.start()
	r.ready()
	available := []string{`"projectcalico.org/IPv4Address":"10.1.0.11/24"`, `"reason":"RouterdIsUpOnHost","status":"False","type":"NetworkUnavailable"`}
	says("the host is on its Node", node, available...)

	// What somebody writes there in its place is no address.
	spoilt := strings.Replace(string(api.Get(node)), available[0], `"projectcalico.org/IPv4Address":"ten"`, 1)
	if !strings.Contains(spoilt, `"ten"`) {
		t.Fatalf("the Node is %s", spoilt)
	}
	if err := api.Create(node, spoilt); err != nil {
		t.Fatal(err)
	}
	says("the host is on its Node again", node, available...)

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

// TestNamespaceDeleted: a namespace goes with all that is in it, in the order that the API likes,
// while a pod of it runs. That pod's end is clean, pods of others keep what they have, and the
// namespace and the pod come again under the same names.
func TestNamespaceDeleted(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	api, kubeconfig := kubernetesAPI(t, h)
	boot, err := bootid.Read()
	if err != nil {
		t.Fatal(err)
	}
	const ns, pods = "/api/v1/namespaces/", "/pods/"
	pod := `{"kind":"Pod","apiVersion":"v1","spec":{"nodeName":"node1","serviceAccountName":"default"},"status":{"phase":"Pending"}}`
	team := map[string]string{
		ns + "team":                         `{"kind":"Namespace","apiVersion":"v1","metadata":{"labels":{"team":"a"}}}`,
		ns + "team/serviceaccounts/default": `{"kind":"ServiceAccount","apiVersion":"v1"}`,
		ns + "team/services/db":             `{"kind":"Service","apiVersion":"v1","spec":{"clusterIP":"10.96.0.9"}}`,
		ns + "team" + pods + "db":           pod,
		"/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/closed": `{"kind":"NetworkPolicy","apiVersion":"networking.k8s.io/v1","spec":{"podSelector":{},"policyTypes":["Ingress"]}}`,
	}
	createAll(t, api, team)
	createAll(t, api, map[string]string{
		"/api/v1/nodes/node1":                  fmt.Sprintf(`{"kind":"Node","apiVersion":"v1","status":{"addresses":[{"type":"InternalIP","address":"10.1.0.11"}],"nodeInfo":{"bootID":%q}}}`, boot),
		ns + "kube-system":                     `{"kind":"Namespace","apiVersion":"v1"}`,
		ns + "default":                         `{"kind":"Namespace","apiVersion":"v1"}`,
		ns + "default/serviceaccounts/default": `{"kind":"ServiceAccount","apiVersion":"v1"}`,
		ns + "default" + pods + "web":          pod,
	})
	h.config["datastore"] = map[string]any{"kind": "kubernetes", "kubernetes": map[string]any{"kubeconfig": kubeconfig}}
	h.config["address"] = map[string]any{"ipv4": "kubernetes-internal-ip"}
	r := h.start()
	r.ready()
	workload := func(namespace, name string) *apiv1.Workload {
		return &apiv1.Workload{Orchestrator: "k8s", Namespace: namespace, Pod: name}
	}
	add := func(namespace, name, id string) (*netnstest.Netns, string) {
		t.Helper()
		inside, path := netnstest.New(t), ns+namespace+pods+name
		w := workload(namespace, name)
		w.Uid = uidOf(t, api.Get(path))
		got, err := r.cni.Add(await.Context(t), &apiv1.AddRequest{Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: id, Ifname: "eth0"}, Workload: w, Netns: inside.Path, AssignIpv4: true})
		if err != nil {
			t.Fatal(err)
		}
		addr, _, _ := strings.Cut(got.GetAddresses()[0].GetCidr(), "/")
		await.Until(t, "the API has the pod's address", func() error {
			return mentions(string(api.Get(path)), `"cni.projectcalico.org/podIP":"`+addr+`/32"`)
		})
		return inside, addr
	}
	const handle = "/apis/projectcalico.org/v3/ipamhandles/"
	there := func(what, path string, want bool) {
		t.Helper()
		await.Until(t, what, func() error {
			if is := api.Get(path) != nil; is != want {
				return fmt.Errorf("%s is there: %v", path, is)
			}
			return nil
		})
	}
	web, addr := add("default", "web", "c1")
	db, _ := add("team", "db", "c2")
	there("the pod's handle", handle+"routerd.c2", true)
	l := listenIn(t, web, addr+":80")
	defer l.Close()
	reaches := func(what string, from *netnstest.Netns) {
		t.Helper()
		await.Until(t, what, func() error {
			return from.Do(func() error {
				c, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp4", l.Addr().String())
				if err == nil {
					err = c.Close()
				}
				return err
			})
		})
	}
	reaches("the pods reach each other", db)

	for path := range team { // in any order
		api.Delete(path)
	}
	if _, err := r.cni.Del(await.Context(t), &apiv1.DelRequest{Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: "c2", Ifname: "eth0"}, Workload: workload("team", "db")}); err != nil {
		t.Fatalf("the end of a pod that the API has no more: %v", err)
	}
	there("the pod's handle is gone", handle+"routerd.c2", false)
	there("the other's stays", handle+"routerd.c1", true)
	r.when("one workload is left", func(n *apiv1.NodeResponse) error {
		if n.GetWorkloads() != 1 {
			return fmt.Errorf("%d workloads", n.GetWorkloads())
		}
		return nil
	})

	createAll(t, api, team)
	again, _ := add("team", "db", "c3")
	reaches("the pod that was made anew reaches the other", again)
	r.ready()
}

// kubernetesAPI serves an API of Kubernetes on a host, and returns the file that leads there.
func kubernetesAPI(t *testing.T, h *host) (api *kubetest.Server, kubeconfig string) {
	t.Helper()
	var listener net.Listener
	if err := h.ns.Do(func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	api, kubeconfig = kubetest.New(t, listener), filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(api.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	return api, kubeconfig
}

func createAll(t *testing.T, api *kubetest.Server, objects map[string]string) {
	t.Helper()
	for path, text := range objects {
		if err := api.Create(path, text); err != nil {
			t.Fatal(err)
		}
	}
}

// TestKubernetesBesideEtcd: on a node of Kubernetes whose datastore is etcd, pods have the labels
// and profiles that their objects say, a NetworkPolicy is in force, its end too, and so is
// a label that changes. A static pod that is made anew while the API is away is served. The host's
// address is the one of several that the kubelet says, and becomes another one with it.
func TestKubernetesBesideEtcd(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.ip("addr add 10.1.0.12/24 dev eth0")
	api, kubeconfig := kubernetesAPI(t, h)
	const pods, policy = "/api/v1/namespaces/default/pods/", "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/closed"
	podOf := func(app string) string {
		return fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"labels":{"app":%q}},"spec":{"nodeName":"node1","serviceAccountName":"default"},"status":{"phase":"Pending"}}`, app)
	}
	nodeAt := func(addr string) string {
		return fmt.Sprintf(`{"kind":"Node","apiVersion":"v1","metadata":{"labels":{"rack":"r1"}},"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`, addr)
	}
	createAll(t, api, map[string]string{
		"/api/v1/nodes/node1":                                nodeAt("10.1.0.12"),
		"/api/v1/namespaces/kube-system":                     `{"kind":"Namespace","apiVersion":"v1"}`,
		"/api/v1/namespaces/default":                         `{"kind":"Namespace","apiVersion":"v1","metadata":{"labels":{"team":"a"}}}`,
		"/api/v1/namespaces/default/serviceaccounts/default": `{"kind":"ServiceAccount","apiVersion":"v1"}`,
		pods + "web": podOf("web"), pods + "client": podOf("client"),
	})
	h.config["kubernetes"] = map[string]any{"enabled": true}
	h.config["address"] = map[string]any{"ipv4": "kubernetes-internal-ip"}
	h.config["datastore"] = map[string]any{"kubernetes": map[string]any{"kubeconfig": kubeconfig}}
	r := h.start()
	r.ready()
	s := h.store(filepath.Join(h.dir, "run", "etcd.sock"))

	add := func(pod, id string) (*netnstest.Netns, string, error) {
		inside := netnstest.New(t)
		got, err := r.cni.Add(await.Context(t), &apiv1.AddRequest{
			Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: id, Ifname: "eth0"}, Netns: inside.Path, AssignIpv4: true,
			Workload: &apiv1.Workload{Orchestrator: "k8s", Namespace: "default", Pod: pod, Uid: uidOf(t, api.Get(pods+pod))},
		})
		if err != nil {
			return nil, "", err
		}
		addr, _, _ := strings.Cut(got.GetAddresses()[0].GetCidr(), "/")
		return inside, addr, nil
	}
	web, addr, err := add("web", "c1")
	if err != nil {
		t.Fatal(err)
	}
	client, _, err := add("client", "c2")
	if err != nil {
		t.Fatal(err)
	}
	key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node1-k8s-web-eth0"}
	says := func(what, app string) {
		t.Helper()
		await.Until(t, what, func() error {
			o, err := s.Get(t.Context(), key)
			if err != nil {
				return err
			}
			w, ok := o.Value.(*store.WorkloadEndpoint)
			if !ok || w.Labels["app"] != app || !slices.Equal(w.Spec.Profiles, []string{"kns.default", "ksa.default.default"}) {
				return fmt.Errorf("the endpoint is %s", o.Raw)
			}
			return nil
		})
	}
	says("the endpoint says what the pod says", "web")
	nodeSays := func(what string, want ...string) {
		t.Helper()
		await.Until(t, what, func() error {
			o, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
			if err != nil {
				return err
			}
			return mentions(string(o.Raw), want...)
		})
	}
	nodeSays("the Node has the labels of Kubernetes', and the kubelet's address", `"rack":"r1"`, `"orchestrator":"k8s"`, `"ipv4Address":"10.1.0.12/24"`)
	await.Until(t, "the Node in Kubernetes has its network", func() error {
		return mentions(string(api.Get("/api/v1/nodes/node1")), `"reason":"RouterdIsUpOnHost","status":"False","type":"NetworkUnavailable"`)
	})

	l := listenIn(t, web, addr+":80")
	defer l.Close()
	reaches := func(what string, want bool) {
		t.Helper()
		await.Until(t, what, func() error {
			err := client.Do(func() error {
				c, err := (&net.Dialer{Timeout: 200 * time.Millisecond}).DialContext(t.Context(), "tcp4", l.Addr().String())
				if err == nil {
					err = c.Close()
				}
				return err
			})
			if (err == nil) != want {
				return fmt.Errorf("dial: %w", err)
			}
			return nil
		})
	}
	reaches("without a policy everybody is let in", true)
	createAll(t, api, map[string]string{policy: `{"kind":"NetworkPolicy","apiVersion":"networking.k8s.io/v1","spec":{"podSelector":{"matchLabels":{"app":"web"}},"policyTypes":["Ingress"]}}`})
	reaches("the policy lets nobody in", false)
	createAll(t, api, map[string]string{pods + "web": podOf("other")})
	says("the endpoint has the label that the pod has now", "other")
	reaches("the policy selects the pod no more", true)
	createAll(t, api, map[string]string{pods + "web": podOf("web")})
	reaches("the policy selects it again", false)
	api.Delete(policy)
	reaches("the policy is gone", true)

	api.SetAway(true)
	if _, err := r.cni.Del(await.Context(t), &apiv1.DelRequest{Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: "c2", Ifname: "eth0"}, Workload: &apiv1.Workload{Orchestrator: "k8s", Namespace: "default", Pod: "client"}}); err != nil {
		t.Errorf("detach while the API is away: %v", err)
	}
	if _, _, err := add("web", "c3"); err != nil {
		t.Errorf("attach a pod that is known while the API is away: %v", err)
	}
	r.kill(syscall.SIGTERM)
	r = h.start()
	r.ready()
	if _, _, err := add("client", "c4"); err != nil {
		t.Errorf("attach a pod that the run before knew while the API is away: %v", err)
	}
	api.SetAway(false)
	createAll(t, api, map[string]string{"/api/v1/nodes/node1": nodeAt("10.1.0.11")})
	nodeSays("the kubelet says another address", `"ipv4Address":"10.1.0.11/24"`)
}

// listenIn listens for TCP in a namespace.
func listenIn(t *testing.T, in *netnstest.Netns, addr string) (l net.Listener) {
	t.Helper()
	err := in.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp4", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// stream sends by TCP from one namespace to the host's address in another as fast as that
// goes, and returns how many bytes came in a time.
func stream(t *testing.T, from, to *netnstest.Netns, lasts time.Duration) (n int64) {
	t.Helper()
	l := listenIn(t, to, "10.1.0.11:0")
	defer l.Close()
	var out net.Conn
	err := from.Do(func() (err error) {
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
