package crd

import (
	"fmt"

	"github.com/routerd/routerd/store"
)

func (l *limits) policy(kind store.Kind) {
	switch kind {
	case store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy:
		l.at("spec.stagedAction").oneOf("Set", "Delete", "Learn", "Ignore")
	}
	if kind == store.KindStagedKubernetesNetworkPolicy {
		l.at("spec.policyTypes[]").oneOf("Ingress", "Egress")
		return
	}
	l.at("spec.tier").name()
	types := l.at("spec.types")
	types.Items.exactly("Ingress", "Egress")
	types.rule("size(self) < 2 || size(self) == 2 && self[0] != self[1]", "one stands there twice; keep one")
	l.at("spec.performanceHints[]").oneOf("AssumeNeededOnEveryNode")
	global := kind == store.KindGlobalNetworkPolicy || kind == store.KindStagedGlobalNetworkPolicy
	l.rules("spec.ingress", true, global)
	l.rules("spec.egress", false, global)
	if global {
		l.globalPolicy()
	}
}

func (l *limits) globalPolicy() {
	spec := l.at("spec")
	const untracked, early = "has(self.doNotTrack) && self.doNotTrack", "has(self.preDNAT) && self.preDNAT"
	spec.ruleFor(".preDNAT", "!("+untracked+" && "+early+")", "cannot be set together with doNotTrack; write a policy for each")
	// Both at once have the message above.
	spec.ruleFor(".applyOnForward", "("+untracked+") == ("+early+") || has(self.applyOnForward) && self.applyOnForward",
		"must be true with doNotTrack and with preDNAT, which see forwarded packets too")
	spec.ruleFor(".egress", "!("+early+") || (!has(self.egress) || size(self.egress) == 0) && (!has(self.types) || !('Egress' in self.types))",
		"cannot be used with preDNAT, which looks at what comes in only; use ingress rules and types [Ingress]")
}

// rules is about the rules of one direction. What they list has no bound, so that the
// entries are judged by what costs nothing.
func (l *limits) rules(list string, ingress, global bool) {
	l.at(list).MaxItems = maxEntries
	path := list + "[]"
	rule := l.at(path)
	rule.require("action")
	l.at(path+".action").exactly("Allow", "Deny", "Log", "Pass")
	l.at(path + ".ipVersion").Enum = []any{4, 6}
	l.at(path + ".protocol").protocol()
	l.at(path + ".notProtocol").protocol()
	for _, f := range []string{"icmp", "notICMP"} {
		l.at(path+"."+f+".type").between(0, 254)
		l.at(path+"."+f+".code").between(0, 255)
		l.at(path+"."+f).ruleFor(".type", "!has(self.code) || has(self.type)", "required with code")
	}
	rule.ruleFor(".icmp", "!has(self.icmp) || has(self.protocol) && self.protocol in ['ICMP', 'ICMPv6']", "needs protocol ICMP or ICMPv6 in the same rule")
	for _, side := range []string{"source", "destination"} {
		l.entity(path, side)
	}
	allowed, other := "source", "destination"
	if !ingress {
		allowed, other = other, allowed
	}
	rule.ruleFor("."+other+".services", fmt.Sprintf("!has(self.%[1]s) || !has(self.%[1]s.services)", other),
		fmt.Sprintf("can be matched in %s rules only", map[string]string{"source": "ingress", "destination": "egress"}[other]))
	if global {
		rule.ruleFor("."+allowed+".services.namespace", fmt.Sprintf("!has(self.%[1]s) || !has(self.%[1]s.services) || has(self.%[1]s.services.__namespace__) && self.%[1]s.services.__namespace__ != ''", allowed),
			"required in a GlobalNetworkPolicy, which has none of its own")
	}
	l.http(path, ingress)
}

func (l *limits) entity(path, side string) {
	at := path + "." + side
	entity := l.at(at)
	l.at(at + ".nets").nets()
	l.at(at + ".notNets").nets()
	for _, f := range []string{"ports", "notPorts"} {
		l.at(at+"."+f+"[]").between(1, 65535)
		// A look at the first port has to do.
		list := "self." + side + "." + f
		l.at(path).ruleFor("."+side+"."+f, fmt.Sprintf("!has(self.%s) || !has(%s) || size(%[2]s) == 0 || type(%[2]s[0]) == string || has(self.protocol) && %[3]s", side, list, hasPorts("self.protocol")),
			"needs a protocol with ports in the same rule: TCP, UDP or SCTP")
	}
	services := l.at(at + ".services")
	services.ruleFor(".name", "has(self.name) && self.name != ''", "required")
	entity.ruleFor(".services", "!has(self.services) || !(has(self.selector) && self.selector != '' || has(self.notSelector) && self.notSelector != '' || "+
		"has(self.namespaceSelector) && self.namespaceSelector != '' || has(self.nets) && size(self.nets) > 0 || has(self.notNets) && size(self.notNets) > 0 || has(self.serviceAccounts))",
		"cannot be matched together with nets, selectors or service accounts on the same side")
}

func (l *limits) http(path string, ingress bool) {
	rule := l.at(path)
	if !ingress {
		rule.ruleFor(".http", "!has(self.http)", "can be matched in ingress rules with action Allow only")
		return
	}
	rule.ruleFor(".http", "!has(self.http) || self.action == 'Allow'", "can be matched in ingress rules with action Allow only")
	rule.ruleFor(".http", "!has(self.http) || !has(self.protocol) || self.protocol == 'TCP'", "needs protocol TCP")
}
