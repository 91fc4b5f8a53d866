package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/kubesync"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
	"github.com/routerd/routerd/store/memory"
)

// TestEtcdRoles: with the least of etcd's rights, which configs/etcd/roles.sh gives, a
// host does all its work, and nothing else can be done with them; a right that is taken
// away is named, and touches nothing in the kernel.
func TestEtcdRoles(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	socket := filepath.Join(h.dir, "ext.sock")
	clustertest.StartAuth(t, t.TempDir(), socket)
	root := []string{"ETCDCTL_ENDPOINTS=unix://" + socket, "ETCDCTL_API=3", "ETCDCTL_COMMAND_TIMEOUT=1m", "ETCDCTL_DIAL_TIMEOUT=1m"} // its own are 5 s and 2 s
	run := func(stdin string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(await.Context(t), args[0], args[1:]...)
		cmd.Env, cmd.Stdin = append(os.Environ(), root...), strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	script := filepath.Join("..", "..", "configs", "etcd", "roles.sh")
	run("secret-one\nsecret-two\n", script, "node1", "node2")
	run("", script, "--first", "node1")
	run("top\n", "etcdctl", "user", "add", "root", "--interactive=false")
	run("", "etcdctl", "user", "grant-role", "root", "root")
	run("", "etcdctl", "auth", "enable")
	root = append(root, "ETCDCTL_USER=root:top")
	run("", script, "node1", "node2") // again: nothing is to be read

	password := filepath.Join(h.dir, "password")
	if err := os.WriteFile(password, []byte("secret-one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.config["datastore"] = map[string]any{"endpoints": []string{"unix://" + socket}, "dialTimeout": "1s", "username": "node1", "passwordFile": password}
	h.config["bgp"] = map[string]any{"enabled": false}
	r := h.start()
	r.ready()
	run("", script, "--first-done", "node1")
	comesAndGoes(t, r, "pod1")
	r.tells(1, "this host looks for leaks of the whole cluster")
	enough := func() {
		t.Helper()
		if denied := r.log.lines("permission denied"); len(denied) > 0 {
			t.Errorf("a right was missed: %s", denied)
		}
	}
	enough()
	// By way of etcd's proxy the same rights do.
	r.kill(syscall.SIGKILL)
	behind := maps.Clone(h.config["datastore"].(map[string]any))
	behind["endpoints"] = []string{"http://" + h.proxy("unix://"+socket)}
	h.config["datastore"] = behind
	r = h.start()
	r.ready()
	comesAndGoes(t, r, "pod2")
	enough()

	// What a thief of these rights cannot do.
	thief, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + socket}, Username: "node1", Password: "secret-one", Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer thief.Close()
	const resources = "/calico/resources/v3/projectcalico.org/"
	for _, key := range []string{
		resources + "globalnetworkpolicies/default.x", resources + "networkpolicies/default/default.x", resources + "ippools/x", resources + "bgppeers/x",
		resources + "felixconfigurations/default", resources + "clusterinformations/default", resources + "tiers/x", resources + "hostendpoints/x",
		resources + "nodes/node2", resources + "nodes/node11", "/calico/ipam/v2/config",
		"/routerd/v1/secrets/reach", "/routerd/v1/presences/node2", "/routerd/v1/incarnations/node2", "/routerd/v1/unconfirmed/x", "/routerd/v1/changes/x", "/elsewhere",
		"/routerd/v1/services/x/y", "/routerd/v1/endpointslices/x/y", "/routerd/v1/servicecidrs/x",
	} {
		if _, err := thief.Put(t.Context(), key, "{}"); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("write %s: %v", key, err)
		}
		if _, err := thief.Delete(t.Context(), key); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("delete %s: %v", key, err)
		}
	}
	if _, err := thief.Get(t.Context(), "/elsewhere"); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("read of others' keys: %v", err)
	}
	if _, err := thief.Get(t.Context(), "/routerd/v1/changes/", clientv3.WithPrefix()); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("read of what operators changed: %v", err)
	}
	// And what he can: docs/security.md says so.
	if _, err := thief.Get(t.Context(), resources+"globalnetworkpolicies/", clientv3.WithPrefix()); err != nil {
		t.Errorf("read policies: %v", err)
	}
	if _, err := thief.Put(t.Context(), "/calico/ipam/v2/handle/of-another", `{"block":{},"deleted":false}`); err != nil {
		t.Errorf("write of addresses: %v", err)
	}

	run("", script, "--kubernetes", "node2")
	bringsKubernetes(t, "unix://"+socket)

	// A right that goes while the host runs.
	if _, err := r.attach("stays"); err != nil {
		t.Fatal(err)
	}
	m := r.monitor()
	const blocks = "/calico/ipam/v2/assignment/"
	run("", "etcdctl", "role", "revoke-permission", "routerd-node", blocks, "--prefix=true")
	// etcd asks for rights when something is read or written, and not of a watch.
	if _, err := r.attach("during"); err != nil {
		t.Errorf("ADD without the right to write it down: %v", err)
	}
	await.Until(t, "the loss is named, with the cure", func() error {
		return mentions(strings.Join(r.log.lines("permission denied"), " "), "permission denied", "configs/etcd/roles.sh")
	})
	ofWorkloads := func(change string) bool {
		return strings.Contains(change, "cali") || strings.HasPrefix(change, "link/ether ee:ee")
	}
	if got := slices.DeleteFunc(m.changes(), ofWorkloads); len(got) > 0 {
		t.Errorf("a right that went changed in the kernel:\n%s", strings.Join(got, "\n"))
	}
	run("", "etcdctl", "role", "grant-permission", "routerd-node", "readwrite", blocks, "--prefix=true")
	all, err := etcd.Open(t.Context(), etcd.Config{Endpoints: []string{"unix://" + socket}, Username: "root", Password: "top"})
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	await.Until(t, "the datastore knows of it when the right is back", func() error {
		held, endpoints, err := holders(t, all)
		if err == nil && (len(held) != 2 || len(endpoints) != 2) {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
	comesAndGoes(t, r, "pod3")

	// Who deletes ClusterInformation locks nothing. Without the first host's rights it stays
	// away, which is said; with them it is put back as it was.
	info := store.ResourceKey(store.KindClusterInformation, store.DefaultName)
	was, err := all.Get(t.Context(), info)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), all, info, 0); err != nil {
		t.Fatal(err)
	}
	r.when("the deletion is told", func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Datastore")
		if c.GetOk() {
			return errors.New("all is well")
		}
		return mentions(c.GetReason(), "ClusterInformation default was deleted")
	})
	comesAndGoes(t, r, "pod4")
	run("", script, "--first", "node1")
	r.when("it is there again", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return nil
	})
	is, err := all.Get(t.Context(), info)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(was.Raw), string(is.Raw)); diff != "" {
		t.Errorf("ClusterInformation (-before +put back):\n%s", diff)
	}
}

// bringsKubernetes has node2 bring what Kubernetes says into etcd, and node1 follow it.
func bringsKubernetes(t *testing.T, endpoint string) {
	t.Helper()
	as := func(user, password string) *etcd.Store {
		t.Helper()
		s, err := etcd.Open(t.Context(), etcd.Config{Endpoints: []string{endpoint}, Username: user, Password: password})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	api := memory.New()
	defer api.Close()
	policy := store.New(store.KindNetworkPolicy).(*v3.NetworkPolicy)
	policy.Namespace, policy.Name = "default", "knp.default.web"
	global := store.New(store.KindGlobalNetworkPolicy).(*v3.GlobalNetworkPolicy)
	global.Name = "kcnp.web"
	profile := store.New(store.KindProfile).(*v3.Profile)
	profile.Name = "kns.default"
	wants := map[store.Key]any{
		{Kind: store.KindNetworkPolicy, Namespace: "default", Name: policy.Name}: policy, store.ResourceKey(store.KindGlobalNetworkPolicy, global.Name): global,
		store.ResourceKey(store.KindProfile, profile.Name): profile, store.ServiceKey("default", "web"): &store.Service{}, store.ServiceCIDRKey("kubernetes"): &store.ServiceCIDR{},
		store.EndpointSliceKey("default", "web-1"): &store.EndpointSlice{Service: "web"},
	}
	var kinds []store.Kind
	for key, value := range wants {
		if _, err := api.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: value}}); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, key.Kind)
	}
	ctx, cancel := context.WithCancel(await.Context(t))
	var running sync.WaitGroup
	defer func() { cancel(); running.Wait() }()
	running.Go(func() { kubesync.New(api, as("node2", "secret-two"), slog.New(slog.DiscardHandler)).Run(ctx) })
	for b := range as("node1", "secret-one").Watch(ctx, kinds...) {
		if b.Err != nil || len(b.Withheld) > 0 {
			t.Errorf("what is brought from Kubernetes is not told: %v, %v", b.Err, b.Withheld)
		}
		for _, e := range b.Events {
			delete(wants, e.Key)
		}
		if len(wants) == 0 {
			return
		}
	}
	t.Errorf("not brought from Kubernetes: %v", slices.Collect(maps.Keys(wants)))
}

// comesAndGoes attaches a workload and takes it away.
func comesAndGoes(t *testing.T, r *running, id string) {
	t.Helper()
	if _, err := r.attach(id); err != nil {
		t.Fatal(err)
	}
	if err := r.detach(id); err != nil {
		t.Fatal(err)
	}
}

// proxy starts `etcd grpc-proxy` on the host, which ends with the test, and returns its address.
func (h *host) proxy(endpoint string) string {
	h.t.Helper()
	const at = "127.0.0.1:23790"
	cmd := exec.Command("etcd", "grpc-proxy", "start", "--endpoints="+endpoint, "--listen-addr="+at, "--data-dir="+h.t.TempDir())
	cmd.Stdout, cmd.Stderr = h.t.Output(), h.t.Output()
	if err := h.ns.Do(cmd.Start); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	return at
}
