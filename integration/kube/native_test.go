package kube_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// create makes an object of Kubernetes' own, and deletes it after the test.
func create(t *testing.T, path, body string) {
	t.Helper()
	if _, err := server.Do(t.Context(), http.MethodPost, path, "application/json", []byte(body)); err != nil {
		t.Fatal(err)
	}
	var o struct{ Metadata struct{ Name string } }
	if err := json.Unmarshal([]byte(body), &o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, err := server.Do(context.WithoutCancel(t.Context()), http.MethodDelete, path+"/"+o.Metadata.Name+"?gracePeriodSeconds=0", "", nil)
		if err != nil {
			t.Error(err)
		}
	})
}

// until takes batches of a watch until one has an event that done accepts.
func until(t *testing.T, ch <-chan store.Batch, what string, done func(store.Event) bool) store.Event {
	t.Helper()
	deadline := time.After(await.Patience)
	for {
		select {
		case b, ok := <-ch:
			if !ok {
				t.Fatalf("the watch ended before: %s", what)
			}
			for _, e := range b.Events {
				if done(e) {
					return e
				}
			}
		case <-deadline:
			t.Fatalf("not within %v: %s", await.Patience, what)
		}
	}
}

// TestNative follows what objects of Kubernetes stand for: a node, its pod, their
// profiles and a policy, all in one watch; and writes to the node.
func TestNative(t *testing.T) {
	s, _ := open(t, convert.V3)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := s.Watch(ctx, store.KindNode, store.KindWorkloadEndpoint, store.KindProfile, store.KindNetworkPolicy)
	for b := range ch {
		if b.Synced {
			break
		}
	}
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node1","labels":{"zone":"a"}}}`)
	create(t, "/api/v1/namespaces/default/serviceaccounts", `{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"web","labels":{"team":"a"}}}`)
	create(t, "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies", `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web"},"spec":{"podSelector":{"matchLabels":{"app":"web"}},"policyTypes":["Ingress"]}}`)
	create(t, "/api/v1/namespaces/default/pods", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web-0","labels":{"app":"web"}},"spec":{"nodeName":"node1","serviceAccountName":"web","automountServiceAccountToken":false,"containers":[{"name":"c","image":"x"}]}}`)
	wep := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node1-k8s-web--0-eth0"}
	policy := store.Key{Kind: store.KindNetworkPolicy, Namespace: "default", Name: "knp.default.web"}
	missing := map[store.Key]bool{
		store.ResourceKey(store.KindNode, "node1"): true, store.ResourceKey(store.KindProfile, "ksa.default.web"): true, wep: true, policy: true,
	}
	until(t, ch, "all that was made", func(e store.Event) bool {
		if e.Err != nil {
			t.Errorf("%s: %v", e.Key, e.Err)
		}
		delete(missing, e.Key)
		return len(missing) == 0
	})

	// A pod's addresses come by its annotation before its status has them.
	_, err := server.Do(ctx, http.MethodPatch, "/api/v1/namespaces/default/pods/web-0", "application/merge-patch+json", []byte(`{"metadata":{"annotations":{"cni.projectcalico.org/podIPs":"10.1.1.1/32"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	e := until(t, ch, "the pod's address", func(e store.Event) bool {
		w, ok := e.Object.Value.(*store.WorkloadEndpoint)
		return ok && len(w.Spec.IPNetworks) > 0
	})
	if diff := cmp.Diff([]string{"kns.default", "ksa.default.web"}, e.Object.Value.(*store.WorkloadEndpoint).Spec.Profiles); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}

	// What routerd says of its host is on the Node, and Kubernetes' part stays.
	written, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, "node1"), func(cur store.Object) (any, error) {
		n := store.Clone(cur.Value).(*store.Node)
		n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: "10.0.0.1/24"}
		n.Annotations["routerd.io/uses"] = "direct"
		return n, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	e = until(t, ch, "the Node as it was written", func(e store.Event) bool { return e.Object.Revision == written.Revision })
	if diff := cmp.Diff(written, e.Object); diff != "" {
		t.Errorf("the watch tells another Node than was written (-written +watched):\n%s", diff)
	}
	n := e.Object.Value.(*store.Node)
	if n.Labels["zone"] != "a" || n.Annotations["routerd.io/uses"] != "direct" || n.Spec.BGP.IPv4Address != "10.0.0.1/24" {
		t.Errorf("the Node: %s", e.Object.Raw)
	}

	// What cannot be written here says what to change in its place.
	for _, tt := range []struct {
		op   store.Op
		want string
	}{
		{store.Op{Action: store.Remove, Object: store.Object{Key: store.ResourceKey(store.KindNode, "node1")}}, "change that with kubectl (node node1)"},
		{store.Op{Action: store.Remove, Object: store.Object{Key: policy}}, "change that with kubectl (networkpolicy -n default web)"},
		{store.Op{Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindProfile, "ksa.default.web"), Value: profile("ksa.default.web")}}, "(serviceaccount -n default web)"},
		{store.Op{Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindProfile, "mine"), Value: profile("mine")}}, "the Kubernetes datastore holds no such object"},
	} {
		if _, err := s.Txn(ctx, tt.op); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.op.Object.Key, err)
		}
	}
	nobody := &store.Node{}
	nobody.Name = "nobody"
	if _, err := store.Create(ctx, s, nobody); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "kubelet") {
		t.Errorf("a Node that nobody has: %v", err)
	}
}

func profile(name string) *v3.Profile {
	p := store.New(store.KindProfile).(*v3.Profile)
	p.Name = name
	return p
}

func handle(id string) store.Op {
	return store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: store.HandleKey(id), Value: &store.Handle{Block: map[string]int{"10.0.0.0/26": 1}}}}
}

// TestTwoSteps: a record that is deleted by halves counts as gone for everybody,
// and whoever meets it finishes.
func TestTwoSteps(t *testing.T) {
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		t.Run(string(g), func(t *testing.T) { testTwoSteps(t, g) })
	}
}

func testTwoSteps(t *testing.T, g convert.Group) {
	s, proxy := open(t, g)
	aff := store.AffinityKey("n1", netip.MustParsePrefix("10.0.0.0/26"))
	confirmed := store.Object{Key: aff, Value: &store.Affinity{State: store.AffinityConfirmed}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := s.Watch(ctx, store.KindIPAMAffinity, store.KindIPAMHandle)
	for b := range ch {
		if b.Synced {
			break // what is marked before is never told of
		}
	}
	path := resource(t, g, store.KindIPAMAffinity) + "/" + convert.AffinityName("n1", aff.CIDR())
	for _, finish := range []string{"Get", "make it anew", "check that it is absent"} {
		made, err := s.Txn(ctx, store.Op{If: store.IfAbsent(), Action: store.Put, Object: confirmed})
		if err != nil {
			t.Fatal(err)
		}
		proxy.LetWrites(1)
		_, err = s.Txn(ctx, store.RemoveOp(made[0]))
		proxy.LetWrites(-1)
		if !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("the second step was cut: %v", err)
		}
		until(t, ch, "the mark", func(e store.Event) bool { return e.Key == aff && e.Deleted() })
		if raw, err := server.Do(ctx, http.MethodGet, path, "", nil); err != nil || !strings.Contains(string(raw), `"deleted":`) {
			t.Fatalf("the mark is not there: %v: %s", err, raw)
		}
		if objs, _, err := s.List(ctx, store.KindIPAMAffinity, "n1"); err != nil || len(objs) != 0 {
			t.Errorf("a marked record is listed: %v, %v", objs, err)
		}
		switch finish {
		case "Get":
			if _, err := s.Get(ctx, aff); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("Get: %v", err)
			}
		case "check that it is absent":
			if _, err := s.Txn(ctx, store.CheckAbsent(aff)); err != nil {
				t.Errorf("check: %v", err)
			}
		case "make it anew":
			made, err := s.Txn(ctx, store.Op{If: store.IfAbsent(), Action: store.Put, Object: confirmed})
			if err != nil {
				t.Fatal(err)
			}
			until(t, ch, "the new one", func(e store.Event) bool { return e.Key == aff && e.Object.Revision == made[0].Revision })
			if _, err := s.Txn(ctx, store.RemoveOp(made[0])); err != nil {
				t.Fatal(err)
			}
		}
		if raw, err := server.Do(ctx, http.MethodGet, path, "", nil); err == nil {
			t.Errorf("%s did not finish the deletion: %s", finish, raw)
		}
	}
}

// resource is where the objects of a kind are.
func resource(t *testing.T, g convert.Group, kind store.Kind) string {
	t.Helper()
	r, ok := convert.Custom(g, kind)
	if !ok {
		t.Fatalf("%s has no resource", kind)
	}
	return r.Path("")
}

// TestCrashBetweenWrites cuts the connection after each write of a transaction:
// what is done is a beginning of it, in the order of the roles.
func TestCrashBetweenWrites(t *testing.T) {
	s, proxy := open(t, convert.V1)
	for n := range 4 {
		names := []string{fmt.Sprint("prepares", n), fmt.Sprint("decides", n), fmt.Sprint("follows", n)}
		var ops []store.Op
		for i, role := range []store.Role{store.Follows, store.Decides, store.Prepares} {
			op := handle(names[2-i])
			op.Role = role
			ops = append(ops, op)
		}
		proxy.LetWrites(n)
		_, err := s.Txn(t.Context(), ops...)
		proxy.LetWrites(-1)
		// With the decision the transaction took place, whatever becomes of the rest.
		if decided := n >= 2; (err == nil) != decided || err != nil && !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("cut after %d writes: %v", n, err)
		}
		for i, name := range names {
			_, err := s.Get(t.Context(), store.HandleKey(name))
			if there := err == nil; there != (i < n) {
				t.Errorf("cut after %d writes: %s is there: %v, %v", n, name, there, err)
			}
		}
	}
}

// TestCaseOfHandles: two handles that differ in case alone have one name in the
// API, and are not taken for each other.
func TestCaseOfHandles(t *testing.T) {
	s, _ := open(t, convert.V3)
	if _, err := s.Txn(t.Context(), handle("net.ABC")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), store.HandleKey("net.abc")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("Get of another one: %v", err)
	}
	if _, err := s.Txn(t.Context(), handle("net.abc")); !errors.Is(err, store.ErrExists) {
		t.Errorf("making another one: %v", err)
	}
	if obj, err := s.Get(t.Context(), store.HandleKey("net.ABC")); err != nil || obj.Value.(*store.Handle).Block["10.0.0.0/26"] != 1 {
		t.Errorf("%+v, %v", obj, err)
	}
}

// TestOlderPolicyNames: a policy whose object has the tier in front of its name is
// found, written and deleted where it is.
func TestOlderPolicyNames(t *testing.T) {
	s, _ := open(t, convert.V1)
	path := resource(t, convert.V1, store.KindGlobalNetworkPolicy)
	body := `{"apiVersion":"crd.projectcalico.org/v1","kind":"GlobalNetworkPolicy","metadata":{"name":"default.deny"},"spec":{"types":["Ingress"]}}`
	if _, err := server.Do(t.Context(), http.MethodPost, path, "application/json", []byte(body)); err != nil {
		t.Fatal(err)
	}
	key := store.ResourceKey(store.KindGlobalNetworkPolicy, "deny")
	written, err := store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) {
		if cur.Revision == 0 {
			return nil, errors.New("it is not found")
		}
		p := store.Clone(cur.Value).(*v3.GlobalNetworkPolicy)
		p.Spec.Order = new(float64(5))
		return p, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.Do(t.Context(), http.MethodGet, path+"/default.deny", "", nil); err != nil {
		t.Errorf("it was written elsewhere: %v", err)
	}
	if _, err := server.Do(t.Context(), http.MethodGet, path+"/deny", "", nil); err == nil {
		t.Error("there are two of it")
	}
	if err := store.Delete(t.Context(), s, key, written.Revision); err != nil {
		t.Error(err)
	}
	if _, err := server.Do(t.Context(), http.MethodGet, path+"/default.deny", "", nil); err == nil {
		t.Error("it is still there")
	}
}

// TestRights: what a user may not do is said with the verb and the resource, and
// the rest works.
func TestRights(t *testing.T) {
	s, proxy := open(t, convert.V3)
	config, err := server.Kubeconfig(proxy.URL, kube.NodeToken)
	if err != nil {
		t.Fatal(err)
	}
	kubelet := dialAs(t, config)
	_, err = kubelet.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p"))
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), `"ippools"`) || !strings.Contains(err.Error(), "lacks the right to get") || !strings.Contains(err.Error(), "account.yaml") {
		t.Errorf("without rights: %v", err)
	}
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"`+kube.Node+`"}}`)
	if _, err := kubelet.Get(t.Context(), store.ResourceKey(store.KindNode, kube.Node)); err != nil {
		t.Errorf("with rights: %v", err)
	}
	stranger, err := server.Kubeconfig("", "nobody's token")
	if err != nil {
		t.Fatal(err)
	}
	_, err = dialAs(t, stranger).Get(t.Context(), store.ResourceKey(store.KindIPPool, "p"))
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "the token in "+stranger+" is refused: it may have expired") {
		t.Errorf("with a wrong token: %v", err)
	}
	if _, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the administrator: %v", err)
	}
}

// TestOneRight: of two kinds one may be watched, and is told; the other is withheld
// with the verb and the cure, until the right is there.
func TestOneRight(t *testing.T) {
	s, proxy := open(t, convert.V3)
	config, err := server.Kubeconfig(proxy.URL, kube.NodeToken)
	if err != nil {
		t.Fatal(err)
	}
	const roles = "/apis/rbac.authorization.k8s.io/v1/clusterrole"
	grant := func(resource string) {
		t.Helper()
		name := "watch-" + resource
		create(t, roles+"s", fmt.Sprintf(`{"metadata":{"name":%q},"rules":[{"apiGroups":["projectcalico.org"],"resources":[%q],"verbs":["list","watch"]}]}`, name, resource))
		create(t, roles+"bindings", fmt.Sprintf(`{"metadata":{"name":%q},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":%[1]q},"subjects":[{"kind":"User","apiGroup":"rbac.authorization.k8s.io","name":%q}]}`, name, "system:node:"+kube.Node))
	}
	tier, _ := store.New(store.KindTier).(*v3.Tier)
	tier.Name = "t"
	if _, err := store.Create(t.Context(), s, tier); err != nil {
		t.Fatal(err)
	}
	grant("ippools")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := dialAs(t, config).Watch(ctx, store.KindIPPool, store.KindTier)
	b := next(t, ch)
	for !b.Synced {
		b = next(t, ch)
	}
	w := b.Withheld[store.KindTier]
	if len(b.Withheld) != 1 || w.Known || w.Err == nil || !strings.Contains(w.Err.Error(), "lacks the right to watch") || !strings.Contains(w.Err.Error(), "account.yaml") {
		t.Errorf("with one right: %+v", b)
	}
	grant("tiers")
	until(t, ch, "the tier", func(e store.Event) bool { return e.Key.Name == "t" })
}

// TestGoesOn: after the server's end and its start, a watch goes on from where it
// was: nothing is listed again.
func TestGoesOn(t *testing.T) {
	s, proxy := open(t, convert.V3)
	for i := range 3 {
		if _, err := s.Txn(t.Context(), handle(fmt.Sprint("h", i))); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := s.Watch(ctx, store.KindIPAMHandle)
	until(t, ch, "the state", func(e store.Event) bool { return e.Key.Name == "h2" })
	proxy.Requests()
	heal := proxy.Interrupt()
	if b := next(t, ch); b.Err == nil {
		t.Errorf("no notice of the outage: %+v", b)
	}
	heal()
	if _, err := s.Txn(ctx, handle("new")); err != nil {
		t.Fatal(err)
	}
	// That the outage is over may be told before, where the watch was quicker than the write.
	for told, synced := false, false; !told || !synced; {
		b := next(t, ch)
		for _, e := range b.Events {
			told = true
			if e.Key.Name != "new" {
				t.Errorf("told again: %s", e.Key)
			}
		}
		synced = synced || b.Synced
	}
	for _, u := range proxy.Requests() {
		if q := u.Query(); q.Get("sendInitialEvents") != "" || q.Get("continue") != "" || q.Get("limit") != "" && q.Get("limit") != "1" {
			t.Errorf("the state was read again: %v", u)
		}
	}
}

func next(t *testing.T, ch <-chan store.Batch) store.Batch {
	t.Helper()
	select {
	case b, ok := <-ch:
		if !ok {
			t.Fatal("the watch ended")
		}
		return b
	case <-time.After(await.Patience):
		t.Fatal("the watch is silent")
		return store.Batch{}
	}
}

// TestPodWrites: what the CNI plugin writes to a pod is one request each way, for the
// pod of the uid and the container that it is about alone.
func TestPodWrites(t *testing.T) {
	s, proxy := open(t, convert.V3)
	create(t, "/api/v1/namespaces/default/pods", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web-0"},"spec":{"nodeName":"node1","automountServiceAccountToken":false,"containers":[{"name":"c","image":"x"}]}}`)
	key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node1-k8s-web--0-eth0"}
	pod, err := s.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	w := store.Clone(pod.Value).(*store.WorkloadEndpoint)
	w.Spec.ContainerID, w.Spec.IPNetworks = "c1", []string{"10.1.1.1/32"}
	put := func(uid string) error {
		w.UID = types.UID(uid)
		_, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: w}})
		return err
	}
	end := func(container string) error {
		of := &store.WorkloadEndpoint{Spec: store.WorkloadEndpointSpec{ContainerID: container}}
		_, err := s.Txn(t.Context(), store.Op{Action: store.Remove, Object: store.Object{Key: key, Value: of}})
		return err
	}
	networks := func() []string {
		t.Helper()
		o, err := s.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		return o.Value.(*store.WorkloadEndpoint).Spec.IPNetworks
	}
	if err := put("of another pod"); !errors.Is(err, store.ErrConflict) {
		t.Errorf("a pod of another uid: %v", err)
	}
	proxy.Requests()
	if err := put(string(pod.Value.(*store.WorkloadEndpoint).UID)); err != nil {
		t.Fatal(err)
	}
	if n := len(proxy.Requests()); n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
	if diff := cmp.Diff([]string{"10.1.1.1/32"}, networks()); diff != "" {
		t.Error(diff)
	}
	if err := end("c0"); err != nil {
		t.Errorf("the end of another container: %v", err)
	}
	if diff := cmp.Diff([]string{"10.1.1.1/32"}, networks()); diff != "" {
		t.Errorf("after the end of another container: %s", diff)
	}
	proxy.Requests()
	if err := end("c1"); err != nil {
		t.Fatal(err)
	}
	if n := len(proxy.Requests()); n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
	if got := networks(); len(got) != 0 {
		t.Errorf("after its end: %v", got)
	}
	gone := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node1-k8s-gone-eth0"}
	if _, err := s.Txn(t.Context(), store.Op{Action: store.Remove, Object: store.Object{Key: gone}}); err != nil {
		t.Errorf("the end of a pod that is gone: %v", err)
	}
}

// TestSharedKey: hosts share a key, which is a Secret.
func TestSharedKey(t *testing.T) {
	s, _ := open(t, convert.V3)
	first, err := store.SharedSecret(t.Context(), s, "reach")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Delete(context.WithoutCancel(t.Context()), s, store.SecretKey("reach"), 0); err != nil {
			t.Error(err)
		}
	})
	second, err := store.SharedSecret(t.Context(), s, "reach")
	if err != nil || string(first) != string(second) {
		t.Errorf("%x and %x, %v", first, second, err)
	}
}
