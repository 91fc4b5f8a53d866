package policy_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// sim is a calculator with its mirror.
type sim struct {
	*testing.T
	calc   *policy.Calculator
	mirror *filter.Ruleset
}

func newSim(t *testing.T, cfg policy.Config, objects ...store.Object) *sim {
	t.Helper()
	s := &sim{T: t}
	s.calc, s.mirror = newMirror(cfg)
	s.calc.SetInterfaces(hostInterfaces())
	s.send(events(objects)...)
	return s
}

func (s *sim) send(list ...store.Event) filter.Delta {
	s.Helper()
	s.calc.Update(store.Batch{Events: list, Synced: true})
	return step(s.T, s.calc, s.mirror)
}

func (s *sim) says(what, want string) {
	s.Helper()
	if got := say(s.mirror.Judge(flow(s.T, what))); got != want {
		s.Errorf("%s: %s, want %s", what, got, want)
	}
}

// problem returns why an object is not used as it is, or "".
func (s *sim) problem(key store.Key) string {
	for _, p := range s.calc.Problems() {
		if p.Key == key {
			return p.Reason
		}
	}
	return ""
}

func TestNothingIsToldBeforeTheStateIsComplete(t *testing.T) {
	t.Parallel()
	c, _ := newMirror(policy.Config{})
	c.Update(store.Batch{Events: events(base()[:3])})
	c.Update(store.Batch{Err: store.ErrUnavailable})
	if d, ok := c.Flush(); ok || !d.Empty() {
		t.Errorf("told %+v", d)
	}
	c.Update(store.Batch{Synced: true})
	if d, ok := c.Flush(); !ok || d.Empty() {
		t.Errorf("told nothing: %+v", d)
	}
}

func TestUnreadableObjectsLeaveInForceWhatWasKnown(t *testing.T) {
	t.Parallel()
	allow := gnp("p", `{selector: "app == 'web'", ingress: [{action: Allow, protocol: TCP}]}`)
	s := newSim(t, policy.Config{}, append(base(), allow)...)
	s.says("client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]")

	if d := s.send(store.Event{Key: allow.Key, Err: errors.New("the value is no JSON object")}); !d.Empty() {
		t.Errorf("an object that cannot be decoded changes %+v", d)
	}
	if got := s.problem(allow.Key); got != "the value is no JSON object" {
		t.Errorf("problem is %q", got)
	}
	for name, broken := range map[string]store.Object{
		"spec.ingress[0].source.nets[0]":           gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, source: {nets: [here]}}]}`),
		"spec.ingress[0].action":                   gnp("p", `{selector: "app == 'web'", ingress: [{action: Perhaps}]}`),
		"spec.ingress[0].protocol":                 gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, protocol: IPX}]}`),
		"spec.ingress[0].destination.ports[0]":     gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, destination: {ports: [80]}}]}`),
		"spec.ingress[0].icmp":                     gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, icmp: {type: 8}}]}`),
		"spec.ingress[0].ipVersion":                gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, ipVersion: 5}]}`),
		"spec.ingress[0].source.selector":          gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, source: {selector: "="}}]}`),
		"spec.ingress[0].source.notSelector":       gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, source: {notSelector: "="}}]}`),
		"spec.ingress[0].source.namespaceSelector": gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny, source: {namespaceSelector: "="}}]}`),
		"spec.egress[0].action":                    gnp("p", `{selector: "app == 'web'", egress: [{}]}`),
		"spec.selector":                            gnp("p", `{selector: "="}`),
		"spec.namespaceSelector":                   gnp("p", `{namespaceSelector: "="}`),
		"spec.serviceAccountSelector":              gnp("p", `{serviceAccountSelector: "="}`),
	} {
		if d := s.send(event(broken)); !d.Empty() {
			t.Errorf("%s: an object that cannot be read changes %+v", name, d)
		}
		if got := s.problem(allow.Key); !strings.Contains(got, name) || !strings.Contains(got, "stays in force") {
			t.Errorf("%s: problem is %q", name, got)
		}
	}
	s.send(event(gnp("p", `{selector: "app == 'web'", ingress: [{action: Deny}]}`)))
	s.says("client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]")
	if got := s.problem(allow.Key); got != "" {
		t.Errorf("problem after it was mended: %q", got)
	}
}

// A policy of which nothing was known and whose rules cannot be read: closed,
// never open.
func TestUnreadableFromTheStart(t *testing.T) {
	t.Parallel()
	broken := gnp("p", `{selector: "app == 'web'", ingress: [{action: Allow}, {action: Perhaps}]}`)
	lost := gnp("q", `{selector: "=", ingress: [{action: Deny}]}`)
	s := newSim(t, policy.Config{}, append(base(), broken, lost)...)
	s.says("client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]")
	s.says("web>client tcp/80", "allow: Profile/kns.prod[0]")
	if got := s.problem(broken.Key); !strings.Contains(got, "is denied") {
		t.Errorf("problem is %q", got)
	}
	if got := s.problem(lost.Key); !strings.Contains(got, "selects nothing") {
		t.Errorf("problem is %q", got)
	}
	s.send(gone(broken.Key))
	s.says("client>web tcp/80", "allow: Profile/kns.prod[0]")
}

// A profile that is not known denies what it might have denied: the next one in
// the list, which allows, is not asked in its place.
func TestUnknownProfile(t *testing.T) {
	t.Parallel()
	strict := profile("strict", `{ingress: [{action: Deny, protocol: TCP}], egress: [{action: Deny, protocol: TCP}]}`)
	s := newSim(t, policy.Config{}, later(append(base(), strict,
		pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [strict, projectcalico-default-allow]")))...)
	known := func() {
		t.Helper()
		s.says("client>web tcp/80", "deny: Profile/strict[0]")
		s.says("client>web udp/53", "allow: Profile/projectcalico-default-allow[0]")
		s.says("web>world udp/53", "allow: Profile/projectcalico-default-allow[0]")
	}
	unknown := func() {
		t.Helper()
		s.says("client>web tcp/80", "deny: Profile/strict[0]")
		s.says("client>web udp/53", "deny: Profile/strict[0]")
		s.says("web>world udp/53", "deny: Profile/strict[0]")
	}
	known()
	if d := s.send(gone(strict.Key)); len(d.PutEndpoints)+len(d.DelEndpoints) > 0 || len(d.PutPolicies) != 1 {
		t.Errorf("more than the profile was touched: %+v", d)
	}
	unknown()
	if d := s.send(store.Event{Key: strict.Key, Err: errors.New("the value is no JSON object")}); !d.Empty() {
		t.Errorf("a profile that cannot be decoded changes %+v", d)
	}
	if got := s.problem(strict.Key); got != "the value is no JSON object" {
		t.Errorf("problem is %q", got)
	}
	s.send(event(strict))
	known()
	s.send(store.Event{Key: strict.Key, Err: errors.New("the value is no JSON object")})
	known() // as it was
	s.send(gone(strict.Key))
	unknown()
	s.send(event(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [projectcalico-default-allow]")))
	s.says("client>web tcp/80", "allow: Profile/projectcalico-default-allow[0]")
}

func TestAddressesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	set := obj(store.KindGlobalNetworkSet, "s", "role: partner", `{nets: [nonsense, 203.0.113.7, "::ffff:198.51.100.0/120", "::ffff:0.0.0.0/90"]}`)
	web := pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "app: client", `profiles: [kns.prod]`)
	web.Value.(*store.WorkloadEndpoint).Spec.IPNetworks = append(web.Value.(*store.WorkloadEndpoint).Spec.IPNetworks, "10.7.0.0/16")
	s := newSim(t, policy.Config{}, later(append(base(), set, web,
		gnp("p", `{selector: "app == 'web'", ingress: [{action: Allow, source: {selector: "role == 'partner' || app == 'client'"}}]}`)))...)
	s.says("world>web tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	s.says("198.51.100.9>web tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	s.says("10.7.0.1>web tcp/80", "deny: end of default")
	s.says("client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	for _, k := range []store.Key{set.Key, web.Key} {
		if s.problem(k) == "" {
			t.Errorf("nothing is said about %s", k)
		}
	}
}

// Two endpoints of one interface, as after a quick end and start: the younger
// one is it, in whatever order they come, until it is gone.
func TestTwoWorkloadsOfOneInterface(t *testing.T) {
	t.Parallel()
	old := pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", `profiles: [kns.prod]`)
	young := pod("n1", "prod", "aaa", "10.0.0.9", "fd00::9", "app: young", `profiles: [kns.prod]`)
	young.Value.(*store.WorkloadEndpoint).Spec.InterfaceName = "caliweb"
	old.Value.(*store.WorkloadEndpoint).CreationTimestamp = metav1.NewTime(time.Unix(1000, 0))
	young.Value.(*store.WorkloadEndpoint).CreationTimestamp = metav1.NewTime(time.Unix(2000, 0))
	for _, order := range [][]store.Object{{old, young}, {young, old}} {
		s := newSim(t, policy.Config{}, append(base()[:3], order...)...)
		if got := s.mirror.Endpoints["caliweb"].Name; got != young.Key.String() {
			t.Errorf("the interface is %s's", got)
		}
		if got := s.problem(old.Key); !strings.Contains(got, young.Key.String()) {
			t.Errorf("problem of the other: %q", got)
		}
		s.send(gone(young.Key))
		if got := s.mirror.Endpoints["caliweb"].Name; got != old.Key.String() || s.problem(old.Key) != "" {
			t.Errorf("then the interface is %s's, problem %q", got, s.problem(old.Key))
		}
	}
}

// What is shared stays as it is when one of those who share it comes or goes.
func TestSetsChangeHandsInPlace(t *testing.T) {
	t.Parallel()
	const rule = `ingress: [{action: Allow, source: {selector: "app == 'client'"}}]`
	s := newSim(t, policy.Config{}, append(base(), gnp("p", `{selector: "app == 'web'", `+rule+`}`))...)
	d := s.send(event(gnp("q", `{selector: "app == 'web'", `+rule+`}`)), gone(gnp("p", "{}").Key))
	if len(d.PutSets)+len(d.DelSets)+len(d.Members) > 0 {
		t.Errorf("the set was touched: %+v", d)
	}
	// A rule that changes and keeps its set.
	d = s.send(event(gnp("q", `{selector: "app == 'web'", ingress: [{action: Deny, source: {selector: "app=='client'"}}]}`)))
	if len(d.PutSets)+len(d.DelSets)+len(d.Members)+len(d.PutEndpoints) > 0 || len(d.PutPolicies) != 1 {
		t.Errorf("more than the policy was touched: %+v", d)
	}
	// A policy that selects nobody here has no sets.
	d = s.send(event(gnp("q", `{selector: "app == 'nobody'", `+rule+`}`)))
	if len(d.DelSets) != 1 || len(d.DelPolicies) != 1 || len(s.mirror.Sets) != 3 {
		t.Errorf("the set stays: %+v", d)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	legacy := gnp("default.b", `{selector: "app == 'web'", ingress: [{action: Allow}]}`)
	legacy.Raw = []byte(`{"metadata":{"name":"default.b"}}`)
	s := newSim(t, policy.Config{}, append(base(), legacy, gnp("c", `{selector: "app == 'web'", ingress: [{action: Deny}]}`))...)
	// By its key's name it would come after c.
	s.says("client>web tcp/80", "allow: GlobalNetworkPolicy/default.b[0]")
}

func TestStagedPoliciesAreTold(t *testing.T) {
	t.Parallel()
	staged := obj(store.KindStagedGlobalNetworkPolicy, "s", "", `{selector: "app == 'web'", order: 1, ingress: [{action: Deny}]}`)
	away := obj(store.KindStagedGlobalNetworkPolicy, "t", "", `{stagedAction: Delete, selector: "app == 'web'", order: 3, ingress: [{action: Deny}]}`)
	kube := obj(store.KindStagedKubernetesNetworkPolicy, "prod/k", "", `{podSelector: {matchLabels: {app: web}, matchExpressions: [{key: x, operator: DoesNotExist}, {key: app, operator: In, values: [web]}]},
		ingress: [{from: [{podSelector: {matchLabels: {app: client}}, namespaceSelector: {}}, {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}], ports: [{port: http}, {port: 80, endPort: 90}, {protocol: UDP}]}],
		egress: [{to: [{namespaceSelector: {matchLabels: {env: live}}}]}]}`)
	s := newSim(t, policy.Config{}, append(base(), staged, away, kube, gnp("p", `{selector: "app == 'web'", order: 2, ingress: [{action: Allow}]}`))...)
	got := s.mirror.Endpoints["caliweb"].Ingress.Tiers
	ref := func(kind, ns, name string, staged bool) filter.PolicyRef {
		return filter.PolicyRef{ID: filter.PolicyID{Kind: kind, Namespace: ns, Name: name}, Staged: staged}
	}
	want := []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{
		ref("StagedGlobalNetworkPolicy", "", "s", true), ref("GlobalNetworkPolicy", "", "p", false),
		ref("StagedGlobalNetworkPolicy", "", "t", true), ref("StagedKubernetesNetworkPolicy", "prod", "k", true),
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tiers (-want +got):\n%s", diff)
	}
	if p := s.mirror.Policies[want[0].Policies[2].ID]; len(p.Ingress) > 0 {
		t.Errorf("rules of a policy that is to be deleted: %+v", p)
	}
	k := s.mirror.Policies[want[0].Policies[3].ID]
	if len(k.Ingress) != 4 || len(k.Egress) != 1 { // two protocols of two peers; one peer of any
		t.Fatalf("rules of the Kubernetes policy: %+v", k)
	}
	if r := k.Ingress[1]; r.Protocol != 6 || r.Source.Nets[0] != netip.MustParsePrefix("10.0.0.0/8") || r.Source.NotNets[0] != netip.MustParsePrefix("10.1.0.0/16") ||
		r.Destination.PortSet == "" || r.Destination.Ports[0] != (filter.PortRange{Low: 80, High: 90}) {
		t.Errorf("second rule: %+v", r)
	}
	if r := k.Ingress[2]; r.Protocol != 17 || r.Destination.Ports != nil || s.mirror.Sets[r.Source.Set].Origin != `(has(projectcalico.org/namespace) && projectcalico.org/orchestrator == "k8s" && app == "client")` {
		t.Errorf("third rule: %+v of %+v", r, s.mirror.Sets[r.Source.Set])
	}
	// With nothing but staged policies the tier decides nothing.
	s.send(gone(gnp("p", "{}").Key))
	if got := s.mirror.Endpoints["caliweb"].Ingress.Tiers[0].End; got != filter.Pass {
		t.Errorf("the end of the tier is %s", got)
	}
}

func TestAutomaticHostEndpoints(t *testing.T) {
	t.Parallel()
	node := obj(store.KindNode, "n1", "rack: r1", `{bgp: {ipv4Address: 192.0.2.1/24, ipv4IPIPTunnelAddr: 10.0.0.64}, ipv4VXLANTunnelAddr: 10.0.0.65, addresses: [{address: 192.0.2.1}, {address: "2001:db8::1"}]}`)
	remote := obj(store.KindNode, "n2", "rack: r2", `{bgp: {ipv4Address: 192.0.2.2/24}}`)
	s := newSim(t, policy.Config{AutoHostEndpoints: true}, append(base(), node, remote, gnp("p", `{selector: "rack == 'r1'", ingress: [{action: Allow, source: {selector: "has(rack)"}}]}`))...)
	s.says("192.0.2.2>host tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	s.says("10.0.0.65>host tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	s.says("world>host tcp/80", "deny: end of default")
	s.says("host>world tcp/80", "allow: Profile/projectcalico-default-allow[0]")
	own := hep("n1-auto-hep", "rack: none", `{node: n1, interfaceName: "*"}`)
	s.send(event(own))
	s.says("192.0.2.2>host tcp/80", "deny: no policy or profile decided")
	s.send(gone(own.Key))
	s.says("192.0.2.2>host tcp/80", "allow: GlobalNetworkPolicy/p[0]")
	s.send(gone(node.Key))
	s.says("192.0.2.2>host tcp/80", "allow: no endpoint on the way")
}

// TestAutoHostEndpointsAsked: host endpoints of Nodes come and go with what the KubeControllersConfiguration asks for; what the host's
// own setting gives stays, and what is not done is said.
func TestAutoHostEndpointsAsked(t *testing.T) {
	t.Parallel()
	node := obj(store.KindNode, "n1", "rack: r1", `{bgp: {ipv4Address: 192.0.2.1/24}, addresses: [{address: 192.0.2.1}]}`)
	only := gnp("p", `{selector: "rack == 'r1'", ingress: [{action: Allow, protocol: TCP, destination: {ports: [443]}}]}`)
	const open, closed = "allow: no endpoint on the way", "deny: end of default"
	ask := func(s *sim, name, spec string) {
		s.send(event(obj(store.KindKubeControllersConfiguration, name, "", spec)))
	}
	s := newSim(t, policy.Config{}, append(base(), node, only)...)
	s.says("world>host tcp/80", open)
	for _, c := range []struct{ name, spec, says, problem string }{
		{"default", `{controllers: {node: {hostEndpoint: {autoCreate: Enabled}}}}`, closed, ""},
		{"other", `{controllers: {node: {hostEndpoint: {autoCreate: Disabled}}}}`, closed, ""},
		{"default", `{controllers: {node: {hostEndpoint: {autoCreate: Disabled}}}}`, open, ""},
		{"default", `{controllers: {node: {hostEndpoint: {autoCreate: Enabled, createDefaultHostEndpoint: Disabled, templates: [{generateName: a}]}}}}`, open, "templates[0].interfaceCIDRs: none is given"},
		{"default", `{controllers: {node: {hostEndpoint: {autoCreate: Enabled, createDefaultHostEndpoint: Enabled, templates: [{generateName: a, interfaceSelector: eth0}]}}}}`, closed, ""},
		{"default", `{controllers: {node: {}}}`, open, ""},
		{"default", `{controllers: {node: {hostEndpoint: {autoCreate: Enabled}}}}`, closed, ""},
	} {
		ask(s, c.name, c.spec)
		s.says("world>host tcp/80", c.says)
		said := ""
		for _, p := range s.calc.Problems() {
			said += p.Reason
		}
		if !strings.Contains(said, c.problem) || c.problem == "" && said != "" {
			t.Errorf("%s: the problems are %q, want %q", c.spec, said, c.problem)
		}
	}
	s.send(gone(store.ResourceKey(store.KindKubeControllersConfiguration, "default")))
	s.says("world>host tcp/80", open)

	own := newSim(t, policy.Config{AutoHostEndpoints: true}, append(base(), node, only)...)
	ask(own, "default", `{controllers: {node: {hostEndpoint: {autoCreate: Disabled}}}}`)
	own.says("world>host tcp/80", closed)
}

func TestInterfacesComeLater(t *testing.T) {
	t.Parallel()
	s := newSim(t, policy.Config{}, append(base(), hep("h", "", `{node: n1, expectedIPs: [192.0.2.1]}`))...)
	s.says("world>host tcp/80", "deny: no policy or profile decided")
	s.calc.SetInterfaces(map[string][]netip.Addr{"eth7": {netip.MustParseAddr("192.0.2.1")}})
	step(t, s.calc, s.mirror)
	s.says("world>host tcp/80", "allow: no endpoint on the way")
	s.says("world>host tcp/80 via=eth7", "deny: no policy or profile decided")
	s.calc.SetInterfaces(nil)
	step(t, s.calc, s.mirror)
	s.says("world>host tcp/80 via=eth7", "allow: no endpoint on the way")
}

func prefixes(r *filter.Ruleset, id filter.SetID) map[string]bool {
	m := make(map[string]bool)
	for e := range r.Members[id] {
		m[e.String()] = true
	}
	return m
}

func TestNAT(t *testing.T) {
	t.Parallel()
	pool := func(name, spec string) store.Object { return obj(store.KindIPPool, name, "", spec) }
	s := newSim(t, policy.Config{},
		pool("out", `{cidr: 10.0.0.0/16, natOutgoing: true}`),
		pool("inner", `{cidr: 10.9.0.0/16, disabled: true}`),
		pool("six", `{cidr: "fd00::/64", natOutgoing: true}`),
		pool("balancer", `{cidr: 172.16.0.0/24, allowedUses: [LoadBalancer]}`),
		obj(store.KindNode, "n1", "", `{bgp: {ipv4Address: 192.0.2.1/24}}`),
		obj(store.KindNode, "n2", "", `{bgp: {ipv4Address: 192.0.2.2/24, ipv6Address: "2001:db8::2/64"}}`))
	check := func(id filter.SetID, want ...string) {
		t.Helper()
		m := make(map[string]bool)
		for _, w := range want {
			m[w] = true
		}
		if diff := cmp.Diff(m, prefixes(s.mirror, id)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", id, diff)
		}
	}
	check(filter.NATSources, "10.0.0.0/16", "fd00::/64")
	check(filter.NATExempt, "10.0.0.0/16", "10.9.0.0/16", "fd00::/64")
	check(filter.TunnelSources, "192.0.2.1/32", "192.0.2.2/32", "2001:db8::2/128")

	s.send(event(felix("default", `{natOutgoingExclusions: IPPoolsAndHostIPs, natPortRange: "1024:2048", natOutgoingAddress: 198.51.100.9, iptablesNATOutgoingInterfaceFilter: eth0, externalNodesList: [203.0.113.0/24]}`)))
	check(filter.NATExempt, "10.0.0.0/16", "10.9.0.0/16", "fd00::/64", "192.0.2.1/32", "192.0.2.2/32", "2001:db8::2/128")
	check(filter.TunnelSources, "192.0.2.1/32", "192.0.2.2/32", "2001:db8::2/128", "203.0.113.0/24")
	want := filter.NAT{PortLow: 1024, PortHigh: 2048, Address: netip.MustParseAddr("198.51.100.9"), OutInterface: "eth0"}
	if s.mirror.Settings.NAT != want {
		t.Errorf("NAT is %+v, want %+v", s.mirror.Settings.NAT, want)
	}
	d := s.send(event(obj(store.KindNode, "n2", "", `{bgp: {ipv4Address: 192.0.2.77/24, ipv6Address: "2001:db8::2/64"}}`)))
	if n := members(d); n != 4 { // one gone and one come in each of two sets
		t.Errorf("a changed address of a node tells %d members: %+v", n, d)
	}
	s.send(gone(pool("out", "{}").Key), gone(obj(store.KindNode, "n1", "", "{}").Key), event(felix("default", `{}`)))
	check(filter.NATSources, "fd00::/64")
	check(filter.NATExempt, "10.9.0.0/16", "fd00::/64")
	check(filter.TunnelSources, "192.0.2.77/32", "2001:db8::2/128")
}

func TestSettings(t *testing.T) {
	t.Parallel()
	byNode := felix("racks", `{logPrefix: chosen, defaultEndpointToHostAction: Accept}`)
	byNode.Raw = []byte(`{"spec":{"nodeSelector":"rack == 'r1'"}}`)
	byNode.Value.(*v3.FelixConfiguration).CreationTimestamp = metav1.NewTime(time.Unix(1000, 0))
	younger := felix("a", `{logPrefix: not this}`)
	younger.Raw = byNode.Raw
	younger.Value.(*v3.FelixConfiguration).CreationTimestamp = metav1.NewTime(time.Unix(2000, 0))
	s := newSim(t, policy.Config{}, felix("default", `{logPrefix: all, iptablesFilterDenyAction: Reject, disableConntrackInvalidCheck: true}`), byNode, younger,
		felix("node.n1", `{defaultEndpointToHostAction: Return, nftablesFilterAllowAction: Return}`), felix("node.n2", `{logPrefix: other}`),
		obj(store.KindNode, "n1", "rack: r1", `{}`))
	opt := cmpopts.IgnoreFields(filter.Settings{}, "FailsafeIn", "FailsafeOut", "HostTraffic")
	want := filter.Settings{
		WorkloadPrefixes: []string{"cali"}, WorkloadToHost: filter.HostReturn, Reject: true, AllowReturns: true, AllowInvalid: true, LogPrefix: "chosen",
		VXLANPorts: []uint16{4789},
	}
	if diff := cmp.Diff(want, s.mirror.Settings, opt, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
	s.send(event(obj(store.KindNode, "n1", "rack: r2", `{}`)), gone(felix("node.n1", "{}").Key))
	if got := s.mirror.Settings; got.LogPrefix != "all" || got.WorkloadToHost != filter.HostDrop || got.AllowReturns {
		t.Errorf("settings after the node left the rack: %+v", got)
	}
	if len(s.mirror.Settings.FailsafeIn) != 9 || len(s.mirror.Settings.FailsafeOut) != 9 {
		t.Errorf("failsafe ports: %+v", s.mirror.Settings)
	}
}

func TestFloatingAddresses(t *testing.T) {
	t.Parallel()
	w := pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "", `profiles: [kns.prod], ipNATs: [{internalIP: 10.0.0.1, externalIP: 198.51.100.4}]`)
	s := newSim(t, policy.Config{}, w)
	if got := s.mirror.Endpoints["caliweb"].NAT; got != nil {
		t.Errorf("floating addresses without being switched on: %+v", got)
	}
	s.send(event(felix("default", `{floatingIPs: Enabled}`)))
	want := []filter.Translation{{External: netip.MustParseAddr("198.51.100.4"), Internal: netip.MustParseAddr("10.0.0.1")}}
	if diff := cmp.Diff(want, s.mirror.Endpoints["caliweb"].NAT, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("floating addresses (-want +got):\n%s", diff)
	}
}

// TestLimits: an endpoint's limits hold in the units of the kernel, and follow it.
func TestLimits(t *testing.T) {
	t.Parallel()
	limited := func(qos string) store.Event {
		return event(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "", "profiles: [kns.prod], qosControls: "+qos))
	}
	s := newSim(t, policy.Config{}, pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "", "profiles: [kns.prod]"))
	for _, c := range []struct {
		qos  string
		want filter.Limits
	}{
		{`{ingressBandwidth: 8000000, ingressBurst: 16000, egressPacketRate: 100, dscp: AF11}`, filter.Limits{
			Ingress: filter.Limit{Bandwidth: 1_000_000, Burst: 2000}, Egress: filter.Limit{Packets: 100, PacketBurst: 5},
		}},
		{`{egressBandwidth: 8000, egressPeakrate: 16000, egressMinburst: 1500, egressMaxConnections: 4294967295, ingressMaxConnections: 7, ingressPacketRate: 1, ingressPacketBurst: 9}`, filter.Limits{
			Ingress: filter.Limit{Packets: 1, PacketBurst: 9, Connections: 7},
			Egress:  filter.Limit{Bandwidth: 1000, Peak: 2000, PeakBurst: 1500, Connections: 1<<32 - 1},
		}},
		{`{}`, filter.Limits{}},
		{`[]`, filter.Limits{}}, // which validation refuses
	} {
		s.send(limited(c.qos))
		if diff := cmp.Diff(c.want, s.mirror.Endpoints["caliweb"].Limits); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.qos, diff)
		}
	}
}

// TestDSCP: the code point of a workload or a host endpoint follows it.
func TestDSCP(t *testing.T) {
	t.Parallel()
	s := newSim(t, policy.Config{})
	for _, c := range []struct {
		pod, host string
		want      [2]filter.DSCP // of the pod, of the host
	}{
		{`{dscp: AF11}`, "46", [2]filter.DSCP{{Set: true, Value: 10}, {Set: true, Value: 46}}},
		{`{dscp: 63}`, "DF", [2]filter.DSCP{{Set: true, Value: 63}, {Set: true}}},
		{`{dscp: 64}`, "AF15", [2]filter.DSCP{}}, // which validation refuses
		{`{egressBandwidth: 8000}`, "", [2]filter.DSCP{}},
	} {
		s.send(event(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "", "profiles: [kns.prod], qosControls: "+c.pod)))
		h := hep("eth0", "", `{node: n1, interfaceName: eth0}`)
		h.Value.(*v3.HostEndpoint).Annotations = map[string]string{store.AnnotationDSCP: c.host}
		s.send(event(h))
		if diff := cmp.Diff(c.want, [2]filter.DSCP{s.mirror.Endpoints["caliweb"].DSCP, s.mirror.Endpoints["eth0"].DSCP}); diff != "" {
			t.Errorf("%s and %s (-want +got):\n%s", c.pod, c.host, diff)
		}
	}
}

func TestTierChanges(t *testing.T) {
	t.Parallel()
	s := newSim(t, policy.Config{}, append(base(), tier("a", `{order: 1}`), gnp("p", `{tier: a, selector: "app == 'web'", ingress: [{action: Allow, protocol: UDP}]}`),
		gnp("q", `{selector: "app == 'web'", ingress: [{action: Allow}]}`))...)
	s.says("client>web tcp/80", "deny: end of a")
	s.send(event(tier("a", `{order: 1, defaultAction: Pass}`)))
	s.says("client>web tcp/80", "allow: GlobalNetworkPolicy/q[0]")
	s.send(event(tier("a", `{order: 2000000}`)))
	s.says("client>web udp/80", "allow: GlobalNetworkPolicy/q[0]")
	// Without it its policies stay, in a tier that denies at its end.
	s.send(gone(tier("a", "{}").Key), event(gnp("q", `{selector: "app == 'web'", ingress: [{action: Pass}]}`)))
	s.says("client>web tcp/80", "deny: end of a")
	if d := s.send(gone(tier("a", "{}").Key)); !d.Empty() {
		t.Errorf("a tier that was gone before tells %+v", d)
	}
}

// TestHostTraffic: the encapsulations that this host publishes are open between hosts and
// closed to workloads, the old one too while a change of the port is under way; the datastore and the
// daemons' ports are whatever the failsafe ports are.
func TestHostTraffic(t *testing.T) {
	t.Parallel()
	bgp, etcd := filter.Tunnel{Protocol: 6, Port: 179}, filter.Failsafe{Protocol: 6, Port: 4001, Net: netip.MustParsePrefix("192.0.2.9/32")}
	s := newSim(t, policy.Config{HostPorts: []filter.Tunnel{bgp}, Guarded: []filter.Tunnel{bgp}, Datastore: []filter.Failsafe{etcd}},
		felix("default", `{vxlanPort: 4790, failsafeOutboundHostPorts: []}`))
	node := func(accepts, uses string) store.Object {
		o := obj(store.KindNode, thisNode, "", `{}`)
		store.Meta(o.Value).Annotations = map[string]string{store.AnnotationAccepts: accepts, store.AnnotationUses: uses}
		return o
	}
	other := obj(store.KindNode, "n2", "", `{}`)
	store.Meta(other.Value).Annotations = map[string]string{store.AnnotationAccepts: "vxlan/77/5353", store.AnnotationUses: "vxlan/78/5000"}
	s.send(event(other))
	check := func(ports ...uint16) {
		t.Helper()
		want := []filter.Tunnel{{Protocol: 4}, {Protocol: 41}}
		for _, p := range ports {
			want = append(want, filter.Tunnel{Protocol: 17, Port: p})
		}
		if diff := cmp.Diff(append(want, bgp), s.mirror.Settings.HostTraffic); diff != "" {
			t.Errorf("between hosts (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(want, s.mirror.Settings.WorkloadTunnel()); diff != "" {
			t.Errorf("workloads may not send (-want +got):\n%s", diff)
		}
	}
	check(4790)
	s.send(event(node("direct,vxlan/4096/4789,vxlan/4096/4790", "vxlan6/4096/4791")))
	check(4789, 4790, 4791)
	s.send(event(node("vxlan/4096,vxlan/1/x,ipip", "")))
	check(4790)
	s.send(event(node("vxlan/77/53", "vxlan/4096/1023,vxlan/4096/1024")))
	check(1024, 4790)
	s.send(event(node("vxlan/4096/4789", "")), gone(node("", "").Key))
	check(4790)
	listen := obj(store.KindBGPConfiguration, "default", "", `{listenPort: 1790}`)
	s.send(event(listen))
	if got := s.mirror.Settings.HostTraffic; !slices.Contains(got, filter.Tunnel{Protocol: 6, Port: 1790}) {
		t.Errorf("between hosts, without the port of the BGPConfiguration: %+v", got)
	}
	if diff := cmp.Diff([]filter.Tunnel{bgp, {Protocol: 6, Port: 1790}}, s.mirror.Settings.Guarded); diff != "" {
		t.Errorf("what workloads do not reach (-want +got):\n%s", diff)
	}
	s.send(gone(listen.Key))
	check(4790)
	if diff := cmp.Diff([]filter.Tunnel{bgp}, s.mirror.Settings.Guarded); diff != "" {
		t.Errorf("what workloads do not reach (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]filter.Failsafe{etcd}, s.mirror.Settings.FailsafeOut, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("outbound (-want +got):\n%s", diff)
	}
}

// TestTunnelSources: a host decapsulates what pools ask for and what it publishes, from
// the addresses that Nodes and externalNodesList name and from those that packets of a
// node were seen to come from, as long as there is such a node.
func TestTunnelSources(t *testing.T) {
	t.Parallel()
	s := newSim(t, policy.Config{})
	check := func(when string, want ...filter.Tunnel) {
		t.Helper()
		if diff := cmp.Diff(want, s.mirror.Settings.Tunnels); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	check("without a pool")
	pool := func(name, spec string) store.Object { return obj(store.KindIPPool, name, "", spec) }
	s.send(event(pool("a", `{cidr: 10.0.0.0/16, vxlanMode: CrossSubnet}`)))
	check("with a pool of VXLAN", filter.Tunnel{Protocol: 17, Port: 4789})
	s.send(event(felix("default", `{vxlanPort: 53}`)), event(pool("b", `{cidr: 10.1.0.0/16, ipipMode: Always}`)))
	check("with another port, and a pool of IPIP", filter.Tunnel{Protocol: 4}, filter.Tunnel{Protocol: 17, Port: 53})
	own := obj(store.KindNode, thisNode, "", `{}`)
	store.Meta(own.Value).Annotations = map[string]string{store.AnnotationAccepts: "direct,ip6tnl,vxlan/1/54,vxlan/1/4790", store.AnnotationUses: "vxlan/1/4789"}
	s.send(event(own), event(felix("default", `{}`)), gone(pool("a", `{}`).Key), gone(pool("b", `{}`).Key))
	check("by what it publishes", filter.Tunnel{Protocol: 4}, filter.Tunnel{Protocol: 17, Port: 4789}, filter.Tunnel{Protocol: 17, Port: 4790}, filter.Tunnel{Protocol: 41})

	from := func(addr string) bool {
		return s.mirror.Judge(filter.Flow{In: "eth0", Packet: filter.Packet{
			Src: netip.MustParseAddr(addr), Dst: netip.MustParseAddr("192.0.2.1"), Protocol: 17, DstPort: 4789,
		}}).Allowed
	}
	sources := func(when string, want map[string]bool) {
		t.Helper()
		for addr, allowed := range want {
			if from(addr) != allowed {
				t.Errorf("%s: tunnel packets from %s are decapsulated: %t", when, addr, !allowed)
			}
		}
	}
	s.calc.SetSources("n2", []netip.Addr{netip.MustParseAddr("198.51.100.2")})
	s.send()
	sources("of a node that is not there", map[string]bool{"198.51.100.2": false, "192.0.2.2": false})
	node := obj(store.KindNode, "n2", "", `{bgp: {ipv4Address: 192.0.2.2/24}}`)
	store.Meta(node.Value).Annotations = map[string]string{store.AnnotationTunnelSources: "192.0.2.3,x,192.0.2.4"}
	s.send(event(node))
	sources("of a node", map[string]bool{"198.51.100.2": true, "192.0.2.2": true, "192.0.2.3": true, "192.0.2.4": true, "198.51.100.3": false})
	s.calc.SetSources("n2", []netip.Addr{netip.MustParseAddr("198.51.100.3")})
	s.send(event(felix("default", `{externalNodesList: [203.0.113.0/24]}`)))
	sources("when it moved", map[string]bool{"198.51.100.2": false, "198.51.100.3": true, "203.0.113.7": true})
	s.send(gone(node.Key), event(felix("default", `{}`)))
	sources("when it is gone", map[string]bool{"198.51.100.3": false, "192.0.2.2": false, "192.0.2.3": false, "203.0.113.7": false})

	open := newSim(t, policy.Config{TunnelsFromAnywhere: true}, pool("a", `{cidr: 10.0.0.0/16, vxlanMode: Always}`))
	if got := open.mirror.Settings.Tunnels; got != nil {
		t.Errorf("with a setting that opens it: %v", got)
	}
}
