package vrouter

import (
	"maps"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/nexthop"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/vxlan"
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

// node is what the core keeps of a Node resource.
type node struct {
	name     string
	revision store.Revision // of its last change
	addr     map[dataplane.Family]netip.Prefix
	public   map[dataplane.Family]netip.Addr // where tunnels may have to send to instead

	// By the family of the workloads.
	ipipAddr  map[dataplane.Family]netip.Addr
	vxlanAddr map[dataplane.Family]netip.Addr
	// By the family of the underlay.
	vxlanMAC map[dataplane.Family]dataplane.MAC

	labels map[string]string
	encaps nodeEncaps
}

// nodeEncaps is what a node publishes of the encapsulations of its packets.
type nodeEncaps struct {
	store.NodeEncaps
	accepts, uses set[dataplane.Encap]
	sorted        []dataplane.Encap // accepts
	sends         map[string]store.Mode
	refuses       map[dataplane.Encap]string
}

func newNodeEncaps(e *cluster.Encaps) nodeEncaps {
	return nodeEncaps{NodeEncaps: e.NodeEncaps, accepts: e.Accept, uses: e.Use, sorted: e.Accepted, sends: e.Send, refuses: e.Refuse}
}

// canAccept reports whether the node accepts an encapsulation. One that does not
// take part in live changes follows its pools at once.
func (f nodeEncaps) canAccept(encap dataplane.Encap) bool {
	_, ok := f.accepts[encap]
	return ok || !f.Published
}

func sameEncaps(a, b store.NodeEncaps) bool {
	return a.Published == b.Published && slices.Equal(a.Accepts, b.Accepts) && slices.Equal(a.Uses, b.Uses) &&
		maps.Equal(a.Sends, b.Sends) && maps.Equal(a.Refuses, b.Refuses)
}

// equal compares nodes but for the revision and what they publish.
func (n *node) equal(o *node) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.name == o.name && maps.Equal(n.addr, o.addr) && maps.Equal(n.public, o.public) &&
		maps.Equal(n.ipipAddr, o.ipipAddr) && maps.Equal(n.vxlanAddr, o.vxlanAddr) && maps.Equal(n.vxlanMAC, o.vxlanMAC) &&
		maps.Equal(n.labels, o.labels)
}

// newNode returns what the core keeps of a node; nil: there is none.
func newNode(r *cluster.Node) *node {
	if r == nil {
		return nil
	}
	n := &node{
		name: r.Name, revision: r.Revision, labels: r.Labels, encaps: newNodeEncaps(r.Encaps),
		public: byFamily(r.Public), ipipAddr: byFamily(r.IPIPAddr), vxlanAddr: byFamily(r.VXLANAddr),
		addr:     map[dataplane.Family]netip.Prefix{},
		vxlanMAC: map[dataplane.Family]dataplane.MAC{},
	}
	for f, name := range map[dataplane.Family]string{dataplane.IPv4: r.Name, dataplane.IPv6: r.Name + "-v6"} {
		if p := r.Addr.Of(f); p.IsValid() {
			n.addr[f] = p
		}
		if n.vxlanMAC[f] = r.VXLANMAC.Of(f); n.vxlanMAC[f] == (dataplane.MAC{}) {
			n.vxlanMAC[f] = vxlan.MAC(name)
		}
	}
	return n
}

// byFamily returns the families that have an address; nil: none has.
func byFamily(fs cluster.Families[netip.Addr]) map[dataplane.Family]netip.Addr {
	var out map[dataplane.Family]netip.Addr
	for _, f := range families() {
		if a := fs.Of(f); a.IsValid() {
			if out == nil {
				out = map[dataplane.Family]netip.Addr{}
			}
			out[f] = a
		}
	}
	return out
}

// pool is what the core keeps of an IPPool. Disabled pools count: disabling
// stops allocation, not routing.
type pool struct {
	name    string
	cidr    netip.Prefix
	encap   store.Encapsulation
	nodes   *selector.Selector // of the nodes that have workloads in it; nil: it selects nobody
	tunnels bool               // it gives addresses to tunnels
}

// family is that of the workloads.
func (p pool) family() dataplane.Family { return dataplane.FamilyOf(p.cidr.Addr()) }

func newPool(r *cluster.Pool) (pool, bool) {
	return pool{name: r.Name, cidr: r.CIDR, encap: r.Encap, nodes: r.Nodes, tunnels: r.Tunnels}, r.CIDR.IsValid()
}

// selects reports whether nodes with these labels have workloads in the pool.
func (p pool) selects(labels map[string]string) bool {
	return p.nodes != nil && p.nodes.Matches(selector.Map(labels))
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
func hostOf(n *node, u *network, f dataplane.Family) (dataplane.Host, bool) {
	addr, ok := n.addr[f]
	if !ok || u.underlay == nil {
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
	return dataplane.Host{Name: n.name, Addr: addr, Uplink: l.Name, UplinkMTU: l.MTU}, true
}
