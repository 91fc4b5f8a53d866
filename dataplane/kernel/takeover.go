package kernel

import (
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/felix"
)

// takesOver reports whether a new route of ours replaces the foreign one that has its
// key, in one step and so without a gap: where Calico, flannel or kube-router wired pods
// on this host before. What carries Felix's number goes whatever it says, and so does what
// leads through flannel's tunnel; of the others only what sends packets
// where ours does, so that nothing but the owner changes: those of BIRD, of the routes
// to workloads and through vxlan.calico (deviceRouteProtocol), of flannel's host-gw and of
// kube-router have numbers that others use as well.
func (wr *writer) takesOver(r *fibRoute, w dataplane.Route) bool {
	switch r.protocol {
	case felix.Protocol:
		return true
	case unix.RTPROT_BOOT:
		return wr.throughFlannel(r) && w.Type != dataplane.Blackhole || wr.doesAs(r, w)
	case unix.RTPROT_BIRD, kubeRouter:
		return wr.doesAs(r, w)
	}
	return false
}

// kubeRouter is the number that kube-router gives its routes: RTPROT_MROUTED, though it
// means zebra's.
const kubeRouter = unix.RTPROT_MROUTED

// throughFlannel reports whether a route leads through a tunnel of flannel's to another node:
// flannel.VNI, and flannel-v6.VNI for IPv6.
func (wr *writer) throughFlannel(r *fibRoute) bool {
	if r.typ != unix.RTN_UNICAST || len(r.legs) != 1 || !r.legs[0].gateway.IsValid() {
		return false
	}
	l := wr.mirror.links[r.legs[0].link]
	return l != nil && l.kind == string(dataplane.LinkVXLAN) && (strings.HasPrefix(l.name, "flannel.") || strings.HasPrefix(l.name, "flannel-v6."))
}

// doesAs reports whether a route in the kernel does with packets what w would.
func (wr *writer) doesAs(r *fibRoute, w dataplane.Route) bool {
	if w.Type == dataplane.Blackhole {
		return r.typ == unix.RTN_BLACKHOLE
	}
	if r.typ != unix.RTN_UNICAST || len(r.legs) != 1 {
		return false
	}
	want := dataplane.NextHop{Link: w.Link}
	if w.NextHop != 0 {
		have, _ := wr.want.Have(dataplane.NextHopKey{ID: w.NextHop})
		hop, ok := have.(dataplane.NextHop)
		if !ok {
			return false
		}
		want = hop
	}
	l := wr.mirror.link(want.Link)
	if l == nil || r.legs[0].link != l.index {
		return false
	}
	gateway := r.legs[0].gateway
	return gateway == want.Gateway || l.kind == string(dataplane.LinkVXLAN) && wr.samePeer(want.Link, gateway, want.Gateway)
}

// samePeer reports whether a VXLAN device of ours sends to one peer what goes by either of two
// gateways: they have one MAC. Calico's IPv6 routes lead to the peer's tunnel address, ours to the
// link-local one that stands for it.
func (wr *writer) samePeer(link string, a, b netip.Addr) bool {
	mac := func(gateway netip.Addr) dataplane.MAC {
		have, _ := wr.want.Have(dataplane.NeighbourKey{Link: link, Addr: gateway})
		n, _ := have.(dataplane.Neighbour)
		return n.MAC
	}
	return !mac(a).IsZero() && mac(a) == mac(b)
}

// tookOver notes that a new route of ours is there: a foreign one that had its key was
// replaced by it. The kernel's notice of that does not say which it replaced.
func (wr *writer) tookOver(k dataplane.RouteKey) {
	if over, _ := wr.mirror.foreignRoute(k); over != nil {
		wr.log.Debug("route taken over", "route", k.String(), "protocol", protocolName(over.protocol))
		wr.mirror.deleteRoute(*over)
		wr.underlay.changed()
	}
}
