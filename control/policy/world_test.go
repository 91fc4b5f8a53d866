package policy_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/policy/reference"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

const thisNode = "n1"

// obj makes a stored object. name is [namespace/]name, labels are YAML's flow
// style without braces, spec is YAML.
func obj(kind store.Kind, name, labels, spec string) store.Object {
	key := store.Key{Kind: kind, Name: name}
	if ns, rest, ok := strings.Cut(name, "/"); ok {
		key.Namespace, key.Name = ns, rest
	}
	v := store.New(kind)
	text := fmt.Sprintf("metadata: {name: %q, namespace: %q, labels: {%s}}\nspec: %s\n", key.Name, key.Namespace, labels, spec)
	if err := yaml.UnmarshalStrict([]byte(text), v); err != nil {
		panic(fmt.Sprintf("%s: %v", text, err))
	}
	return store.Object{Key: key, Value: v, Revision: 1}
}

func gnp(name, spec string) store.Object { return obj(store.KindGlobalNetworkPolicy, name, "", spec) }
func np(name, spec string) store.Object  { return obj(store.KindNetworkPolicy, name, "", spec) }
func tier(name, spec string) store.Object {
	return obj(store.KindTier, name, "", spec)
}
func profile(name, spec string) store.Object { return obj(store.KindProfile, name, "", spec) }
func hep(name, labels, spec string) store.Object {
	return obj(store.KindHostEndpoint, name, labels, spec)
}

func felix(name, spec string) store.Object {
	return obj(store.KindFelixConfiguration, name, "", spec)
}

// pod makes the endpoint of a workload. Its interface is cali and its name.
func pod(node, ns, name, addr4, addr6, labels, more string) store.Object {
	s := store.WorkloadEndpointSpec{Node: node, Orchestrator: "k8s", Pod: name, Endpoint: "eth0"}
	full, err := store.WorkloadEndpointName(&s)
	if err != nil {
		panic(err)
	}
	return obj(store.KindWorkloadEndpoint, ns+"/"+full, labels, fmt.Sprintf(
		"{node: %s, orchestrator: k8s, pod: %s, endpoint: eth0, interfaceName: cali%s, ipNetworks: [%s/32, %q], %s}", node, name, name, addr4, addr6+"/128", more))
}

// base is the world that most cases are set in.
func base() []store.Object {
	return []store.Object{
		profile("kns.prod", `{ingress: [{action: Allow}], egress: [{action: Allow}], labelsToApply: {pcns.projectcalico.org/name: prod, pcns.env: live}}`),
		profile("kns.dev", `{ingress: [{action: Allow}], egress: [{action: Allow}], labelsToApply: {pcns.projectcalico.org/name: dev, pcns.env: test}}`),
		profile("ksa.prod.robot", `{labelsToApply: {pcsa.projectcalico.org/name: robot, pcsa.role: bot}}`),
		pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", `profiles: [kns.prod], ports: [{name: http, protocol: TCP, port: 80}, {name: dns, protocol: UDP, port: 53}]`),
		pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "app: client", `serviceAccountName: robot, profiles: [kns.prod, ksa.prod.robot]`),
		pod("n1", "dev", "other", "10.0.0.3", "fd00::3", "app: client, team: blue", `profiles: [kns.dev], ports: [{name: http, protocol: TCP, port: 8080}]`),
		pod("n2", "dev", "far", "10.0.1.1", "fd00::11", "app: web", `profiles: [kns.dev], ports: [{name: http, protocol: TCP, port: 80}]`),
	}
}

var addresses = map[string][2]string{
	"web": {"10.0.0.1", "fd00::1"}, "client": {"10.0.0.2", "fd00::2"}, "other": {"10.0.0.3", "fd00::3"},
	"far": {"10.0.1.1", "fd00::11"}, "world": {"203.0.113.7", "2001:db8::7"}, "host": {"192.0.2.1", "2001:db8:1::1"},
}

// flow reads "client>web tcp/80" and the like: who, a protocol, a port (of ICMP
// type.code), "6" at the end for IPv6, "from=" for another source port and
// "via=", "out=" for other interfaces than the usual ones.
func flow(t *testing.T, s string) filter.Flow {
	t.Helper()
	words := strings.Fields(s)
	family := 0
	f := filter.Flow{}
	for _, w := range words[2:] {
		switch k, v, _ := strings.Cut(w, "="); k {
		case "6":
			family = 1
		case "from":
			port, err := strconv.ParseUint(v, 10, 16)
			if err != nil {
				t.Fatal(err)
			}
			f.Packet.SrcPort = uint16(port)
		}
	}
	ends := func(who string) (iface string, addr netip.Addr) {
		both, ok := addresses[who]
		if !ok {
			a := netip.MustParseAddr(who)
			return "eth0", a
		}
		switch who {
		case "host":
		case "far", "world":
			iface = "eth0"
		default:
			iface = "cali" + who
		}
		return iface, netip.MustParseAddr(both[family])
	}
	from, to, _ := strings.Cut(words[0], ">")
	f.In, f.Packet.Src = ends(from)
	f.Out, f.Packet.Dst = ends(to)
	for _, w := range words[2:] {
		switch k, v, _ := strings.Cut(w, "="); k {
		case "via":
			f.In = v
		case "out":
			f.Out = v
		}
	}
	proto, rest, _ := strings.Cut(words[1], "/")
	f.Packet.Protocol = map[string]uint8{"tcp": 6, "udp": 17, "sctp": 132, "udplite": 136, "icmp": 1, "icmp6": 58, "gre": 47}[proto]
	if strings.HasPrefix(proto, "icmp") {
		if _, err := fmt.Sscanf(rest, "%d.%d", &f.Packet.ICMPType, &f.Packet.ICMPCode); err != nil {
			t.Fatal(err)
		}
	} else if rest != "" {
		port, err := strconv.ParseUint(rest, 10, 16)
		if err != nil {
			t.Fatal(err)
		}
		f.Packet.DstPort = uint16(port)
		if f.Packet.SrcPort == 0 {
			f.Packet.SrcPort = 40000
		}
	}
	return f
}

// say puts a verdict into the short form of the table: what happened, and who
// did it last.
func say(v filter.Verdict) string {
	word := "deny"
	if v.Allowed {
		word = "allow"
	}
	s := v.Steps[len(v.Steps)-1]
	switch s.Reason {
	case filter.ByRule:
		return fmt.Sprintf("%s: %s/%s[%d]", word, s.Policy.Kind, s.Policy.Name, s.Rule)
	case filter.ByTierEnd:
		return fmt.Sprintf("%s: end of %s", word, s.Tier)
	default:
		return fmt.Sprintf("%s: %s", word, s.Reason)
	}
}

func event(o store.Object) store.Event { return store.Event{Key: o.Key, Object: o} }

func gone(k store.Key) store.Event { return store.Event{Key: k, Object: store.Object{Key: k}} }

// later puts one batch of events over another: what a second object of a name
// says replaces the first.
func later(objects []store.Object) []store.Object {
	var list []store.Object
	at := make(map[store.Key]int)
	for _, o := range objects {
		if i, ok := at[o.Key]; ok {
			list[i] = o
			continue
		}
		at[o.Key] = len(list)
		list = append(list, o)
	}
	return list
}

type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

func newMirror(cfg policy.Config) (*policy.Calculator, *filter.Ruleset) {
	cfg.Node = thisNode
	return policy.New(cfg), filter.NewRuleset()
}

// step flushes the calculator into the mirror and holds the two together.
func step(t fataler, c *policy.Calculator, mirror *filter.Ruleset) filter.Delta {
	t.Helper()
	d, ok := c.Flush()
	if !ok {
		t.Fatalf("no step after the state was complete")
	}
	if err := mirror.Apply(&d); err != nil {
		t.Fatalf("the step does not fit: %v", err)
	}
	if err := mirror.Check(); err != nil {
		t.Fatalf("after the step: %v", err)
	}
	if snapshot := c.Snapshot(); !reflect.DeepEqual(snapshot, mirror) {
		t.Fatalf("the steps lead elsewhere (-snapshot +steps):\n%s", diffRulesets(snapshot, mirror))
	}
	if again, _ := c.Flush(); !again.Empty() {
		t.Fatalf("a second flush tells %+v", again)
	}
	return d
}

// diffRulesets is slow: ask it only what differs in rulesets that do.
func diffRulesets(a, b *filter.Ruleset) string {
	return cmp.Diff(a, b, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}))
}

func events(objects []store.Object) []store.Event {
	var list []store.Event
	for _, o := range objects {
		list = append(list, event(o))
	}
	return list
}

func world(objects []store.Object) *reference.World {
	return &reference.World{Node: thisNode, Objects: objects, Interfaces: hostInterfaces()}
}

func hostInterfaces() map[string][]netip.Addr {
	return map[string][]netip.Addr{
		"eth0": {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1")},
		"eth1": {netip.MustParseAddr("198.51.100.1")},
	}
}
