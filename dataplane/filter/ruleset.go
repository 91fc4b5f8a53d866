package filter

import (
	"fmt"
	"maps"
	"slices"
)

// Ruleset is everything that holds on one host.
type Ruleset struct {
	Sets      map[SetID]Set
	Members   map[SetID]map[Member]struct{} // of each set
	Policies  map[PolicyID]Policy
	Endpoints map[string]Endpoint // by interface
	Settings  Settings
}

// NewRuleset returns a ruleset that holds nothing.
func NewRuleset() *Ruleset {
	return &Ruleset{
		Sets:      make(map[SetID]Set),
		Members:   make(map[SetID]map[Member]struct{}),
		Policies:  make(map[PolicyID]Policy),
		Endpoints: make(map[string]Endpoint),
	}
}

// MemberChange is what comes to a set and what goes from it. No member is in
// both lists; both are sorted.
type MemberChange struct {
	Set      SetID
	Add, Del []Member
}

// Delta is a step from one ruleset to the next, to be taken at once. Its parts
// are in the order in which they can be applied one by one: what is referred
// to comes before what refers to it, and goes after it.
type Delta struct {
	PutSets      []Set          // new, without members
	Members      []MemberChange // of old and new sets
	PutPolicies  []Policy       // new or changed
	PutEndpoints []Endpoint     // new or changed
	Settings     *Settings      // nil: as before

	DelEndpoints []string // interfaces
	DelPolicies  []PolicyID
	DelSets      []SetID // with their members, which are not reported one by one
}

// Empty reports whether the delta changes nothing.
func (d *Delta) Empty() bool {
	return len(d.PutSets)+len(d.Members)+len(d.PutPolicies)+len(d.PutEndpoints)+len(d.DelEndpoints)+len(d.DelPolicies)+len(d.DelSets) == 0 && d.Settings == nil
}

// Apply takes a step. The error says which part of the delta does not fit what
// is there; r is then of no more use.
func (r *Ruleset) Apply(d *Delta) error {
	for _, s := range d.PutSets {
		if _, ok := r.Sets[s.ID]; ok {
			return fmt.Errorf("put set %s: it exists", s.ID)
		}
		r.Sets[s.ID], r.Members[s.ID] = s, make(map[Member]struct{})
	}
	for _, c := range d.Members {
		if err := r.applyMembers(c); err != nil {
			return fmt.Errorf("change set %s: %w", c.Set, err)
		}
	}
	for _, p := range d.PutPolicies {
		r.Policies[p.ID] = p
	}
	for _, e := range d.PutEndpoints {
		r.Endpoints[e.Interface] = e
	}
	if d.Settings != nil {
		r.Settings = *d.Settings
	}
	for _, name := range d.DelEndpoints {
		if _, ok := r.Endpoints[name]; !ok {
			return fmt.Errorf("delete endpoint %s: there is none", name)
		}
		delete(r.Endpoints, name)
	}
	for _, id := range d.DelPolicies {
		if _, ok := r.Policies[id]; !ok {
			return fmt.Errorf("delete policy %s: there is none", id)
		}
		delete(r.Policies, id)
	}
	for _, id := range d.DelSets {
		if _, ok := r.Sets[id]; !ok {
			return fmt.Errorf("delete set %s: there is none", id)
		}
		delete(r.Sets, id)
		delete(r.Members, id)
	}
	return nil
}

func (r *Ruleset) applyMembers(c MemberChange) error {
	members, ok := r.Members[c.Set]
	if !ok {
		return fmt.Errorf("there is none")
	}
	for _, m := range c.Del {
		if _, ok := members[m]; !ok {
			return fmt.Errorf("delete %s: it is no member", m)
		}
		delete(members, m)
	}
	for _, m := range c.Add {
		if _, ok := members[m]; ok {
			return fmt.Errorf("add %s: it is a member", m)
		}
		members[m] = struct{}{}
	}
	return nil
}

// Check reports references to what is not there, sets and policies that
// nothing refers to, and members that overlap. It is for tests: it looks at
// everything.
func (r *Ruleset) Check() error {
	policies, sets := make(map[PolicyID]bool), map[SetID]bool{NATSources: true, NATExempt: true, TunnelSources: true}
	for _, e := range r.Endpoints {
		for _, id := range e.Policies() {
			if _, ok := r.Policies[id]; !ok {
				return fmt.Errorf("endpoint %s names %s, which is not there", e.Interface, id)
			}
			policies[id] = true
		}
	}
	for id, p := range r.Policies {
		if !policies[id] {
			return fmt.Errorf("no endpoint names %s", id)
		}
		for _, rule := range slices.Concat(p.Ingress, p.Egress) {
			for _, set := range rule.Sets() {
				if _, ok := r.Sets[set]; !ok {
					return fmt.Errorf("%s names the set %s, which is not there", id, set)
				}
				sets[set] = true
			}
		}
	}
	for id, s := range r.Sets {
		if !sets[id] {
			return fmt.Errorf("no rule names the set %s", id)
		}
		if s.Type == Nets {
			if err := r.checkOverlap(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkOverlap looks at neighbours: of two nets that overlap, the longer comes
// after the shorter with nothing but others of its members between.
func (r *Ruleset) checkOverlap(id SetID) error {
	sorted := slices.SortedFunc(maps.Keys(r.Members[id]), Member.Compare)
	for i := 1; i < len(sorted); i++ {
		if sorted[i-1].Prefix.Overlaps(sorted[i].Prefix) {
			return fmt.Errorf("set %s: %s and %s overlap", id, sorted[i-1], sorted[i])
		}
	}
	return nil
}
