package vrouter

import (
	"maps"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Path is the best path that BGP has for a prefix.
type Path struct {
	Prefix netip.Prefix
	nexthop.Announced
}

// PathUpdate is a step of BGP's best paths.
type PathUpdate struct {
	Reset bool // what was known before is void: Put is all there is
	Put   []Path
	Del   []netip.Prefix

	// Down names next hops to which nothing is to be sent any more, though the
	// withdrawals of the paths are still to come; Up those that may be used
	// again. Down counts before the paths of the same update, Up after them.
	Down, Up []netip.Addr

	// Synced says that the peers have announced all they know, so that what the
	// previous run left in the kernel may be swept.
	Synced bool
}

// Kinds lists what the core follows of the cluster.
func Kinds() []store.Kind {
	return []store.Kind{store.KindNode, store.KindIPPool, store.KindIPAMBlock, store.KindFelixConfiguration}
}

// canAccept reports whether a node accepts an encapsulation. One that does not take
// part in live changes follows its pools at once.
func canAccept(e *cluster.Encaps, encap dataplane.Encap) bool {
	_, ok := e.Accept[encap]
	return ok || !e.Published
}

func sameEncaps(a, b store.NodeEncaps) bool {
	return a.Published == b.Published && slices.Equal(a.Accepts, b.Accepts) && slices.Equal(a.Uses, b.Uses) &&
		maps.Equal(a.Sends, b.Sends) && maps.Equal(a.Refuses, b.Refuses)
}

// sameNode compares nodes but for the revision and what they publish.
func sameNode(a, b *cluster.Node) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Name == b.Name && a.Addr == b.Addr && a.Public == b.Public && a.IPIPAddr == b.IPIPAddr &&
		a.VXLANAddr == b.VXLANAddr && a.VXLANMAC == b.VXLANMAC && maps.Equal(a.Labels, b.Labels)
}

// vxlanMAC is the address of a node's VXLAN device over a family of the underlay:
// what it publishes, or else what follows from its name.
func vxlanMAC(n *cluster.Node, outer dataplane.Family) dataplane.MAC {
	if m := n.VXLANMAC.Of(outer); m != (dataplane.MAC{}) {
		return m
	}
	return derivedMAC(n.Name, outer)
}

// familyOf is that of a pool's workloads.
func familyOf(p *cluster.Pool) dataplane.Family { return dataplane.FamilyOf(p.CIDR.Addr()) }

// samePool compares what counts of pools here.
func samePool(a, b *cluster.Pool) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Name == b.Name && a.CIDR == b.CIDR && a.Encap == b.Encap && a.Nodes == b.Nodes && a.Tunnels == b.Tunnels
}

// selects reports whether nodes with these labels have workloads in a pool.
func selects(p *cluster.Pool, labels map[string]string) bool {
	return p.Nodes != nil && p.Nodes.Matches(selector.Map(labels))
}

// origin says why the store wants a prefix to go to a node.
type origin struct {
	node     string
	borrowed bool // a single address within another node's block
}

// maxBlockBits is the size of the largest block that a pool may have: /20 and
// /116, as Calico's validation has it. A larger one would let a single wrong
// key of the store take all of a host's traffic.
const maxBlockBits = 12

// blockOrigins returns what a block says about who has which prefix: the block
// as a whole for the node that holds it, and each address that another node
// borrowed from it.
func blockOrigins(b *cluster.Block) map[netip.Prefix]origin {
	if b == nil || b.CIDR.Addr().BitLen()-b.CIDR.Bits() > maxBlockBits {
		return nil
	}
	out := make(map[netip.Prefix]origin, 1+len(b.Borrowed))
	if b.Holder != "" {
		out[b.CIDR] = origin{node: b.Holder}
	}
	for _, g := range b.Borrowed {
		out[single(g.Addr)] = origin{node: g.Node, borrowed: true}
	}
	return out
}

// settings are the numbers of FelixConfiguration that drivers use. MTUs are in
// bytes, 0: computed.
type settings struct {
	vni        uint32
	port       uint16
	ipipMTU    int
	vxlanMTU   int
	vxlanMTUV6 int
}

// newSettings merges the objects that concern a node, weakest first.
func newSettings(specs ...*v3.FelixConfigurationSpec) settings {
	var s settings
	s.vni, s.port = store.VXLANNumbers(specs...)
	for _, f := range specs {
		if f == nil {
			continue
		}
		for to, v := range map[*int]*int{&s.ipipMTU: f.IPIPMTU, &s.vxlanMTU: f.VXLANMTU, &s.vxlanMTUV6: f.VXLANMTUV6} {
			if v != nil && saneMTU(*v) {
				*to = *v
			}
		}
	}
	return s
}

// tunnelMTU returns what the operator set for devices over a family of the
// underlay. Calico has no setting for IPIP over IPv6.
func (s settings) tunnelMTU(outer dataplane.Family) (ipip, vxlan int) {
	if outer == dataplane.IPv6 {
		return 0, s.vxlanMTUV6
	}
	return s.ipipMTU, s.vxlanMTU
}

// saneMTU reports whether IPv4 can work with it: from the 68 bytes of RFC 791,
// section 3.2, to what a packet's length can say.
func saneMTU(v int) bool { return v >= 68 && v <= 65535 }

// hostOf says how this host stands on the underlay in one family: which device
// holds the node's address, and that device's MTU.
func hostOf(n *cluster.Node, u *network, f dataplane.Family) (dataplane.Host, bool) {
	addr := n.Addr.Of(f)
	if !addr.IsValid() || u.underlay == nil {
		return dataplane.Host{}, false
	}
	i := slices.IndexFunc(u.underlay.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == addr.Addr() })
	if i < 0 {
		return dataplane.Host{}, false
	}
	l, ok := u.device(u.underlay.Addresses[i].Link)
	if !ok {
		return dataplane.Host{}, false
	}
	return dataplane.Host{Name: n.Name, Addr: addr, Uplink: l.Name, UplinkMTU: l.MTU}, true
}
