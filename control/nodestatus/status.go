// Package nodestatus answers CalicoNodeStatus resources: whoever makes one that names
// this host finds in its status, as Calico's reporter writes it, whether BGP runs here,
// which sessions there are, and which routes. The answers are of what the operator's
// API says.
package nodestatus

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// maxRoutes is how many routes of a family a status lists: etcd takes no object above
// 1.5 MiB, and nobody reads more.
const maxRoutes = 4096

// timeLayout is how BIRD, and so Calico, writes times.
const timeLayout = time.DateTime

// status makes the status of the classes asked for. Of other classes it keeps what old
// has.
func status(classes []v3.NodeStatusClassType, old v3.CalicoNodeStatusStatus, node *apiv1.NodeResponse, routes *apiv1.RoutesResponse, now time.Time) v3.CalicoNodeStatusStatus {
	s := old
	s.LastUpdated = metav1.NewTime(now.UTC().Truncate(time.Second))
	if slices.Contains(classes, v3.NodeStatusClassTypeAgent) {
		s.Agent = agent(node)
	}
	if slices.Contains(classes, v3.NodeStatusClassTypeBGP) {
		s.BGP = sessions(node.GetPeers())
	}
	if slices.Contains(classes, v3.NodeStatusClassTypeRoutes) {
		s.Routes = routesOf(routes.GetRoutes(), node.GetPeers())
	}
	return s
}

// agent says how the BGP speaker is. One of routerd's speaks for both families.
func agent(node *apiv1.NodeResponse) v3.CalicoNodeAgentStatus {
	d := v3.BGPDaemonStatus{State: v3.BGPDaemonStateReady, Version: "routerd " + node.GetVersion(), RouterID: node.GetRouterId()}
	if node.GetBgpError() != "" {
		d.State = v3.BGPDaemonStateNotReady
	}
	if t := node.GetStarted(); t != nil {
		d.LastBootTime = t.AsTime().Format(timeLayout)
	}
	return v3.CalicoNodeAgentStatus{BIRDV4: d, BIRDV6: d}
}

func sessions(peers []*apiv1.BGPPeer) v3.CalicoNodeBGPStatus {
	var s v3.CalicoNodeBGPStatus
	for _, p := range peers {
		a, ok := address(p.GetAddress())
		if !ok {
			continue
		}
		peer := v3.CalicoNodePeer{PeerIP: a.String(), Type: typeOf(p), State: stateOf(p)}
		if t := p.GetSince(); t != nil {
			peer.Since = t.AsTime().Format(timeLayout)
		}
		up := peer.State == v3.BGPSessionStateEstablished
		switch {
		case a.Is4() && up:
			s.NumberEstablishedV4++
		case a.Is4():
			s.NumberNotEstablishedV4++
		case up:
			s.NumberEstablishedV6++
		default:
			s.NumberNotEstablishedV6++
		}
		if a.Is4() {
			s.PeersV4 = append(s.PeersV4, peer)
		} else {
			s.PeersV6 = append(s.PeersV6, peer)
		}
	}
	return s
}

// address reads the address of a peer, which may have a port or a device with it.
func address(s string) (netip.Addr, bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().WithZone("").Unmap(), true
	}
	a, err := netip.ParseAddr(s)
	return a.WithZone("").Unmap(), err == nil
}

func typeOf(p *apiv1.BGPPeer) v3.BGPPeerType {
	switch {
	case strings.Contains(p.GetType(), "mesh"):
		return v3.BGPPeerTypeNodeMesh
	case strings.Contains(p.GetType(), "node"):
		return v3.BGPPeerTypeNodePeer
	}
	return v3.BGPPeerTypeGlobalPeer
}

func stateOf(p *apiv1.BGPPeer) v3.BGPSessionState {
	switch p.GetState() {
	case "up":
		return v3.BGPSessionStateEstablished
	case "start":
		return v3.BGPSessionStateActive
	}
	return v3.BGPSessionStateIdle
}

func routesOf(routes []*apiv1.Route, peers []*apiv1.BGPPeer) v3.CalicoNodeBGPRouteStatus {
	mesh := map[string]bool{} // peers, as routes name them
	for _, p := range peers {
		if typeOf(p) == v3.BGPPeerTypeNodeMesh {
			mesh[p.GetName()], mesh[p.GetAddress()] = true, true
		}
	}
	var s v3.CalicoNodeBGPRouteStatus
	for _, r := range routes {
		prefix, err := netip.ParsePrefix(r.GetPrefix())
		if err != nil {
			continue
		}
		out := v3.CalicoNodeRoute{
			Type: v3.RouteTypeRIB, Destination: prefix.String(), Interface: r.GetDevice(),
			Gateway: r.GetVia(), LearnedFrom: learnedFrom(r, mesh),
		}
		if out.Gateway == "" {
			out.Gateway = r.GetNextHop()
		}
		if r.GetBest() {
			out.Type = v3.RouteTypeFIB
		}
		list := &s.RoutesV6
		if prefix.Addr().Is4() {
			list = &s.RoutesV4
		}
		if len(*list) < maxRoutes {
			*list = append(*list, out)
		}
	}
	return s
}

// learnedFrom says where a route comes from in Calico's words, which have none for
// what the datastore says of other nodes' blocks: that is Static.
func learnedFrom(r *apiv1.Route, mesh map[string]bool) v3.CalicoNodeRouteLearnedFrom {
	from := v3.CalicoNodeRouteLearnedFrom{SourceType: v3.RouteSourceTypeStatic}
	switch r.GetSource() {
	case "local":
		from.SourceType = v3.RouteSourceTypeDirect
	case "bgp":
		from.SourceType = v3.RouteSourceTypeBGPPeer
		if mesh[r.GetPeer()] {
			from.SourceType = v3.RouteSourceTypeNodeMesh
		}
		if a, ok := address(r.GetPeer()); ok {
			from.PeerIP = a.String()
		} else if a, ok := address(r.GetNextHop()); ok {
			from.PeerIP = a.String()
		}
	}
	return from
}
