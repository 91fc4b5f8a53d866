package policy

import (
	"cmp"
	"slices"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// build says what holds at an interface that belongs to an endpoint.
func (c *Calculator) build(name string, id itemID) filter.Endpoint {
	e := c.locals.list[id]
	out := filter.Endpoint{Interface: name, Name: e.key.String(), Host: e.host}
	for _, p := range c.ordered(id) {
		c.place(&out, p)
	}
	for _, name := range e.profiles {
		pid := filter.PolicyID{Kind: profileKind, Name: name}
		out.Ingress.Profiles = append(out.Ingress.Profiles, pid)
		out.Egress.Profiles = append(out.Egress.Profiles, pid)
	}
	out.DSCP = e.dscp
	s := c.settings.current(c)
	if !e.host {
		out.Limits = e.limits
		out.Sources, out.Own = slices.Clone(e.addrs), len(e.addrs)
		if s.spoofing {
			out.Sources = append(out.Sources, e.spoof...)
		}
		if s.floating {
			out.NAT = e.nat
		}
	} else {
		out.ForwardIngress.Default, out.ForwardEgress.Default = filter.Allow, filter.Allow
		out.UntrackedIngress.Default, out.UntrackedEgress.Default = filter.Pass, filter.Pass
		out.PreDNATIngress.Default = filter.Pass
	}
	for _, path := range []*filter.Path{
		&out.Ingress, &out.Egress, &out.ForwardIngress, &out.ForwardEgress,
		&out.UntrackedIngress, &out.UntrackedEgress, &out.PreDNATIngress,
	} {
		for i := range path.Tiers {
			if !path.Tiers[i].Enforced() {
				path.Tiers[i].End = filter.Pass
			}
		}
	}
	return out
}

// ordered returns the policies that select a local endpoint, in the order in
// which they are looked at.
func (c *Calculator) ordered(id itemID) []*policySpec {
	type placed struct {
		*policySpec
		tier tierInfo
	}
	matches := c.locals.matcher.matches(id)
	list := make([]placed, 0, len(matches))
	for _, q := range matches {
		spec := c.policies.byQuery[q].spec
		list = append(list, placed{spec, c.policies.tier(spec.tier)})
	}
	slices.SortFunc(list, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.tier.order, b.tier.order), cmp.Compare(a.policySpec.tier, b.policySpec.tier), a.compare(b.policySpec))
	})
	specs := make([]*policySpec, len(list))
	for i, p := range list {
		specs[i] = p.policySpec
	}
	return specs
}

// place puts a policy on the paths of an endpoint that it is for.
func (c *Calculator) place(e *filter.Endpoint, p *policySpec) {
	ref := filter.PolicyRef{ID: p.id, Staged: p.staged}
	add := func(path *filter.Path, wanted bool, end filter.Action) {
		if !wanted {
			return
		}
		if n := len(path.Tiers); n == 0 || path.Tiers[n-1].Name != p.tier {
			path.Tiers = append(path.Tiers, filter.Tier{Name: p.tier, End: end})
		}
		t := &path.Tiers[len(path.Tiers)-1]
		t.Policies = append(t.Policies, ref)
	}
	end := c.policies.tier(p.tier).end
	switch {
	case p.untracked:
		// The end of a tier decides nothing here: there are normal policies to come.
		add(&e.UntrackedIngress, e.Host && p.in, filter.Pass)
		add(&e.UntrackedEgress, e.Host && p.out, filter.Pass)
	case p.preDNAT:
		add(&e.PreDNATIngress, e.Host && p.in, filter.Pass)
	default:
		add(&e.Ingress, p.in, end)
		add(&e.Egress, p.out, end)
		add(&e.ForwardIngress, e.Host && p.forward && p.in, end)
		add(&e.ForwardEgress, e.Host && p.forward && p.out, end)
	}
}

const profileKind = string(store.KindProfile)
