package kube_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// kubectl runs the program of this name as the administrator.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return kubectlWith(t, "", args...)
}

// kubeBin is where Kubernetes' programs are.
func kubeBin() string { return cmp.Or(os.Getenv("KUBE_BIN"), "../../.cache/kube") }

// kubectlWith is kubectl with something to read.
func kubectlWith(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	config, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	bin := kubeBin()
	ctx := context.WithoutCancel(t.Context())
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "kubectl"), append([]string{"--kubeconfig", config}, args...)...)
	cmd.Env = []string{"HOME=" + t.TempDir()}
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("kubectl %v: %v: %s", args, err, stderr.String())
	}
	return string(out)
}

// install applies what the manifests of configs/kubernetes hold, as users do, and
// returns when the policy of admission is in force.
func install(t *testing.T) {
	t.Helper()
	installFrom(t, "beside-calico")
}

func installFrom(t *testing.T, name string) {
	t.Helper()
	dir := filepath.Join("../../configs/kubernetes", name)
	before, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	kubectl(t, "apply", "--server-side", "-k", dir)
	t.Cleanup(func() {
		kubectl(t, "delete", "--ignore-not-found", "-k", dir)
		after, err := server.Audit()
		if err != nil {
			t.Error(err)
		}
		if usedWith[name] == nil {
			usedWith[name] = map[kube.Asked]int{}
		}
		for a, n := range after {
			if n > before[a] {
				usedWith[name][a] += n - before[a]
			}
		}
	})
}

// token returns what the daemon on a node shows to the server: the token of
// routerd's account, which names the node.
func token(t *testing.T, node string) string { return tokenFor(t, node, time.Hour) }

// tokenFor is token with a life.
func tokenFor(t *testing.T, node string, life time.Duration) string {
	t.Helper()
	uid := kubectl(t, "get", "node", node, "-o", "jsonpath={.metadata.uid}")
	body := fmt.Sprintf(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":%d,"boundObjectRef":{"apiVersion":"v1","kind":"Node","name":%q,"uid":%q}}}`, int(life.Seconds()), node, uid)
	raw, err := server.Do(t.Context(), http.MethodPost, "/api/v1/namespaces/kube-system/serviceaccounts/routerd/token", "application/json", []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	var answer struct{ Status struct{ Token string } }
	if err := json.Unmarshal(raw, &answer); err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

// as opens the store with the token of a node's daemon.
func as(t *testing.T, node string) *kubestore.Store {
	t.Helper()
	config, err := server.Kubeconfig("", token(t, node))
	if err != nil {
		t.Fatal(err)
	}
	return openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3), Node: node, UserAgent: kube.Thief})
}

func block(cidr, holder string, nodes ...string) (store.Key, *store.Block) {
	key := store.Key{Kind: store.KindIPAMBlock, Name: cidr}
	p := netip.MustParsePrefix(cidr)
	affinity := "host:" + holder
	b := &store.Block{CIDR: p.String(), Affinity: &affinity}
	for i := range 1 << (32 - p.Bits()) {
		if i >= len(nodes) || nodes[i] == "" {
			b.Allocations = append(b.Allocations, nil)
			b.Unallocated = append(b.Unallocated, i)
			continue
		}
		at := len(b.Attributes)
		handle := "h-" + nodes[i]
		b.Allocations = append(b.Allocations, &at)
		b.Attributes = append(b.Attributes, store.Attribute{HandleID: &handle, Secondary: map[string]string{"node": nodes[i]}})
	}
	return key, b
}

// TestOneNodesToken: with the token of one node's daemon, what is another node's is
// refused.
func TestOneNodesToken(t *testing.T) {
	admin, _ := open(t, convert.V3)
	for _, n := range []string{"node1", "node2"} {
		create(t, "/api/v1/nodes", fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":%q}}`, n))
		create(t, "/api/v1/namespaces/default/pods", fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"on-%s"},"spec":{"nodeName":%[1]q,"automountServiceAccountToken":false,"containers":[{"name":"c","image":"x"}]}}`, n))
	}
	install(t)
	s := as(t, "node1")
	put := func(s *kubestore.Store, key store.Key, change func(cur any) any) error {
		_, err := store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) { return change(cur.Value), nil })
		return err
	}
	last := byte(0)
	address := func(node string) error {
		last++ // what is written unchanged is not written
		return put(s, store.ResourceKey(store.KindNode, node), func(cur any) any {
			n := store.Clone(cur).(*store.Node)
			n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: fmt.Sprintf("10.0.0.%d/24", last)}
			return n
		})
	}
	pod := func(node string) error {
		w := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
		w.Name, w.Namespace = node+"-k8s-on--"+node+"-eth0", "default"
		w.Spec = store.WorkloadEndpointSpec{Orchestrator: "k8s", Node: node, Pod: "on-" + node, Endpoint: "eth0", ContainerID: "c", IPNetworks: []string{"10.9.9.9/32"}}
		key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: w.Name}
		_, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: w}})
		return err
	}
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "may not write") {
			t.Errorf("%s: %v", what, err)
		}
	}
	allowed := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	await.Until(t, "the policies are in force", func() error {
		if err := address("node2"); err == nil || !strings.Contains(err.Error(), "may not write") {
			return fmt.Errorf("another Node is written: %v", err)
		}
		if err := pod("node2"); err == nil || !strings.Contains(err.Error(), "may not write") {
			return fmt.Errorf("another's pod is written: %v", err)
		}
		return nil
	})
	allowed("its own Node", address("node1"))
	allowed("its own pod", pod("node1"))
	refused("another's pod", pod("node2"))

	// Blocks.
	mine, own := block("10.77.0.0/30", "node1", "node1")
	_, err := s.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: mine, Value: own}})
	allowed("a block of its own", err)
	theirs, other := block("10.77.0.4/30", "node2", "node2")
	_, err = s.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: theirs, Value: other}})
	refused("a block in another's name", err)
	_, err = admin.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: theirs, Value: other}})
	allowed("the administrator", err)
	write := func(key store.Key, b *store.Block) error { return put(s, key, func(any) any { return b }) }
	_, borrowed := block("10.77.0.4/30", "node2", "node2", "node1")
	allowed("an address that is borrowed", write(theirs, borrowed))
	_, stolen := block("10.77.0.4/30", "node2", "node1", "node1")
	refused("an address that is another's", write(theirs, stolen))
	_, taken := block("10.77.0.4/30", "node1", "node2", "node1")
	refused("a block that another holds", write(theirs, taken))
	_, freed := block("10.77.0.4/30", "node2", "", "node1")
	refused("to free an address of another's", write(theirs, freed))
	_, back := block("10.77.0.4/30", "node2", "node2")
	allowed("to give back what was borrowed", write(theirs, back))
	refused("to delete another's block", store.Delete(t.Context(), s, theirs, 0))

	// Handles.
	handle := func(s *kubestore.Store, id string, count int) error {
		return put(s, store.HandleKey(id), func(any) any { return &store.Handle{Block: map[string]int{"10.77.0.4/30": count}} })
	}
	drop := func(s *kubestore.Store, id string) error {
		return store.Delete(t.Context(), s, store.HandleKey(id), 0)
	}
	neighbour := as(t, "node2")
	allowed("its own handle", handle(s, "net.c1", 1))
	allowed("another's own handle", handle(neighbour, "net.c2", 1))
	allowed("to change its own handle", handle(s, "net.c1", 2))
	refused("to change another's handle", handle(s, "net.c2", 9))
	allowed("the administrator's change of a handle", handle(admin, "net.c2", 2))
	refused("to change another's handle that the administrator has changed", handle(s, "net.c2", 9))
	refused("to delete another's handle", drop(s, "net.c2"))
	raw := func(node, method, name, contentType, body string) error {
		_, err := server.DoAs(t.Context(), token(t, node), kube.Thief, method, "/apis/projectcalico.org/v3/ipamhandles"+name, contentType, []byte(body))
		return err
	}
	refused("a handle that says it is another's", raw("node1", http.MethodPost, "", "application/json", `{"apiVersion":"projectcalico.org/v3","kind":"IPAMHandle","metadata":{"name":"net.c3","annotations":{"routerd.io/node":"node2"}},"spec":{"handleID":"net.c3","block":{}}}`))
	// changed writes a handle as it is but for one value.
	changed := func(node, id, value string, path ...string) error {
		t.Helper()
		text, err := server.Do(t.Context(), http.MethodGet, "/apis/projectcalico.org/v3/ipamhandles/"+id, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		var o map[string]any
		if err := json.Unmarshal(text, &o); err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal([]byte(value), &v); err != nil {
			t.Fatal(err)
		}
		if err := unstructured.SetNestedField(o, v, path...); err != nil {
			t.Fatal(err)
		}
		body, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		return raw(node, http.MethodPut, "/"+id, "application/json", string(body))
	}
	refused("to take another's handle", changed("node1", "net.c2", `"node1"`, "metadata", "annotations", "routerd.io/node"))
	refused("to give its own handle to another", changed("node1", "net.c1", `"node2"`, "metadata", "annotations", "routerd.io/node"))
	allowed("a handle of Calico's", handle(admin, "net.c4", 1))
	refused("to take a handle that is of nobody", changed("node1", "net.c4", `"node1"`, "metadata", "annotations", "routerd.io/node"))
	allowed("to change a handle that is of nobody", handle(s, "net.c4", 2))
	for _, id := range []string{"routerd-reserve-", "vxlan-tunnel-addr-", "ipip-v6-tunnel-addr-"} {
		allowed("a handle of its Node's", handle(s, id+"node1", 1))
		refused("a handle of another Node's", handle(s, id+"node2", 1))
		allowed("the administrator's handle of another Node", handle(admin, id+"node2", 1))
		refused("to change a handle of another Node's", handle(s, id+"node2", 2))
		refused("to delete a handle of another Node's", drop(s, id+"node2"))
	}
	allowed("to delete its own handle", drop(s, "net.c1"))
	allowed("the mark of a deletion", changed("node2", "net.c2", "true", "spec", "deleted"))
	allowed("to finish another's deletion", raw("node1", http.MethodDelete, "/net.c2", "", ""))

	// Keys that all nodes share.
	secret := func(method, name, kind string) error {
		path, body := "/api/v1/namespaces/kube-system/secrets", fmt.Sprintf(`{"apiVersion":"v1","kind":"Secret","type":%q,"metadata":{"name":%q,"annotations":{"kubernetes.io/service-account.name":"routerd"}},"data":{"key":"AAAA"}}`, kind, name)
		if method == http.MethodPut {
			path += "/" + name
		}
		_, err := server.DoAs(t.Context(), token(t, "node1"), kube.Thief, method, path, "application/json", []byte(body))
		return err
	}
	key, err := store.SharedSecret(t.Context(), s, store.ProbeSecret)
	allowed("a key that is missing", err)
	t.Cleanup(func() { kubectl(t, "-n", "kube-system", "delete", "secret", "routerd-probe") })
	if again, err := store.SharedSecret(t.Context(), neighbour, store.ProbeSecret); err != nil || !bytes.Equal(key, again) {
		t.Errorf("the other node has another key: %v", err)
	}
	refused("a Secret of another name", secret(http.MethodPost, "routerd-other", "Opaque"))
	refused("a token of an account in a key's place", secret(http.MethodPost, "routerd-reach", "kubernetes.io/service-account-token"))
	if err := secret(http.MethodPut, "routerd-probe", "Opaque"); err == nil || !strings.Contains(err.Error(), "cannot update") {
		t.Errorf("to replace a key: %v", err)
	}

	affinity := func(node string) error {
		key := store.AffinityKey(node, netip.MustParsePrefix("10.77.0.8/30"))
		_, err := s.Txn(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: &store.Affinity{State: "pending"}}})
		return err
	}
	allowed("an affinity", affinity("node1"))
	refused("an affinity of another", affinity("node2"))
}
