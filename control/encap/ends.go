package encap

import (
	"fmt"
	"maps"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/crosssubnet"
	"github.com/routerd/routerd/dataplane/direct"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

func families() []dataplane.Family { return []dataplane.Family{dataplane.IPv4, dataplane.IPv6} }

// driverFor returns the driver that carries packets of an encapsulation.
func driverFor(e store.Encapsulation) dataplane.Driver {
	switch e {
	case store.IPIP:
		return ipip.Driver{}
	case store.VXLAN:
		return vxlan.Driver{}
	case store.IPIPCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: ipip.Driver{}}
	case store.VXLANCrossSubnet:
		return crosssubnet.Driver{Near: direct.Driver{}, Far: vxlan.Driver{}}
	case store.Direct:
	}
	return direct.Driver{}
}

// driverOf returns the driver of an encapsulation.
func driverOf(f dataplane.Encap) dataplane.Driver {
	switch f.Driver {
	case dataplane.DriverIPIP:
		return ipip.Driver{}
	case dataplane.DriverVXLAN:
		return vxlan.Driver{}
	}
	return direct.Driver{}
}

// outerFor chooses the family of the underlay over which two hosts exchange
// packets of a family of workloads: that family itself, or else the one that
// both have. Both come to the same answer.
func outerFor(inner dataplane.Family, mine, theirs func(dataplane.Family) bool) (dataplane.Family, bool) {
	other := dataplane.IPv4
	if inner == dataplane.IPv4 {
		other = dataplane.IPv6
	}
	for _, f := range []dataplane.Family{inner, other} {
		if mine(f) && theirs(f) {
			return f, true
		}
	}
	return 0, false
}

// ends says how this host and the others appear to drivers, and by that which
// encapsulations there can be between them.
type ends struct {
	nodes     *topology.Nodes
	pools     *topology.Pools
	blocks    *topology.Blocks
	network   *topology.Network
	nodesWith map[familySet]int                   // other nodes, by their families
	hosts     map[dataplane.Family]dataplane.Host // this host's place on the underlay
	vteps     *vteps
	slots     map[dataplane.Encap]int                         // which VXLAN device is whose
	reach     map[dataplane.Family]map[string]dataplane.Reach // what was measured of the underlay, by node
}

func newEnds(n *topology.Nodes, p *topology.Pools, b *topology.Blocks, u *topology.Network) *ends {
	return &ends{
		nodes: n, pools: p, blocks: b, network: u, nodesWith: map[familySet]int{},
		vteps: newVTEPs(n, b), hosts: map[dataplane.Family]dataplane.Host{}, slots: map[dataplane.Encap]int{}, reach: map[dataplane.Family]map[string]dataplane.Reach{},
	}
}

// place finds this host's place on the underlay, and reports whether it is new.
// What cannot be found at the moment (the device is gone, say) stays as it was.
func (e *ends) place() bool {
	changed := false
	for _, f := range families() {
		if n := e.nodes.Own(); n != nil {
			if h, ok := hostOf(n, e.network, f); ok && h != e.hosts[f] {
				e.hosts[f] = h
				changed = true
			}
		}
	}
	return changed
}

func (e *ends) hasHost(f dataplane.Family) bool {
	_, ok := e.hosts[f]
	return ok
}

// hostFor is this host as a driver sees it, for workloads of a family over an
// underlay of a family, with the numbers of a mode or an encapsulation.
func (e *ends) hostFor(inner, outer dataplane.Family, vni uint32, port uint16) dataplane.Host {
	h, n := e.hosts[outer], e.nodes.Own()
	h.Family = inner
	h.VXLANVNI, h.VXLANPort = vni, port
	h.IPIPAddr, h.VXLANAddr, h.VXLANMAC = n.IPIPAddr.Of(inner), n.VXLANAddr.Of(inner), vxlanMAC(n, outer)
	h.IPIPMTU, h.VXLANMTU = e.pools.Settings.TunnelMTU(outer)
	h.VXLANDevice = vxlan.DeviceName(outer, e.slots[dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: outer, VNI: vni, Port: port}])
	return h
}

// peerFor is a node as a driver sees it.
func (e *ends) peerFor(n *cluster.Node, inner, outer dataplane.Family) dataplane.Peer {
	r := e.reach[outer][n.Name]
	p := dataplane.Peer{
		Name: n.Name, Addr: n.Addr.Of(outer).Addr(), Near: r.Near, TunnelAddr: r.Addr, TunnelPort: r.Port,
	}
	if e.vteps.refuses(n, inner, outer) == nil {
		p.VXLANAddr, p.VXLANMAC = n.VXLANAddr.Of(inner), vxlanMAC(n, outer)
	}
	return p
}

// encapOf is what travels to a node in a mode. It does not depend on the ends of tunnels.
func (e *ends) encapOf(m store.Mode, inner, outer dataplane.Family, n *cluster.Node) (dataplane.Encap, error) {
	h := e.hosts[outer]
	h.Family, h.VXLANVNI, h.VXLANPort = inner, m.VNI, m.Port
	return driverFor(m.Encapsulation).Encap(h, dataplane.Peer{Name: n.Name, Addr: n.Addr.Of(outer).Addr(), Near: e.reach[outer][n.Name].Near})
}

// outers lists the families of the underlay over which this host may be sent
// packets of a family of workloads: the usual one, and the other where some
// node has no address of the usual one.
func (e *ends) outers(inner dataplane.Family) []dataplane.Family {
	var out []dataplane.Family
	for _, f := range families() {
		if !e.hasHost(f) {
			continue
		}
		needed := f == inner || !e.hasHost(inner)
		for has, n := range e.nodesWith {
			if o, ok := outerFor(inner, e.hasHost, has.family); n > 0 && ok && o == f {
				needed = true
			}
		}
		if needed {
			out = append(out, f)
		}
	}
	return out
}

// familySet says in which families a node has an address.
type familySet struct{ ipv4, ipv6 bool }

func (s familySet) family(f dataplane.Family) bool {
	return f == dataplane.IPv4 && s.ipv4 || f == dataplane.IPv6 && s.ipv6
}

func familiesOf(n *cluster.Node) familySet {
	return familySet{n.Addr.IPv4.IsValid(), n.Addr.IPv6.IsValid()}
}

// encapsOf lists what nodes may send to this host in a mode, for workloads of a
// family.
func (e *ends) encapsOf(m store.Mode, inner dataplane.Family) []dataplane.Encap {
	var out []dataplane.Encap
	for _, outer := range e.outers(inner) {
		out = append(out, driverFor(m.Encapsulation).Encaps(e.hostFor(inner, outer, m.VNI, m.Port))...)
	}
	return out
}

// WantedEncaps lists what this host has to accept by its pools' modes.
func (e *ends) WantedEncaps() map[dataplane.Encap]struct{} {
	out := set[dataplane.Encap]{}
	for _, p := range e.pools.ByName {
		for _, f := range e.encapsOf(e.pools.Mode(p), p.Family()) {
			out[f] = struct{}{}
		}
	}
	return out
}

func sortedEncaps(s set[dataplane.Encap]) []dataplane.Encap {
	return slices.SortedFunc(maps.Keys(s), dataplane.CompareEncaps)
}

func errNoFamily(inner dataplane.Family, node string) error {
	return fmt.Errorf("no family of addresses that both this host and node %s have, for %s workloads: %w", node, inner, dataplane.ErrIncomplete)
}

// pathEnds are both ends of a forwarding path as a driver sees them.
func (e *ends) pathEnds(k Key, outer dataplane.Family, f dataplane.Encap, id dataplane.NextHopID) (dataplane.Host, dataplane.Peer) {
	p := e.peerFor(e.nodes.ByName[k.Node], k.Family, outer)
	p.NextHop = id
	return e.pathHost(k.Family, outer, f), p
}

// pathHost is this host's end of forwarding paths as a driver sees it.
func (e *ends) pathHost(inner, outer dataplane.Family, f dataplane.Encap) dataplane.Host {
	vni, port := f.VNI, f.Port
	if f.Driver != dataplane.DriverVXLAN {
		vni, port = e.pools.Settings.VNI, e.pools.Settings.Port
	}
	return e.hostFor(inner, outer, vni, port)
}

func (e *ends) missingAddr(inner dataplane.Family, n *cluster.Node) error {
	switch {
	case len(e.hosts) == 0:
		return fmt.Errorf("%s address of this host: %w", inner, dataplane.ErrIncomplete)
	case familiesOf(n) == familySet{} && n.AddrErr != nil:
		return fmt.Errorf("%s address of node %s: %w: %w", inner, n.Name, n.AddrErr, dataplane.ErrIncomplete)
	case familiesOf(n) == familySet{}:
		return fmt.Errorf("%s address of node %s: %w", inner, n.Name, dataplane.ErrIncomplete)
	}
	return errNoFamily(inner, n.Name)
}

// encapMTU is how large a packet may be inside an encapsulation, in bytes; 0:
// this host cannot send it.
func (e *ends) encapMTU(f dataplane.Encap) int {
	if f.Driver == dataplane.DriverDirect {
		least := 0
		for _, h := range e.hosts {
			if least == 0 || h.UplinkMTU < least {
				least = h.UplinkMTU
			}
		}
		return least
	}
	h, ok := e.hosts[f.Outer]
	if !ok {
		return 0
	}
	ipip, vx := e.pools.Settings.TunnelMTU(f.Outer)
	set := vx
	if f.Driver == dataplane.DriverIPIP {
		set = ipip
	}
	if set != 0 {
		return set
	}
	return h.UplinkMTU - driverOf(f).Overhead(f.Outer)
}

// canAccept reports whether a node accepts an encapsulation. One that does not take
// part in live changes follows its pools at once.
func canAccept(e *cluster.Encaps, encap dataplane.Encap) bool {
	_, ok := e.Accept[encap]
	return ok || !e.Published
}

func sameEncaps(a, b store.NodeEncaps) bool {
	return a.Published == b.Published && slices.Equal(a.Accepts, b.Accepts) && slices.Equal(a.Uses, b.Uses) &&
		maps.Equal(a.Sends, b.Sends) && maps.Equal(a.Refuses, b.Refuses) && maps.Equal(a.Stays, b.Stays)
}

// hostOf says how this host stands on the underlay in one family: which device
// holds the node's address, and that device's MTU.
func hostOf(n *cluster.Node, u *topology.Network, f dataplane.Family) (dataplane.Host, bool) {
	addr := n.Addr.Of(f)
	if !addr.IsValid() || u.Underlay == nil {
		return dataplane.Host{}, false
	}
	i := slices.IndexFunc(u.Underlay.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == addr.Addr() })
	if i < 0 {
		return dataplane.Host{}, false
	}
	l, ok := u.Device(u.Underlay.Addresses[i].Link)
	if !ok {
		return dataplane.Host{}, false
	}
	return dataplane.Host{Name: n.Name, Addr: addr, Uplink: l.Name, UplinkMTU: l.MTU}, true
}
