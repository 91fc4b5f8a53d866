package vrouter

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Path is the best path that BGP has for a prefix.
type Path struct {
	Prefix  netip.Prefix
	NextHop netip.Addr // as announced
	Peer    string     // who announced it, for people
	Set     HopSet     // the next hops of all paths of equal cost, if there are several
}

// PathUpdate is a step of BGP's best paths.
type PathUpdate struct {
	Reset bool // what was known before is void: Put is all there is
	Put   []Path
	Del   []netip.Prefix

	// Lost names next hops that nobody is to be sent to any more, though the
	// withdrawals of the paths are still to come; Found those of which that is
	// over. Lost counts before the paths of the same update, Found after them.
	Lost, Found []netip.Addr

	// Synced says that the peers have told all they know, so that what an
	// earlier life of the daemon left in the kernel may be swept.
	Synced bool
}

// Kinds lists what the core wants to see of the store.
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
	forms  nodeForms
}

// nodeForms is what a node publishes of the forms of its packets.
type nodeForms struct {
	store.NodeForms
	accepts, uses set[dataplane.Form]
	sorted        []dataplane.Form // accepts
	sends         map[string]store.Mode
	refuses       map[dataplane.Form]string
}

func newNodeForms(f store.NodeForms) nodeForms {
	n := nodeForms{
		NodeForms: f, accepts: parseForms(f.Accepts), uses: parseForms(f.Uses),
		sends: map[string]store.Mode{}, refuses: map[dataplane.Form]string{},
	}
	n.sorted = sortedForms(n.accepts)
	for pool, s := range f.Sends {
		if m, err := store.ParseMode(s); err == nil {
			n.sends[pool] = m
		}
	}
	for s, why := range f.Refuses {
		if form, err := dataplane.ParseForm(s); err == nil {
			n.refuses[form] = why
		}
	}
	return n
}

// takesIn reports whether the node accepts a form. One that does not take part
// in live changes follows its pools at once.
func (f nodeForms) takesIn(form dataplane.Form) bool {
	_, ok := f.accepts[form]
	return ok || !f.Published
}

func sameForms(a, b store.NodeForms) bool {
	return a.Published == b.Published && slices.Equal(a.Accepts, b.Accepts) && slices.Equal(a.Uses, b.Uses) &&
		maps.Equal(a.Sends, b.Sends) && maps.Equal(a.Refuses, b.Refuses)
}

// equal compares nodes but for the revision and what they publish of forms.
func (n *node) equal(o *node) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.name == o.name && maps.Equal(n.addr, o.addr) && maps.Equal(n.public, o.public) &&
		maps.Equal(n.ipipAddr, o.ipipAddr) && maps.Equal(n.vxlanAddr, o.vxlanAddr) && maps.Equal(n.vxlanMAC, o.vxlanMAC) &&
		maps.Equal(n.labels, o.labels)
}

// newNode reads a Node resource. Members that do not parse are taken as not
// set: one bad resource must not stop the others, and validation refuses them
// where they are written.
func newNode(r *store.Node, rev store.Revision) *node {
	n := &node{
		name:      r.Name,
		revision:  rev,
		addr:      map[dataplane.Family]netip.Prefix{},
		public:    map[dataplane.Family]netip.Addr{},
		ipipAddr:  map[dataplane.Family]netip.Addr{},
		vxlanAddr: map[dataplane.Family]netip.Addr{},
		vxlanMAC:  map[dataplane.Family]dataplane.MAC{},
		labels:    r.Labels,
		forms:     newNodeForms(store.FormsOf(r)),
	}
	for _, a := range store.TunnelAddresses(r) {
		n.public[dataplane.FamilyOf(a)] = a
	}
	if r.Spec.BGP != nil {
		for _, s := range []string{r.Spec.BGP.IPv4Address, r.Spec.BGP.IPv6Address} {
			if p, err := store.ParseAddress(s); err == nil {
				n.addr[dataplane.FamilyOf(p.Addr())] = p
			}
		}
		n.setTunnel(n.ipipAddr, r.Spec.BGP.IPv4IPIPTunnelAddr)
	}
	n.setTunnel(n.ipipAddr, r.Annotations[store.AnnotationIPv6IPIPTunnelAddr])
	for f, v := range map[dataplane.Family][3]string{
		dataplane.IPv4: {r.Spec.IPv4VXLANTunnelAddr, r.Spec.VXLANTunnelMACAddr, r.Name},
		dataplane.IPv6: {r.Spec.IPv6VXLANTunnelAddr, r.Spec.VXLANTunnelMACAddrV6, r.Name + "-v6"},
	} {
		n.setTunnel(n.vxlanAddr, v[0])
		mac, err := dataplane.ParseMAC(v[1])
		if err != nil {
			mac = vxlan.MAC(v[2])
		}
		n.vxlanMAC[f] = mac
	}
	return n
}

func (n *node) setTunnel(to map[dataplane.Family]netip.Addr, s string) {
	if a := parseAddr(s); a.IsValid() {
		to[dataplane.FamilyOf(a)] = a
	}
}

func parseAddr(s string) netip.Addr {
	if a, err := netip.ParseAddr(s); err == nil {
		return a
	}
	return netip.Addr{}
}

// pool is what the core keeps of an IPPool. Disabled pools count: disabling
// stops allocation, not routing.
type pool struct {
	name    string
	cidr    netip.Prefix
	encap   store.Encapsulation
	nodes   string // selector of the nodes that have workloads in it
	tunnels bool   // it gives addresses to tunnels
}

// family is that of the workloads.
func (p pool) family() dataplane.Family { return dataplane.FamilyOf(p.cidr.Addr()) }

func newPool(r *v3.IPPool) (pool, bool) {
	cidr, err := netip.ParsePrefix(r.Spec.CIDR)
	if err != nil {
		return pool{}, false
	}
	uses := r.Spec.AllowedUses
	return pool{
		name: r.Name, cidr: cidr.Masked(), encap: store.EncapsulationOf(r), nodes: r.Spec.NodeSelector,
		tunnels: !r.Spec.Disabled && (len(uses) == 0 || slices.Contains(uses, v3.IPPoolAllowedUseTunnel)),
	}, true
}

// selects reports whether nodes with these labels have workloads in the pool. A
// selector that cannot be read selects nobody, as in IPAM.
func (p pool) selects(labels map[string]string) bool {
	if p.nodes == "" {
		return true
	}
	sel, err := selector.Parse(p.nodes)
	return err == nil && sel.Matches(selector.Map(labels))
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
func blockOrigins(b *store.Block) map[netip.Prefix]origin {
	cidr, err := netip.ParsePrefix(b.CIDR)
	if err != nil || cidr != cidr.Masked() || cidr.Addr().BitLen()-cidr.Bits() > maxBlockBits {
		return nil
	}
	out := map[netip.Prefix]origin{}
	owner := blockOwner(b)
	if owner != "" {
		out[cidr] = origin{node: owner}
	}
	for ord, attr := range b.Allocations {
		if attr == nil || *attr < 0 || *attr >= len(b.Attributes) {
			continue
		}
		holder := b.Attributes[*attr].Secondary["node"]
		if holder == "" || holder == owner {
			continue
		}
		if a, ok := addOrdinal(cidr, ord); ok {
			out[netip.PrefixFrom(a, a.BitLen())] = origin{node: holder, borrowed: true}
		}
	}
	return out
}

// blockOwner returns the node that holds a block, if one does. Decoding has
// brought very old blocks into the present form.
func blockOwner(b *store.Block) string {
	if b.Affinity != nil {
		if host, ok := strings.CutPrefix(*b.Affinity, "host:"); ok {
			return host
		}
	}
	return ""
}

// addOrdinal returns the address at an offset from the start of a block. It
// reports false when that lies outside.
func addOrdinal(cidr netip.Prefix, ord int) (netip.Addr, bool) {
	if ord < 0 {
		return netip.Addr{}, false
	}
	raw := cidr.Addr().AsSlice()
	carry := ord
	for i := len(raw) - 1; i >= 0 && carry > 0; i-- {
		carry += int(raw[i])
		raw[i] = byte(carry)
		carry >>= 8
	}
	a, ok := netip.AddrFromSlice(raw)
	return a, ok && carry == 0 && cidr.Contains(a)
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
func hostOf(n *node, u *dataplane.Underlay, f dataplane.Family) (dataplane.Host, bool) {
	addr, ok := n.addr[f]
	if !ok || u == nil {
		return dataplane.Host{}, false
	}
	i := slices.IndexFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == addr.Addr() })
	if i < 0 {
		return dataplane.Host{}, false
	}
	l, ok := ownDevice(u, u.Addresses[i].Link)
	if !ok {
		return dataplane.Host{}, false
	}
	return dataplane.Host{Name: n.name, Addr: addr, Uplink: l.Name, UplinkMTU: l.MTU}, true
}
