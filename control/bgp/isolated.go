package bgp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/routerd/routerd/control/bgp/engine/wire"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// clone returns a view that may be changed without changing v: what it shares
// with v is only ever replaced. Claims on blocks and blocks are left out, for
// sessions do not depend on them.
func (v *View) clone() *View {
	out := &View{
		injection: v.injection,
		nodes:     maps.Clone(v.nodes), peers: maps.Clone(v.peers), confs: maps.Clone(v.confs), filters: maps.Clone(v.filters),
		synced: v.synced, idx: v.idx, self: v.self, hasServices: v.hasServices,
		services: service.NewTable(v.self), cidrs: map[string][]string{},
	}
	out.pools, out.affinities = map[string]pool{}, map[string]map[netip.Prefix]bool{}
	out.blocks, out.borrowed = map[netip.Prefix]block{}, map[string]map[netip.Addr]bool{}
	return out
}

// speaks reports whether a node takes part in BGP.
func (v *View) speaks(name string) bool {
	n, ok := v.nodes[name]
	return ok && n.bgp && len(n.addrs()) > 0
}

// hasSession reports whether a node has a session with a peer that is
// configured and carries something, whether it is up or not. It looks no
// further than the first.
func (v *View) hasSession(name string) bool {
	if !v.speaks(name) {
		return false
	}
	d := newDerivation(v, name)
	taken := map[netip.Addr]bool{}
	for p := range d.asked() {
		if p.Addr.IsValid() {
			if taken[p.Addr] {
				continue // the first is this session
			}
			taken[p.Addr] = true
		}
		l := []Peer{p}
		if filters := d.filters(l); l[0].wanted() && !mute(l[0], filters) {
			return true
		}
	}
	return false
}

// mute reports whether a peer's filters let nothing in and nothing out. Only
// rules without conditions are looked at: what others match depends on routes,
// and the change of a filter of that sort is not to be refused.
func mute(p Peer, filters map[string]Filter) bool {
	if p.Filters == "" || p.Interface != "" { // of two families: what is open is not looked for
		return false
	}
	for _, f := range p.carries() {
		if !closed(p, filters, f, true) || !closed(p, filters, f, false) {
			return false
		}
	}
	return true
}

// closed reports whether nothing of a family passes a peer's filters.
func closed(p Peer, filters map[string]Filter, f wire.Family, export bool) bool {
	bits := f.MaxBits()
	for name := range strings.SplitSeq(p.Filters, ",") {
		for _, r := range filters[name].rules(export, f == wire.IPv6) {
			if r.Accept || r.always(bits) {
				return !r.Accept
			}
		}
	}
	return false
}

// always reports whether a rule matches every route of a family whose
// addresses have so many bits.
func (rule FilterRule) always(bits int) bool {
	open := !rule.CIDR.IsValid() || rule.CIDR.Bits() == 0
	return open && !rule.Not && rule.Min == 0 && rule.Max == bits && !rule.RemotePeers && rule.Interface == "" &&
		rule.PeerType == "" && rule.Priority == 0 && rule.Community == "" && len(rule.ASPath) == 0
}

// Isolated names the nodes that have a session now and would have none after
// changes to Nodes, BGPPeers, BGPConfigurations and BGPFilters. A session whose
// filters are missing, or reject everything in both directions, is none; one
// that only sends or only listens is. A node that the changes themselves
// delete, or take out of BGP, is not among them, and neither is one that is the
// only one left. It takes 0.1 s for a cluster of 1,000 nodes.
func (v *View) Isolated(changes []store.Event) ([]string, error) {
	after := v.clone()
	var step cluster.Step
	for _, ev := range changes {
		step.Changes = append(step.Changes, cluster.Decode(v.self, ev))
	}
	if _, err := after.Apply(step); err != nil {
		return nil, fmt.Errorf("judge the change: %w", err)
	}
	speakers := 0
	for name := range after.nodes {
		if after.speaks(name) {
			speakers++
		}
	}
	var out []string
	for _, name := range after.nodeNames() {
		if speakers > 1 && after.speaks(name) && !after.hasSession(name) && v.hasSession(name) {
			out = append(out, name)
		}
	}
	return out, nil
}

// Isolated is [View.Isolated] of what the datastore holds now. The error is
// [ErrNotSynced] while that is not known.
func (c *Controller) Isolated(_ context.Context, changes []store.Event) ([]string, error) {
	// The feed of the store does not wait while the sessions of all nodes are
	// made.
	c.mu.Lock()
	v := c.view.clone()
	c.mu.Unlock()
	if !v.synced {
		return nil, ErrNotSynced
	}
	return v.Isolated(changes)
}
