package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// bringUpEtcd brings up hosts of Kubernetes whose datastore is etcd, with the rights that the
// manifests for this give them.
func bringUpEtcd(t *testing.T, suffix string, top lab.Topology) *cluster {
	t.Helper()
	open(t, convert.V3)
	installFrom(t, "etcd")
	return bringUpWith(t, suffix, top, nil, func(file string) map[string]any {
		return map[string]any{
			"kubernetes": map[string]any{"enabled": true},
			"address":    map[string]any{"ipv4": "kubernetes-internal-ip", "ipv6": "kubernetes-internal-ip"},
			"datastore":  map[string]any{"kubernetes": map[string]any{"kubeconfig": file}},
		}
	})
}

// TestEtcd: hosts of Kubernetes whose datastore is etcd, with the rights that the manifests
// for this give them. Pods have the labels and profiles that their objects say; a
// NetworkPolicy is in force on all hosts within seconds, also when the host that brings it there
// has died; a Node that Kubernetes has no more goes.
func TestEtcd(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods = &pods
	c := bringUpEtcd(t, "e", top)
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

	c.probed()
	for _, h := range c.Hosts() {
		await.Until(t, "its Node has a network", func() error {
			if got := c.unavailable(h); got != "False RouterdIsUpOnHost" {
				return fmt.Errorf("NetworkUnavailable of %s is %q", h, got)
			}
			return nil
		})
	}

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

	// A rule that names a Service denies by its endpoints, and everybody while nobody knows them.
	denies := func(name, service string) store.Object {
		t.Helper()
		p := v3.NewNetworkPolicy()
		p.Name, p.Namespace, p.Spec.Selector = name, "default", "app == '"+name+"'"
		p.Spec.Ingress = []v3.Rule{{Action: v3.Deny, Source: v3.EntityRule{Services: &v3.ServiceMatch{Name: service}}}, {Action: v3.Allow}}
		o, err := store.Create(t.Context(), s, p)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	denies("other", "probed")
	c.reach("an endpoint of the Service", "node2/web", "node1/other", true)
	c.reach("who is none", "node3/client", "node1/other", false)
	unknown := denies("client", "unheard")
	c.reach("a Service that nobody brought", "node1/other", "node3/client", true)
	await.Until(t, "it is said of the policy", func() error {
		r, err := c.Exec(t.Context(), "node3", filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node3"), "policy", "show")
		if want := "the endpoints of Service default/unheard are not known: the datastore has no EndpointSlice of it"; err != nil || !strings.Contains(r.Stdout, want) {
			return fmt.Errorf("%w: %s%s", err, r.Stdout, r.Stderr)
		}
		return nil
	})
	if err := store.Delete(t.Context(), s, unknown.Key, unknown.Revision); err != nil {
		t.Fatal(err)
	}
	c.reach("without that policy", "node1/other", "node3/client", false)

	// What cannot be carried out is said on the policy, and that it was mended. (Kubernetes before
	// 1.36 takes ranges with leading zeros.)
	t.Cleanup(func() { kubectl(t, "delete", "--ignore-not-found", "networkpolicy/odd-in-etcd") })
	for _, step := range [][2]string{{"010.1.0.0/16", "is no CIDR such as"}, {"10.1.0.0/16", "everything in it is carried out"}} {
		kubectlWith(t, fmt.Sprintf(`{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"odd-in-etcd","namespace":"default"},"spec":{"podSelector":{"matchLabels":{"none":"such"}},"ingress":[{"from":[{"ipBlock":{"cidr":%q}}]}]}}`, step[0]), "apply", "-f", "-")
		await.Until(t, "an event says it", func() error {
			if events := kubectl(t, "events", "--for", "networkpolicy/odd-in-etcd"); !strings.Contains(events, step[1]) {
				return fmt.Errorf("events: %s", events)
			}
			return nil
		})
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

// probed sends packets from a pod on one host to a Service and to a port of another node, whose endpoint is on a third. Rules as
// of kube-proxy translate them, and every host says where it saw them.
func (c *cluster) probed() {
	c.t.Helper()
	where := func(name string) string {
		a, err := c.Addr(name)
		if err != nil {
			c.t.Fatal(err)
		}
		return a.String()
	}
	client, web, node1, node3 := where("node1/other"), where("node2/web"), where("node1"), where("node3")
	create(c.t, "/api/v1/namespaces/default/services", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"probed"},"spec":{"type":"NodePort","clusterIP":"10.96.8.8","ports":[{"name":"http","port":80,"targetPort":8080,"nodePort":30090},`+
		`{"name":"dns","protocol":"UDP","port":53,"targetPort":5353},{"name":"diameter","protocol":"SCTP","port":3868,"targetPort":13868}]}}`)
	create(c.t, slicesPath, `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"probed-1","labels":{"kubernetes.io/service-name":"probed"}},"addressType":"IPv4","ports":[{"name":"http","port":8080},{"name":"dns","protocol":"UDP","port":5353},{"name":"diameter","protocol":"SCTP","port":13868}],`+
		`"endpoints":[{"addresses":["`+web+`"],"nodeName":"node2","targetRef":{"kind":"Pod","namespace":"default","name":"web"},"conditions":{"ready":true,"serving":true}}]}`)
	await.Until(c.t, "node1 knows the Service and its endpoint", func() error {
		_, err := c.Output(c.t.Context(), "node1", filepath.Join(abs(c.t, binDir(c.t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node1"), "trace", "--from", client, "--to", "service/default/probed", "--port", "80")
		return err
	})
	c.runIn(c.Space("node1"), "add table ip proxy\nadd chain ip proxy pre { type nat hook prerouting priority dstnat; }\nadd rule ip proxy pre ip daddr 10.96.8.8 tcp dport 80 dnat to "+web+":8080\n", "nft", "-f", "-")
	c.runIn(c.Space("node3"), "add table ip proxy\nadd chain ip proxy pre { type nat hook prerouting priority dstnat; }\nadd chain ip proxy post { type nat hook postrouting priority srcnat; }\n"+
		"add rule ip proxy pre ip daddr "+node3+" tcp dport 30090 meta mark set 0x4000 dnat to "+web+":8080\nadd rule ip proxy post meta mark 0x4000 masquerade fully-random\n", "nft", "-f", "-")
	seen := func(node, what, way, from, to string) string {
		return node + " +" + what + " +" + way + ` +\S+ +4 +` + from + " +" + to + `\s`
	}
	const arrived, any = `probe: it arrived at \S+:8080 \(default/web\), and its answer came back`, `[0-9.]+`
	c.traceSays("to a Service", []string{"--from", client, "--to", "10.96.8.8", "--port", "80", "--probe"}, `\Awhole `, arrived,
		seen("node1", "packet", "in", client, "10.96.8.8:80"), seen("node1", "packet", "out", client, web+":8080"), seen("node2", "packet", "in", client, web+":8080"),
		seen("node2", "packet", "out", client, web+":8080"), seen("node2", "answer", "out", web+":8080", client), seen("node1", "answer", "out", "10.96.8.8:80", client))
	c.traceSays("to a port of another node", []string{"--from", client, "--to", "node3:30090", "--probe"}, `\Awhole `, arrived,
		seen("node1", "packet", "in", client, node3+":30090"), seen("node3", "packet", "in", node1, node3+":30090"), seen("node3", "packet", "out", any, web+":8080"),
		seen("node2", "packet", "out", any, web+":8080"), seen("node3", "answer", "out", node3+":30090", node1), seen("node1", "answer", "out", node3+":30090", client))
	// Nobody answers these: the pod's programs do not, and its kernel need not know SCTP.
	c.runIn(c.Space("node1"), "add rule ip proxy pre ip daddr 10.96.8.8 udp dport 53 dnat to "+web+":5353\nadd rule ip proxy pre ip daddr 10.96.8.8 sctp dport 3868 dnat to "+web+":13868\n", "nft", "-f", "-")
	for protocol, ports := range map[string][2]string{"udp": {"53", "5353"}, "sctp": {"3868", "13868"}} {
		at := web + ":" + ports[1]
		c.traceSays(protocol+" to a Service", []string{"--from", client, "--to", "service/default/probed", "--protocol", protocol, "--probe"}, `\Awhole `, `probe: it arrived at `+at+` \(default/web\); an answer to it is up to the program`,
			seen("node1", "packet", "in", client, "10.96.8.8:"+ports[0]), seen("node1", "packet", "out", client, at), seen("node2", "packet", "in", client, at), seen("node2", "packet", "out", client, at))
	}
	c.runIn(c.Space("node2"), "add table ip fw\nadd chain ip fw c { type filter hook forward priority -300; }\nadd rule ip fw c meta l4proto { tcp, udp, sctp } th dport { 8080, 5353, 13868 } drop\n", "nft", "-f", "-")
	c.traceSays("a rule of another program drops it at the endpoint's host", []string{"--from", client, "--to", "node3:30090", "--probe"}, `\Abroken +node2 +probe +on its way to \S+:8080 \(default/web\) it was seen last on node2, coming in by`)
	for _, protocol := range []string{"udp", "sctp"} {
		c.traceSays("and "+protocol, []string{"--from", client, "--to", "10.96.8.8", "--protocol", protocol, "--probe"}, `\Abroken +node2 +probe +on its way to \S+ \(default/web\) it was seen last on node2, coming in by`)
	}
	c.runIn(c.Space("node2"), "delete table ip fw\n", "nft", "-f", "-")
	c.runIn(c.Space("node3"), "flush chain ip proxy pre\n", "nft", "-f", "-")
	c.traceSays("the node has no rule for its port", []string{"--from", client, "--to", "node3:30090", "--probe"}, `\Abroken +node3 +not-translated +node3 answered it by itself: nothing there translates `+node3+":30090 to an endpoint")
}
