package bgp

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// SessionFate is what a change does to a session that a node should have.
type SessionFate string

// The fates of a session.
const (
	SessionComes   SessionFate = "comes"
	SessionEnds    SessionFate = "ends"
	SessionAnew    SessionFate = "starts anew"
	SessionChanges SessionFate = "changes" // and stays up
	SessionRefused SessionFate = "cannot run"
)

// PlannedSession is what a change does to one session.
type PlannedSession struct {
	Peer Peer // as it will be; of one that ends, as it is
	Fate SessionFate
	Why  []string // the settings that differ, or why it cannot run
}

// Plan is what a change does to a node's part in BGP.
type Plan struct {
	Node     string
	Settings []string // of the speaker, that differ
	Sessions []PlannedSession

	Announce, Withdraw []netip.Prefix // what the node originates from then on, and what no more
}

// empty reports whether nothing changes.
func (p *Plan) empty() bool {
	return len(p.Settings) == 0 && len(p.Sessions) == 0 && len(p.Announce) == 0 && len(p.Withdraw) == 0
}

// whole is clone with pools, blocks and claims, on which announcements depend.
func (v *View) whole() *View {
	out := v.clone()
	out.pools, out.blocks = maps.Clone(v.pools), maps.Clone(v.blocks)
	if v.services != nil {
		out.services, out.cidrs, out.held = v.services.Clone(), maps.Clone(v.cidrs), v.held
	}
	for node, held := range v.affinities {
		out.affinities[node] = maps.Clone(held)
	}
	for node, addrs := range v.borrowed {
		out.borrowed[node] = maps.Clone(addrs)
	}
	return out
}

// Plan says what changes of Nodes, BGPPeers, BGPConfigurations, BGPFilters and IPPools would do to each node's part in BGP,
// by what [Desired] and the speaker make of them. Nodes to which they do nothing are left out.
// It takes 5 s for a full mesh of 1,000 nodes, and ends with ctx.
func (v *View) Plan(ctx context.Context, changes []store.Event, yield func(Plan) error) error {
	after, err := v.after(changes)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for n := range v.nodes {
		names[n] = true
	}
	for n := range after.nodes {
		names[n] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if p := v.planOf(name, after); !p.empty() {
			if err := yield(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// after is a copy of what the datastore holds, with changes.
func (v *View) after(changes []store.Event) (*View, error) {
	after := v.whole()
	var step cluster.Step
	for _, ev := range changes {
		step.Changes = append(step.Changes, cluster.Decode(v.self, ev))
	}
	if _, err := after.Apply(step); err != nil {
		return nil, fmt.Errorf("judge the change: %w", err)
	}
	return after, nil
}

func (v *View) planOf(name string, after *View) Plan {
	// A node that takes no part in BGP has an empty configuration.
	was, _ := Desired(v, name)
	will, _ := Desired(after, name)
	return planOf(name, &was, &will)
}

// Plan is [View.Plan] of what the datastore holds now. The error is [ErrNotSynced] while that is not known.
func (c *Controller) Plan(ctx context.Context, changes []store.Event, yield func(Plan) error) error {
	c.mu.Lock()
	v := c.view.whole()
	c.mu.Unlock()
	if !v.synced {
		return ErrNotSynced
	}
	return v.Plan(ctx, changes, yield)
}

// PlanOwn is [Controller.Plan] for this host alone.
func (c *Controller) PlanOwn(changes []store.Event) (Plan, error) {
	c.mu.Lock()
	v := c.view.whole()
	c.mu.Unlock()
	if !v.synced {
		return Plan{}, ErrNotSynced
	}
	after, err := v.after(changes)
	if err != nil {
		return Plan{}, err
	}
	return v.planOf(v.self, after), nil
}

// Wanted lists the sessions that each node should have, as [Desired] has them; a node that takes no part in BGP has none.
// The error is [ErrNotSynced] while that is not known.
func (c *Controller) Wanted(ctx context.Context) (map[string][]Peer, error) {
	c.mu.Lock()
	v := c.view.whole()
	c.mu.Unlock()
	if !v.synced {
		return nil, ErrNotSynced
	}
	out := make(map[string][]Peer, len(v.nodes))
	for name := range v.nodes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		will, _ := Desired(v, name)
		out[name] = will.Peers
	}
	return out, nil
}

// planOf compares what a speaker should do before and after a change.
func planOf(node string, was, will *Config) Plan {
	p := Plan{Node: node, Announce: missingIn(will.Announce, was.Announce), Withdraw: missingIn(was.Announce, will.Announce)}
	if was.Node != "" && will.Node != "" {
		p.Settings = differing(*was, *will, "Node", "Peers", "Announce", "Tags", "Leaving", "Services", "Injected", "Filters", "Pools", "Own", "Borrowed", "NodesAt", "Links")
	}
	// As [Speaker.Apply] has it.
	anew := !was.sameIdentity(will) || !was.sameListener(will)
	before := map[peerKey]Peer{}
	for _, q := range was.Peers {
		before[keyOf(q)] = q
	}
	for _, q := range will.Peers {
		old, there := before[keyOf(q)]
		delete(before, keyOf(q))
		if s := sessionPlan(was, will, old, q, there, anew); s.Fate != "" {
			p.Sessions = append(p.Sessions, s)
		}
	}
	for _, q := range was.Peers {
		if _, left := before[keyOf(q)]; left && q.wanted() {
			p.Sessions = append(p.Sessions, PlannedSession{Peer: q, Fate: SessionEnds})
		}
	}
	return p
}

// peerKey is by what a session before and one after a change are the same.
type peerKey struct {
	addr  netip.Addr
	port  uint16 // of those alone that share an address
	iface string
	name  string // of those alone that have no address
}

func keyOf(p Peer) peerKey {
	k := peerKey{addr: p.Addr, iface: p.Interface}
	if p.Beside {
		k.port = p.Port
	}
	if !p.Addr.IsValid() {
		k.name = p.Name
	}
	return k
}

func sessionPlan(was, will *Config, old, p Peer, there, anew bool) PlannedSession {
	s := PlannedSession{Peer: p}
	ran := there && old.wanted()
	switch {
	case !p.wanted():
		if !there || old.Problem != p.Problem {
			s.Fate, s.Why = SessionRefused, []string{p.Problem}
		}
	case !ran:
		s.Fate = SessionComes
	default:
		s.Why = differing(old, p, "Password", "Waiting")
		for _, export := range []bool{false, true} {
			if old.Filters == p.Filters && !was.sameFilters(old, will, p, export) {
				s.Why = append(s.Why, map[bool]string{false: "import", true: "export"}[export]+" rules of "+p.Filters)
			}
		}
		switch {
		case anew || !p.sameSession(old):
			s.Fate = SessionAnew
		case len(s.Why) > 0:
			s.Fate = SessionChanges
		}
	}
	return s
}

// differing names the fields in which two structures of a type differ, with both values, but for those that are left out.
func differing(a, b any, but ...string) []string {
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	var out []string
	for i := range x.NumField() {
		name := x.Type().Field(i).Name
		if !slices.Contains(but, name) && !reflect.DeepEqual(x.Field(i).Interface(), y.Field(i).Interface()) {
			out = append(out, fmt.Sprintf("%s %s → %s", name, shown(x.Field(i)), shown(y.Field(i))))
		}
	}
	return out
}

// shown is a field's value for people.
func shown(v reflect.Value) string {
	if m, ok := v.Interface().(NextHopMode); ok {
		return [...]string{NextHopAuto: "Auto", NextHopSelf: "Self", NextHopKeep: "Keep"}[m]
	}
	if v.IsZero() {
		return "none"
	}
	return cmp.Or(strings.TrimSpace(fmt.Sprint(v.Interface())), "none")
}

// missingIn returns those of a sorted list that another one lacks.
func missingIn(list, other []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		if _, found := slices.BinarySearchFunc(other, p, netip.Prefix.Compare); !found {
			out = append(out, p)
		}
	}
	return out
}
