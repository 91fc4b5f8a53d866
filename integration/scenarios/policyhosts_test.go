package scenarios

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// hostStep is something that is put in force for host endpoints, beside what
// was before it, and what passes then and what does not. A flow is FROM>TO
// PROTOCOL/PORT, over both families; a 4 after the protocol says over IPv4
// only. OBJECTS in the manifest have addresses in place of their hosts' names
// in braces: {node2} and {node2/6}.
type hostStep struct {
	name       string
	manifest   string
	gone       []store.Key // objects that are deleted
	felix      func(*v3.FelixConfigurationSpec, func(string) string)
	pass, drop []string
	then       func(*testing.T, *lab.Lab)
}

// hostEndpoint is the manifest of node1's host endpoint.
func hostEndpoint(name, spec string) string {
	return "\napiVersion: projectcalico.org/v3\nkind: HostEndpoint\nmetadata: {name: " + name + ", labels: {role: edge}}\nspec: {node: node1, " + spec + "}\n---"
}

func gnpKey(name string) store.Key {
	return store.ResourceKey(store.KindGlobalNetworkPolicy, name)
}
func hepKey(name string) store.Key { return store.ResourceKey(store.KindHostEndpoint, name) }

func edgePolicy(name, spec string) string { return policyManifest(name, "role == 'edge'", spec) }

// podFlows are those that cross host endpoints on their way between workloads,
// without a tunnel and through one.
func podFlows() []string {
	return []string{
		"node1/pod1>node2/pod1 tcp/8080", "node2/pod1>node1/pod1 tcp/8080", "node1/pod1>node3/pod1 tcp/8080", "node3/pod1>node1/pod1 tcp/8080",
	}
}

func hostSteps() []hostStep {
	closed := []string{"node2>node1 tcp/8080", "spine>node1 tcp/8080", "node1>node2 tcp/8080", "node1>node2 udp/8080"}
	always := slices.Concat(podFlows(), []string{"node1>node1/pod1 tcp/8080", "node1/pod1>node1 tcp/8080", "node2>node1 tcp4/2379"})
	usual := slices.Concat(always, []string{"spine>node1 tcp/22", "spine>node1 tcp4/2379", "node1>node2 udp/53", "node1>node2 tcp/6443"})
	return []hostStep{
		{
			name: "automatic", pass: slices.Concat(podFlows(), closed),
			manifest: policyManifest("edge-auto", "projectcalico.org/created-by == 'calico-kube-controllers'", "ingress: [{action: Deny, protocol: TCP, destination: {ports: [8081]}}]"),
			drop:     []string{"node2>node1 tcp/8081", "spine>node3 tcp/8081"},
		},
		{
			name: "nothing opens it", gone: []store.Key{gnpKey("edge-auto")},
			manifest: hostEndpoint("node1-eth0", "interfaceName: eth0"),
			pass:     usual, drop: slices.Concat(closed, []string{"node1>node2 tcp/22"}),
		},
		{
			name: "other failsafe ports",
			felix: func(f *v3.FelixConfigurationSpec, at func(string) string) {
				f.FailsafeInboundHostPorts = &[]v3.ProtoPort{{Protocol: "TCP", Port: 8081, Net: at("node2") + "/32"}, {Protocol: "TCP", Port: 8081, Net: at("node2/6") + "/128"}}
				f.FailsafeOutboundHostPorts = &[]v3.ProtoPort{}
			},
			pass: slices.Concat(always, []string{"node2>node1 tcp/8081"}),
			drop: slices.Concat(closed, []string{"spine>node1 tcp/22", "spine>node1 tcp/8081", "spine>node1 tcp4/2379", "node1>node2 udp/53", "node1>node2 tcp/6443"}),
		},
		{
			// The host endpoint of node2 is found by its addresses; the second rule
			// is about it. Forwarded packets are none of this policy's business.
			name: "policies",
			felix: func(f *v3.FelixConfigurationSpec, _ func(string) string) {
				f.FailsafeInboundHostPorts, f.FailsafeOutboundHostPorts = nil, nil
			},
			manifest: "\napiVersion: projectcalico.org/v3\nkind: HostEndpoint\nmetadata: {name: node2-found, labels: {role: peer}}\n" +
				"spec: {node: node2, expectedIPs: ['{node2}', '{node2/6}'], profiles: [projectcalico-default-allow], ports: [{name: web, protocol: TCP, port: 8080}]}\n---" +
				edgePolicy("edge", "ingress: [{action: Allow, protocol: TCP, source: {selector: role == 'peer'}, destination: {ports: [8080]}}]\n"+
					"  egress: [{action: Allow, protocol: TCP, destination: {selector: role == 'peer', ports: [web]}}]"),
			pass: slices.Concat(usual, []string{"node2>node1 tcp/8080", "node1>node2 tcp/8080", "node2/pod1>node1/pod1 tcp/8081", "node2>node1 tcp/9000"}),
			drop: []string{"spine>node1 tcp/8080", "node2>node1 tcp/8081", "node1>node2 tcp/8081", "node1>node3 tcp/8080", "spine>node1 tcp/9000"},
		},
		{
			// What comes through a tunnel comes in by its device, which this
			// endpoint does not stand for.
			name:     "applyOnForward",
			manifest: edgePolicy("edge-forward", "order: 1\n  applyOnForward: true\n  ingress: [{action: Deny, protocol: TCP, destination: {ports: [8081]}}, {action: Allow}]"),
			pass:     slices.Concat(podFlows(), []string{"spine>node1 tcp/8080", "node1/pod1>node2/pod1 tcp/8081", "node3/pod1>node1/pod1 tcp/8081"}),
			drop:     []string{"node2/pod1>node1/pod1 tcp/8081", "node2>node1 tcp/8081"},
		},
		{
			// 9000 is translated to 8080, which the next policies allow.
			name: "preDNAT", gone: []store.Key{gnpKey("edge-forward")},
			manifest: edgePolicy("edge-dnat", "applyOnForward: true\n  preDNAT: true\n  ingress: [{action: Deny, protocol: TCP, destination: {ports: [9000]}}, {action: Allow, protocol: TCP, destination: {ports: [8081]}}]"),
			pass:     slices.Concat(usual, []string{"node2>node1 tcp/8080", "spine>node1 tcp/8081", "node2/pod1>node1/pod1 tcp/8081"}),
			drop:     []string{"node2>node1 tcp/9000", "spine>node1 tcp/8080"},
		},
		{
			name: "doNotTrack", gone: []store.Key{gnpKey("edge-dnat")},
			manifest: edgePolicy("edge-raw", "applyOnForward: true\n  doNotTrack: true\n  ingress: [{action: Allow, protocol: TCP, destination: {ports: [8082]}}, {action: Deny}]\n"+
				"  egress: [{action: Allow, protocol: TCP, source: {ports: [8082]}}]"),
			pass: []string{
				"spine>node1 tcp/8082", "node2>node1 tcp/8082", "spine>node1 tcp/22", "node1>node2 udp/53",
				"node1/pod1>node3/pod1 tcp/8080", "node3/pod1>node1/pod1 tcp/8080",
			},
			drop: []string{"node2>node1 tcp/8080", "node2/pod1>node1/pod1 tcp/8080"},
			then: untracked,
		},
		{
			name: "found by its addresses", gone: []store.Key{gnpKey("edge-raw"), gnpKey("edge"), hepKey("node1-eth0")},
			manifest: hostEndpoint("node1-found", "expectedIPs: ['{node1}']"),
			pass:     usual, drop: closed,
		},
		{
			// Of the automatic one's name, hence in its place.
			name: "all interfaces", gone: []store.Key{hepKey("node1-found")},
			manifest: hostEndpoint("node1-auto-hep", "interfaceName: '*'"),
			felix: func(f *v3.FelixConfigurationSpec, _ func(string) string) {
				f.FailsafeInboundHostPorts = &[]v3.ProtoPort{}
			},
			pass: always, drop: slices.Concat(closed, []string{"spine>node1 tcp/22"}),
			then: func(t *testing.T, l *lab.Lab) {
				retryTunnels(t, l, "node3")
				waitTunnel(t, l, "node3", "node1", delivers)
			},
		},
		{
			name: "opened again", gone: []store.Key{hepKey("node1-auto-hep"), hepKey("node2-found")},
			felix: func(f *v3.FelixConfigurationSpec, _ func(string) string) { f.FailsafeInboundHostPorts = nil },
			pass:  slices.Concat(usual, closed),
		},
	}
}

// untracked looks for connections of doNotTrack's port.
func untracked(t *testing.T, l *lab.Lab) {
	t.Helper()
	if out := output(t, l, "node1", "conntrack", "-L", "-p", "tcp", "--orig-port-dst", "8082"); strings.Contains(out, "8082") {
		t.Errorf("connections of doNotTrack are tracked: %s", out)
	}
}

// testHostEndpoints puts host endpoints before node1, and looks at what passes
// to it, from it and through it, and that nothing of the cluster's own is cut
// off: sessions, datastore, tunnels.
func testHostEndpoints(t *testing.T, l *lab.Lab, s store.Store) {
	for _, where := range []string{"node1", "node2", "node3", "node1/pod1", "node2/pod1", "node3/pod1"} {
		serve(t, l, where, unix.IPPROTO_TCP, 22, 6443, 8080, 8081, 8082)
		serve(t, l, where, unix.IPPROTO_UDP, 53, 8080)
	}
	for _, command := range []string{
		"nft add table inet other", "nft add chain inet other prerouting { type nat hook prerouting priority dstnat ; }",
		"nft add rule inet other prerouting iifname eth0 tcp dport 9000 redirect to :8080",
	} {
		if _, err := try(t.Context(), l, "node1", command); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, h := range l.Hosts() {
		names = append(names, "{"+h+"}", addrOf(t, l, h, dataplane.IPv4).String(), "{"+h+"/6}", addrOf(t, l, h, dataplane.IPv6).String())
	}
	at := strings.NewReplacer(names...).Replace
	for _, step := range hostSteps() {
		if step.felix != nil {
			changeFelix(t, s, store.DefaultName, func(f *v3.FelixConfigurationSpec) {
				step.felix(f, func(host string) string { return at("{" + host + "}") })
			})
		}
		if step.manifest != "" {
			create(t, s, at(step.manifest))
		}
		for _, o := range step.gone {
			if err := store.Delete(t.Context(), s, o, 0); err != nil {
				t.Fatal(err)
			}
		}
		settledBy(t, l, s)
		judgeFlows(t, l, step.name, step.pass, step.drop)
		if step.then != nil {
			step.then(t, l)
		}
	}
	output(t, l, "node1", "nft", "delete", "table", "inet", "other")
	testToHost(t, l, s)
}

// testToHost changes what becomes of what workloads send to their own host.
func testToHost(t *testing.T, l *lab.Lab, s store.Store) {
	t.Helper()
	flow := []string{"node1/pod1>node1 tcp/8080", "node1/pod1>node1 udp4/8080"}
	for _, action := range []string{"Drop", "Accept", "Return"} {
		changeFelix(t, s, "node.node1", func(f *v3.FelixConfigurationSpec) { f.DefaultEndpointToHostAction = action })
		settledBy(t, l, s)
		pass, drop := flow, []string(nil)
		if action == "Drop" {
			pass, drop = []string{"node1>node1/pod1 tcp/8080", "node1/pod1>node2 tcp/8080"}, flow
		}
		judgeFlows(t, l, "defaultEndpointToHostAction: "+action, pass, drop)
	}
}

// judgeFlows makes connections, and compares which pass. Those that are to pass
// have time; for the others the absence of an answer is what there is to see, for
// at least as long as the slowest answer took to come just before.
func judgeFlows(t *testing.T, l *lab.Lab, name string, pass, drop []string) {
	t.Helper()
	try := func(list []string, within time.Duration, want bool) {
		var all []*attempt
		for _, text := range list {
			all = append(all, flowsOf(t, l, text)...)
		}
		tryAll(t, l, all, within)
		for _, a := range all {
			if a.passed != want {
				t.Errorf("%s: %s: passed %t, want %t (%v)", name, a, a.passed, want, a.err)
			}
		}
	}
	start := time.Now()
	try(pass, 15*time.Second, true)
	try(drop, max(400*time.Millisecond, time.Since(start)), false)
}

// flowsOf reads a flow, and returns it over the families that it is about.
func flowsOf(t *testing.T, l *lab.Lab, text string) []*attempt {
	t.Helper()
	from, rest, _ := strings.Cut(text, ">")
	to, rest, _ := strings.Cut(rest, " ")
	protocol, number, _ := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	known := map[string]int{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}
	name, only4 := strings.CutSuffix(protocol, "4")
	if err != nil || known[name] == 0 {
		t.Fatal(fmt.Errorf("flow %q: %w", text, err))
	}
	var list []*attempt
	for _, f := range dataplane.Families() {
		if f == dataplane.IPv6 && only4 {
			continue
		}
		a := &attempt{from: from, to: addrOf(t, l, to, f), protocol: known[name], port: uint16(port)}
		list = append(list, a)
	}
	return list
}

// create stores the objects of a manifest.
func create(t *testing.T, s store.Store, text string) {
	t.Helper()
	docs, err := manifest.Read("case", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range docs {
		if _, err := store.Create(t.Context(), s, d.Object.Value); err != nil {
			t.Fatal(err)
		}
	}
}

// changeFelix changes a FelixConfiguration.
func changeFelix(t *testing.T, s store.Store, name string, change func(*v3.FelixConfigurationSpec)) {
	t.Helper()
	_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindFelixConfiguration, name), func(cur store.Object) (any, error) {
		f := store.Clone(cur.Value).(*v3.FelixConfiguration)
		change(&f.Spec)
		return f, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
