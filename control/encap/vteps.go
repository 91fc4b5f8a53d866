package encap

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/vxlan"
)

// vteps says which node each VTEP address and MAC belongs to. Two nodes with one of
// them would share a neighbour or FDB entry, and one would have the other's packets.
type vteps struct {
	nodes  *topology.Nodes
	blocks *topology.Blocks // with what IPAM assigned to tunnels
	byAddr topology.Index[netip.Addr, string]
	byMAC  topology.Index[vtepMAC, string]

	contested set[netip.Addr] // claimed by another node than IPAM assigned them to
	refused   []string        // what conflicts found
	examined  bool            // and that is so still
}

// vtepMAC is the MAC of a VTEP over a family of the underlay, which has a device of
// its own.
type vtepMAC struct {
	outer dataplane.Family
	mac   dataplane.MAC
}

func newVTEPs(n *topology.Nodes, b *topology.Blocks) *vteps {
	return &vteps{
		nodes: n, blocks: b, contested: set[netip.Addr]{},
		byAddr: topology.NewIndex[netip.Addr, string](), byMAC: topology.NewIndex[vtepMAC, string](),
	}
}

// contest notes whether another node claims an address than the one that IPAM assigned
// it to.
func (v *vteps) contest(a netip.Addr) {
	owner := v.blocks.Assigned(a)
	delete(v.contested, a)
	for name := range v.byAddr.Of(a) {
		if owner != "" && name != owner {
			v.contested[a] = struct{}{}
		}
	}
}

// replaceNode applies a change of a node, nil where there was none or is none any
// more, and adds the nodes of which it may be new whether they are refused. The nodes
// have it already.
func (v *vteps) replaceNode(name string, old, n *cluster.Node, changed set[string]) {
	v.examined = false
	if old != nil {
		for _, a := range vxlanAddrs(old) {
			v.byAddr.Remove(a, name)
			changed.add(v.byAddr.Of(a))
			v.contest(a)
		}
		for _, m := range vtepMACs(old) {
			v.byMAC.Remove(m, name)
			changed.add(v.byMAC.Of(m))
		}
	}
	if n != nil {
		for _, a := range vxlanAddrs(n) {
			changed.add(v.byAddr.Of(a))
			v.byAddr.Add(a, name)
			v.contest(a)
		}
		for _, m := range vtepMACs(n) {
			changed.add(v.byMAC.Of(m))
			v.byMAC.Add(m, name)
		}
	}
	if (old == nil) == (n == nil) {
		return
	}
	for a := range v.contested {
		if v.blocks.Assigned(a) == name {
			changed.add(v.byAddr.Of(a))
		}
	}
}

// setBlock applies what a block assigns to tunnels, nil where there was none or is none
// any more, and adds the nodes of which it may be new whether they are refused. The blocks
// have it already.
func (v *vteps) setBlock(old, b *cluster.Block, changed set[string]) {
	var before, now []cluster.Assigned
	if old != nil {
		before = old.Tunnels
	}
	if b != nil {
		now = b.Tunnels
	}
	if slices.Equal(before, now) {
		return
	}
	v.examined = false
	for _, a := range slices.Concat(before, now) {
		changed.add(v.byAddr.Of(a.Addr))
		v.contest(a.Addr)
	}
}

// refuses says why a node's VTEP must not be used for workloads of one family over
// an underlay of another, nil if it may.
//
// The owner of an address is the node that IPAM assigned it to, if there is that
// node, and of a MAC the node from whose name it is derived; where neither says so,
// the first by name, on every host the same.
func (v *vteps) refuses(n *cluster.Node, inner, outer dataplane.Family) error {
	if len(v.contested) == 0 && !v.byAddr.AnyShared() && !v.byMAC.AnyShared() {
		return nil // no two claims meet anywhere, as nearly always
	}
	a, m := n.VXLANAddr.Of(inner), vtepMAC{outer, vxlanMAC(n, outer)}
	owner := v.blocks.Assigned(a)
	switch is := v.nodes.ByName[owner] != nil; {
	case is && owner != n.Name:
		return fmt.Errorf("node %s claims the VXLAN tunnel address %s, which IPAM assigned to node %s", n.Name, a, owner)
	case !is && v.byAddr.Len(a) > 1:
		if first := slices.Min(slices.Collect(v.byAddr.Of(a))); first != n.Name {
			return fmt.Errorf("nodes %s and %s both claim the VXLAN tunnel address %s, which IPAM assigned to neither: it counts as that of %s", first, n.Name, a, first)
		}
	}
	if v.byMAC.Len(m) > 1 {
		claimants := slices.Collect(v.byMAC.Of(m))
		by, owner := "", slices.Min(claimants)
		for _, name := range claimants {
			if m.mac == derivedMAC(name, outer) {
				by, owner = ", from whose name it is derived", name
			}
		}
		if owner != n.Name {
			return fmt.Errorf("nodes %s and %s both claim the VXLAN MAC %s: it counts as that of %s%s", owner, n.Name, m.mac, owner, by)
		}
	}
	return nil
}

// conflicts lists what is refused of whom, once. Nobody changes the list.
func (v *vteps) conflicts() []string {
	if v.examined {
		return v.refused
	}
	suspects := set[string]{}
	for a := range v.contested {
		suspects.add(v.byAddr.Of(a))
	}
	for _, names := range v.byAddr.Shared() {
		suspects.add(slices.Values(names))
	}
	for _, names := range v.byMAC.Shared() {
		suspects.add(slices.Values(names))
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(suspects)) {
		for _, inner := range families() {
			for _, outer := range families() {
				if err := v.refuses(v.nodes.ByName[name], inner, outer); err != nil && !slices.Contains(out, err.Error()) {
					out = append(out, err.Error())
				}
			}
		}
	}
	v.refused, v.examined = out, true
	return out
}

func vxlanAddrs(n *cluster.Node) []netip.Addr {
	return slices.DeleteFunc([]netip.Addr{n.VXLANAddr.IPv4, n.VXLANAddr.IPv6}, func(a netip.Addr) bool { return !a.IsValid() })
}

func vtepMACs(n *cluster.Node) []vtepMAC {
	var out []vtepMAC
	for _, outer := range families() {
		if n.Addr.Of(outer).IsValid() {
			out = append(out, vtepMAC{outer, vxlanMAC(n, outer)})
		}
	}
	return out
}

// derivedMAC is the MAC of a node that publishes none.
func derivedMAC(name string, outer dataplane.Family) dataplane.MAC {
	if outer == dataplane.IPv6 {
		name += "-v6"
	}
	return vxlan.MAC(name)
}

// vxlanMAC is the address of a node's VXLAN device over a family of the underlay:
// what it publishes, or else what follows from its name.
func vxlanMAC(n *cluster.Node, outer dataplane.Family) dataplane.MAC {
	if m := n.VXLANMAC.Of(outer); m != (dataplane.MAC{}) {
		return m
	}
	return derivedMAC(n.Name, outer)
}
