package encap

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/direct"
)

// plainPath is how plain packets would go to a node.
type plainPath struct {
	dataplane.ProbeTunnel
	peer, gateway netip.Addr
}

// plainProbe is what is to be measured of plain packets to a node while a pool moves to
// them: moved lists what it has moved to before. Without a gateway nothing is known by
// which they would leave.
//
// The probe goes between the addresses of the two hosts' tunnels, which are of the
// pools' blocks as those of workloads are, and local to the hosts while the tunnels may
// be in use. It reports false where there is nothing to measure: no change is under way,
// the node has no prober, as Calico's have none, or one of the two has no such address.
func (s *sender) plainProbe(k Key, outer dataplane.Family, moved []dataplane.Encap) (p plainPath, ok bool) {
	plain := dataplane.Encap{Driver: dataplane.DriverDirect}
	from := slices.IndexFunc(moved, func(f dataplane.Encap) bool { return f != plain })
	n, self := s.nodes.ByName[k.Node], s.nodes.Own()
	if from < 0 || n == nil || self == nil || !n.Encaps.Published || !s.accepts(plain) || !canAccept(n.Encaps, plain) {
		return p, false
	}
	driver := moved[from].Driver
	p.Inner, p.InUse = k.Family, s.paths[k].Encap == plain
	p.Local, p.peer = tunnelAddr(self, k.Family, driver), tunnelAddr(n, k.Family, driver)
	if !p.Local.IsValid() || !p.peer.IsValid() {
		return p, false
	}
	p.gateway, p.Link = s.plainHop(k, outer, p.peer)
	if l, ok := s.network.Device(p.Link); ok {
		p.MTU = l.MTU
	}
	return p, true
}

// tunnelAddr is an address that a node has inside its tunnels, of the driver's if it has
// one there.
func tunnelAddr(n *cluster.Node, f dataplane.Family, driver string) netip.Addr {
	first, second := n.VXLANAddr.Of(f), n.IPIPAddr.Of(f)
	if driver == dataplane.DriverIPIP {
		first, second = second, first
	}
	if first.IsValid() {
		return first
	}
	return second
}

// plainHop is by which gateway and device plain packets would leave: the node itself
// where it is a neighbour, else what BGP says of the address, else as packets to the node
// do.
func (s *sender) plainHop(k Key, outer dataplane.Family, to netip.Addr) (gateway netip.Addr, link string) {
	h, p := s.pathEnds(k, outer, dataplane.Encap{Driver: dataplane.DriverDirect}, 0)
	if pl := planWith(direct.Driver{}, h, p); pl.Err == nil {
		return pl.Hop.Gateway, pl.Hop.Link
	}
	if s.learned != nil {
		if gateway, link, ok := s.learned(to); ok {
			return gateway, link
		}
	}
	gateway, link, err := s.network.Resolve(s.nodes.ByName[k.Node].Addr.Of(outer).Addr())
	if err != nil {
		return netip.Addr{}, ""
	}
	return gateway, link
}

// UseLearned has the planner ask by which gateway and device BGP would have packets to an
// address leave.
func (s *sender) UseLearned(via func(netip.Addr) (gateway netip.Addr, link string, ok bool)) {
	s.learned = via
}
