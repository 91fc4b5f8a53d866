package vrouter

import (
	"net/netip"

	"github.com/routerd/routerd/store"
)

func (t *table) setNode(name string, r *store.Node, rev store.Revision) {
	old := t.nodes[name]
	var n *node
	if r != nil {
		n = newNode(r, rev)
	}
	if name == t.self && (n == nil || len(n.addr) == 0) && old != nil {
		// Somebody deleted this host's own resource or its address: keep
		// forwarding on what was known. Registration puts it back.
		return
	}
	same := n.equal(old)
	sameForms := same && (n == nil || sameForms(n.forms.NodeForms, old.forms.NodeForms))
	t.setNodeForms(name, old, n)
	if n != nil {
		t.nodes[name] = n
	} else {
		delete(t.nodes, name)
	}
	if !same {
		t.indexNode(name, old, n)
	}
	switch {
	case name == t.self:
		t.setSelf(sameForms)
	case !sameForms:
		t.rechoose(name)
		t.refreshNode(name)
	}
}

// indexNode keeps the indexes of addresses.
func (t *table) indexNode(name string, old, n *node) {
	if old != nil {
		for _, a := range old.addr {
			t.byAddr.remove(a.Addr(), name)
			if len(t.byAddr[a.Addr()]) == 0 {
				t.nodeAddrs.Delete(single(a.Addr()))
			}
			t.markAround(a.Addr())
		}
	}
	if n != nil {
		for _, a := range n.addr {
			t.byAddr.add(a.Addr(), name)
			t.nodeAddrs.Insert(single(a.Addr()), a.Addr())
			t.markAround(a.Addr())
		}
	}
}

// setNodeForms counts what other nodes say that they send, and in which
// families they have addresses: both decide what this host has to take in.
func (t *table) setNodeForms(name string, old, n *node) {
	if name == t.self {
		return
	}
	for _, x := range []struct {
		node *node
		n    int
	}{{n, 1}, {old, -1}} {
		if x.node == nil {
			continue
		}
		changed := false
		for f := range x.node.forms.uses {
			changed = tally(t.peerUses, f, x.n) || changed
		}
		for pool, m := range x.node.forms.sends {
			changed = tally(t.peerSends, poolMode{pool, m}, x.n) || changed
		}
		if tally(t.nodesWith, x.node.families(), x.n) || changed {
			t.formsDirty = true
		}
	}
}

// tally adds n to a count, and reports whether the key came or went.
func tally[K comparable](counts map[K]int, k K, n int) bool {
	_, had := counts[k]
	counts[k] += n
	if counts[k] == 0 {
		delete(counts, k)
	}
	_, has := counts[k]
	return had != has
}

// poolMode is a mode in which a node sends the packets of a pool.
type poolMode struct {
	pool string
	mode store.Mode
}

// setSelf follows this host's own resource.
func (t *table) setSelf(sameForms bool) {
	settled := t.settleInflight()
	if sameForms && !settled {
		return
	}
	t.rebuildHost()
	t.rechooseAll()
	for k := range t.hops {
		t.refresh(k)
	}
}

// refreshNode brings all that depends on a node up to date: its next hops in
// place where they stay usable, and its prefixes anew where that may have
// changed.
func (t *table) refreshNode(name string) {
	for _, p := range t.pools {
		t.refresh(hopKey{pool: p.name, node: name, fam: p.family()})
	}
	for p := range t.byNode[name] {
		if !t.wellRouted(p, name) {
			t.dirty[p] = struct{}{}
		}
	}
	n := t.nodes[name]
	if n == nil {
		return
	}
	for _, a := range n.addr {
		for k := range t.hopsOf[a.Addr()] {
			for p := range t.byHop[k].prefixes {
				if !t.wellRouted(p, name) {
					t.dirty[p] = struct{}{}
				}
			}
		}
	}
}

// wellRouted reports whether a prefix has a route to a node, and as the way to
// it is now.
func (t *table) wellRouted(p netip.Prefix, name string) bool {
	c, ok := t.routes[p]
	return ok && c.aim != nil && c.aim.key.node == name && !t.stale[c.aim.key] && c.mtu == t.hops[c.aim.key].plan.mtu
}

// nodeAt returns the node with an address. Registration refuses a second one;
// should the store hold two, all hosts take the same.
func (t *table) nodeAt(a netip.Addr) (string, bool) {
	best, ok := "", false
	for n := range t.byAddr[a] {
		if !ok || n < best {
			best, ok = n, true
		}
	}
	return best, ok
}
