package scenarios

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// conformance is one policy, and who may pass to a server by it. PORT in the
// manifest stands for the case's own port, so that all can be in force at once.
type conformance struct {
	name     string
	protocol int    // 0: TCP
	manifest string // "": rules() makes it from source
	source   string // of the rule that allows, when manifest is empty
	allowed  string // letters of the clients that pass: of "abc"
}

// The clients' labels. Client c has none of its own.
func clientLabels() map[string]map[string]string {
	return map[string]map[string]string{
		"a": {"app": "alpha", "env": "prod", "rack": "r1", "in": "b", "a.b/c-d_e": "x"},
		"b": {"app": "beta", "env": "dev", "rack": "r2", "quote": "it's"},
		"c": {},
	}
}

// bySelector are the operators of the selector language, in the source of a
// rule that allows; everybody else is denied.
func bySelector() []conformance {
	var out []conformance
	for _, c := range [][2]string{
		{`all()`, "abc"},
		{`has(app)`, "ab"},
		{`!has(app)`, "a4 c"}, // a's address is in a network set without the label
		{`app == 'alpha'`, "a"},
		{`app == "alpha"`, "a"},
		{`app != 'alpha'`, "a4 bc"},
		{`! app == 'alpha'`, "a4 bc"},
		{`!!has(rack)`, "ab"},
		{`app in {'alpha', 'gamma'}`, "a"},
		{`app in {'alpha', 'beta',}`, "ab"},
		{`app in {}`, ""},
		{`app not in {'alpha'}`, "a4 bc"},
		{`app notin {'alpha','beta'}`, "a4 c"},
		{`app not in {}`, "abc"},
		{`app contains 'lph'`, "a"},
		{`app contains 'a'`, "ab"},
		{`app starts with 'al'`, "a"},
		{`app startswith 'b'`, "b"},
		{`app ends with 'ta'`, "b"},
		{`app endswith 'a'`, "ab"},
		{`env == 'prod' && rack == 'r1'`, "a"},
		{`env == 'prod' && rack == 'r2'`, ""},
		{`env == 'prod' || rack == 'r2'`, "ab"},
		{`env == 'dev' || env == 'prod' && rack == 'r2'`, "b"},
		{`(env == 'dev' || env == 'prod') && rack == 'r2'`, "b"},
		{`!(env == 'dev' || env == 'prod')`, "a4 c"},
		{`in in {'b'}`, "a"},
		{`a.b/c-d_e == 'x'`, "a"},
		{`quote == "it's"`, "b"},
		{`has(app) && !has(quote)`, "a"},
		{`projectcalico.org/namespace == 'default'`, "abc"},
		{`projectcalico.org/orchestrator == 'k8s'`, ""},
		{`projectcalico.org/orchestrator == 'cni'`, "abc"},
	} {
		out = append(out, conformance{name: "selector " + c[0], source: "{selector: " + quoted(c[0]) + "}", allowed: c[1]})
	}
	return out
}

func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// byRule are the other parts of a rule, of policies and of what is around them.
func byRule() []conformance {
	in := func(name, allowed string, protocol int, spec string) conformance {
		return conformance{name: name, allowed: allowed, protocol: protocol, manifest: gnp("{{server}}", spec)}
	}
	return []conformance{
		{name: "notSelector", source: `{notSelector: "app == 'alpha'"}`, allowed: "bc"},
		{name: "selector and notSelector", source: `{selector: "has(app)", notSelector: "env == 'dev'"}`, allowed: "a"},
		{name: "nets", source: `{nets: [A4/32]}`, allowed: "a4"},
		{name: "nets of IPv6", source: `{nets: [A6/128]}`, allowed: "a6"},
		{name: "notNets", source: `{notNets: [A4/32]}`, allowed: "b4 c4"},
		{name: "nets and selector", source: `{nets: [A4/32, B4/32], selector: "app == 'beta'"}`, allowed: "b4"},
		{name: "nets of a global network set", source: `{selector: "set == 'aside'"}`, allowed: "a4"},
		{name: "sets and endpoints by one selector", source: `{selector: "set == 'aside' || app == 'beta'"}`, allowed: "a4 b"},
		{name: "namespaceSelector", source: `{namespaceSelector: "team == 'lab'"}`, allowed: "abc"},
		{name: "namespaceSelector and selector", source: `{namespaceSelector: "team == 'lab'", selector: "app == 'beta'"}`, allowed: "b"},
		{name: "namespaceSelector of another", source: `{namespaceSelector: "team == 'other'"}`},
		{name: "namespaceSelector global", source: `{namespaceSelector: "global()", selector: "has(set)"}`, allowed: "a4"},
		{name: "service accounts by name", source: `{serviceAccounts: {names: [robot]}}`, allowed: "b"},
		{name: "service accounts by selector", source: `{serviceAccounts: {selector: "duty == 'clean'"}}`, allowed: "b"},
		{name: "namespaceSelector all", source: `{namespaceSelector: "all()", selector: "has(app)"}`, allowed: "ab"},
		{name: "notNets of IPv6", source: `{notNets: [A6/128]}`, allowed: "b6 c6"},
		{name: "services, which only Kubernetes knows", source: `{services: {name: web, namespace: default}}`},
		{name: "source ports", source: `{ports: [1]}`},
		{name: "source port range", source: `{ports: ["1024:65535"]}`, allowed: "abc"},
		{name: "source notPorts", source: `{notPorts: ["1024:65535"]}`},
		in("UDP", "a", unix.IPPROTO_UDP, `ingress: [{action: Allow, protocol: UDP, source: {selector: "app == 'alpha'"}, destination: {ports: [PORT]}}, {action: Deny, protocol: UDP, destination: {ports: [PORT]}}]`),
		in("UDP-Lite", "b", unix.IPPROTO_UDPLITE, `ingress: [{action: Allow, protocol: UDPLite, source: {selector: "app == 'beta'"}}, {action: Deny, protocol: UDPLite}]`),
		in("protocol by number", "a4 c", unix.IPPROTO_UDP, `ingress: [{action: Allow, protocol: 17, source: {selector: "!has(app)"}, destination: {ports: [PORT]}}, {action: Deny, protocol: 17, destination: {ports: [PORT]}}]`),
		in("destination notSelector", "abc", 0, `ingress: [{action: Deny, protocol: TCP, destination: {notSelector: "role == 'server'", ports: [PORT]}}]`),
		in("destination nets", "a6 b6 c6", 0, `ingress: [{action: Deny, protocol: TCP, destination: {nets: [192.168.0.0/16], ports: [PORT]}}]`),
		in("destination notNets", "abc", 0, `ingress: [{action: Deny, protocol: TCP, destination: {notNets: [192.168.0.0/16], ports: [PORT]}}]`),
		in("a number and a name", "", 0, `ingress: [{action: Deny, protocol: TCP, destination: {ports: [1, CASE]}}]`),
		in("notPorts by name", "abc", 0, `ingress: [{action: Deny, protocol: TCP, destination: {ports: ["PORT:PORT"], notPorts: [CASE]}}]`),
		in("what is kept and has no effect", "ab", 0, `performanceHints: [AssumeNeededOnEveryNode]
  ingress: [{action: Allow, protocol: TCP, http: {methods: [PUT]}, metadata: {annotations: {why: none}}, source: {selector: has(app)}, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("another protocol's rule", "abc", 0, `ingress: [{action: Deny, protocol: UDP, destination: {ports: [PORT]}}]`),
		in("notProtocol", "", 0, `ingress: [{action: Deny, notProtocol: UDP, destination: {ports: [CASE]}}]`),
		in("port range", "", 0, `ingress: [{action: Deny, protocol: TCP, destination: {ports: ["PORT:PORT"]}}]`),
		in("notPorts", "abc", 0, `ingress: [{action: Deny, protocol: TCP, destination: {ports: ["PORT:PORT"], notPorts: [PORT]}}]`),
		in("named port", "a", 0, `ingress: [{action: Allow, protocol: TCP, source: {selector: "app == 'alpha'"}, destination: {ports: [CASE]}}, {action: Deny, destination: {ports: [CASE]}}]`),
		in("ipVersion 4", "a6 b6 c6", 0, `ingress: [{action: Deny, ipVersion: 4, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("ipVersion 6", "a4 b4 c4", 0, `ingress: [{action: Deny, ipVersion: 6, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("first match decides", "a", 0, `ingress: [{action: Allow, protocol: TCP, source: {selector: "app == 'alpha'"}, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}, {action: Allow, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("Log goes on", "", 0, `ingress: [{action: Log, protocol: TCP, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("Pass leaves the tier", "abc", 0, `ingress: [{action: Pass, protocol: TCP, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`),
		in("destination selector", "", 0, `ingress: [{action: Deny, protocol: TCP, destination: {selector: "role == 'server'", ports: [PORT]}}]`),
		in("destination selector of others", "abc", 0, `ingress: [{action: Deny, protocol: TCP, destination: {selector: "role == 'none'", ports: [PORT]}}]`),
		in("types without Ingress", "abc", 0, `types: [Egress]
  egress: [{action: Pass}]`),
		{name: "egress of the clients", allowed: "bc", manifest: gnp("app == 'alpha'", `egress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "egress by destination", allowed: "c", manifest: gnp("has(app)", `egress: [{action: Deny, protocol: TCP, destination: {selector: "role == 'server'", ports: [PORT]}}]`)},
		{name: "serviceAccountSelector", allowed: "ac", manifest: gnp("all()", `serviceAccountSelector: "duty == 'clean'"
  egress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "namespaceSelector of the policy", allowed: "c", manifest: gnp("has(app)", `namespaceSelector: "team == 'lab'"
  egress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "namespaceSelector of the policy, another", allowed: "abc", manifest: gnp("has(app)", `namespaceSelector: "team == 'other'"
  egress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "nets of a network set", allowed: "a4", manifest: `
apiVersion: projectcalico.org/v3
kind: NetworkSet
metadata: {name: CASE, namespace: default, labels: {set: CASE}}
spec: {nets: [A4/32]}
---` + gnp("{{server}}", `ingress: [{action: Allow, protocol: TCP, source: {selector: set == 'CASE'}, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "a staged policy of the namespace", allowed: "abc", manifest: `
apiVersion: projectcalico.org/v3
kind: StagedNetworkPolicy
metadata: {name: CASE, namespace: default}
spec: {tier: cases, selector: {{server}}, ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]}
---`},
		{name: "order within a tier", allowed: "", manifest: gnp("{{server}}", `order: 20
  ingress: [{action: Allow, protocol: TCP, destination: {ports: [PORT]}}]`) + gnp2("{{server}}", `order: 10
  ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "an earlier tier decides", allowed: "abc", manifest: gnp("{{server}}", `tier: first
  ingress: [{action: Allow, protocol: TCP, destination: {ports: [PORT]}}]`) + gnp2("{{server}}", `ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "an earlier tier passes", allowed: "", manifest: gnp("{{server}}", `tier: first
  ingress: [{action: Pass, protocol: TCP, destination: {ports: [PORT]}}]`) + gnp2("{{server}}", `ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]`)},
		{name: "a network policy of the namespace", allowed: "a", manifest: `
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: CASE, namespace: default}
spec:
  tier: cases
  selector: {{server}}
  ingress: [{action: Allow, protocol: TCP, source: {selector: "app == 'alpha'"}, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]
---`},
		{name: "a network policy of another namespace", allowed: "abc", manifest: `
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: CASE, namespace: elsewhere}
spec: {tier: cases, selector: all(), ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]}
---`},
		{name: "a staged policy", allowed: "abc", manifest: `
apiVersion: projectcalico.org/v3
kind: StagedGlobalNetworkPolicy
metadata: {name: CASE}
spec: {tier: cases, selector: {{server}}, ingress: [{action: Deny, protocol: TCP, destination: {ports: [PORT]}}]}
---`},
		{name: "echo requests", allowed: "b4", protocol: unix.IPPROTO_ICMP, manifest: gnp("{{server}}",
			`ingress: [{action: Allow, protocol: ICMP, icmp: {type: 8}, source: {selector: "app == 'beta'"}}, {action: Deny, protocol: ICMP, icmp: {type: 8, code: 0}}]`)},
		in("notICMP", "b4", unix.IPPROTO_ICMP, `order: 1
  ingress: [{action: Deny, protocol: ICMP, notICMP: {type: 8, code: 0}}]`),
		{name: "echo requests of IPv6", allowed: "a6", protocol: unix.IPPROTO_ICMPV6, manifest: gnp("{{server}}",
			`ingress: [{action: Deny, protocol: ICMPv6, icmp: {type: 128}, source: {notSelector: "app == 'alpha'"}}]`)},
	}
}

// gnp is a policy of the case in the tier of cases, which passes what no rule
// decides.
func gnp(selector, spec string) string { return policyManifest("CASE", selector, spec) }

// gnp2 is the second policy of a case.
func gnp2(selector, spec string) string { return policyManifest("CASE-2", selector, spec) }

func policyManifest(name, selector, spec string) string {
	tier := "\n  tier: cases"
	if strings.Contains(spec, "tier:") {
		tier = ""
	}
	return fmt.Sprintf("\napiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: %s}\nspec:%s\n  selector: %s\n  %s\n---", name, tier, selector, spec)
}

// text is the case's manifest.
func (c conformance) text(i int, port uint16) string {
	m := c.manifest
	if m == "" {
		m = gnp("{{server}}", fmt.Sprintf("ingress: [{action: Allow, protocol: TCP, source: %s, destination: {ports: [PORT]}}, {action: Deny, protocol: TCP, destination: {ports: [PORT]}}]", c.source))
	}
	return strings.NewReplacer("{{server}}", "role == 'server'", "CASE", fmt.Sprintf("case-%d", i), "PORT", fmt.Sprint(port)).Replace(m)
}

// passes reports whether a client passes by a case, over a family.
func (c conformance) passes(client string, v6 bool) bool {
	family := "4"
	if v6 {
		family = "6"
	}
	for word := range strings.FieldsSeq(c.allowed) {
		letters, only := strings.TrimRight(word, "46"), strings.TrimLeft(word, "abc")
		if strings.Contains(letters, client) && (only == "" || only == family) {
			return true
		}
	}
	return false
}
