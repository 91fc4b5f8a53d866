package bgp

import (
	"maps"
	"slices"
	"strings"

	"github.com/routerd/routerd/store"
)

// memo keeps of a [Config] what follows from nodes, peers, settings and filters
// while these stay as they are: a block that comes or goes does not make all
// sessions anew, and in a mesh of nodes alone a Node makes its own. The zero value is
// empty and ready.
type memo struct {
	config   Config
	asked    string // the node
	revision uint64 // of the view
	good     bool
	apart    bool // as [View.apart] had it
}

// fits reports whether what it keeps is of what v is now.
func (m *memo) fits(v *View, node string) bool {
	return m.good && (v.synced || v.fromDisk) && m.asked == node && m.revision == v.revision
}

// follows reports whether what it keeps is of what v is now, but for the sessions with
// the nodes in v.moved.
func (m *memo) follows(v *View, node string) bool {
	return m.good && m.asked == node && m.revision >= v.since && len(v.moved) <= fewMoved && !v.moved[node] && m.apart && v.apart()
}

// desired is [Desired] at the cost of what has changed in v since the last call.
func (m *memo) desired(v *View, node string) (Config, error) {
	switch {
	case m.fits(v, node):
	case m.follows(v, node):
		m.config.Peers = newDerivation(v, node).follow(m.config.Peers)
	default:
		c, err := sessions(v, node)
		m.config, m.asked, m.good, m.apart = c, node, err == nil, v.apart()
		if err != nil {
			return Config{}, err
		}
	}
	m.revision, v.moved, v.since = v.revision, nil, v.revision
	c := m.config
	newDerivation(v, node).routes(&c)
	return c, nil
}

// apart reports whether of all Nodes a session of the mesh follows from those of its two ends,
// and another session from this node's: no node is a reflector that nodes have chosen, no BGPPeer
// selects nodes, lets connect from a range or names a node's address, and no two nodes have
// one address.
func (v *View) apart() bool {
	if _, ok := v.defaultNotes()[store.AnnotationReflectors]; ok {
		return false
	}
	for _, s := range v.peers {
		if addr, _, _ := parsePeerIP(s.PeerIP); s.PeerSelector != "" || s.listen != (store.ListenRange{}) || len(v.index().at[addr.WithZone("")]) > 0 {
			return false
		}
	}
	for _, n := range v.nodes {
		if n.reflection.Reflects {
			return false
		}
	}
	for _, names := range v.index().at {
		if len(names) > 1 {
			return false
		}
	}
	return true
}

// follow returns the peers with the sessions with the nodes in v.moved as they are to be now.
// Those of the mesh are the last, in the order of the nodes' names.
func (d *derivation) follow(peers []Peer) []Peer {
	first, _ := slices.BinarySearchFunc(peers, PeerMesh, func(p Peer, t PeerType) int { return strings.Compare(string(p.Type), string(t)) })
	out := append(make([]Peer, 0, len(peers)+2*len(d.v.moved)), peers[:first]...)
	rest, m := peers[first:], d.newMeshing()
	for _, name := range slices.Sorted(maps.Keys(d.v.moved)) {
		at, _ := slices.BinarySearchFunc(rest, name, func(p Peer, name string) int { return strings.Compare(p.Name, name) })
		out, rest = append(out, rest[:at]...), rest[at:]
		for len(rest) > 0 && rest[0].Name == name {
			rest = rest[1:]
		}
		out = slices.AppendSeq(out, m.with(name))
	}
	return append(out, rest...)
}
