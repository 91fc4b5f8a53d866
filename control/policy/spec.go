package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/selector"
)

// policySpec is what all kinds of policy, and profiles, have in common.
type policySpec struct {
	id    filter.PolicyID
	name  string // by which it is sorted
	tier  string
	order float64 // +Inf: last

	staged bool
	idle   bool // staged to do nothing, or to be deleted: no rules to look at

	// Who it is for; nil in a profile. The texts are parsed into sel.
	sel                                   *selector.Selector
	selector, namespaces, serviceAccounts string
	in, out                               bool
	untracked, preDNAT, forward           bool
	ingress, egress                       []v3.Rule
}

// specOf reads a policy or a profile. The error is about the selectors, without
// which nothing can be said of it.
func specOf(o store.Object) (*policySpec, error) {
	p := &policySpec{
		id:    filter.PolicyID{Kind: string(o.Key.Kind), Namespace: o.Key.Namespace, Name: o.Key.Name},
		order: math.Inf(1),
	}
	var order *float64
	var types []v3.PolicyType
	switch v := o.Value.(type) {
	case *v3.Profile:
		p.ingress, p.egress, p.in, p.out = v.Spec.Ingress, v.Spec.Egress, true, true
		return p, nil
	case *v3.NetworkPolicy:
		s := v.Spec
		p.tier, order, p.selector, p.serviceAccounts = s.Tier, s.Order, s.Selector, s.ServiceAccountSelector
		types, p.ingress, p.egress = s.Types, s.Ingress, s.Egress
	case *v3.GlobalNetworkPolicy:
		s := v.Spec
		p.tier, order, p.selector, p.serviceAccounts = s.Tier, s.Order, s.Selector, s.ServiceAccountSelector
		types, p.ingress, p.egress = s.Types, s.Ingress, s.Egress
		p.namespaces, p.untracked, p.preDNAT, p.forward = s.NamespaceSelector, s.DoNotTrack, s.PreDNAT, s.ApplyOnForward
	case *v3.StagedNetworkPolicy:
		s := v.Spec
		p.tier, order, p.selector, p.serviceAccounts = s.Tier, s.Order, s.Selector, s.ServiceAccountSelector
		types, p.ingress, p.egress = s.Types, s.Ingress, s.Egress
		p.stage(s.StagedAction)
	case *v3.StagedGlobalNetworkPolicy:
		s := v.Spec
		p.tier, order, p.selector, p.serviceAccounts = s.Tier, s.Order, s.Selector, s.ServiceAccountSelector
		types, p.ingress, p.egress = s.Types, s.Ingress, s.Egress
		p.namespaces, p.untracked, p.preDNAT, p.forward = s.NamespaceSelector, s.DoNotTrack, s.PreDNAT, s.ApplyOnForward
		p.stage(s.StagedAction)
	case *v3.StagedKubernetesNetworkPolicy:
		s := convert.PolicySpec(&networkingv1.NetworkPolicySpec{
			PodSelector: v.Spec.PodSelector, Ingress: v.Spec.Ingress, Egress: v.Spec.Egress, PolicyTypes: v.Spec.PolicyTypes,
		})
		p.tier, order, p.selector = s.Tier, s.Order, s.Selector
		types, p.ingress, p.egress = s.Types, s.Ingress, s.Egress
		p.stage(v.Spec.StagedAction)
	default:
		return nil, fmt.Errorf("a %T is no policy", o.Value)
	}
	if p.tier == "" {
		p.tier = store.DefaultName
	}
	p.name = store.PolicyName(o, p.tier)
	if order != nil {
		p.order = *order
	}
	types = store.PolicyTypes(types, p.ingress, p.egress)
	p.in, p.out = slices.Contains(types, v3.PolicyTypeIngress), slices.Contains(types, v3.PolicyTypeEgress)
	return p, p.parse()
}

// stage marks a staged policy. Only one that is to be set has rules whose
// effect can be shown.
func (p *policySpec) stage(a v3.StagedAction) {
	p.staged = true
	p.idle = a != v3.StagedActionSet && a != "" && a != v3.StagedActionLearn
}

// parse makes one selector of who the policy is for.
func (p *policySpec) parse() error {
	own, err := selector.Parse(p.selector)
	if err != nil {
		return fmt.Errorf("spec.selector: %w", err)
	}
	parts := []*selector.Selector{own}
	if p.id.Namespace != "" {
		parts = append(parts, selector.Equal(store.LabelNamespace, p.id.Namespace))
	}
	if p.namespaces != "" {
		sel, err := selector.Parse(p.namespaces)
		if err != nil {
			return fmt.Errorf("spec.namespaceSelector: %w", err)
		}
		parts = append(parts, ofNamespaces(sel))
	}
	if p.serviceAccounts != "" {
		sel, err := ofServiceAccounts(p.serviceAccounts)
		if err != nil {
			return fmt.Errorf("spec.serviceAccountSelector: %w", err)
		}
		parts = append(parts, sel)
	}
	p.sel = selector.And(parts...)
	return nil
}

// compare orders policies of one tier.
func (p *policySpec) compare(o *policySpec) int {
	return cmp.Or(
		cmp.Compare(p.order, o.order), cmp.Compare(p.name, o.name),
		cmp.Compare(p.id.Namespace, o.id.Namespace), cmp.Compare(p.id.Kind, o.id.Kind),
		cmp.Compare(p.id.Name, o.id.Name), // of an old store two can be shown under one name
	)
}

// sameFor reports whether two versions of a policy are for the same endpoints
// in the same place, whatever their rules.
func (p *policySpec) sameFor(o *policySpec) bool {
	return p.compare(o) == 0 && p.tier == o.tier && p.in == o.in && p.out == o.out && p.staged == o.staged && p.idle == o.idle &&
		p.untracked == o.untracked && p.preDNAT == o.preDNAT && p.forward == o.forward
}

// denyAll is the rules of a policy that cannot be read, or of a profile that is
// not known.
func denyAll(p *policySpec) filter.Policy {
	out := filter.Policy{ID: p.id}
	if p.in {
		out.Ingress = []filter.Rule{{Action: filter.Deny}}
	}
	if p.out {
		out.Egress = []filter.Rule{{Action: filter.Deny}}
	}
	return out
}
