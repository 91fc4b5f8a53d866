package scenarios

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// policyLab is three hosts with dual-stack pods: node2 is reached without a
// tunnel, node3 through one. Every host has an automatic host endpoint, which
// allows everything.
func policyLab(t *testing.T, name string) *lab.Lab {
	t.Helper()
	e := store.VXLANCrossSubnet
	if os.Getenv("ROUTERD_STAGE") == "vm" {
		e = store.IPIPCrossSubnet
	}
	top := topology(3, 0, e)
	top.Pool6 = &lab.Pool{}
	three, one := 3, 1
	top.Nodes[0].Pods, top.Nodes[1].Pods, top.Nodes[2].Pods = &three, &one, &one
	top.Underlay = lab.UnderlayDual
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"policy": map[string]any{"autoHostEndpoints": true}}
	}
	return bringUp(t, name, top)
}

// endpointOf returns the store's key of a pod's endpoint.
func endpointOf(t *testing.T, l *lab.Lab, s store.Store, where string) store.Key {
	t.Helper()
	host, name, _ := strings.Cut(where, "/")
	p, err := l.Pod(host, name)
	if err != nil {
		t.Fatal(err)
	}
	list, _, err := s.List(t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list {
		if w, ok := o.Value.(*store.WorkloadEndpoint); ok && w.Spec.ContainerID == p.ContainerID {
			return o.Key
		}
	}
	t.Fatalf("%s has no endpoint in the store", where)
	return store.Key{}
}

// changeEndpoint changes a pod's endpoint as an orchestrator would.
func changeEndpoint(t *testing.T, l *lab.Lab, s store.Store, where string, change func(*store.WorkloadEndpoint)) {
	t.Helper()
	_, err := store.Modify(t.Context(), s, endpointOf(t, l, s, where), func(cur store.Object) (any, error) {
		w := store.Clone(cur.Value).(*store.WorkloadEndpoint)
		if w.Labels == nil {
			w.Labels = make(map[string]string)
		}
		change(w)
		return w, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// label gives a pod a label; an empty value takes it away.
func label(t *testing.T, l *lab.Lab, s store.Store, where, name, value string) {
	t.Helper()
	changeEndpoint(t, l, s, where, func(w *store.WorkloadEndpoint) {
		if w.Labels[name] = value; value == "" {
			delete(w.Labels, name)
		}
	})
}

// settled waits until every host has in force what the store holds now. It
// writes one more policy: the hosts take everything in the order of the store.
func settled(t *testing.T, l *lab.Lab) {
	t.Helper()
	name := fmt.Sprintf("sentinel-%d", time.Now().UnixNano())
	routerctl(t, l, "node1", sentinel(name), "apply", "-f", "-")
	waitSentinel(t, l, name)
	routerctl(t, l, "node1", "", "delete", "gnp", name)
}

// settledBy is settled by a client of the store.
func settledBy(t *testing.T, l *lab.Lab, s store.Store) {
	t.Helper()
	name := fmt.Sprintf("sentinel-%d", time.Now().UnixNano())
	create(t, s, sentinel(name))
	waitSentinel(t, l, name)
	if err := store.Delete(t.Context(), s, gnpKey(name), 0); err != nil {
		t.Fatal(err)
	}
}

func sentinel(name string) string {
	return policyManifest(name, "all()", "tier: cases\n  order: 9999\n  ingress: [{action: Pass, protocol: TCP, destination: {ports: [1]}}]")
}

func waitSentinel(t *testing.T, l *lab.Lab, name string) {
	t.Helper()
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		poll(t, "rules of "+p.String(), func() string {
			if !ruleCounted(t, l, p.Host, p.ContainerID, "GlobalNetworkPolicy("+name+")") {
				return "the kernel has not got " + name + ":\n" + routerctl(t, l, p.Host, "", "policy", "show")
			}
			return ""
		})
	}
}

// ruleCounted reports whether the kernel counts for a policy of an endpoint.
func ruleCounted(t *testing.T, l *lab.Lab, host, endpoint, policy string) bool {
	t.Helper()
	r, err := askPolicy(t, l, host, endpoint)
	if err != nil {
		return false
	}
	for _, e := range r.GetEndpoints() {
		for _, p := range e.GetPaths() {
			for _, tier := range p.GetTiers() {
				for _, rules := range tier.GetPolicies() {
					if rules.GetPolicy() == policy && len(rules.GetRules()) > 0 && rules.GetRules()[0].GetCounted() {
						return true
					}
				}
			}
		}
	}
	return false
}

func askPolicy(t *testing.T, l *lab.Lab, host, endpoint string) (*apiv1.PolicyResponse, error) {
	t.Helper()
	c, err := l.Client(host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return apiv1.NewOperatorClient(c).Policy(await.Context(t), &apiv1.PolicyRequest{Endpoint: endpoint})
}

// policyOf is what a host says of its rules as a whole.
func policyOf(t *testing.T, l *lab.Lab, host string) *apiv1.PolicyResponse {
	t.Helper()
	r, err := askPolicy(t, l, host, "")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const tiersOfCases = `
apiVersion: projectcalico.org/v3
kind: Tier
metadata: {name: first}
spec: {order: 10, defaultAction: Pass}
---
apiVersion: projectcalico.org/v3
kind: Tier
metadata: {name: cases}
spec: {order: 20, defaultAction: Pass}
---
`

// TestPolicy runs in one lab what policies mean and what they withstand.
func TestPolicy(t *testing.T) {
	beside(t)
	l := policyLab(t, "policy")
	s := openStore(t, l)
	routerctl(t, l, "node1", tiersOfCases, "apply", "-f", "-")
	for _, sc := range []struct {
		name string
		run  func(*testing.T, *lab.Lab, store.Store)
	}{
		{"conformance", testConformance},
		{"tightened", testTighten},
		{"under changes", testChurn},
		{"daemon killed", testKilled},
		{"flushed", testFlush},
		{"beside others", testBeside},
		{"traced", testTrace},
		{"natOutgoing", testNATOutgoing},
		{"host endpoints", testHostEndpoints},
		{"first millisecond", testFirstMillisecond},
	} {
		t.Run(sc.name, func(t *testing.T) { sc.run(t, l, s) })
	}
}

// testConformance holds policies against real connections: every case is a
// policy in force beside all others, tried by three clients, over both
// families, to a server that is reached without a tunnel and to one that is
// reached through one.
func testConformance(t *testing.T, l *lab.Lab, s store.Store) {
	clients := map[string]string{"a": "node1/pod1", "b": "node1/pod2", "c": "node1/pod3"}
	servers := []string{"node2/pod1", "node3/pod1"}
	cases := append(bySelector(), byRule()...)
	if speaks(unix.IPPROTO_SCTP) {
		cases = append(cases, conformance{name: "SCTP", allowed: "a", protocol: unix.IPPROTO_SCTP, manifest: gnp("{{server}}",
			`ingress: [{action: Allow, protocol: SCTP, source: {selector: "app == 'alpha'"}, destination: {ports: [PORT]}}, {action: Deny, protocol: SCTP, destination: {ports: [PORT]}}]`)})
	}
	port := func(i int) uint16 { return uint16(20000 + i) }
	prepareConformance(t, l, s, clients, servers, len(cases), port)
	manifest := ""
	for i, c := range cases {
		manifest += c.text(i, port(i))
		protocol := c.protocol
		if protocol == 0 {
			protocol = unix.IPPROTO_TCP
		}
		for _, where := range servers {
			if !echoes(protocol) {
				serve(t, l, where, protocol, port(i))
			}
		}
	}
	a := func(where string, f dataplane.Family) string { return addrOf(t, l, where, f).String() }
	manifest = strings.NewReplacer("A4", a(clients["a"], dataplane.IPv4), "A6", a(clients["a"], dataplane.IPv6), "B4", a(clients["b"], dataplane.IPv4)).Replace(manifest)
	routerctl(t, l, "node1", manifest, "apply", "-f", "-")
	settled(t, l)
	judgeConformance(t, l, cases, clients, servers, port)
	routerctl(t, l, "node1", manifest, "delete", "-f", "-")
}

func prepareConformance(t *testing.T, l *lab.Lab, s store.Store, clients map[string]string, servers []string, n int, port func(int) uint16) {
	t.Helper()
	for _, v := range []any{
		&v3.Profile{ObjectMeta: metav1.ObjectMeta{Name: "kns.default"}, Spec: v3.ProfileSpec{LabelsToApply: map[string]string{"pcns.team": "lab"}}},
		&v3.Profile{ObjectMeta: metav1.ObjectMeta{Name: "ksa.default.robot"}, Spec: v3.ProfileSpec{LabelsToApply: map[string]string{"pcsa.duty": "clean"}}},
		&v3.GlobalNetworkSet{
			ObjectMeta: metav1.ObjectMeta{Name: "aside", Labels: map[string]string{"set": "aside"}},
			Spec:       v3.GlobalNetworkSetSpec{Nets: []string{addrOf(t, l, clients["a"], dataplane.IPv4).String() + "/32", "203.0.113.0/24"}},
		},
	} {
		store.SetDefaults(v)
		if _, err := store.Create(t.Context(), s, v); err != nil {
			t.Fatal(err)
		}
	}
	for letter, where := range clients {
		changeEndpoint(t, l, s, where, func(w *store.WorkloadEndpoint) {
			maps.Copy(w.Labels, clientLabels()[letter])
			w.Spec.Profiles = append(w.Spec.Profiles, "kns.default")
			if letter == "b" {
				w.Spec.ServiceAccountName = "robot"
				w.Spec.Profiles = append(w.Spec.Profiles, "ksa.default.robot")
			}
		})
	}
	for _, where := range servers {
		changeEndpoint(t, l, s, where, func(w *store.WorkloadEndpoint) {
			w.Labels["role"] = "server"
			for i := range n {
				w.Spec.Ports = append(w.Spec.Ports, store.WorkloadEndpointPort{Name: fmt.Sprintf("case-%d", i), Protocol: numorstring.ProtocolFromString("TCP"), Port: port(i)})
			}
		})
	}
}

// judgeConformance tries every case and compares.
func judgeConformance(t *testing.T, l *lab.Lab, cases []conformance, clients map[string]string, servers []string, port func(int) uint16) {
	t.Helper()
	type flow struct {
		*attempt
		c    conformance
		want bool
	}
	var flows []flow
	for i, c := range cases {
		for letter, from := range clients {
			for _, to := range servers {
				for _, f := range dataplane.Families() {
					protocol := c.protocol
					if protocol == 0 {
						protocol = unix.IPPROTO_TCP
					}
					if protocol == unix.IPPROTO_ICMP && f == dataplane.IPv6 || protocol == unix.IPPROTO_ICMPV6 && f == dataplane.IPv4 {
						continue
					}
					flows = append(flows, flow{
						&attempt{from: from, to: addrOf(t, l, to, f), protocol: protocol, port: port(i)}, c, c.passes(letter, f == dataplane.IPv6),
					})
				}
			}
		}
	}
	denied := 0
	start := time.Now()
	for batch := range slices.Chunk(flows, 400) {
		var all []*attempt
		for _, f := range batch {
			all = append(all, f.attempt)
		}
		tryAll(t, l, all, attemptWithin())
		for _, f := range batch {
			if !f.want {
				denied++
			}
			if f.passed != f.want {
				t.Errorf("%s: %s: passed %t, want %t (%v)", f.c.name, f.attempt, f.passed, f.want, f.err)
			}
		}
	}
	t.Logf("%d cases, %d connections of which %d are to be denied, in %.1f s", len(cases), len(flows), denied, time.Since(start).Seconds())
	if len(flows) < 150 {
		t.Errorf("only %d connections", len(flows))
	}
}

// attemptWithin is how long a connection may take. TCP repeats a SYN after one
// second and after three.
func attemptWithin() time.Duration {
	if emulated() {
		return 8 * time.Second
	}
	return 3500 * time.Millisecond
}

// one makes one attempt.
func one(t *testing.T, l *lab.Lab, from string, to netip.Addr, protocol int, port uint16) bool {
	t.Helper()
	a := &attempt{from: from, to: to, protocol: protocol, port: port}
	tryAll(t, l, []*attempt{a}, attemptWithin())
	return a.passed
}

// until tries again until a connection passes, or does not any more.
func until(t *testing.T, l *lab.Lab, want bool, from string, to netip.Addr, protocol int, port uint16) {
	t.Helper()
	poll(t, fmt.Sprintf("%s → %s port %d passes: %t", from, to, port, want), func() string {
		if one(t, l, from, to, protocol, port) != want {
			return "not yet"
		}
		return ""
	})
}
