package policy

import (
	"math"
	"reflect"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// policies are all policies and profiles, which of them are in force here, and
// the sets that these hold.
type policies struct {
	all     map[filter.PolicyID]*policyState
	byQuery []*policyState // by the query of the local endpoints' matcher
	tiers   map[string]tierInfo

	refs      map[filter.PolicyID]int // endpoints that name it
	held      map[filter.PolicyID][]filter.SetID
	published map[filter.PolicyID]filter.Policy
	dirty     map[filter.PolicyID]struct{}

	closed map[filter.PolicyID]string // what is said of rules that name a Service whose endpoints are not known
}

type policyState struct {
	spec  *policySpec
	query queryID // of spec.sel; not of a profile
	rules filter.Policy
	defs  map[filter.SetID]setDef
}

// selects reports whether the rules are about endpoints that a selector names. A policy that is
// not there, nil, is about nobody.
func (p *policyState) selects() bool {
	if p != nil {
		for _, d := range p.defs {
			if d.sel != nil && !d.nodes {
				return true
			}
		}
	}
	return false
}

type tierInfo struct {
	order float64
	end   filter.Action
}

func (p *policies) init() {
	p.all = make(map[filter.PolicyID]*policyState)
	p.tiers = make(map[string]tierInfo)
	p.refs = make(map[filter.PolicyID]int)
	p.held = make(map[filter.PolicyID][]filter.SetID)
	p.published = make(map[filter.PolicyID]filter.Policy)
	p.dirty = make(map[filter.PolicyID]struct{})
	p.closed = make(map[filter.PolicyID]string)
}

// put applies a policy or a profile, or its deletion.
func (p *policies) put(c *Calculator, o store.Object) {
	id := filter.PolicyID{Kind: string(o.Key.Kind), Namespace: o.Key.Namespace, Name: o.Key.Name}
	old := p.all[id]
	if o.Value == nil {
		if old != nil {
			p.unmatch(c, old)
			p.name(c, id, compiled{})
			delete(p.all, id)
			p.dirty[id] = struct{}{}
		}
		return
	}
	spec, err := specOf(o)
	if err != nil {
		c.problems[o.Key] = err.Error() + unread(old)
		return
	}
	is, err := compileRules(spec, c.members.services.unknown)
	switch {
	case err == nil:
	case old != nil:
		c.problems[o.Key] = err.Error() + unread(old)
		return
	default:
		c.problems[o.Key] = err.Error() + "; until it can be read, everything that it selects is denied"
		is = compiled{rules: denyAll(spec)}
	}
	if text := store.Meta(o.Value).Annotations[store.AnnotationProblems]; text != "" && err == nil {
		c.problems[o.Key] = text
	}
	if spec.idle {
		is = compiled{rules: filter.Policy{ID: id}}
	}
	p.name(c, id, is)
	state := &policyState{spec: spec, rules: is.rules, defs: is.defs}
	p.all[id] = state
	p.dirty[id] = struct{}{}
	p.match(c, old, state)
}

// name notes which Services the rules of a policy name.
func (p *policies) name(c *Calculator, id filter.PolicyID, is compiled) {
	c.members.services.name(id, is.services)
	if p.closed[id] = is.closed; is.closed == "" {
		delete(p.closed, id)
	}
}

// settle compiles those policies anew that name a Service whose endpoints have become known, or
// have ceased to be.
func (p *policies) settle(c *Calculator) {
	for _, id := range c.members.services.settle() {
		state := p.all[id]
		is, err := compileRules(state.spec, c.members.services.unknown)
		if err != nil {
			continue // it was compiled before
		}
		p.name(c, id, is)
		state.rules, state.defs = is.rules, is.defs
		p.dirty[id] = struct{}{}
	}
}

// unread says what becomes of an object that cannot be read at all.
func unread(old *policyState) string {
	if old != nil {
		return "; what was there before stays in force"
	}
	return "; it selects nothing until it can be read"
}

// match finds the local endpoints that a policy is for, and has those built anew
// for which its place may differ from what it was.
func (p *policies) match(c *Calculator, old, now *policyState) {
	switch {
	case now.spec.sel == nil: // endpoints name it whether it is there or not
		return
	case old != nil && old.spec.sel.String() == now.spec.sel.String():
		now.query = old.query
		p.byQuery[now.query] = now
		if !old.spec.sameFor(now.spec) {
			c.locals.matcher.each(now.query, c.locals.touch)
		}
		return
	case old != nil:
		p.unmatch(c, old)
	}
	q, found := c.locals.matcher.add(now.spec.sel)
	now.query = q
	for len(p.byQuery) <= int(q) {
		p.byQuery = append(p.byQuery, nil)
	}
	p.byQuery[q] = now
	for _, id := range found {
		c.locals.touch(id)
	}
}

// unmatch has the endpoints built anew that a policy was for.
func (p *policies) unmatch(c *Calculator, old *policyState) {
	if old.spec.sel == nil {
		return
	}
	c.locals.matcher.each(old.query, c.locals.touch)
	c.locals.matcher.drop(old.query)
	p.byQuery[old.query] = nil
}

func (p *policies) putTier(c *Calculator, name string, t *v3.Tier) {
	was, known := p.tiers[name]
	now := tierInfo{order: math.Inf(1), end: filter.Deny}
	if t == nil {
		if !known {
			return
		}
		delete(p.tiers, name)
		c.locals.touchAll()
		return
	}
	if t.Spec.Order != nil {
		now.order = *t.Spec.Order
	}
	if a := t.Spec.DefaultAction; a != nil && *a == v3.Pass {
		now.end = filter.Pass
	}
	if !known || now != was {
		p.tiers[name] = now
		c.locals.touchAll()
	}
}

// tier returns what is known of a tier. The built-in ones are there when the
// store has not got them yet.
func (p *policies) tier(name string) tierInfo {
	if t, ok := p.tiers[name]; ok {
		return t
	}
	if order, action, ok := store.BuiltInTier(name); ok {
		t := tierInfo{order: order, end: filter.Deny}
		if action == v3.Pass {
			t.end = filter.Pass
		}
		return t
	}
	return tierInfo{order: math.Inf(1), end: filter.Deny}
}

// refer counts the endpoints that name a policy.
func (p *policies) refer(id filter.PolicyID, n int) {
	if p.refs[id] += n; p.refs[id] == 0 {
		delete(p.refs, id)
	}
	p.dirty[id] = struct{}{}
}

// waits reports whether a policy stays as it was published until the workloads of other hosts are
// known: it selects, or it is gone and an endpoint that waits itself still names it.
func (p *policies) waits(id filter.PolicyID, was filter.Policy) bool {
	state := p.all[id]
	if state == nil {
		return id.Kind != profileKind
	}
	return state.selects() && !reflect.DeepEqual(was, state.rules)
}

// emit reports the policies in force that came, went or changed, and takes
// their sets into use and gives back those of no more use.
func (p *policies) emit(c *Calculator) (put []filter.Policy, del []filter.PolicyID) {
	var released []filter.SetID
	for _, id := range sortedKeys(p.dirty, filter.PolicyID.Compare) {
		was, published := p.published[id]
		if p.refs[id] == 0 {
			released = append(released, p.held[id]...)
			delete(p.held, id)
			if published {
				del = append(del, id)
				delete(p.published, id)
			}
			continue
		}
		state := p.all[id]
		if c.ownOnly && published && p.waits(id, was) {
			p.dirty[id], c.held = struct{}{}, true
			continue
		}
		if state == nil {
			// A profile that is not known might deny what the next one allows.
			state = &policyState{rules: denyAll(&policySpec{id: id, in: true, out: true})}
		}
		var held []filter.SetID
		for set, d := range state.defs {
			c.acquire(d)
			held = append(held, set)
		}
		released = append(released, p.held[id]...)
		p.held[id] = held
		if !published || !reflect.DeepEqual(was, state.rules) {
			put = append(put, state.rules)
			p.published[id] = state.rules
		}
	}
	// Last, so that a set which only changes hands stays as it is.
	for _, set := range released {
		c.release(set)
	}
	return put, slices.Clip(del)
}
