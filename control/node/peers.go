package node

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// peers is what the watch has shown of the other nodes. It is safe for concurrent
// use.
type peers struct {
	mu    sync.Mutex
	nodes map[string]peer
	// own is the revision at which the watch showed this host's own Node last: it has shown
	// all earlier changes of Nodes by then, and of no other kind does a change say so.
	own   store.Revision
	moved chan struct{} // closed when own grows
}

// peer is another node.
type peer struct {
	node  *cluster.Node
	since store.Revision // from when on its addresses have been seen
}

func newPeers() *peers { return &peers{nodes: map[string]peer{}, moved: make(chan struct{})} }

// apply takes over a step of the cluster's copy; self is no peer.
func (p *peers) apply(self string, s cluster.Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ch := range s.Changes {
		switch {
		case ch.Key.Kind != store.KindNode:
			continue
		case ch.Key.Name == self:
			p.shown(ch.Object.Revision)
			continue
		case ch.Err != nil:
			continue
		}
		n, ok := ch.Value.(*cluster.Node)
		if !ok {
			delete(p.nodes, ch.Key.Name)
			continue
		}
		since := n.Revision
		if old, ok := p.nodes[n.Name]; ok && old.node.Addr == n.Addr {
			since = old.since // it wrote something else
		}
		p.nodes[n.Name] = peer{n, since}
	}
}

// shown takes note of a revision of this host's own Node. The lock is held.
func (p *peers) shown(rev store.Revision) {
	if rev <= p.own {
		return
	}
	p.own = rev
	close(p.moved)
	p.moved = make(chan struct{})
}

// await returns when the watch has shown all Nodes up to a revision at which this host wrote
// its own.
func (p *peers) await(ctx context.Context, rev store.Revision) error {
	for {
		p.mu.Lock()
		at, moved := p.own, p.moved
		p.mu.Unlock()
		if at >= rev {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("wait for this host's Node of revision %d in the datastore's watch: %w", rev, context.Cause(ctx))
		}
	}
}

// holder returns which other node has one of the addresses, the first by name, and
// which of them. With a revision, only those count that had it before: of two that
// raced, the later one gives way.
func (p *peers) holder(addrs []netip.Prefix, before store.Revision) (name string, addr netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for other, o := range p.nodes {
		if before != 0 && o.since > before || name != "" && name < other {
			continue
		}
		for _, a := range addrs {
			if o.node.Addr.Of(dataplane.FamilyOf(a.Addr())).Addr() == a.Addr() {
				name, addr = other, a.Addr()
			}
		}
	}
	return name, addr
}

// addrs lists the addresses of all.
func (p *peers) addrs() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]netip.Addr, 0, len(p.nodes))
	for _, o := range p.nodes {
		for _, f := range dataplane.Families() {
			if a := o.node.Addr.Of(f); a.IsValid() {
				out = append(out, a.Addr())
			}
		}
	}
	return out
}
