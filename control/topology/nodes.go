package topology

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/cluster"
)

// Nodes are the nodes of the cluster.
type Nodes struct {
	Self   string                   // this host's name
	ByName map[string]*cluster.Node // to be read; [Nodes.Replace] changes it

	byAddr Index[netip.Addr, string]
	addrs  *bart.Table[netip.Addr] // the keys of byAddr
}

// NewNodes returns no nodes yet.
func NewNodes(self string) *Nodes {
	return &Nodes{Self: self, ByName: map[string]*cluster.Node{}, byAddr: NewIndex[netip.Addr, string](), addrs: new(bart.Table[netip.Addr])}
}

// Own is this host's node; nil: it is not registered.
func (m *Nodes) Own() *cluster.Node { return m.ByName[m.Self] }

// Replace replaces a node; nil: there is none any more. It returns the addresses of
// which it is new whether and how a node has them.
func (m *Nodes) Replace(name string, n *cluster.Node) map[netip.Addr]struct{} {
	old := m.ByName[name]
	if n != nil {
		m.ByName[name] = n
	} else {
		delete(m.ByName, name)
	}
	if SameNode(n, old) {
		return nil
	}
	changed := map[netip.Addr]struct{}{}
	if old != nil {
		for _, a := range old.Addrs() {
			if m.byAddr.Remove(a, name); m.byAddr.Len(a) == 0 {
				m.addrs.Delete(Single(a))
			}
			changed[a] = struct{}{}
		}
	}
	if n != nil {
		for _, a := range n.Addrs() {
			m.byAddr.Add(a, name)
			m.addrs.Insert(Single(a), a)
			changed[a] = struct{}{}
		}
	}
	return changed
}

// At returns the node with an address. Registration refuses a second one;
// should the store hold two, all hosts take the same.
func (m *Nodes) At(a netip.Addr) (string, bool) {
	switch n := m.byAddr.Len(a); n {
	case 0:
		return "", false
	case 1:
		return first(m.byAddr.Of(a)), true
	}
	return slices.Min(slices.Collect(m.byAddr.Of(a))), true
}

// Within yields the nodes' own addresses that lie in a prefix, with their nodes.
func (m *Nodes) Within(p netip.Prefix) iter.Seq2[string, netip.Addr] {
	return func(yield func(string, netip.Addr) bool) {
		for _, a := range m.addrs.Subnets(p) {
			if n, _ := m.At(a); !yield(n, a) {
				return
			}
		}
	}
}

// SameNode compares nodes but for the revision and what they publish.
func SameNode(a, b *cluster.Node) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Name == b.Name && a.Addr == b.Addr && a.Public == b.Public && a.IPIPAddr == b.IPIPAddr &&
		a.VXLANAddr == b.VXLANAddr && a.VXLANMAC == b.VXLANMAC && maps.Equal(a.Labels, b.Labels)
}

// Single is the prefix of one address.
func Single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func first(names iter.Seq[string]) string {
	for name := range names {
		return name
	}
	return ""
}
