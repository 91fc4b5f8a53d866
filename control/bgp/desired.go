package bgp

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// Errors of [Desired] that resolve themselves when the store delivers more.
var (
	// ErrNotSynced says that the store's state is not complete yet.
	ErrNotSynced = errors.New("the datastore has not been read yet")

	// ErrNoNode says that this host's Node resource does not exist yet.
	ErrNoNode = errors.New("this host's Node resource does not exist yet")

	// ErrNoAddress says that the Node has no address to speak from.
	ErrNoAddress = errors.New("this host's Node resource has neither spec.bgp.ipv4Address nor ipv6Address: it takes no part in BGP")
)

// Desired says what the speaker on a node should do. It is pure and its result
// depends only on the content of v, not on the order in which it came.
func Desired(v *View, node string) (Config, error) {
	if !v.synced {
		return Config{}, ErrNotSynced
	}
	self, ok := v.nodes[node]
	if !ok {
		return Config{}, ErrNoNode
	}
	if !self.bgp || len(self.addrs()) == 0 {
		return Config{}, ErrNoAddress
	}
	d := derivation{v: v, node: node, self: self}
	d.asn = d.asnOf(self)
	c := Config{
		Node: node, ASN: d.asn, RouterID: routerID(node, self),
		ListenPort: v.portOf(node), ListenAddrs: d.listenAddrs(),
		NextHop: self.addr.Addr(), NextHop6: self.addr6.Addr(),
	}
	c.Peers = d.peers()
	c.Announce = d.announce()
	c.Pools, c.Own, c.Lent = d.importSets()
	c.Ignored = d.ignored()
	return c, nil
}

// derivation is what the parts of [Desired] share.
type derivation struct {
	v    *View
	node string
	self nodeFacts
	asn  uint32
}

// routerID is a node's BGP identifier (RFC 6286): its IPv4 address. A node
// without one has a number that is hashed from its name, as Calico makes it.
func routerID(node string, self nodeFacts) netip.Addr {
	if self.addr.IsValid() {
		return self.addr.Addr()
	}
	sum := sha256.Sum256([]byte(node))
	if sum[0] > 223 { // not in the range of multicast
		sum[0] -= 32
	}
	return netip.AddrFrom4([4]byte(sum[:4]))
}

// ipTo returns the node's own address of a peer's family; invalid: none.
func (d *derivation) ipTo(peer netip.Addr) netip.Addr {
	if peer.Is4() {
		return d.self.addr.Addr()
	}
	return d.self.addr6.Addr()
}

// isSelf reports whether an address is one of the node's own.
func (d *derivation) isSelf(a netip.Addr) bool { return slices.Contains(d.self.addrs(), a) }

// asnOf returns a node's AS: its own, else the default BGPConfiguration's,
// else 64512.
func (d *derivation) asnOf(n nodeFacts) uint32 {
	if n.asn != 0 {
		return n.asn
	}
	if c := d.v.defaults(); c.ASNumber != nil && *c.ASNumber != 0 {
		return uint32(*c.ASNumber)
	}
	return DefaultASN
}

// defaults returns the default BGPConfiguration's spec.
func (v *View) defaults() v3.BGPConfigurationSpec {
	if c, ok := v.confs["default"]; ok {
		return c.Spec
	}
	return v3.BGPConfigurationSpec{}
}

// portOf returns the port that a node listens on.
func (v *View) portOf(node string) uint16 {
	if c, ok := v.confs["node."+node]; ok && c.Spec.ListenPort != 0 {
		return c.Spec.ListenPort
	}
	if p := v.defaults().ListenPort; p != 0 {
		return p
	}
	return DefaultPort
}

func (d *derivation) listenAddrs() []netip.Addr {
	mode := d.v.defaults().BindMode
	if c, ok := d.v.confs["node."+d.node]; ok && c.Spec.BindMode != nil {
		mode = c.Spec.BindMode
	}
	out := d.self.addrs()
	if mode != nil && *mode == v3.BindModeNodeIP {
		return out
	}
	for i, a := range out {
		if out[i] = netip.IPv4Unspecified(); a.Is6() {
			out[i] = netip.IPv6Unspecified()
		}
	}
	return out
}

// peers returns explicit peers and the mesh. An explicit BGPPeer wins over the
// mesh session to the same node: it carries settings that somebody asked for,
// a password perhaps, and an address has one session. Among BGPPeers the
// global ones come first, then by name; first wins by address and port.
func (d *derivation) peers() []Peer {
	peers := slices.Concat(d.explicit(), d.mesh())
	seen := map[netip.Addr]Peer{}
	var out []Peer
	for _, p := range peers {
		if !p.Addr.IsValid() {
			out = append(out, p)
			continue
		}
		first, dup := seen[p.Addr]
		switch {
		case !dup:
			seen[p.Addr] = p
		case p.Type == PeerMesh && first.Type == PeerMesh:
			p.Problem = fmt.Sprintf("the address is also that of node %s: give one of the two another spec.bgp.%s", first.Name, addressField(p.Addr))
		case p.Type == PeerMesh || p.Port == first.Port:
			continue // identity is address and port: the first is this session
		default:
			p.Problem = fmt.Sprintf("BGPPeer %s already has a session with %s on port %d; one session per address is supported", first.Name, p.Addr, first.Port)
		}
		out = append(out, p)
	}
	slices.SortStableFunc(out, func(a, b Peer) int {
		return strings.Compare(string(a.Type), string(b.Type))
	})
	return out
}

// addressField names the field of a Node that holds an address of this family.
func addressField(a netip.Addr) string {
	if a.Is4() {
		return "ipv4Address"
	}
	return "ipv6Address"
}

// mesh returns the node-to-node mesh: unless it is disabled, every node
// without a cluster id peers with every other one, over each family that both
// have.
func (d *derivation) mesh() []Peer {
	conf := d.v.defaults()
	if conf.NodeToNodeMeshEnabled != nil && !*conf.NodeToNodeMeshEnabled || d.self.cluster != "" {
		return nil
	}
	problem := ""
	restart := defaultRestartTime
	if conf.NodeMeshPassword != nil {
		problem = "BGPConfiguration default: nodeMeshPassword is not supported by this version; the session is not run without it"
	}
	if t := conf.NodeMeshMaxRestartTime; t != nil {
		restart = t.Duration
		if p := restartProblem("BGPConfiguration default: nodeMeshMaxRestartTime", restart); p != "" {
			problem = p
		}
	}
	var peers []Peer
	for _, name := range d.v.nodeNames() {
		n := d.v.nodes[name]
		if name == d.node || n.cluster != "" {
			continue
		}
		for _, addr := range n.addrs() {
			if !d.ipTo(addr).IsValid() {
				continue
			}
			p := Peer{
				Name: name, Type: PeerMesh, Addr: addr, Port: d.v.portOf(name),
				// A peer without an AS is expected to have this node's, not the
				// global one: so Calico's nodes do.
				ASN: n.asn, Source: d.ipTo(addr), PoolsOnly: true, Problem: problem,
				Passive:     d.passiveTo(addr),
				RestartTime: restart, HoldTime: defaultHoldTime,
			}
			if p.ASN == 0 {
				p.ASN = d.asn
			}
			if d.isSelf(p.Addr) {
				p.Problem = fmt.Sprintf("node %s has the address of this node, %s: give one of the two another spec.bgp.%s", name, p.Addr, addressField(p.Addr))
			}
			peers = append(peers, p)
		}
	}
	return peers
}

// passiveTo implements the rule that Calico's nodes share: passive is the side
// for which the peer's address is the greater one as a string.
func (d *derivation) passiveTo(peer netip.Addr) bool { return peer.String() > d.ipTo(peer).String() }

func restartProblem(field string, t time.Duration) string {
	if t >= time.Second && t <= maxRestartTime {
		return ""
	}
	return fmt.Sprintf("%s is %s: want 1s to %s (RFC 4724 section 3)", field, t, maxRestartTime)
}

// announce returns the node's blocks and the addresses it borrowed, of the
// families that it has an address of to be their next hop.
func (d *derivation) announce() []netip.Prefix {
	set := map[netip.Prefix]bool{}
	for cidr := range d.own() {
		if !d.hidden(cidr) && d.ipTo(cidr.Addr()).IsValid() {
			set[cidr] = true
		}
	}
	for _, b := range d.v.blocks {
		for _, g := range b.guests {
			host := netip.PrefixFrom(g.addr, g.addr.BitLen())
			if g.node == d.node && d.ipTo(g.addr).IsValid() && !d.hidden(host) {
				set[host] = true
			}
		}
	}
	return sorted(set)
}

// own returns the blocks with a confirmed affinity. The block, not the
// affinity, says who owns it where the two differ.
func (d *derivation) own() map[netip.Prefix]bool {
	set := map[netip.Prefix]bool{}
	for cidr, confirmed := range d.v.affinities[d.node] {
		b, known := d.v.blocks[cidr]
		if confirmed && (!known || b.holder == "" || b.holder == d.node) {
			set[cidr] = true
		}
	}
	return set
}

// hidden reports whether a prefix lies in a pool that must not be announced.
func (d *derivation) hidden(p netip.Prefix) bool {
	for _, pool := range d.v.pools {
		if pool.noExport && pool.cidr.Bits() <= p.Bits() && pool.cidr.Contains(p.Addr()) {
			return true
		}
	}
	return false
}

// importSets returns what import is judged by.
func (d *derivation) importSets() (pools, own, lent []netip.Prefix) {
	poolSet := map[netip.Prefix]bool{}
	for _, p := range d.v.pools {
		poolSet[p.cidr] = true
	}
	ownSet := d.own()
	lentSet := map[netip.Prefix]bool{}
	for cidr := range ownSet {
		for _, g := range d.v.blocks[cidr].guests {
			if g.node != d.node {
				lentSet[netip.PrefixFrom(g.addr, g.addr.BitLen())] = true
			}
		}
	}
	for _, p := range []netip.Prefix{d.self.addr, d.self.addr6} {
		if p.IsValid() {
			ownSet[p.Masked()] = true
		}
	}
	return sorted(poolSet), sorted(ownSet), sorted(lentSet)
}

// ignored names what BGPConfiguration asks for and this version does not do.
func (d *derivation) ignored() []string {
	var l []string
	for _, name := range []string{"default", "node." + d.node} {
		c, ok := d.v.confs[name]
		if !ok {
			continue
		}
		s := c.Spec
		for _, f := range []struct {
			field string
			set   bool
		}{
			{"serviceClusterIPs", len(s.ServiceClusterIPs) > 0},
			{"serviceExternalIPs", len(s.ServiceExternalIPs) > 0},
			{"serviceLoadBalancerIPs", len(s.ServiceLoadBalancerIPs) > 0},
			{"communities", len(s.Communities) > 0},
			{"prefixAdvertisements", len(s.PrefixAdvertisements) > 0},
			{"localWorkloadPeeringIPV4", s.LocalWorkloadPeeringIPV4 != ""},
			{"localWorkloadPeeringIPV6", s.LocalWorkloadPeeringIPV6 != ""},
		} {
			if f.set {
				l = append(l, fmt.Sprintf("BGPConfiguration %s: %s is not supported by this version", name, f.field))
			}
		}
	}
	return l
}

func sorted(set map[netip.Prefix]bool) []netip.Prefix {
	return slices.SortedFunc(maps.Keys(set), func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
}
