package bgp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"github.com/routerd/routerd/store"
)

// clone returns a view that may be changed without changing v: what it shares
// with v is only ever replaced. Claims on blocks and blocks are left out, for
// sessions do not depend on them.
func (v *View) clone() *View {
	return &View{
		nodes: maps.Clone(v.nodes), peers: maps.Clone(v.peers), confs: maps.Clone(v.confs), filters: maps.Clone(v.filters),
		pools: maps.Clone(v.pools), affinities: map[string]map[netip.Prefix]bool{}, blocks: map[netip.Prefix]block{}, synced: v.synced,
	}
}

// sessionsOf counts the sessions with somebody else that are configured for
// each node, whether they are up or not.
func sessionsOf(v *View) map[string]int {
	out := map[string]int{}
	for name, self := range v.nodes {
		if !self.bgp || len(self.addrs()) == 0 {
			continue
		}
		d := derivation{v: v, node: name, self: self}
		d.asn = d.asnOf(self)
		out[name] = 0
		for _, p := range d.peers() {
			if p.runs() {
				out[name]++
			}
		}
	}
	return out
}

// Bereft names the nodes that have a session now and would have none after
// changes to Nodes, BGPPeers and BGPConfigurations. A node that the changes
// themselves delete, or take out of BGP, is not among them, and neither is one
// that has nobody left to talk to.
func (v *View) Bereft(changes []store.Event) ([]string, error) {
	after := v.clone()
	if _, err := after.Apply(store.Batch{Events: changes}); err != nil {
		return nil, fmt.Errorf("judge the change: %w", err)
	}
	before, then := sessionsOf(v), sessionsOf(after)
	var out []string
	for _, name := range v.nodeNames() {
		left, stays := then[name]
		if before[name] > 0 && stays && left == 0 && len(then) > 1 {
			out = append(out, name)
		}
	}
	return out, nil
}

// Bereft asks [View.Bereft] of what the datastore holds now. The error is
// [ErrNotSynced] while that is not known.
func (c *Controller) Bereft(_ context.Context, changes []store.Event) ([]string, error) {
	// The feed of the store does not wait while the sessions of all nodes are
	// made.
	c.mu.Lock()
	v := c.view.clone()
	c.mu.Unlock()
	if !v.synced {
		return nil, ErrNotSynced
	}
	return v.Bereft(changes)
}
