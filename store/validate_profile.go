package store

import (
	"fmt"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
)

// DefaultAllowProfile is the profile that exists without being stored: it
// allows all traffic both ways. It can be referred to, not written.
const DefaultAllowProfile = "projectcalico-default-allow"

// DefaultAllow returns the profile of that name, as if it were stored.
func DefaultAllow() Object {
	p := New(KindProfile).(*v3.Profile) //nolint:errcheck // what New makes of the kind
	p.Name = DefaultAllowProfile
	p.Spec.Ingress = []v3.Rule{{Action: v3.Allow}}
	p.Spec.Egress = []v3.Rule{{Action: v3.Allow}}
	return Object{Key: ResourceKey(KindProfile, p.Name), Value: p, Revision: 1}
}

// Limits of the CRDs' schema.
const (
	maxRules    = 1024
	maxRuleNets = 256
	maxPorts    = 50
)

// fixedTier is a tier whose order and action cannot be changed.
type fixedTier struct {
	order  float64
	action v3.Action
}

func builtInTier(name string) (fixedTier, bool) {
	switch name {
	case DefaultName:
		return fixedTier{v3.DefaultTierOrder, v3.Deny}, true
	case TierKubeAdmin:
		return fixedTier{v3.AdminNetworkPolicyTierOrder, v3.Pass}, true
	case TierKubeBaseline:
		return fixedTier{v3.BaselineAdminNetworkPolicyTierOrder, v3.Pass}, true
	}
	return fixedTier{}, false
}

func (c *checker) tier(t *v3.Tier) {
	if a := t.Spec.DefaultAction; a != nil {
		c.oneOf("spec.defaultAction", string(*a), string(v3.Deny), string(v3.Pass))
	}
	fixed, ok := builtInTier(t.Name)
	if !ok {
		return
	}
	if o := t.Spec.Order; o != nil && *o != fixed.order {
		c.add("spec.order", *o, "the order of the built-in tier %s is %.0f and cannot be changed", t.Name, fixed.order)
	}
	if a := t.Spec.DefaultAction; a != nil && *a != fixed.action {
		c.add("spec.defaultAction", string(*a), "the default action of the built-in tier %s is %s and cannot be changed", t.Name, fixed.action)
	}
}

func (c *checker) clusterInformation(i *v3.ClusterInformation) {
	c.onlyDefault(KindClusterInformation, i.Name)
}

// onlyDefault is for kinds of which there is one object.
func (c *checker) onlyDefault(kind Kind, name string) {
	c.reject(name != "" && name != DefaultName, "metadata.name", name, "must be %q: there is one %s", DefaultName, kind)
}

func (c *checker) profile(p *v3.Profile) {
	c.reject(p.Name == DefaultAllowProfile, "metadata.name", p.Name, "is built in and cannot be written; use another name")
	c.labels("spec.labelsToApply", p.Spec.LabelsToApply)
	c.rules("spec.ingress", p.Spec.Ingress, true)
	c.rules("spec.egress", p.Spec.Egress, false)
	c.serviceNamespaces("spec.ingress", p.Spec.Ingress, KindProfile)
	c.serviceNamespaces("spec.egress", p.Spec.Egress, KindProfile)
}

// serviceNamespaces refuses rules that name a Service without its namespace, in a kind that has none
// of its own.
func (c *checker) serviceNamespaces(field string, rules []v3.Rule, kind Kind) {
	for i := range rules {
		for _, side := range []struct {
			field    string
			services *v3.ServiceMatch
		}{{"source", rules[i].Source.Services}, {"destination", rules[i].Destination.Services}} {
			c.reject(side.services != nil && side.services.Namespace == "",
				index(field, i)+"."+side.field+".services.namespace", nil, "required in a %s, which has none of its own", kind)
		}
	}
}

func (c *checker) rules(field string, rules []v3.Rule, ingress bool) {
	c.reject(len(rules) > maxRules, field, len(rules), "has too many rules; at most %d are allowed", maxRules)
	for i := range rules {
		c.rule(index(field, i), &rules[i], ingress)
	}
}

func (c *checker) rule(field string, r *v3.Rule, ingress bool) {
	c.reject(r.Action == "", field+".action", nil, "required: one of Allow, Deny, Log, Pass")
	c.oneOf(field+".action", string(r.Action), string(v3.Allow), string(v3.Deny), string(v3.Log), string(v3.Pass))
	if v := r.IPVersion; v != nil && *v != 4 && *v != 6 {
		c.add(field+".ipVersion", *v, "must be 4 or 6")
	}
	c.protocol(field+".protocol", r.Protocol)
	c.protocol(field+".notProtocol", r.NotProtocol)
	c.icmp(field+".icmp", r.ICMP, r.Protocol)
	c.icmp(field+".notICMP", r.NotICMP, r.Protocol)
	c.entity(field+".source", &r.Source, r.Protocol)
	c.entity(field+".destination", &r.Destination, r.Protocol)
	c.reject(r.Source.Services != nil && !ingress, field+".source.services", nil, "can be matched in ingress rules only")
	c.reject(r.Destination.Services != nil && ingress, field+".destination.services", nil, "can be matched in egress rules only")
	c.oneFamily(field, r)
	if r.HTTP != nil {
		c.http(field, r, ingress)
	}
}

func protocolNames() []string {
	return []string{
		numorstring.ProtocolTCP, numorstring.ProtocolUDP, numorstring.ProtocolICMP,
		numorstring.ProtocolICMPv6, numorstring.ProtocolSCTP, numorstring.ProtocolUDPLite,
	}
}

func (c *checker) protocol(field string, p *numorstring.Protocol) {
	if p == nil {
		return
	}
	if n, err := p.NumValue(); err == nil {
		c.reject(n == 0, field, n, "must be a number from 1 to 255, or one of %s", strings.Join(protocolNames(), ", "))
		return
	}
	c.reject(!slices.Contains(protocolNames(), p.String()), field, p.String(), "must be one of %s, or a number from 1 to 255", strings.Join(protocolNames(), ", "))
}

func (c *checker) icmp(field string, f *v3.ICMPFields, p *numorstring.Protocol) {
	if f == nil {
		return
	}
	c.reject(p == nil || p.String() != numorstring.ProtocolICMP && p.String() != numorstring.ProtocolICMPv6, field, nil, "needs protocol ICMP or ICMPv6 in the same rule")
	if f.Type != nil {
		c.between(field+".type", *f.Type, 0, 254)
	}
	if f.Code != nil {
		c.between(field+".code", *f.Code, 0, 255)
		c.reject(f.Type == nil, field+".type", nil, "required with code")
	}
}

func (c *checker) entity(field string, e *v3.EntityRule, p *numorstring.Protocol) {
	c.ruleNets(field+".nets", e.Nets)
	c.ruleNets(field+".notNets", e.NotNets)
	for i, n := range e.NotNets {
		c.reject(n == "0.0.0.0/0" || n == "::/0", index(field+".notNets", i), n, "excludes every address, so that the rule matches nothing; leave it out")
	}
	c.selector(field+".selector", e.Selector, noGlobal)
	c.selector(field+".notSelector", e.NotSelector, noGlobal)
	c.selector(field+".namespaceSelector", e.NamespaceSelector, globalAlone)
	c.rulePorts(field+".ports", e.Ports, p)
	c.rulePorts(field+".notPorts", e.NotPorts, p)
	if a := e.ServiceAccounts; a != nil {
		c.selector(field+".serviceAccounts.selector", a.Selector, noGlobal)
	}
	if s := e.Services; s != nil {
		c.reject(s.Name == "", field+".services.name", nil, "required")
		c.reject(e.Selector != "" || e.NotSelector != "" || e.NamespaceSelector != "" || len(e.Nets) > 0 || len(e.NotNets) > 0 || e.ServiceAccounts != nil,
			field+".services", s.Name, "cannot be matched together with nets, selectors or service accounts on the same side")
	}
}

func (c *checker) ruleNets(field string, nets []string) {
	c.reject(len(nets) > maxRuleNets, field, len(nets), "has too many entries; at most %d are allowed", maxRuleNets)
	c.nets(field, nets)
}

// rulePorts checks ports; a named port needs no protocol, for it has one.
func (c *checker) rulePorts(field string, ports []numorstring.Port, p *numorstring.Protocol) {
	c.reject(len(ports) > maxPorts, field, len(ports), "has too many entries; at most %d are allowed", maxPorts)
	for i, port := range ports {
		if port.PortName != "" {
			continue
		}
		c.reject(port.MinPort == 0 || port.MinPort > port.MaxPort, index(field, i), port.String(), "must be a port from 1 to 65535, a range such as 8000:8100, or a name")
		c.reject(p == nil || !p.SupportsPorts(), index(field, i), port.String(), "needs a protocol with ports in the same rule: TCP, UDP or SCTP")
	}
}

// oneFamily refuses IPv4 and IPv6 nets in one rule: no packet has both.
func (c *checker) oneFamily(field string, r *v3.Rule) {
	families := map[bool]string{}
	for _, l := range [][]string{r.Source.Nets, r.Source.NotNets, r.Destination.Nets, r.Destination.NotNets} {
		for _, n := range l {
			families[strings.Contains(n, ":")] = n
		}
	}
	c.reject(len(families) > 1, field, nil, "mixes IPv4 (%s) and IPv6 (%s); write a rule for each", families[false], families[true])
	if v := r.IPVersion; v != nil {
		if n, ok := families[*v == 4]; ok {
			c.add(field+".ipVersion", *v, "does not fit %s in the same rule", n)
		}
	}
}

func (c *checker) http(field string, r *v3.Rule, ingress bool) {
	f := field + ".http"
	c.reject(!ingress || r.Action != v3.Allow, f, nil, "can be matched in ingress rules with action Allow only")
	c.reject(r.Protocol != nil && r.Protocol.String() != numorstring.ProtocolTCP, f, nil, "needs protocol TCP, not %s", r.Protocol)
	for i, p := range r.HTTP.Paths {
		c.reject((p.Exact == "") == (p.Prefix == ""), fmt.Sprintf("%s.paths[%d]", f, i), nil, "needs either exact or prefix")
	}
}
