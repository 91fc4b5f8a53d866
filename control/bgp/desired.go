package bgp

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
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
	c, err := sessions(v, node)
	if err != nil {
		return Config{}, err
	}
	newDerivation(v, node).routes(&c)
	return c, nil
}

// sessions is [Desired] without what depends on blocks, pools and Services.
func sessions(v *View, node string) (Config, error) {
	if !v.synced && !v.fromDisk {
		return Config{}, ErrNotSynced
	}
	self, ok := v.nodes[node]
	if !ok {
		return Config{}, ErrNoNode
	}
	if !self.bgp || len(self.addrs()) == 0 {
		return Config{}, ErrNoAddress
	}
	d := newDerivation(v, node)
	c := Config{
		Node: node, ASN: d.asn, RouterID: routerID(node, self),
		ListenPort: v.portOf(node),
		NextHop:    self.addr.Addr(), NextHop6: self.addr6.Addr(),
	}
	newer := v.confs["default"].newer
	c.LocalPref, c.LocalPref6 = preferenceOf(newer.Priority4), preferenceOf(newer.Priority6)
	c.Peers, c.Callers = d.peers()
	c.ListenAddrs = d.listenAddrs(c.Peers)
	c.Filters = d.filters(c.Peers)
	c.Ignored = d.ignored()
	var err error
	if c.Collectors, err = v.bmpOf(node); err != nil {
		c.Ignored = append(c.Ignored, err.Error())
	}
	return c, nil
}

// routes fills in what depends on blocks, pools and Services.
func (d *derivation) routes(c *Config) {
	c.Announce, c.Hidden = d.announce(c.Filters, c.Peers)
	c.Tags, c.Leaving, c.Services = d.tags(c.Announce), d.leaving, d.of
	c.Pools, c.Own, c.Borrowed = d.importSets(c.Peers)
	d.inject(c)
	d.drain(c)
}

// derivation is what the parts of [Desired] share.
type derivation struct {
	v    *View
	node string
	self nodeFacts
	asn  uint32

	// Of the addresses of Services that are announced by themselves; set by announce.
	of      map[netip.Addr]service.Announcement // shared: not to be changed
	leaving map[netip.Prefix]bool               // their endpoints here are about to go
}

func newDerivation(v *View, node string) *derivation {
	d := &derivation{v: v, node: node, self: v.nodes[node]}
	d.asn = d.asnOf(d.self)
	return d
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

// defaultNotes returns the default BGPConfiguration's annotations.
func (v *View) defaultNotes() map[string]string {
	if c, ok := v.confs["default"]; ok {
		return c.Annotations
	}
	return nil
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

// listenAddrs returns where the node listens: on its own addresses, or on all of
// their families. Peers on links come to addresses that come and go with the
// devices, so for them it is all of IPv6: a listener of another address is a new
// one for all sessions. In mode NodeIP there is no listener.
func (d *derivation) listenAddrs(peers []Peer) []netip.Addr {
	mode := d.v.defaults().BindMode
	if c, ok := d.v.confs["node."+d.node]; ok && c.Spec.BindMode != nil {
		mode = c.Spec.BindMode
	}
	out := d.self.addrs()
	if mode != nil && *mode == v3.BindModeNodeIP {
		for _, p := range peers {
			if at := loopbackOf(p.Addr); p.Local && p.wanted() && !slices.Contains(out, at) {
				out = append(out, at)
			}
		}
		return out
	}
	for i, a := range out {
		if out[i] = netip.IPv4Unspecified(); a.Is6() {
			out[i] = netip.IPv6Unspecified()
		}
	}
	hears := func(p Peer) bool { return p.Interface != "" && p.wanted() }
	if !d.self.addr6.IsValid() && slices.ContainsFunc(peers, hears) {
		out = append(out, netip.IPv6Unspecified())
	}
	return out
}

// peers returns explicit peers and the mesh. An explicit BGPPeer wins over the
// mesh session to the same node: it carries settings that an operator asked for,
// a password perhaps, and an address has one session. Among BGPPeers the
// global ones come first, then by name; first wins by address and port.
func (d *derivation) peers() (out []Peer, callers map[netip.Addr]Password) {
	seen, others := map[netip.Addr]Peer{}, map[netip.AddrPort]bool{}
	links := map[string]Peer{}
	for p := range d.asked() {
		if p.Interface != "" && d.usable(p) { // one that cannot run takes no other's place
			first, dup := links[p.Interface]
			switch {
			case !dup:
				links[p.Interface] = p
			case !p.Addr.IsValid() || !first.Addr.IsValid():
				p.Problem = fmt.Sprintf("BGPPeer %s already has a session on the link of %s: give both their spec.peerIP", first.Name, p.Interface)
			}
		}
		if !p.Addr.IsValid() {
			out = append(out, p)
			continue
		}
		first, dup := seen[p.Addr]
		switch {
		case !dup:
			seen[p.Addr] = p
		case p.betweenNodes() && first.betweenNodes():
			p.Problem = fmt.Sprintf("the address is also that of node %s: give one of the two another spec.bgp.%s", first.Name, addressField(p.Addr))
		case p.betweenNodes() || p.Port == first.Port || others[netip.AddrPortFrom(p.Addr, p.Port)]:
			continue // identity is address and port: the first is this session
		default:
			p.Beside, others[netip.AddrPortFrom(p.Addr, p.Port)] = true, true
		}
		out = append(out, p)
	}
	out, callers = d.withCallers(out, seen)
	slices.SortStableFunc(out, func(a, b Peer) int {
		return strings.Compare(string(a.Type), string(b.Type))
	})
	return out, callers
}

// usable reports whether nothing is wrong with a peer or its filters.
func (d *derivation) usable(p Peer) bool {
	l := []Peer{p}
	d.filters(l)
	return l[0].wanted()
}

// asked are all sessions that a resource asks for, in the order of precedence.
func (d *derivation) asked() iter.Seq[Peer] {
	return func(yield func(Peer) bool) {
		for _, some := range []iter.Seq[Peer]{d.explicit(), d.mesh()} {
			for p := range some {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// addressField names the field of a Node that holds an address of this family.
func addressField(a netip.Addr) string {
	if a.Is4() {
		return "ipv4Address"
	}
	return "ipv6Address"
}

// inMesh reports whether a node takes part in the mesh: it does not reflect. A
// node with a cluster id that no BGPPeer gives a session with a node does not do
// so yet, and stays in the mesh until then, so that it is never without routes.
func (d *derivation) inMesh(name string, n nodeFacts) bool {
	if n.cluster == "" {
		return true
	}
	for _, s := range d.v.peers {
		addr, _, _ := parsePeerIP(s.PeerIP)
		_, toNode := d.nodeAt(addr)
		switch {
		case s.peerSel != nil && s.peerSel.Matches(n.labels), slices.Contains(n.addrs(), addr):
			return false
		case (s.peerSel != nil || toNode) && s.isFor(name, n):
			return false
		}
	}
	return true
}

// mesh returns the node-to-node mesh: unless it is disabled, every node that
// is in it peers with every other one, over each family that both have, but for those that have each other's
// routes by reflectors that the nodes have chosen; and the sessions with these.
func (d *derivation) mesh() iter.Seq[Peer] {
	return func(yield func(Peer) bool) { d.eachMate(yield) }
}

func (d *derivation) eachMate(yield func(Peer) bool) {
	m := d.newMeshing()
	if !m.meshed && len(d.v.reflection().serving) == 0 {
		return
	}
	for _, name := range d.v.nodeNames() {
		for p := range m.with(name) {
			if !yield(p) {
				return
			}
		}
	}
}

// meshing is what a node's sessions with the others have in common.
type meshing struct {
	*derivation
	meshed  bool   // this node is in the mesh
	problem string // of all
	secret  SecretRef
	restart time.Duration
	watch   store.BFD
	limit   uint32
}

func (d *derivation) newMeshing() *meshing {
	conf := d.v.defaults()
	m := &meshing{derivation: d, meshed: d.v.meshed() && d.inMesh(d.node, d.self), restart: defaultRestartTime}
	var wrong string
	if m.secret, wrong = secretOf(conf.NodeMeshPassword); wrong != "" {
		m.problem = "BGPConfiguration default: nodeMeshPassword" + wrong
	}
	var err error
	if m.watch, err = bfdOf(d.v.defaultNotes()); err != nil {
		m.problem = "BGPConfiguration default: " + err.Error()
	}
	if m.limit, err = meshLimit(d.v.defaultNotes()); err != nil {
		m.problem = "BGPConfiguration default: " + err.Error()
	}
	if t := conf.NodeMeshMaxRestartTime; t != nil {
		m.restart = t.Duration
		if p := restartProblem("BGPConfiguration default: nodeMeshMaxRestartTime", m.restart); p != "" {
			m.problem = p
		}
	}
	return m
}

// with returns the sessions with another node, if there is one of that name.
func (m *meshing) with(name string) iter.Seq[Peer] {
	return func(yield func(Peer) bool) { m.eachWith(name, yield) }
}

func (m *meshing) eachWith(name string, yield func(Peer) bool) {
	n, ok := m.v.nodes[name]
	if !ok || name == m.node {
		return
	}
	reflected := m.v.reflected(m.node, name)
	if !reflected && (!m.meshed || !m.inMesh(name, n) || m.v.released(m.node, name)) {
		return
	}
	for _, addr := range n.addrs() {
		if !m.ipTo(addr).IsValid() {
			continue
		}
		p := Peer{
			Name: name, Type: PeerMesh, Addr: addr, Port: m.v.portOf(name),
			// A peer without an AS is expected to have this node's, not the
			// global one: so Calico's nodes do.
			ASN: n.asn, Source: m.ipTo(addr), PoolsOnly: true, Problem: m.problem,
			Passive: m.passiveTo(addr), Secret: m.secret,
			RestartTime: m.restart, HoldTime: defaultHoldTime, BFD: m.watch, MaxPrefixes: m.limit,
		}
		if p.ASN == 0 {
			p.ASN = m.asn
		}
		m.sign(&p, n)
		if m.isSelf(p.Addr) {
			p.Problem = fmt.Sprintf("node %s has the address of this node, %s: give one of the two another spec.bgp.%s", name, p.Addr, addressField(p.Addr))
		}
		if reflected {
			m.asReflected(&p)
		}
		if !yield(p) {
			return
		}
	}
}

// asReflected makes a session between nodes one of which the other has the routes of all by. Each reflector has a cluster id of its
// own, its router id (RFC 4456 section 7), so that what one sends the other is not taken for a loop; a route that comes back to where it was
// is found by either's.
func (d *derivation) asReflected(p *Peer) {
	r := d.v.reflection()
	p.Type = PeerReflected
	if r.reflects(p.Name) && p.MaxPrefixes == MeshMaxPrefixes {
		p.MaxPrefixes = 0 // the default is for what one node announces
	}
	if !r.reflects(d.node) {
		return
	}
	p.Reflect = true
	if !r.reflects(p.Name) {
		p.ClusterID = routerID(d.node, d.self)
	}
}

// meshLimit reads how many prefixes a node of the mesh may announce.
func meshLimit(notes map[string]string) (uint32, error) {
	switch v, ok := notes[store.AnnotationMaxPrefixes]; {
	case !ok:
		return MeshMaxPrefixes, nil
	case v == "off":
		return 0, nil
	default:
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n == 0 {
			return 0, fmt.Errorf("annotation %s is %q: want a number of prefixes from 1 on, or off", store.AnnotationMaxPrefixes, v)
		}
		return uint32(n), nil
	}
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

// announce returns the node's blocks, the addresses it borrowed and the ranges
// of services, of the families that it has an address of to be their next hop;
// and what of that is announced only where a filter accepts it.
func (d *derivation) announce(filters map[string]Filter, peers []Peer) (all, hidden []netip.Prefix) {
	set, hide := map[netip.Prefix]bool{}, map[netip.Prefix]bool{}
	may := func(p netip.Prefix) {
		switch {
		case !d.carries(p, peers):
		case !d.hidden(p):
			set[p] = true
		case exportAccepts(filters):
			// An Accept overrides disableBGPExport.
			set[p], hide[p] = true, true
		}
	}
	for cidr := range d.own() {
		may(cidr)
	}
	for a := range d.v.borrowed[d.node] {
		may(hostRoute(a))
	}
	if d.self.labels[excludeLabel] != "true" {
		for _, p := range d.services() {
			may(p)
		}
		d.single(may)
	}
	return sorted(set), sorted(hide)
}

// carries reports whether a prefix may be announced at all: the node has an address of its
// family to be the next hop, or a session that gives one.
func (d *derivation) carries(p netip.Prefix, peers []Peer) bool {
	return d.ipTo(p.Addr()).IsValid() || slices.ContainsFunc(peers, func(q Peer) bool { return q.wanted() && q.carriesOf(p) })
}

// exportAccepts reports whether a filter may let out what is hidden.
func exportAccepts(filters map[string]Filter) bool {
	for _, f := range filters {
		for _, r := range slices.Concat(f.Export4, f.Export6) {
			if r.Accept {
				return true
			}
		}
	}
	return false
}

// filters returns the filters that the peers name, and gives a Problem to those
// whose filters are missing.
func (d *derivation) filters(peers []Peer) map[string]Filter {
	out := map[string]Filter{}
	for i := range peers {
		p := &peers[i]
		if p.Filters == "" || !p.wanted() {
			continue
		}
		for name := range strings.SplitSeq(p.Filters, ",") {
			if _, ok := d.v.filters[name]; !ok {
				p.Problem = fmt.Sprintf("spec.filters: there is no BGPFilter %s; the session is not run without it", name)
				break
			}
		}
		if !p.wanted() {
			continue
		}
		for name := range strings.SplitSeq(p.Filters, ",") {
			out[name] = d.v.filters[name]
		}
	}
	return out
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
func (d *derivation) importSets(peers []Peer) (pools, own, borrowed []netip.Prefix) {
	poolSet := map[netip.Prefix]bool{}
	for _, p := range d.v.pools {
		poolSet[p.cidr] = true
	}
	ownSet := d.own()
	borrowedSet := map[netip.Prefix]bool{}
	for cidr := range ownSet {
		for _, g := range d.v.blocks[cidr].borrowed {
			if g.Node != d.node {
				borrowedSet[netip.PrefixFrom(g.Addr, g.Addr.BitLen())] = true
			}
		}
	}
	for _, p := range []netip.Prefix{d.self.addr, d.self.addr6} {
		if p.IsValid() {
			ownSet[p.Masked()] = true
		}
	}
	// A peer that announced one with a higher preference would win.
	for a := range d.v.borrowed[d.node] {
		ownSet[hostRoute(a)] = true
	}
	// A way to a peer is not for another one to say.
	for i := range peers {
		if p := &peers[i]; p.ReachableBy.IsValid() && p.runs() {
			ownSet[hostRoute(p.Addr)] = true
		}
	}
	// What every node announces has no route.
	for _, p := range d.services() {
		ownSet[p] = true
	}
	if d.v.hasServices {
		// Of these every node knows where they lead, by its own proxy of services.
		for _, p := range d.v.services.Ranges().All() {
			ownSet[p] = true
		}
	}
	return sorted(poolSet), sorted(ownSet), sorted(borrowedSet)
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
			{"localWorkloadPeeringIPV4", s.LocalWorkloadPeeringIPV4 != ""},
			{"localWorkloadPeeringIPV6", s.LocalWorkloadPeeringIPV6 != ""},
		} {
			if f.set {
				l = append(l, fmt.Sprintf("BGPConfiguration %s: %s is not supported by this version", name, f.field))
			}
		}
		l = append(l, c.newer.unused(name)...)
	}
	if why := d.v.reflection().why; why != "" {
		l = append(l, "BGPConfiguration default: "+why)
	}
	return l
}

func sorted(set map[netip.Prefix]bool) []netip.Prefix {
	return slices.SortedFunc(maps.Keys(set), comparePrefixes)
}

// comparePrefixes is the order of a [Config]'s lists.
func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
