package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestEtcd: hosts of Kubernetes whose datastore is etcd, with the rights that the manifests
// for this give them. Pods have the labels and profiles that their objects say; a
// NetworkPolicy is in force on all hosts within seconds, also when the host that brings it there
// has died; a Node that Kubernetes has no more goes.
func TestEtcd(t *testing.T) {
	open(t, convert.V3)
	installFrom(t, "etcd")
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods = &pods
	c := bringUpWith(t, "e", top, nil, func(file string) map[string]any {
		return map[string]any{
			"kubernetes": map[string]any{"enabled": true},
			"datastore":  map[string]any{"kubernetes": map[string]any{"kubeconfig": file}},
		}
	})
	s, err := c.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	all := []string{"node2/web", "node3/client", "node1/other"}
	for _, where := range all {
		c.run(where)
	}
	for _, from := range all {
		for _, to := range all {
			if from != to {
				c.reach("pods reach each other", from, to, false)
			}
		}
	}
	await.Until(t, "the endpoint says what the pod says", func() error {
		o, err := s.Get(t.Context(), store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node2-k8s-web-eth0"})
		if err != nil {
			return err
		}
		w, ok := o.Value.(*store.WorkloadEndpoint)
		if !ok || w.Labels["app"] != "web" || !slices.Contains(w.Spec.Profiles, "kns.default") {
			return fmt.Errorf("it is %s", o.Raw)
		}
		return nil
	})

	const policies = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
	closed := `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"closed","namespace":"default"},"spec":{"podSelector":{"matchLabels":{"app":"web"}},"policyTypes":["Ingress"],` +
		`"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"other"}}}]}]}}`
	apply := func() { kubectlWith(t, closed, "apply", "-f", "-") }
	apply()
	t.Cleanup(func() { kubectl(t, "delete", "--ignore-not-found", "networkpolicy/closed") })
	c.reach("the policy keeps the client out", "node3/client", "node2/web", true)
	c.reach("and lets the other in", "node1/other", "node2/web", false)

	// Whoever brings it into etcd dies; another host takes over.
	for _, h := range c.Hosts()[1:] { // the first one's etcd would be away too
		if err := c.Kill(t.Context(), h, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if _, err := server.Do(t.Context(), http.MethodDelete, policies+"/closed", "", nil); err != nil {
			t.Fatal(err)
		}
		await.Until(t, "the end of the policy is in etcd", func() error {
			_, err := s.Get(t.Context(), store.Key{Kind: store.KindNetworkPolicy, Namespace: "default", Name: "knp.default.closed"})
			if err == nil {
				return fmt.Errorf("it is still there, with %s dead", h)
			}
			return nil
		})
		if err := c.Restart(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		c.reach("the policy is gone", "node3/client", "node2/web", false)
		apply()
		c.reach("the policy is back", "node3/client", "node2/web", true)
	}

	gone := store.New(store.KindNode).(*store.Node)
	gone.Name, gone.Spec.OrchRefs = "gone", []store.OrchRef{{NodeName: "gone", Orchestrator: "k8s"}}
	if _, err := store.Create(t.Context(), s, gone); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "a Node that Kubernetes has no more is gone from etcd", func() error {
		if _, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, gone.Name)); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
	forbidden(t)
}
