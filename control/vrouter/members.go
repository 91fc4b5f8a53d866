package vrouter

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/cluster"
)

// members are the nodes of the cluster.
type members struct {
	self      string
	nodes     map[string]*cluster.Node
	byAddr    index[netip.Addr, string] // node address → nodes
	nodeAddrs *bart.Table[netip.Addr]   // the keys of byAddr
	nodesWith map[familySet]int         // other nodes, by their families
}

func newMembers(self string) *members {
	return &members{
		self: self, nodes: map[string]*cluster.Node{}, byAddr: index[netip.Addr, string]{}, nodeAddrs: new(bart.Table[netip.Addr]), nodesWith: map[familySet]int{},
	}
}

// ownNode is this host's node; nil: it is not registered.
func (m *members) ownNode() *cluster.Node { return m.nodes[m.self] }

// replace replaces a node; nil: there is none any more. It returns the addresses of
// which it is new whether and how a node has them.
func (m *members) replace(name string, n *cluster.Node) set[netip.Addr] {
	old := m.nodes[name]
	if n != nil {
		m.nodes[name] = n
	} else {
		delete(m.nodes, name)
	}
	if sameNode(n, old) {
		return nil
	}
	changed := set[netip.Addr]{}
	if old != nil {
		for _, a := range old.Addrs() {
			if m.byAddr.remove(a, name); len(m.byAddr[a]) == 0 {
				m.nodeAddrs.Delete(single(a))
			}
			changed[a] = struct{}{}
		}
	}
	if n != nil {
		for _, a := range n.Addrs() {
			m.byAddr.add(a, name)
			m.nodeAddrs.Insert(single(a), a)
			changed[a] = struct{}{}
		}
	}
	return changed
}

// nodeAt returns the node with an address. Registration refuses a second one;
// should the store hold two, all hosts take the same.
func (m *members) nodeAt(a netip.Addr) (string, bool) {
	names := m.byAddr[a]
	if len(names) == 0 {
		return "", false
	}
	return slices.Min(names), true
}

// nodesWithin yields the nodes' own addresses that lie in a prefix, with their nodes.
func (m *members) nodesWithin(p netip.Prefix) iter.Seq2[string, netip.Addr] {
	return func(yield func(string, netip.Addr) bool) {
		for _, a := range m.nodeAddrs.Subnets(p) {
			if n, _ := m.nodeAt(a); !yield(n, a) {
				return
			}
		}
	}
}
