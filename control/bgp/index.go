package bgp

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
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

// sessionsChanged notes that what [Desired] says of sessions may be another
// now.
func (v *View) sessionsChanged(k store.Kind) {
	v.revision++
	v.reflects = nil
	if k == store.KindNode || k == store.KindBGPPeer {
		v.idx = nil
	}
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

// memo keeps of a [Config] what follows from nodes, peers, settings and filters
// while these stay as they are: a block that comes or goes does not make all
// sessions anew. The zero value is empty and ready.
type memo struct {
	config   Config
	asked    string // the node
	revision uint64 // of the view
	good     bool
}

// fits reports whether what it keeps is of what v is now.
func (m *memo) fits(v *View, node string) bool {
	return m.good && (v.synced || v.fromDisk) && m.asked == node && m.revision == v.revision
}

// desired is [Desired] at the cost of what has changed in v since the last call.
func (m *memo) desired(v *View, node string) (Config, error) {
	if !m.fits(v, node) {
		c, err := sessions(v, node)
		m.config, m.asked, m.revision, m.good = c, node, v.revision, err == nil
		if err != nil {
			return Config{}, err
		}
	}
	c := m.config
	newDerivation(v, node).routes(&c)
	return c, nil
}
