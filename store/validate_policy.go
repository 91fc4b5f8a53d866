package store

import (
	"reflect"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"k8s.io/apimachinery/pkg/util/validation"
)

// policyKind checks the kinds of network policy. It reports false for others.
func (c *checker) policyKind(v any) bool {
	if p, global, ok := policySpec(v); ok {
		c.policy(&p)
		if global {
			c.globalPolicy(&p)
		}
	}
	switch o := v.(type) {
	case *v3.NetworkPolicy, *v3.GlobalNetworkPolicy:
	case *v3.StagedNetworkPolicy:
		c.stagedAction(o.Spec.StagedAction)
		c.stagedDelete(o.Spec.StagedAction, &o.Spec)
	case *v3.StagedGlobalNetworkPolicy:
		c.stagedAction(o.Spec.StagedAction)
		c.stagedDelete(o.Spec.StagedAction, &o.Spec)
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
		checkAnnotation(c, o.Annotations, AnnotationDSCP, ParseDSCP)
	default:
		return false
	}
	return true
}

// policySpec returns the spec of a policy with a tier in the shape of the largest
// of the four kinds, and whether the policy is of no namespace.
func policySpec(v any) (spec v3.GlobalNetworkPolicySpec, global, ok bool) {
	switch o := v.(type) {
	case *v3.GlobalNetworkPolicy:
		return o.Spec, true, true
	case *v3.StagedGlobalNetworkPolicy:
		p := o.Spec
		return v3.GlobalNetworkPolicySpec{
			Tier: p.Tier, Selector: p.Selector, ServiceAccountSelector: p.ServiceAccountSelector, NamespaceSelector: p.NamespaceSelector,
			Types: p.Types, Ingress: p.Ingress, Egress: p.Egress, PerformanceHints: p.PerformanceHints,
			DoNotTrack: p.DoNotTrack, PreDNAT: p.PreDNAT, ApplyOnForward: p.ApplyOnForward,
		}, true, true
	case *v3.NetworkPolicy:
		p := o.Spec
		return v3.GlobalNetworkPolicySpec{
			Tier: p.Tier, Selector: p.Selector, ServiceAccountSelector: p.ServiceAccountSelector,
			Types: p.Types, Ingress: p.Ingress, Egress: p.Egress, PerformanceHints: p.PerformanceHints,
		}, false, true
	case *v3.StagedNetworkPolicy:
		p := o.Spec
		return v3.GlobalNetworkPolicySpec{
			Tier: p.Tier, Selector: p.Selector, ServiceAccountSelector: p.ServiceAccountSelector,
			Types: p.Types, Ingress: p.Ingress, Egress: p.Egress, PerformanceHints: p.PerformanceHints,
		}, false, true
	}
	return v3.GlobalNetworkPolicySpec{}, false, false
}

func (c *checker) policy(p *v3.GlobalNetworkPolicySpec) {
	c.reject(p.Tier != "" && len(validation.IsDNS1123Label(p.Tier)) > 0, "spec.tier", p.Tier, "must be the name of a Tier: at most 63 lower case letters, digits and '-'")
	c.selector("spec.selector", p.Selector, noGlobal)
	c.selector("spec.serviceAccountSelector", p.ServiceAccountSelector, noGlobal)
	for i, t := range p.Types {
		field := index("spec.types", i)
		c.reject(t == "", field, nil, "must be one of Ingress, Egress")
		c.oneOf(field, string(t), string(v3.PolicyTypeIngress), string(v3.PolicyTypeEgress))
		c.reject(slices.Contains(p.Types[:i], t), field, string(t), "stands there twice; keep one")
	}
	for i, h := range p.PerformanceHints {
		c.oneOf(index("spec.performanceHints", i), string(h), string(v3.PerfHintAssumeNeededOnEveryNode))
	}
	c.rules("spec.ingress", p.Ingress, true)
	c.rules("spec.egress", p.Egress, false)
}

func (c *checker) globalPolicy(p *v3.GlobalNetworkPolicySpec) {
	c.selector("spec.namespaceSelector", p.NamespaceSelector, noGlobal)
	switch {
	case p.DoNotTrack && p.PreDNAT:
		c.add("spec.preDNAT", true, "cannot be set together with doNotTrack; write a policy for each")
	case (p.DoNotTrack || p.PreDNAT) && !p.ApplyOnForward:
		c.add("spec.applyOnForward", false, "must be true with doNotTrack and with preDNAT, which see forwarded packets too")
	}
	c.reject(p.PreDNAT && (len(p.Egress) > 0 || slices.Contains(p.Types, v3.PolicyTypeEgress)),
		"spec.egress", nil, "cannot be used with preDNAT, which looks at what comes in only; use ingress rules and types [Ingress]")
	c.serviceNamespaces("spec.ingress", p.Ingress, KindGlobalNetworkPolicy)
	c.serviceNamespaces("spec.egress", p.Egress, KindGlobalNetworkPolicy)
}

func (c *checker) stagedAction(a v3.StagedAction) {
	c.oneOf("spec.stagedAction", string(a), string(v3.StagedActionSet), string(v3.StagedActionDelete), string(v3.StagedActionLearn), string(v3.StagedActionIgnore))
}

// stagedDelete refuses what the deletion of a policy has no use for: it names the policy
// and its tier. The types follow from the rules that are not there.
func (c *checker) stagedDelete(a v3.StagedAction, spec any) {
	if a != v3.StagedActionDelete {
		return
	}
	v := reflect.ValueOf(spec).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		switch name {
		case "stagedAction", "tier", "types":
		default:
			c.reject(!v.Field(i).IsZero(), "spec."+name, nil, "must be left out where stagedAction is Delete")
		}
	}
}

// policyName takes one DNS label or two, and Kubernetes' policies under the
// names that Calico's controllers give them.
func (c *checker) policyName(field, name string) {
	if strings.HasPrefix(name, PrefixNetworkPolicy) {
		c.add(field, name, "is reserved for what Calico's controllers make of a Kubernetes NetworkPolicy; use another name")
		return
	}
	if rest, ok := strings.CutPrefix(name, "ossg.default."); ok {
		c.reject(len(validation.IsDNS1123Subdomain(rest)) > 0, field, name, "must go on after ossg.default. with lower case letters, digits, '-' and '.'")
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
	c.nets("spec.nets", nets)
}

func (c *checker) hostEndpoint(s *v3.HostEndpointSpec) {
	if s.Node == "" {
		c.add("spec.node", nil, "required: the name of the node that the interface is on")
	} else {
		c.reference("spec.node", s.Node)
	}
	c.reject(s.InterfaceName == "" && len(s.ExpectedIPs) == 0,
		"spec.interfaceName", nil, "required, unless expectedIPs tells the interface by its addresses; \"*\" stands for all of the host's")
	if s.InterfaceName != "*" {
		c.interfaceName("spec.interfaceName", s.InterfaceName)
	}
	for i, a := range s.ExpectedIPs {
		c.addr(index("spec.expectedIPs", i), a, "")
	}
	each("spec.profiles", s.Profiles, c.reference)
	for i, p := range s.Ports {
		c.endpointPort(index("spec.ports", i), WorkloadEndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
}

// tierAgainst refuses a policy whose tier nobody made.
func (c *checker) tierAgainst(v any, others []Object) {
	p, _, ok := policySpec(v)
	tier := p.Tier
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
