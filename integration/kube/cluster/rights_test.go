package cluster_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
	"github.com/routerd/routerd/store"
)

// TestStolenToken: with the very token of the daemon on one node what is of that node
// is written, and nothing else of the cluster is.
func TestStolenToken(t *testing.T) {
	c := world.Up(t)
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	// The collector frees addresses in any block: another's token is the one to try.
	collector := kubectl(t, c, "-n", "kube-system", "get", "lease", "routerd-ipam-collector", "-o", "jsonpath={.spec.holderIdentity}")
	i := slices.IndexFunc(c.Nodes, func(n *cluster.Node) bool { return n.Name != collector })
	own, other := c.Nodes[i].Name, c.Nodes[(i+1)%len(c.Nodes)].Name
	root := fmt.Sprintf("/proc/%d/root", daemonOn(t, c.Nodes[i], 0))
	token, err := os.ReadFile(root + account + "token")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(root + account + "ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}, Timeout: 10 * time.Second}
	pods := map[string]string{}
	for line := range strings.Lines(kubectl(t, c, "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=routerd", "-o", `jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name}{"\n"}{end}`)) {
		f := strings.Fields(line)
		pods[f[0]] = f[1]
	}
	group, etcd := "projectcalico.org/v3", world.Config.Datastore == cluster.Etcd
	if world.Config.Datastore == cluster.V1 {
		group = "crd.projectcalico.org/v1"
	}
	// Of a pod that lives on there is a handle; of what else runs on that node there may be none.
	create(t, c, fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: owner}\nspec: {nodeName: %s, terminationGracePeriodSeconds: 0, containers: [{name: c, image: %q, args: [pause]}]}\n", other, cluster.AgnhostImage))
	block, handle, address := anothers(t, c, other)
	const annotate, merge, plain = `{"metadata":{"annotations":{"example.org/tried":"yes"}}}`, "application/merge-patch+json", "application/json"
	const patch = "application/json-patch+json"
	for _, tt := range []struct {
		what, method, path, contentType, body string
		code                                  int
		says                                  string
		etcd                                  string // what is said where resources are in an etcd, and the daemon has no right to it
	}{
		{"its own Node's status", "PATCH", "/api/v1/nodes/" + own + "/status", merge, annotate, 200, "", ""},
		{"another's", "PATCH", "/api/v1/nodes/" + other + "/status", merge, annotate, 422, "may not write the Node " + other, ""},
		{"its own Node itself", "PATCH", "/api/v1/nodes/" + own, merge, annotate, 403, "cannot patch", ""},
		{"its own Node's deletion", "DELETE", "/api/v1/nodes/" + own, "", "", 403, "cannot delete", ""},
		{"the status of a pod of its own", "PATCH", "/api/v1/namespaces/kube-system/pods/" + pods[own] + "/status", merge, annotate, 200, "", "cannot patch"},
		{"that of a pod of another", "PATCH", "/api/v1/namespaces/kube-system/pods/" + pods[other] + "/status", merge, annotate, 422, "may not write a pod of another node", "cannot patch"},
		{"a pod's deletion", "DELETE", "/api/v1/namespaces/kube-system/pods/" + pods[own], "", "", 403, "cannot delete", ""},
		{"a pod", "POST", "/api/v1/namespaces/kube-system/pods", plain, `{}`, 403, "cannot create", ""},
		{"a command in a pod", "POST", "/api/v1/namespaces/kube-system/pods/" + pods[own] + "/exec?command=x", "", "", 403, "cannot create", ""},
		{"all secrets", "GET", "/api/v1/secrets", "", "", 403, "cannot list", ""},
		{"the secrets of its namespace", "GET", "/api/v1/namespaces/kube-system/secrets", "", "", 403, "cannot list", ""},
		{"another token", "POST", "/api/v1/namespaces/kube-system/serviceaccounts/routerd/token", plain, `{}`, 403, "cannot create", ""},
		{"the right to more", "PATCH", "/apis/rbac.authorization.k8s.io/v1/clusterroles/routerd", merge, annotate, 403, "cannot patch", ""},
		{"the policy of admission's deletion", "DELETE", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/routerd", "", "", 403, "cannot delete", ""},
		{"a pool", "PATCH", "/apis/" + group + "/ippools/default-ipv4-ippool", merge, annotate, 403, "cannot patch", ""},
		{
			"a block in another's name", "POST", "/apis/" + group + "/ipamblocks", plain,
			`{"apiVersion":"` + group + `","kind":"IPAMBlock","metadata":{"name":"192-168-255-0-30"},"spec":{"cidr":"192.168.255.0/30","affinity":"host:` + other + `","allocations":[null,null,null,null],"unallocated":[0,1,2,3],"attributes":[]}}`, 422, "may not write the block", "cannot create",
		},
		{"another's address, to be free", "PATCH", "/apis/" + group + "/ipamblocks/" + block, patch, fmt.Sprintf(`[{"op":"replace","path":"/spec/allocations/%d","value":null}]`, address), 422, "may not write the block", "cannot patch"},
		{"another's block's deletion", "DELETE", "/apis/" + group + "/ipamblocks/" + block, "", "", 422, "may not write the block", "cannot delete"},
		{"a handle of another's deletion", "DELETE", "/apis/" + group + "/ipamhandles/" + handle, "", "", 422, "may not write the handle", "cannot delete"},
		{"its count", "PATCH", "/apis/" + group + "/ipamhandles/" + handle, merge, `{"spec":{"block":{"192.168.255.0/30":7}}}`, 403, "cannot patch", ""},
		{"a key of all", "PUT", "/api/v1/namespaces/kube-system/secrets/routerd-probe", plain, `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"routerd-probe"}}`, 403, "cannot update", ""},
		{
			"the token of another account", "POST", "/api/v1/namespaces/kube-system/secrets", plain,
			`{"apiVersion":"v1","kind":"Secret","type":"kubernetes.io/service-account-token","metadata":{"name":"routerd-token","annotations":{"kubernetes.io/service-account.name":"namespace-controller"}}}`, 422, "may not write the Secret", "cannot create",
		},
		{"an event", "POST", "/api/v1/namespaces/kube-system/events", plain, `{"apiVersion":"v1","kind":"Event","metadata":{"name":"forged"},"involvedObject":{"namespace":"kube-system"}}`, 422, "may not write events", ""},
		{"the collector's Lease in another's name", "PATCH", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/routerd-ipam-collector", merge, `{"spec":{"holderIdentity":"` + other + `"}}`, 403, "cannot patch", ""},
	} {
		if etcd && tt.etcd != "" {
			tt.code, tt.says = http.StatusForbidden, tt.etcd
		}
		req, err := http.NewRequestWithContext(t.Context(), tt.method, c.URL+tt.path, bytes.NewReader([]byte(tt.body)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+string(token))
		req.Header.Set("User-Agent", kube.Thief)
		if tt.contentType != "" {
			req.Header.Set("Content-Type", tt.contentType)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != tt.code || !strings.Contains(string(answer), tt.says) {
			t.Errorf("%s: %s, %v: %s; want %d and %q", tt.what, resp.Status, err, answer, tt.code, tt.says)
		}
	}
}

// anothers returns the names of a block of a node, with the ordinal of an address that is in use,
// and of a handle that its daemon made. Where resources are in an etcd there are none in the API.
func anothers(t *testing.T, c *cluster.Cluster, node string) (block, handle string, address int) {
	t.Helper()
	if world.Config.Datastore == cluster.Etcd {
		return "none", "none", 0
	}
	type object struct {
		Metadata struct {
			Name        string
			Annotations map[string]string
		}
		Spec struct {
			Affinity    string
			Allocations []*int
		}
	}
	find := func(resource string, want func(object) bool) (name string) {
		await.Until(t, "a record of "+node+" among the "+resource, func() error {
			var list struct{ Items []object }
			if err := json.Unmarshal([]byte(kubectl(t, c, "get", resource, "-o", "json")), &list); err != nil {
				return err
			}
			i := slices.IndexFunc(list.Items, want)
			if i < 0 {
				return fmt.Errorf("none of %d", len(list.Items))
			}
			name = list.Items[i].Metadata.Name
			return nil
		})
		return name
	}
	block = find("ipamblocks", func(o object) bool {
		address = slices.IndexFunc(o.Spec.Allocations, func(at *int) bool { return at != nil })
		return o.Spec.Affinity == "host:"+node && address >= 0
	})
	handle = find("ipamhandles", func(o object) bool { return o.Metadata.Annotations[store.AnnotationHandleNode] == node })
	return block, handle, address
}

// TestMalformedAnnotation: a pod with one does not start, and an event on it says which
// annotation it is, and what is wrong with it. A pod that is right starts beside it.
func TestMalformedAnnotation(t *testing.T) {
	c := world.Up(t)
	pod := func(name, annotations string) string {
		return fmt.Sprintf("---\napiVersion: v1\nkind: Pod\nmetadata: {name: %s, annotations: {%s}}\nspec: {terminationGracePeriodSeconds: 0, containers: [{name: c, image: %q, args: [pause]}]}\n", name, annotations, cluster.AgnhostImage)
	}
	create(t, c, pod("bad", `cni.projectcalico.org/ipAddrs: '["10.0.0.300"]'`)+pod("good", ""))
	await.Until(t, "an event on the pod names the annotation", func() error {
		out := kubectl(t, c, "get", "events", "--field-selector", "involvedObject.name=bad,reason=FailedCreatePodSandBox", "-o", "jsonpath={.items[*].message}")
		if !strings.Contains(out, "cni.projectcalico.org/ipAddrs") || !strings.Contains(out, "10.0.0.300") {
			return fmt.Errorf("events: %q", out)
		}
		return nil
	})
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/good", "--timeout=60s")
}

// TestRightsOfGroup: daemons ask for Calico's resources in the one group that is defined, of which what is
// called otherwise there is used too, and in none where they are in an etcd.
func TestRightsOfGroup(t *testing.T) {
	c := world.Up(t)
	group, config := "projectcalico.org", "ipamconfigurations"
	switch world.Config.Datastore {
	case cluster.V1:
		group, config = "crd.projectcalico.org", "ipamconfigs"
	case cluster.Etcd:
		group = ""
	}
	// A watch is in the log when it has ended.
	before := asked(t, c)
	kubectl(t, c, "-n", "kube-system", "rollout", "restart", "daemonset/routerd")
	kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=180s")
	watches := 0
	for a, n := range asked(t, c) {
		if a.Verb == "watch" && a.Group == group && a.Resource == config && !a.Refused() {
			watches += n - before[a]
		}
		if strings.HasSuffix(a.Group, "projectcalico.org") && a.Group != group {
			t.Errorf("%d times in another group than %q: %+v", n, group, a)
		}
	}
	if group != "" && watches < len(c.Nodes) {
		t.Errorf("%d watches of %s.%s have ended, want one of each of %d nodes", watches, config, group, len(c.Nodes))
	}
	refused(t, c)
}
