package bgp

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
)

// index is what is looked up in a [View] again and again. It is made when it is
// needed and never changed; a change of a Node or a BGPPeer drops it.
type index struct {
	nodes []string                // names in order
	peers []string                // of the BGPPeers, in order
	at    map[netip.Addr][]string // nodes that have an address, in order
}

func (v *View) index() *index {
	if v.idx != nil {
		return v.idx
	}
	x := &index{
		nodes: slices.Sorted(maps.Keys(v.nodes)), peers: slices.Sorted(maps.Keys(v.peers)),
		at: make(map[netip.Addr][]string, len(v.nodes)),
	}
	for _, name := range x.nodes {
		for _, a := range v.nodes[name].addrs() {
			x.at[a] = append(x.at[a], name)
		}
	}
	v.idx = x
	return x
}

// nodeNames returns the names of all nodes in order.
func (v *View) nodeNames() []string { return v.index().nodes }

// with returns the index after a change of a Node. What it is made of stays as it was.
func (x *index) with(name string, was, now nodeFacts, there bool) *index {
	i, known := slices.BinarySearch(x.nodes, name)
	if there == known && slices.Equal(was.addrs(), now.addrs()) {
		return x
	}
	out := &index{nodes: x.nodes, peers: x.peers, at: maps.Clone(x.at)}
	switch {
	case there && !known:
		out.nodes = slices.Insert(slices.Clone(x.nodes), i, name)
	case known && !there:
		out.nodes = slices.Delete(slices.Clone(x.nodes), i, i+1)
	}
	for _, a := range was.addrs() {
		out.at[a] = slices.DeleteFunc(slices.Clone(out.at[a]), func(n string) bool { return n == name })
		if len(out.at[a]) == 0 {
			delete(out.at, a)
		}
	}
	for _, a := range now.addrs() {
		i, _ := slices.BinarySearch(out.at[a], name)
		out.at[a] = slices.Insert(slices.Clone(out.at[a]), i, name)
	}
	return out
}

// fewMoved is how many Nodes may change for what follows from them to be found one by one.
const fewMoved = 16

// nodeChanged notes that what [Desired] says of sessions may be another now for a Node
// that was something else, or is gone.
func (v *View) nodeChanged(name string, was nodeFacts) {
	v.revision++
	v.reflects = nil
	if v.moved == nil {
		v.moved = map[string]bool{}
	}
	v.moved[name] = true
	if now, there := v.nodes[name]; v.idx != nil && len(v.moved) <= fewMoved {
		v.idx = v.idx.with(name, was, now, there)
	} else {
		v.idx = nil
	}
}

// sessionsChanged is [View.nodeChanged] for something else.
func (v *View) sessionsChanged() {
	v.revision++
	v.reflects = nil
	v.moved, v.since = nil, v.revision
}

// lend brings the index of borrowed addresses from one state of a block to the
// next.
func (v *View) lend(was, now block) {
	for _, g := range was.borrowed {
		delete(v.borrowed[g.Node], g.Addr)
		if len(v.borrowed[g.Node]) == 0 {
			delete(v.borrowed, g.Node)
		}
	}
	for _, g := range now.borrowed {
		if v.borrowed[g.Node] == nil {
			v.borrowed[g.Node] = map[netip.Addr]bool{}
		}
		v.borrowed[g.Node][g.Addr] = true
	}
}

// concerns reports whether a change of a block is one for the node that the
// view is about.
func (v *View) concerns(cidr netip.Prefix, was, now block) bool {
	if v.self == "" || v.affinities[v.self][cidr] || was.holder == v.self || now.holder == v.self {
		return true
	}
	mine := func(g cluster.Borrowed) bool { return g.Node == v.self }
	return slices.ContainsFunc(was.borrowed, mine) || slices.ContainsFunc(now.borrowed, mine)
}
