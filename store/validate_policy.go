package store

import (
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"k8s.io/apimachinery/pkg/util/validation"
)

// policyKind checks the kinds of network policy. It reports false for others.
func (c *checker) policyKind(v any) bool {
	switch o := v.(type) {
	case *v3.NetworkPolicy:
		s := o.Spec
		c.policy(&policyBody{
			Tier: s.Tier, Selector: s.Selector, ServiceAccountSelector: s.ServiceAccountSelector,
			Types: s.Types, Ingress: s.Ingress, Egress: s.Egress, PerformanceHints: s.PerformanceHints,
		})
	case *v3.StagedNetworkPolicy:
		s := o.Spec
		c.stagedAction(s.StagedAction)
		c.policy(&policyBody{
			Tier: s.Tier, Selector: s.Selector, ServiceAccountSelector: s.ServiceAccountSelector,
			Types: s.Types, Ingress: s.Ingress, Egress: s.Egress, PerformanceHints: s.PerformanceHints,
		})
	case *v3.GlobalNetworkPolicy:
		s := o.Spec
		c.globalPolicy(&policyBody{
			Tier: s.Tier, Selector: s.Selector, ServiceAccountSelector: s.ServiceAccountSelector,
			Types: s.Types, Ingress: s.Ingress, Egress: s.Egress, PerformanceHints: s.PerformanceHints,
		}, s.NamespaceSelector, s.DoNotTrack, s.PreDNAT, s.ApplyOnForward)
	case *v3.StagedGlobalNetworkPolicy:
		s := o.Spec
		c.stagedAction(s.StagedAction)
		c.globalPolicy(&policyBody{
			Tier: s.Tier, Selector: s.Selector, ServiceAccountSelector: s.ServiceAccountSelector,
			Types: s.Types, Ingress: s.Ingress, Egress: s.Egress, PerformanceHints: s.PerformanceHints,
		}, s.NamespaceSelector, s.DoNotTrack, s.PreDNAT, s.ApplyOnForward)
	case *v3.StagedKubernetesNetworkPolicy:
		c.stagedAction(o.Spec.StagedAction)
		for i, t := range o.Spec.PolicyTypes {
			c.oneOf(index("spec.policyTypes", i), string(t), "Ingress", "Egress")
		}
	case *v3.NetworkSet:
		c.networkSet(o.Labels, o.Spec.Nets)
	case *v3.GlobalNetworkSet:
		c.networkSet(o.Labels, o.Spec.Nets)
	case *v3.HostEndpoint:
		c.hostEndpoint(&o.Spec)
	default:
		return false
	}
	return true
}

// policyBody is what the four kinds of policy with a tier have in common.
type policyBody struct {
	Tier                             string
	Selector, ServiceAccountSelector string
	Types                            []v3.PolicyType
	Ingress, Egress                  []v3.Rule
	PerformanceHints                 []v3.PolicyPerformanceHint
}

func (c *checker) policy(p *policyBody) {
	if p.Tier != "" && len(validation.IsDNS1123Label(p.Tier)) > 0 {
		c.add("spec.tier", p.Tier, "must be the name of a Tier: at most 63 lower case letters, digits and '-'")
	}
	c.selector("spec.selector", p.Selector, noGlobal)
	c.selector("spec.serviceAccountSelector", p.ServiceAccountSelector, noGlobal)
	for i, t := range p.Types {
		field := index("spec.types", i)
		if t == "" {
			c.add(field, nil, "must be one of Ingress, Egress")
		}
		c.oneOf(field, string(t), string(v3.PolicyTypeIngress), string(v3.PolicyTypeEgress))
		if slices.Contains(p.Types[:i], t) {
			c.add(field, string(t), "stands there twice; keep one")
		}
	}
	for i, h := range p.PerformanceHints {
		c.oneOf(index("spec.performanceHints", i), string(h), string(v3.PerfHintAssumeNeededOnEveryNode))
	}
	c.rules("spec.ingress", p.Ingress, true)
	c.rules("spec.egress", p.Egress, false)
}

func (c *checker) globalPolicy(p *policyBody, namespaceSelector string, doNotTrack, preDNAT, applyOnForward bool) {
	c.policy(p)
	c.selector("spec.namespaceSelector", namespaceSelector, noGlobal)
	switch {
	case doNotTrack && preDNAT:
		c.add("spec.preDNAT", true, "cannot be set together with doNotTrack; write a policy for each")
	case (doNotTrack || preDNAT) && !applyOnForward:
		c.add("spec.applyOnForward", false, "must be true with doNotTrack and with preDNAT, which see forwarded packets too")
	}
	if preDNAT && (len(p.Egress) > 0 || slices.Contains(p.Types, v3.PolicyTypeEgress)) {
		c.add("spec.egress", nil, "cannot be used with preDNAT, which looks at what comes in only; use ingress rules and types [Ingress]")
	}
	for _, list := range []struct {
		field string
		rules []v3.Rule
	}{{"spec.ingress", p.Ingress}, {"spec.egress", p.Egress}} {
		for i := range list.rules {
			for _, side := range []struct {
				field    string
				services *v3.ServiceMatch
			}{{"source", list.rules[i].Source.Services}, {"destination", list.rules[i].Destination.Services}} {
				if side.services != nil && side.services.Namespace == "" {
					c.add(index(list.field, i)+"."+side.field+".services.namespace", nil, "required in a GlobalNetworkPolicy, which has none of its own")
				}
			}
		}
	}
}

func (c *checker) stagedAction(a v3.StagedAction) {
	c.oneOf("spec.stagedAction", string(a), string(v3.StagedActionSet), string(v3.StagedActionDelete), string(v3.StagedActionLearn), string(v3.StagedActionIgnore))
}

// policyName takes one DNS label or two, and Kubernetes' policies under the
// names that Calico's controllers give them.
func (c *checker) policyName(field, name string) {
	if strings.HasPrefix(name, "knp.default.") {
		c.add(field, name, "is reserved for what Calico's controllers make of a Kubernetes NetworkPolicy; use another name")
		return
	}
	if rest, ok := strings.CutPrefix(name, "ossg.default."); ok {
		if len(validation.IsDNS1123Subdomain(rest)) > 0 {
			c.add(field, name, "must go on after ossg.default. with lower case letters, digits, '-' and '.'")
		}
		return
	}
	parts := strings.Split(name, ".")
	if len(parts) > 2 || slices.ContainsFunc(parts, func(p string) bool { return len(validation.IsDNS1123Label(p)) > 0 }) {
		c.add(field, name, "must be at most 63 lower case letters, digits and '-', beginning and ending with a letter or a digit, or two of these with a dot between them")
	}
}

func (c *checker) networkSet(labels map[string]string, nets []string) {
	if ns, ok := labels[LabelNamespace]; ok {
		c.add("metadata.labels."+LabelNamespace, ns, "is set by itself from metadata.namespace; leave it out")
	}
	for i, n := range nets {
		c.net(index("spec.nets", i), n)
	}
}

func (c *checker) hostEndpoint(s *v3.HostEndpointSpec) {
	if s.Node == "" {
		c.add("spec.node", nil, "required: the name of the node that the interface is on")
	} else {
		c.reference("spec.node", s.Node)
	}
	if s.InterfaceName == "" && len(s.ExpectedIPs) == 0 {
		c.add("spec.interfaceName", nil, "required, unless expectedIPs tells the interface by its addresses; \"*\" stands for all of the host's")
	}
	if s.InterfaceName != "*" {
		c.interfaceName("spec.interfaceName", s.InterfaceName)
	}
	for i, a := range s.ExpectedIPs {
		c.addr(index("spec.expectedIPs", i), a, "")
	}
	for i, p := range s.Profiles {
		c.reference(index("spec.profiles", i), p)
	}
	for i, p := range s.Ports {
		c.endpointPort(index("spec.ports", i), WorkloadEndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
}

// tierOf returns the tier that a policy names, and false for other values.
func tierOf(v any) (string, bool) {
	switch o := v.(type) {
	case *v3.NetworkPolicy:
		return o.Spec.Tier, true
	case *v3.GlobalNetworkPolicy:
		return o.Spec.Tier, true
	case *v3.StagedNetworkPolicy:
		return o.Spec.Tier, true
	case *v3.StagedGlobalNetworkPolicy:
		return o.Spec.Tier, true
	}
	return "", false
}

// tierAgainst refuses a policy whose tier nobody made.
func (c *checker) tierAgainst(v any, others []Object) {
	tier, ok := tierOf(v)
	if !ok || tier == "" {
		return
	}
	if _, ok := builtInTier(tier); ok {
		return
	}
	for _, o := range others {
		if t, ok := o.Value.(*v3.Tier); ok && t.Name == tier {
			return
		}
	}
	c.add("spec.tier", tier, "no Tier of this name exists; create it first or in the same manifest")
}

// BuiltInTier returns the order and the default action of one of the three
// tiers that every cluster has, and false for any other name.
func BuiltInTier(name string) (order float64, action v3.Action, ok bool) {
	t, ok := builtInTier(name)
	return t.order, t.action, ok
}
