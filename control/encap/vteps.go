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
	"github.com/routerd/routerd/store"
)

// vteps says which node each VTEP address and MAC belongs to. Two nodes with one of
// them would share a neighbour or FDB entry, and one would have the other's packets.
type vteps struct {
	byAddr   topology.Index[netip.Addr, string]
	byMAC    topology.Index[vtepMAC, string]
	nodes    set[string]
	assigned map[netip.Addr]string // by IPAM, to the node of a tunnel
	owned    topology.Index[string, netip.Addr]
	blocks   map[store.Key][]cluster.Assigned
	refused  []string // what conflicts found
	examined bool     // and that is so still
}

// vtepMAC is the MAC of a VTEP over a family of the underlay, which has a device of
// its own.
type vtepMAC struct {
	outer dataplane.Family
	mac   dataplane.MAC
}

func newVTEPs() *vteps {
	return &vteps{
		byAddr: topology.Index[netip.Addr, string]{}, byMAC: topology.Index[vtepMAC, string]{},
		nodes: set[string]{}, assigned: map[netip.Addr]string{}, owned: topology.Index[string, netip.Addr]{}, blocks: map[store.Key][]cluster.Assigned{},
	}
}

// replaceNode applies a change of a node, nil where there was none or is none any
// more, and adds the nodes of which it may be new whether they are refused.
func (v *vteps) replaceNode(name string, old, n *cluster.Node, changed set[string]) {
	v.examined = false
	if old != nil {
		for _, a := range vxlanAddrs(old) {
			v.byAddr.Remove(a, name)
			changed.add(v.byAddr[a])
		}
		for _, m := range vtepMACs(old) {
			v.byMAC.Remove(m, name)
			changed.add(v.byMAC[m])
		}
	}
	if n != nil {
		for _, a := range vxlanAddrs(n) {
			changed.add(v.byAddr[a])
			v.byAddr.Add(a, name)
		}
		for _, m := range vtepMACs(n) {
			changed.add(v.byMAC[m])
			v.byMAC.Add(m, name)
		}
	}
	if _, had := v.nodes[name]; had == (n != nil) {
		return
	}
	if n == nil {
		delete(v.nodes, name)
	} else {
		v.nodes[name] = struct{}{}
	}
	for _, a := range v.owned[name] {
		changed.add(v.byAddr[a])
	}
}

// setBlock applies what a block assigns to tunnels, and adds the nodes of which it
// may be new whether they are refused.
func (v *vteps) setBlock(key store.Key, b *cluster.Block, changed set[string]) {
	var now []cluster.Assigned
	if b != nil {
		now = b.Tunnels
	}
	before := v.blocks[key]
	if slices.Equal(before, now) {
		return
	}
	v.examined = false
	for _, a := range before {
		delete(v.assigned, a.Addr)
		v.owned.Remove(a.Node, a.Addr)
	}
	for _, a := range now {
		v.assigned[a.Addr] = a.Node
		v.owned.Add(a.Node, a.Addr)
	}
	for _, a := range slices.Concat(before, now) {
		changed.add(v.byAddr[a.Addr])
	}
	if v.blocks[key] = now; len(now) == 0 {
		delete(v.blocks, key)
	}
}

// refuses says why a node's VTEP must not be used for workloads of one family over
// an underlay of another, nil if it may.
//
// The owner of an address is the node that IPAM assigned it to, if there is that
// node, and of a MAC the node from whose name it is derived; where neither says so,
// the first by name, on every host the same.
func (v *vteps) refuses(n *cluster.Node, inner, outer dataplane.Family) error {
	a, m := n.VXLANAddr.Of(inner), vtepMAC{outer, vxlanMAC(n, outer)}
	owner := v.assigned[a]
	_, is := v.nodes[owner]
	switch claimants := v.byAddr[a]; {
	case is && owner != n.Name:
		return fmt.Errorf("node %s claims the VXLAN tunnel address %s, which IPAM assigned to node %s", n.Name, a, owner)
	case !is && len(claimants) > 1 && slices.Min(claimants) != n.Name:
		return fmt.Errorf("nodes %s and %s both claim the VXLAN tunnel address %s, which IPAM assigned to neither: it counts as that of %s", slices.Min(claimants), n.Name, a, slices.Min(claimants))
	}
	if claimants := v.byMAC[m]; len(claimants) > 1 {
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
func (v *vteps) conflicts(nodes map[string]*cluster.Node) []string {
	if v.examined {
		return v.refused
	}
	suspects := set[string]{}
	for a, names := range v.byAddr {
		if _, is := v.nodes[v.assigned[a]]; is || len(names) > 1 {
			suspects.add(names)
		}
	}
	for _, names := range v.byMAC {
		if len(names) > 1 {
			suspects.add(names)
		}
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(suspects)) {
		for _, inner := range families() {
			for _, outer := range families() {
				if err := v.refuses(nodes[name], inner, outer); err != nil && !slices.Contains(out, err.Error()) {
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
