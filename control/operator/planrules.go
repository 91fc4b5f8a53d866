package operator

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// plannedRules says what changes of the cluster do to this host's rules.
func (s *Server) plannedRules(ctx context.Context, changes []*cluster.Change) ([]*apiv1.PlannedObject, error) {
	before, d, err := s.foreseenRules(ctx, changes)
	if err != nil || before == nil {
		return nil, err
	}
	return describe(before, &d), nil
}

// foreseenRules returns this host's rules and the step that changes of the cluster lead to; nil: rules do
// not depend on them.
func (s *Server) foreseenRules(ctx context.Context, changes []*cluster.Change) (*filter.Ruleset, filter.Delta, error) {
	concern := func(k store.Kind) bool {
		return slices.Contains(policy.Kinds(), k) || slices.Contains(policy.ServiceKinds(), k)
	}
	if s.PolicyServer == nil || !slices.ContainsFunc(changes, func(c *cluster.Change) bool { return concern(c.Key.Kind) }) {
		return nil, filter.Delta{}, nil
	}
	if err := s.able(); err != nil {
		return nil, filter.Delta{}, err
	}
	known := s.cfg.OthersKnown == nil || s.cfg.OthersKnown()
	holds, err := s.cfg.Snapshot(func(k store.Key) bool {
		return concern(k.Kind) && (known || k.Kind != store.KindWorkloadEndpoint || store.IsEndpointOf(k, s.cfg.Node))
	})
	if err != nil {
		return nil, filter.Delta{}, err
	}
	if known {
		return s.PolicyServer.cfg.Enforcer.Plan(holds, changes, nil)
	}
	return s.PolicyServer.cfg.Enforcer.Plan(holds, changes, func() ([]*cluster.Change, error) { return s.otherEndpoints(ctx) })
}

// otherEndpoints asks the datastore for the endpoints of other hosts.
func (s *Server) otherEndpoints(ctx context.Context) ([]*cluster.Change, error) {
	list, err := listed(ctx, s.cfg.Store, store.KindWorkloadEndpoint)
	if err != nil {
		return nil, err
	}
	var out []*cluster.Change
	for _, ev := range list {
		if !store.IsEndpointOf(ev.Key, s.cfg.Node) {
			out = append(out, cluster.Decode(s.cfg.Node, ev))
		}
	}
	return out, nil
}

// describe says what a step does to rules.
func describe(before *filter.Ruleset, d *filter.Delta) []*apiv1.PlannedObject {
	var out []*apiv1.PlannedObject
	add := func(kind, name, was, will string) {
		if was != will {
			out = append(out, &apiv1.PlannedObject{Kind: kind, Name: name, Was: was, Will: will})
		}
	}
	for _, e := range d.PutEndpoints {
		was := ""
		if old, ok := before.Endpoints[e.Interface]; ok {
			was = showPlannedEndpoint(old)
		}
		add("endpoint", e.Interface, was, showPlannedEndpoint(e))
	}
	for _, name := range d.DelEndpoints {
		add("endpoint", name, showPlannedEndpoint(before.Endpoints[name]), "")
	}
	sets := &filter.Ruleset{Sets: maps.Clone(before.Sets)}
	for _, s := range d.PutSets {
		sets.Sets[s.ID] = s
	}
	for _, p := range d.PutPolicies {
		was := ""
		if old, ok := before.Policies[p.ID]; ok {
			was = showPlannedPolicy(before, old)
		}
		add("policy", showPolicy(p.ID), was, showPlannedPolicy(sets, p))
	}
	for _, id := range d.DelPolicies {
		add("policy", showPolicy(id), showPlannedPolicy(before, before.Policies[id]), "")
	}
	out = append(out, describeSets(before, d)...)
	if d.Settings != nil {
		was, will := reflect.ValueOf(before.Settings), reflect.ValueOf(*d.Settings)
		for i := range was.NumField() {
			name := was.Type().Field(i).Name
			if !reflect.DeepEqual(was.Field(i).Interface(), will.Field(i).Interface()) {
				add("setting", name, fmt.Sprintf("%s %v", name, was.Field(i).Interface()), fmt.Sprintf("%s %v", name, will.Field(i).Interface()))
			}
		}
	}
	slices.SortStableFunc(out, func(a, b *apiv1.PlannedObject) int {
		return cmp.Or(cmp.Compare(a.GetKind(), b.GetKind()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return out
}

// describeSets says which sets come, go, or get other members.
func describeSets(before *filter.Ruleset, d *filter.Delta) []*apiv1.PlannedObject {
	var out []*apiv1.PlannedObject
	changed := map[filter.SetID]filter.MemberChange{}
	for _, m := range d.Members {
		changed[m.Set] = m
	}
	for _, s := range d.PutSets {
		out = append(out, &apiv1.PlannedObject{Kind: "set", Name: string(s.ID), Will: fmt.Sprintf("%s (%s): %s", s.ID, s.Origin, members(changed[s.ID].Add))})
		delete(changed, s.ID)
	}
	for _, id := range d.DelSets {
		out = append(out, &apiv1.PlannedObject{Kind: "set", Name: string(id), Was: fmt.Sprintf("%s (%s)", id, before.Sets[id].Origin)})
		delete(changed, id)
	}
	for id, m := range changed {
		var what []string
		if len(m.Add) > 0 {
			what = append(what, "takes "+members(m.Add))
		}
		if len(m.Del) > 0 {
			what = append(what, "loses "+members(m.Del))
		}
		out = append(out, &apiv1.PlannedObject{Kind: "set", Name: string(id), Was: fmt.Sprintf("%s (%s)", id, before.Sets[id].Origin), Will: strings.Join(what, ", ")})
	}
	return out
}

// membersShown is how many members of a set a plan lists.
const membersShown = 20

func members(list []filter.Member) string {
	var out []string
	for _, m := range slices.SortedFunc(slices.Values(list), filter.Member.Compare) {
		if len(out) == membersShown {
			return fmt.Sprintf("%s and %d more", strings.Join(out, " "), len(list)-membersShown)
		}
		out = append(out, m.String())
	}
	return strings.Join(out, " ")
}

// showPlannedEndpoint says by what an endpoint's packets are judged.
func showPlannedEndpoint(e filter.Endpoint) string {
	out := []string{e.Interface + " " + e.Name}
	for _, h := range e.Hooks() {
		for _, dir := range []filter.Direction{filter.Ingress, filter.Egress} {
			path := e.Path(h, dir)
			if h != filter.Normal && len(path.Tiers) == 0 {
				continue
			}
			var by []string
			for _, t := range path.Tiers {
				for _, p := range t.Policies {
					name := showPolicy(p.ID)
					if p.Staged {
						name += " (staged)"
					}
					by = append(by, name)
				}
				by = append(by, fmt.Sprintf("tier %s ends in %s", t.Name, t.End))
			}
			for _, id := range path.Profiles {
				by = append(by, showPolicy(id))
			}
			out = append(out, fmt.Sprintf("%s %s: %s", h, dir, strings.Join(append(by, path.Default.String()), ", ")))
		}
	}
	for _, p := range e.Sources {
		out = append(out, "from "+p.String())
	}
	for _, n := range e.NAT {
		out = append(out, fmt.Sprintf("nat %v", n))
	}
	return strings.Join(out, "; ")
}

// showPlannedPolicy is the rules of a policy.
func showPlannedPolicy(r *filter.Ruleset, p filter.Policy) string {
	out := []string{showPolicy(p.ID)}
	for _, dir := range []filter.Direction{filter.Ingress, filter.Egress} {
		for i, rule := range p.Rules(dir) {
			out = append(out, fmt.Sprintf("%s %d %s %s", dir, i, rule.Action, r.Describe(rule)))
		}
	}
	return strings.Join(out, "; ")
}
