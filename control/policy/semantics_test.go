package policy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/store"
)

// onWeb is the beginning of a policy for the pod web.
const onWeb = `selector: "app == 'web'", `

type semanticsCase struct {
	name    string
	objects []store.Object // beside those of base; of the same name: in their place
	flow    string
	want    string
}

func semantics() []semanticsCase {
	return slices.Concat(orderCases(), ruleCases(), selectorCases(), hostCases(), otherCases())
}

func one(o ...store.Object) []store.Object { return o }

func orderCases() []semanticsCase {
	allow, deny := `, ingress: [{action: Allow}]}`, `, ingress: [{action: Deny}]}`
	rules := func(order, action string) string { return `{selector: "app == 'web'", order: ` + order + action }
	return []semanticsCase{
		{"no policy: the profile decides", nil, "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"no policy and no profile", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "")), "client>web tcp/80", "deny: no policy or profile decided"},
		{"a profile that does not exist", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [nobody]")), "client>web tcp/80", "deny: Profile/nobody[0]"},
		{"a profile that does not exist leaves nothing to the next", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [nobody, kns.prod]")), "client>web tcp/80", "deny: Profile/nobody[0]"},
		{"and nothing of what goes out", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [nobody, kns.prod]")), "web>world tcp/80", "deny: Profile/nobody[0]"},
		{"a profile that does not exist is asked after the one that decides", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [kns.prod, nobody]")), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a policy decides before a profile that does not exist", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [nobody]"), gnp("p", `{`+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"the built-in profile", one(pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [projectcalico-default-allow]")), "client>web tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"profiles in listed order", one(profile("stop", `{ingress: [{action: Deny}]}`), pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [stop, kns.prod]")), "client>web tcp/80", "deny: Profile/stop[0]"},
		{"a profile that says nothing leaves it to the next", one(profile("mute", `{}`), pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [mute, kns.prod]")), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"Pass in a profile leaves it to the next", one(profile("pass", `{ingress: [{action: Pass}]}`), pod("n1", "prod", "web", "10.0.0.1", "fd00::1", "app: web", "profiles: [pass, kns.prod]")), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"empty policy denies its type", one(gnp("p", `{selector: "app == 'web'"}`)), "client>web tcp/80", "deny: end of default"},
		{"empty policy says nothing about the other direction", one(gnp("p", `{selector: "app == 'web'"}`)), "web>client tcp/80", "allow: Profile/kns.prod[0]"},
		{"an empty selector selects all", one(gnp("p", `{}`)), "client>web tcp/80", "deny: end of default"},
		{"egress rules alone: type Egress", one(gnp("p", `{selector: "app == 'web'", egress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"egress rules alone are applied to egress", one(gnp("p", `{selector: "app == 'web'", egress: [{action: Deny}]}`)), "web>client tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"both rules: both types", one(gnp("p", `{selector: "app == 'web'", ingress: [{action: Allow}], egress: [{action: Allow}]}`)), "web>world tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"types that are stated go before the rules", one(gnp("p", `{selector: "app == 'web'", types: [Ingress], egress: [{action: Deny}]}`)), "web>world tcp/80", "allow: Profile/kns.prod[0]"},
		{"a stated type without rules denies", one(gnp("p", `{selector: "app == 'web'", types: [Egress]}`)), "web>world tcp/80", "deny: end of default"},
		{"lower order first", one(gnp("a", rules("2", deny)), gnp("b", rules("1", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/b[0]"},
		{"orders are fractions", one(gnp("a", rules("1.6", deny)), gnp("b", rules("1.5", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/b[0]"},
		{"negative order", one(gnp("a", rules("0", deny)), gnp("b", rules("-1", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/b[0]"},
		{"no order comes last", one(gnp("a", rules("null", deny)), gnp("b", rules("1000000", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/b[0]"},
		{"same order: by name", one(gnp("b", rules("1", deny)), gnp("a", rules("1", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/a[0]"},
		{"no orders: by name", one(gnp("b", rules("null", deny)), gnp("a", rules("null", allow))), "client>web tcp/80", "allow: GlobalNetworkPolicy/a[0]"},
		{"same name: the global one first", one(gnp("p", rules("1", allow)), np("prod/p", rules("1", deny))), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"a name before another, whatever the kind", one(gnp("q", rules("1", deny)), np("prod/p", rules("1", allow))), "client>web tcp/80", "allow: NetworkPolicy/p[0]"},
		{"the first rule that matches", one(gnp("p", `{`+onWeb+`ingress: [{action: Allow, protocol: TCP}, {action: Deny}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"the next rule, when the first does not match", one(gnp("p", `{`+onWeb+`ingress: [{action: Allow, protocol: UDP}, {action: Deny}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/p[1]"},
		{"the next policy of the tier", one(gnp("a", `{`+onWeb+`order: 1, ingress: [{action: Deny, protocol: UDP}]}`), gnp("b", `{`+onWeb+`order: 2, ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/b[0]"},
		{"Log goes on", one(gnp("p", `{`+onWeb+`ingress: [{action: Log}, {action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[1]"},
		{"Log alone decides nothing", one(gnp("p", `{`+onWeb+`ingress: [{action: Log}]}`)), "client>web tcp/80", "deny: end of default"},
		{"tiers by order", one(tier("a", `{order: 20}`), tier("b", `{order: 10}`), gnp("pa", `{tier: a, `+onWeb+`ingress: [{action: Deny}]}`), gnp("pb", `{tier: b, `+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/pb[0]"},
		{"tiers of one order by name", one(tier("b", `{order: 10}`), tier("a", `{order: 10}`), gnp("pb", `{tier: b, `+onWeb+`ingress: [{action: Deny}]}`), gnp("pa", `{tier: a, `+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/pa[0]"},
		{"a tier without order is last", one(tier("a", `{}`), gnp("pa", `{tier: a, `+onWeb+`ingress: [{action: Deny}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"kube-admin comes before default", one(gnp("pa", `{tier: kube-admin, `+onWeb+`ingress: [{action: Allow}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/pa[0]"},
		{"kube-admin passes on", one(gnp("pa", `{tier: kube-admin, `+onWeb+`ingress: [{action: Deny, protocol: UDP}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"kube-baseline comes after default", one(gnp("pb", `{tier: kube-baseline, `+onWeb+`ingress: [{action: Deny}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Pass}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/pb[0]"},
		{"kube-baseline passes on to the profiles", one(gnp("pb", `{tier: kube-baseline, `+onWeb+`ingress: [{action: Deny, protocol: UDP}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"Pass skips the rest of the tier", one(tier("a", `{order: 1}`), gnp("p1", `{tier: a, order: 1, `+onWeb+`ingress: [{action: Pass}]}`), gnp("p2", `{tier: a, order: 2, `+onWeb+`ingress: [{action: Deny}]}`), gnp("p3", `{`+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "allow: GlobalNetworkPolicy/p3[0]"},
		{"Pass in the last tier: the profiles", one(gnp("p", `{`+onWeb+`ingress: [{action: Pass}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a tier that nothing concerns is skipped", one(tier("a", `{order: 1}`), gnp("p1", `{tier: a, selector: "app == 'nobody'", ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a tier of the other direction is skipped", one(tier("a", `{order: 1}`), gnp("p1", `{tier: a, `+onWeb+`types: [Egress]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"the end of a tier", one(tier("a", `{order: 1}`), gnp("p1", `{tier: a, `+onWeb+`ingress: [{action: Allow, protocol: UDP}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Allow}]}`)), "client>web tcp/80", "deny: end of a"},
		{"a tier that passes at its end", one(tier("a", `{order: 1, defaultAction: Pass}`), gnp("p1", `{tier: a, `+onWeb+`ingress: [{action: Allow, protocol: UDP}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a tier that nobody made denies, last", one(gnp("p1", `{tier: ghost, `+onWeb+`ingress: [{action: Allow, protocol: UDP}]}`), gnp("p", `{`+onWeb+`ingress: [{action: Pass}]}`)), "client>web tcp/80", "deny: end of ghost"},
	}
}

func ruleCases() []semanticsCase {
	in := func(name, rule, flow, want string) semanticsCase {
		if want == "" {
			want = "deny: end of default"
		} else {
			want = "allow: GlobalNetworkPolicy/p[0]"
		}
		return semanticsCase{name, one(gnp("p", `{`+onWeb+`ingress: [{action: Allow, `+rule+`}]}`)), flow, want}
	}
	const yes, no = "yes", ""
	return []semanticsCase{
		in("protocol by name", "protocol: TCP", "client>web tcp/80", yes),
		in("protocol by name, another", "protocol: UDP", "client>web tcp/80", no),
		in("protocol by number", "protocol: 6", "client>web tcp/80", yes),
		in("protocol without a name", "protocol: 47", "client>web gre", yes),
		in("SCTP", "protocol: SCTP, destination: {ports: [9000]}", "client>web sctp/9000", yes),
		in("UDPLite", "protocol: UDPLite", "client>web udplite/9", yes),
		in("UDPLite is not UDP", "protocol: UDP", "client>web udplite/9", no),
		in("notProtocol", "notProtocol: TCP", "client>web udp/53", yes),
		in("notProtocol, the same", "notProtocol: TCP", "client>web tcp/80", no),
		in("ICMP of any type", "protocol: ICMP", "client>web icmp/8.0", yes),
		in("ICMP type", "protocol: ICMP, icmp: {type: 8}", "client>web icmp/8.3", yes),
		in("ICMP type, another", "protocol: ICMP, icmp: {type: 0}", "client>web icmp/8.0", no),
		in("ICMP code", "protocol: ICMP, icmp: {type: 3, code: 4}", "client>web icmp/3.4", yes),
		in("ICMP code, another", "protocol: ICMP, icmp: {type: 3, code: 4}", "client>web icmp/3.1", no),
		in("ICMPv6", "protocol: ICMPv6, icmp: {type: 128}", "client>web icmp6/128.0 6", yes),
		in("ICMPv6 is not ICMP", "protocol: ICMP", "client>web icmp6/128.0 6", no),
		in("notICMP", "protocol: ICMP, notICMP: {type: 8}", "client>web icmp/3.4", yes),
		in("notICMP, the same", "protocol: ICMP, notICMP: {type: 8}", "client>web icmp/8.0", no),
		in("notICMP with code", "protocol: ICMP, notICMP: {type: 3, code: 4}", "client>web icmp/3.1", yes),
		in("ipVersion", "ipVersion: 4", "client>web tcp/80", yes),
		in("ipVersion, the other", "ipVersion: 4", "client>web tcp/80 6", no),
		in("port", "protocol: TCP, destination: {ports: [80]}", "client>web tcp/80", yes),
		in("port, another", "protocol: TCP, destination: {ports: [80]}", "client>web tcp/81", no),
		in("first of a range", `protocol: TCP, destination: {ports: ["80:90"]}`, "client>web tcp/80", yes),
		in("last of a range", `protocol: TCP, destination: {ports: ["80:90"]}`, "client>web tcp/90", yes),
		in("after a range", `protocol: TCP, destination: {ports: ["80:90"]}`, "client>web tcp/91", no),
		in("one of several ports", `protocol: TCP, destination: {ports: [22, "80:90", 443]}`, "client>web tcp/443", yes),
		in("notPorts", "protocol: TCP, destination: {notPorts: [80]}", "client>web tcp/81", yes),
		in("notPorts, one of them", `protocol: TCP, destination: {notPorts: [22, "70:80"]}`, "client>web tcp/80", no),
		in("source port", "protocol: UDP, source: {ports: [68]}", "client>web udp/67 from=68", yes),
		in("source port, another", "protocol: UDP, source: {ports: [68]}", "client>web udp/67 from=69", no),
		in("named port", "protocol: TCP, destination: {ports: [http]}", "client>web tcp/80", yes),
		in("named port, another number", "protocol: TCP, destination: {ports: [http]}", "client>web tcp/8080", no),
		in("named port of another protocol", "protocol: TCP, destination: {ports: [dns]}", "client>web tcp/53", no),
		in("named port without a protocol in the rule is TCP's", "destination: {ports: [http]}", "client>web tcp/80", yes),
		in("named port without a protocol in the rule is not UDP's", "destination: {ports: [dns]}", "client>web udp/53", no),
		in("named port of UDP", "protocol: UDP, destination: {ports: [dns]}", "client>web udp/53", yes),
		in("not a named port without a protocol in the rule", "destination: {notPorts: [dns]}", "client>web udp/53", yes),
		in("named port that nobody has", "protocol: TCP, destination: {ports: [ssh]}", "client>web tcp/22", no),
		in("named port or number", "protocol: TCP, destination: {ports: [http, 443]}", "client>web tcp/443", yes),
		in("one of two named ports", "protocol: UDP, destination: {ports: [http, dns]}", "client>web udp/53", yes),
		in("not a named port", "protocol: TCP, destination: {notPorts: [http]}", "client>web tcp/81", yes),
		in("not a named port, the same", "protocol: TCP, destination: {notPorts: [http]}", "client>web tcp/80", no),
		in("not a named port that nobody has", "protocol: TCP, destination: {notPorts: [ssh]}", "client>web tcp/80", yes),
		in("source nets", "source: {nets: [10.0.0.0/24]}", "client>web tcp/80", yes),
		in("source nets, outside", "source: {nets: [10.0.0.0/24]}", "far>web tcp/80", no),
		in("a net that is an address", "source: {nets: [10.0.0.2]}", "client>web tcp/80", yes),
		in("nets with host bits", "source: {nets: [10.0.0.77/24]}", "client>web tcp/80", yes),
		in("one of several nets", "source: {nets: [172.16.0.0/12, 10.0.0.0/24]}", "client>web tcp/80", yes),
		in("IPv4 nets and IPv6", "source: {nets: [0.0.0.0/0]}", "client>web tcp/80 6", no),
		in("IPv6 nets", `source: {nets: ["fd00::/64"]}`, "client>web tcp/80 6", yes),
		in("notNets", "source: {notNets: [10.0.0.0/24]}", "far>web tcp/80", yes),
		in("notNets, inside", "source: {notNets: [10.0.0.0/24]}", "client>web tcp/80", no),
		in("IPv4 notNets make an IPv4 rule", "source: {notNets: [10.0.0.0/24]}", "client>web tcp/80 6", no),
		in("nets without notNets", "source: {nets: [10.0.0.0/8], notNets: [10.0.0.0/24]}", "far>web tcp/80", yes),
		in("nets without notNets, inside both", "source: {nets: [10.0.0.0/8], notNets: [10.0.0.0/24]}", "client>web tcp/80", no),
		in("destination nets", "destination: {nets: [10.0.0.1]}", "client>web tcp/80", yes),
		in("destination notNets", "destination: {notNets: [10.0.0.1]}", "client>web tcp/80", no),
		in("all parts must match", "protocol: TCP, source: {nets: [10.0.0.0/24], ports: [1]}", "client>web tcp/80", no),
		in("HTTP has no effect here", "protocol: TCP, http: {methods: [GET]}", "client>web tcp/80", yes),
	}
}

func selectorCases() []semanticsCase {
	in := func(name, source, flow, want string) semanticsCase {
		if want == "" {
			want = "deny: end of default"
		} else {
			want = "allow: GlobalNetworkPolicy/p[0]"
		}
		return semanticsCase{name, one(gnp("p", `{`+onWeb+`ingress: [{action: Allow, source: {`+source+`}}]}`)), flow, want}
	}
	local := func(name, source, flow, want string) semanticsCase {
		if want == "" {
			want = "deny: end of default"
		} else {
			want = "allow: NetworkPolicy/p[0]"
		}
		return semanticsCase{name, one(np("prod/p", `{`+onWeb+`ingress: [{action: Allow, source: {`+source+`}}]}`)), flow, want}
	}
	const yes, no = "yes", ""
	sets := func(c semanticsCase) semanticsCase {
		c.objects = append(c.objects,
			obj(store.KindGlobalNetworkSet, "partners", "role: partner", `{nets: [203.0.113.0/24, 203.0.113.7, "2001:db8::/64"]}`),
			obj(store.KindNetworkSet, "prod/office", "role: office", `{nets: [203.0.113.7]}`),
			obj(store.KindNetworkSet, "dev/lab", "role: lab", `{nets: [203.0.113.7]}`))
		return c
	}
	return []semanticsCase{
		in("selector", `selector: "app == 'client'"`, "client>web tcp/80", yes),
		in("selector, another", `selector: "app == 'web'"`, "client>web tcp/80", no),
		in("selector over IPv6", `selector: "app == 'client'"`, "client>web tcp/80 6", yes),
		in("a selector in a global policy looks everywhere", `selector: "app == 'web'"`, "far>web tcp/80", yes),
		in("all() is what is known", `selector: "all()"`, "world>web tcp/80", no),
		in("notSelector", `notSelector: "app == 'client'"`, "far>web tcp/80", yes),
		in("notSelector, one of them", `notSelector: "app == 'client'"`, "client>web tcp/80", no),
		in("notSelector in a global policy is about strangers too", `notSelector: "app == 'client'"`, "world>web tcp/80", yes),
		in("selector without notSelector", `selector: "app == 'client'", notSelector: "team == 'blue'"`, "other>web tcp/80", no),
		in("nets and selector", `selector: "app == 'client'", nets: [10.0.0.3]`, "client>web tcp/80", no),
		in("implicit namespace", `selector: "projectcalico.org/namespace == 'dev'"`, "other>web tcp/80", yes),
		in("implicit orchestrator", `selector: "projectcalico.org/orchestrator == 'k8s'"`, "other>web tcp/80", yes),
		in("implicit service account", `selector: "projectcalico.org/serviceaccount == 'robot'"`, "client>web tcp/80", yes),
		in("labels that a profile lends", `selector: "pcns.env == 'live'"`, "client>web tcp/80", yes),
		in("namespaceSelector", `namespaceSelector: "env == 'test'"`, "other>web tcp/80", yes),
		in("namespaceSelector, another", `namespaceSelector: "env == 'test'"`, "client>web tcp/80", no),
		in("namespaceSelector by name", `namespaceSelector: "projectcalico.org/name == 'dev'"`, "other>web tcp/80", yes),
		in("namespaceSelector all()", `namespaceSelector: "all()"`, "other>web tcp/80", yes),
		in("namespaceSelector and selector", `namespaceSelector: "env == 'test'", selector: "app == 'web'"`, "other>web tcp/80", no),
		in("service account by name", `serviceAccounts: {names: [robot]}`, "client>web tcp/80", yes),
		in("service account by name, none", `serviceAccounts: {names: [robot]}`, "other>web tcp/80", no),
		in("service account by selector", `serviceAccounts: {selector: "role == 'bot'"}`, "client>web tcp/80", yes),
		in("service account all()", `serviceAccounts: {selector: "all()"}`, "other>web tcp/80", no),
		in("service account by name and selector", `serviceAccounts: {names: [robot], selector: "role == 'man'"}`, "client>web tcp/80", no),
		local("in a namespace: its own", `selector: "app == 'client'"`, "client>web tcp/80", yes),
		local("in a namespace: not another", `selector: "app == 'client'"`, "other>web tcp/80", no),
		local("in a namespace: all() is its own", `selector: "all()"`, "other>web tcp/80", no),
		local("in a namespace: another by namespaceSelector", `namespaceSelector: "env == 'test'"`, "other>web tcp/80", yes),
		local("in a namespace: notSelector is about its own", `notSelector: "app == 'client'"`, "other>web tcp/80", no),
		local("in a namespace: no selector is anybody", `nets: [203.0.113.0/24]`, "world>web tcp/80", yes),
		local("in a namespace: service accounts of its own", `serviceAccounts: {names: [robot]}`, "client>web tcp/80", yes),
		sets(in("global network set", `selector: "role == 'partner'"`, "world>web tcp/80", yes)),
		sets(in("global network set over IPv6", `selector: "role == 'partner'"`, "world>web tcp/80 6", yes)),
		sets(in("network set of any namespace", `selector: "role == 'lab'"`, "world>web tcp/80", yes)),
		sets(in("network set by its namespace's labels", `namespaceSelector: "env == 'test'"`, "world>web tcp/80", yes)),
		sets(in("global() is what is in no namespace", `namespaceSelector: "global()"`, "world>web tcp/80", yes)),
		sets(in("global() and selector", `namespaceSelector: "global()", selector: "role == 'office'"`, "world>web tcp/80", no)),
		sets(in("global() is no pod", `namespaceSelector: "global()"`, "client>web tcp/80", no)),
		sets(local("network set of the policy's namespace", `selector: "role == 'office'"`, "world>web tcp/80", yes)),
		sets(local("network set of another namespace", `selector: "role == 'lab'"`, "world>web tcp/80", no)),
		sets(local("global network set in a namespace", `selector: "role == 'partner'"`, "world>web tcp/80", no)),
		sets(local("global network set by global()", `namespaceSelector: "global()", selector: "role == 'partner'"`, "world>web tcp/80", yes)),
		{"own labels beat lent ones", one(
			profile("lender", `{labelsToApply: {app: lent, lent: "yes"}}`),
			pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "app: client", "profiles: [kns.prod, lender]"),
			gnp("p", `{`+onWeb+`ingress: [{action: Allow, source: {selector: "app == 'client' && lent == 'yes'"}}]}`),
		), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"the first profile's labels beat the next one's", one(
			profile("l1", `{labelsToApply: {x: a}}`), profile("l2", `{labelsToApply: {x: b}}`),
			pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "app: client", "profiles: [kns.prod, l1, l2]"),
			gnp("p", `{`+onWeb+`ingress: [{action: Allow, source: {selector: "x == 'a'"}}]}`),
		), "client>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"an endpoint cannot give itself a namespace's labels", one(
			pod("n1", "dev", "other", "10.0.0.3", "fd00::3", "pcns.env: live", "profiles: [kns.dev]"),
			gnp("p", `{`+onWeb+`ingress: [{action: Allow, source: {namespaceSelector: "env == 'live'"}}]}`),
		), "other>web tcp/80", "deny: end of default"},
		{"named port of who the selector is about", one(
			gnp("p", `{selector: "app == 'client'", egress: [{action: Allow, protocol: TCP, destination: {selector: "app == 'web'", ports: [http]}}]}`),
		), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"named port with another's number", one(
			gnp("p", `{selector: "app == 'client'", egress: [{action: Allow, protocol: TCP, destination: {selector: "app == 'web'", ports: [http]}}]}`),
		), "client>other tcp/8080", "deny: end of default"},
		{"a policy in a namespace selects there only", one(np("dev/p", `{`+onWeb+`ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a global policy with namespaceSelector", one(gnp("p", `{namespaceSelector: "env == 'live'", ingress: [{action: Deny}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"a global policy with namespaceSelector, another", one(gnp("p", `{namespaceSelector: "env == 'test'", ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a policy with serviceAccountSelector", one(gnp("p", `{serviceAccountSelector: "role == 'bot'", egress: [{action: Deny}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"a policy with serviceAccountSelector, another", one(gnp("p", `{serviceAccountSelector: "role == 'bot'", egress: [{action: Deny}]}`)), "other>web tcp/80", "allow: Profile/kns.prod[0]"},
	}
}

func hostCases() []semanticsCase {
	eth0 := hep("h", "role: host", `{node: n1, interfaceName: eth0}`)
	wild := hep("w", "role: host", `{node: n1, interfaceName: "*"}`)
	open := hep("h", "role: host", `{node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}`)
	peer := obj(store.KindNode, "n2", "", `{bgp: {ipv4Address: 192.0.2.2/24}}`)
	on := func(spec string) store.Object { return gnp("p", `{selector: "role == 'host'", `+spec+`}`) }
	return []semanticsCase{
		{"no host endpoint: nobody judges", nil, "world>host tcp/80", "allow: no endpoint on the way"},
		{"a host endpoint without policy and profile denies", one(eth0), "world>host tcp/80", "deny: no policy or profile decided"},
		{"and out", one(eth0), "host>world tcp/80", "deny: no policy or profile decided"},
		{"failsafe in", one(eth0), "world>host tcp/22", "allow: failsafe port"},
		{"failsafe out", one(eth0), "host>world udp/53", "allow: failsafe port"},
		{"a host endpoint's profile that does not exist", one(hep("h", "", `{node: n1, interfaceName: eth0, profiles: [nobody, projectcalico-default-allow]}`)), "world>host tcp/80", "deny: Profile/nobody[0]"},
		{"failsafe in is not out", one(eth0), "host>world tcp/22", "deny: no policy or profile decided"},
		{"failsafe of another protocol", one(eth0), "world>host udp/22", "deny: no policy or profile decided"},
		{"failsafe goes before a policy", one(eth0, on(`ingress: [{action: Deny}]`)), "world>host tcp/22", "allow: failsafe port"},
		{"failsafe turned off", one(eth0, felix("default", `{failsafeInboundHostPorts: []}`)), "world>host tcp/22", "deny: no policy or profile decided"},
		{"failsafe of a net", one(eth0, felix("default", `{failsafeInboundHostPorts: [{protocol: tcp, port: 22, net: 203.0.113.0/24}]}`)), "world>host tcp/22", "allow: failsafe port"},
		{"failsafe of another net", one(eth0, felix("default", `{failsafeInboundHostPorts: [{protocol: tcp, port: 22, net: 10.0.0.0/8}]}`)), "world>host tcp/22", "deny: no policy or profile decided"},
		{"the node's own configuration goes before the cluster's", one(eth0, felix("default", `{failsafeInboundHostPorts: []}`), felix("node.n1", `{failsafeInboundHostPorts: [{port: 80}]}`)), "world>host tcp/80", "allow: failsafe port"},
		{"a policy on the host endpoint", one(eth0, on(`ingress: [{action: Allow, protocol: TCP}]`)), "world>host tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"the host endpoint's profile", one(open), "world>host tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"a host endpoint of another node", one(hep("h", "role: host", `{node: n2, interfaceName: eth0}`)), "world>host tcp/80", "allow: no endpoint on the way"},
		{"the interface *", one(wild), "world>host tcp/80", "deny: no policy or profile decided"},
		{"the interface * is not the loopback", one(wild), "world>host tcp/80 via=lo", "allow: no endpoint on the way"},
		{"the interface * is no workload's", one(wild), "world>host tcp/80 via=calistrange", "deny: workload interface without an endpoint"},
		{"an interface's own endpoint goes before *", one(wild, open), "world>host tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"two of one interface: the first by name", one(eth0, hep("a", "", `{node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}`)), "world>host tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"found by expected address", one(hep("h", "role: host", `{node: n1, expectedIPs: [192.0.2.1]}`)), "world>host tcp/80", "deny: no policy or profile decided"},
		{"not found by another address", one(hep("h", "role: host", `{node: n1, expectedIPs: [198.51.100.1]}`)), "world>host tcp/80", "allow: no endpoint on the way"},
		{"a name goes before addresses that do not fit", one(hep("h", "role: host", `{node: n1, interfaceName: eth0, expectedIPs: [198.51.100.1]}`)), "world>host tcp/80", "deny: no policy or profile decided"},
		{"forwarded traffic is free without a policy for it", one(eth0, on(`ingress: [{action: Deny}]`)), "world>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"applyOnForward, in", one(eth0, on(`applyOnForward: true, ingress: [{action: Deny}]`)), "world>web tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"applyOnForward, out", one(eth0, on(`applyOnForward: true, egress: [{action: Deny}]`)), "web>world tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"applyOnForward, end of tier", one(eth0, on(`applyOnForward: true, ingress: [{action: Allow, protocol: UDP}]`)), "world>web tcp/80", "deny: end of default"},
		{"applyOnForward counts for the host's own traffic too", one(eth0, on(`applyOnForward: true, ingress: [{action: Allow}]`)), "world>host tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"forwarded: the host endpoint, then the workload", one(eth0, on(`applyOnForward: true, ingress: [{action: Allow}]`), gnp("q", `{`+onWeb+`ingress: [{action: Deny}]}`)), "world>web tcp/80", "deny: GlobalNetworkPolicy/q[0]"},
		{"forwarded from one interface to another", one(eth0, hep("h1", "role: out", `{node: n1, interfaceName: eth1}`), gnp("q", `{selector: "role == 'out'", applyOnForward: true, egress: [{action: Deny}]}`)), "world>10.9.9.9 tcp/80 out=eth1", "deny: GlobalNetworkPolicy/q[0]"},
		{"profiles are not for forwarded traffic", one(hep("h", "role: host", `{node: n1, interfaceName: eth0, profiles: [stop]}`), profile("stop", `{ingress: [{action: Deny}]}`)), "world>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"hosts of the cluster send each other VXLAN", one(eth0, peer), "192.0.2.2>host udp/4789", "allow: between hosts of the cluster"},
		{"and others do not", one(eth0, peer), "world>host udp/4789", "deny: no policy or profile decided"},
		{"hosts of the cluster, before a policy", one(eth0, peer, on(`egress: [{action: Deny}]`)), "host>192.0.2.2 udp/4789", "allow: between hosts of the cluster"},
		{"hosts of the cluster, failsafe turned off", one(eth0, peer, felix("default", `{failsafeInboundHostPorts: []}`)), "192.0.2.2>host udp/4789", "allow: between hosts of the cluster"},
		{"hosts of the cluster, before doNotTrack", one(eth0, peer, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Deny}]`)), "192.0.2.2>host udp/4789", "allow: between hosts of the cluster"},
		{"doNotTrack denies", one(open, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Deny}]`)), "world>host tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"doNotTrack allows, and nothing else is asked", one(eth0, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Allow}]`)), "world>host tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"the end of a tier of doNotTrack denies nothing", one(open, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Allow, protocol: UDP}]`)), "world>host tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"doNotTrack, out", one(open, on(`doNotTrack: true, applyOnForward: true, egress: [{action: Deny}]`)), "host>world tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"doNotTrack and failsafe", one(open, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Deny}]`)), "world>host tcp/22", "allow: failsafe port"},
		{"doNotTrack and the answer of a failsafe port", one(open, on(`doNotTrack: true, applyOnForward: true, ingress: [{action: Deny}]`)), "world>host udp/40000 from=53", "allow: Profile/projectcalico-default-allow[0]"},
		{"doNotTrack is not for workloads", one(gnp("p", `{`+onWeb+`doNotTrack: true, applyOnForward: true, ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"preDNAT denies", one(open, on(`preDNAT: true, applyOnForward: true, ingress: [{action: Deny}]`)), "world>host tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"preDNAT denies what is forwarded", one(eth0, on(`preDNAT: true, applyOnForward: true, ingress: [{action: Deny}]`)), "world>web tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"preDNAT allows, past the host's own policies", one(eth0, on(`preDNAT: true, applyOnForward: true, ingress: [{action: Allow}]`)), "world>host tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"preDNAT allows, and the workload is asked", one(eth0, on(`preDNAT: true, applyOnForward: true, ingress: [{action: Allow}]`), gnp("q", `{`+onWeb+`ingress: [{action: Deny}]}`)), "world>web tcp/80", "deny: GlobalNetworkPolicy/q[0]"},
		{"the end of a tier of preDNAT denies nothing", one(open, on(`preDNAT: true, applyOnForward: true, ingress: [{action: Allow, protocol: UDP}]`)), "world>host tcp/80", "allow: Profile/projectcalico-default-allow[0]"},
		{"host endpoints are sources too", one(hep("far", "role: gateway", `{node: n2, interfaceName: eth0, expectedIPs: [203.0.113.7]}`), gnp("p", `{`+onWeb+`ingress: [{action: Allow, source: {selector: "role == 'gateway'"}}]}`)), "world>web tcp/80", "allow: GlobalNetworkPolicy/p[0]"},
		{"named port of a host endpoint", one(hep("h", "role: host", `{node: n1, interfaceName: eth0, expectedIPs: [192.0.2.1], ports: [{name: api, protocol: TCP, port: 8443}]}`), on(`ingress: [{action: Allow, protocol: TCP, destination: {ports: [api]}}]`)), "world>host tcp/8443", "allow: GlobalNetworkPolicy/p[0]"},
	}
}

func otherCases() []semanticsCase {
	return []semanticsCase{
		{"workload to its host: dropped", nil, "web>host tcp/80", "deny: action of workloads to their host"},
		{"workload to its host: accepted", one(felix("default", `{defaultEndpointToHostAction: ACCEPT}`)), "web>host tcp/80", "allow: action of workloads to their host"},
		{"workload to its host: returned", one(felix("default", `{defaultEndpointToHostAction: Return}`)), "web>host tcp/80", "allow: action of workloads to their host"},
		{"workload to its host: its egress first", one(felix("default", `{defaultEndpointToHostAction: Accept}`), gnp("p", `{`+onWeb+`egress: [{action: Deny}]}`)), "web>host tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"a host reaches its workloads", one(gnp("p", `{`+onWeb+`ingress: [{action: Deny}]}`)), "host>web tcp/80", "allow: no endpoint on the way"},
		{"the source's egress", one(gnp("p", `{selector: "app == 'client'", egress: [{action: Deny}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/p[0]"},
		{"both ends must allow", one(gnp("p", `{selector: "app == 'client'", egress: [{action: Allow}]}`), gnp("q", `{`+onWeb+`ingress: [{action: Deny}]}`)), "client>web tcp/80", "deny: GlobalNetworkPolicy/q[0]"},
		{"a source that is not the workload's", nil, "10.0.0.99>web tcp/80 via=caliclient", "deny: source is not the workload's"},
		{"a source that it may not pretend", one(pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "", "profiles: [kns.prod], allowSpoofedSourcePrefixes: [10.0.0.96/28]")), "10.0.0.99>web tcp/80 via=caliclient", "deny: source is not the workload's"},
		{"a source that it may pretend", one(felix("default", `{workloadSourceSpoofing: Any}`), pod("n1", "prod", "client", "10.0.0.2", "fd00::2", "", "profiles: [kns.prod], allowSpoofedSourcePrefixes: [10.0.0.96/28]")), "10.0.0.99>web tcp/80 via=caliclient", "allow: Profile/kns.prod[0]"},
		{"an interface without an endpoint", nil, "client>web tcp/80 out=calinew", "deny: workload interface without an endpoint"},
		{"other prefixes of workloads' interfaces", one(felix("default", `{interfacePrefix: "tap,veth"}`)), "client>web tcp/80 out=vethnew", "deny: workload interface without an endpoint"},
		{"a staged policy changes nothing", one(obj(store.KindStagedGlobalNetworkPolicy, "p", "", `{`+onWeb+`ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a staged policy of a namespace changes nothing", one(obj(store.KindStagedNetworkPolicy, "prod/p", "", `{`+onWeb+`ingress: [{action: Deny}]}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a staged policy of Kubernetes changes nothing", one(obj(store.KindStagedKubernetesNetworkPolicy, "prod/p", "", `{podSelector: {}}`)), "client>web tcp/80", "allow: Profile/kns.prod[0]"},
		{"a staged policy does not end a tier", one(obj(store.KindStagedGlobalNetworkPolicy, "p", "", `{`+onWeb+`order: 1, ingress: [{action: Allow}]}`), gnp("q", `{`+onWeb+`order: 2, ingress: [{action: Allow, protocol: UDP}]}`)), "client>web tcp/80", "deny: end of default"},
	}
}

// TestSemantics holds the calculator and the reference against what is written
// in the table, and against each other step by step.
func TestSemantics(t *testing.T) {
	t.Parallel()
	cases := semantics()
	if len(cases) < 80 {
		t.Fatalf("there are %d cases", len(cases))
	}
	seen := make(map[string]bool)
	for _, tt := range cases {
		if seen[tt.name] {
			t.Errorf("two cases are called %q", tt.name)
		}
		seen[tt.name] = true
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			objects := later(append(base(), tt.objects...))
			for _, o := range objects {
				if o.Key.Kind == store.KindWorkloadEndpoint {
					continue // labels pcns.* and the like are what is tried
				}
				if err := store.Validate(withDefaults(o).Value); err != nil {
					t.Fatalf("%s: %v", o.Key, err)
				}
			}
			f := flow(t, tt.flow)
			want := world(objects).Judge(f)
			if got := say(want); got != tt.want {
				t.Errorf("the reference says %q, want %q: %+v", got, tt.want, want.Steps)
			}
			c, mirror := newMirror(policy.Config{})
			c.SetInterfaces(hostInterfaces())
			c.Update(store.Batch{Events: events(objects), Synced: true})
			step(t, c, mirror)
			got := mirror.Judge(f)
			if say(got) != tt.want {
				t.Errorf("the calculator says %q, want %q: %+v", say(got), tt.want, got.Steps)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("steps (-reference +calculator):\n%s", diff)
			}
			for _, p := range c.Problems() {
				if !strings.Contains(p.Reason, " belongs to ") { // two of one interface are not at fault
					t.Errorf("problem: %v", p)
				}
			}
		})
	}
	t.Logf("%d cases", len(cases))
}

func withDefaults(o store.Object) store.Object {
	o.Value = store.Clone(o.Value)
	store.SetDefaults(o.Value)
	return o
}
