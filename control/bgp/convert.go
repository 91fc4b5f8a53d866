package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// converter makes a Hop of GoBGP's path. Prefixes of one UPDATE share their
// attributes, so the text of the last AS path is kept. Not safe for concurrent
// use.
type converter struct {
	peerOf   func(netip.Addr) *Peer // nil: no session with it is configured
	policy   *policy                // by which paths are let in
	lastPath *packet.PathAttributeAsPath
	lastText string
}

// path converts p. It reports false when p is no usable learned path: a
// withdrawal, one that we originate ourselves, or one without a usable next hop. The
// prefix is valid also then, unless p is of another family.
func (c *converter) path(p *apiutil.Path) (netip.Prefix, Hop, bool) {
	nlri, ok := p.Nlri.(*packet.IPAddrPrefix)
	if !ok {
		return netip.Prefix{}, Hop{}, false
	}
	if p.Withdrawal || !p.PeerAddress.IsValid() {
		return nlri.Prefix, Hop{}, false
	}
	out := Hop{PeerAddr: p.PeerAddress, Stale: p.Stale}
	from := c.peerOf(p.PeerAddress)
	if from != nil {
		out.Peer, out.IBGP = from.Name, from.ibgp(c.policy.c.ASN)
	}
	for _, a := range p.Attrs {
		switch a := a.(type) {
		case *packet.PathAttributeNextHop:
			out.NextHop = a.Value
		case *packet.PathAttributeMpReachNLRI:
			out.NextHop = onLink(a.Nexthop, out.PeerAddr, out.IBGP)
		case *packet.PathAttributeCommunities:
			out.LongLived = slices.Contains(a.Value, uint32(packet.COMMUNITY_LLGR_STALE))
		case *packet.PathAttributeLocalPref:
			out.LocalPref = a.Value
		case *packet.PathAttributeMultiExitDisc:
			out.MED = a.Value
		case *packet.PathAttributeAsPath:
			if a != c.lastPath {
				c.lastPath, c.lastText = a, packet.AsPathString(a)
			}
			out.ASPath = c.lastText
		}
	}
	if from != nil && from.Filters != "" {
		if r, ok := readPath(p, from, c.policy.c.ASN); ok {
			out.Named = c.policy.named(*from, r.judged())
		}
	}
	return nlri.Prefix, out, c.policy.c.usable(out.NextHop)
}

// readPath reads a path's attributes; from is the peer that sent it.
func readPath(p *apiutil.Path, from *Peer, asn uint32) (Route, bool) {
	nlri, ok := p.Nlri.(*packet.IPAddrPrefix)
	if !ok {
		return Route{}, false
	}
	r := Route{Prefix: nlri.Prefix, Since: time.Unix(p.Age, 0), Own: !p.PeerAddress.IsValid(), equal: p.Best}
	r.Hop = Hop{Peer: from.Name, PeerAddr: p.PeerAddress, IBGP: !r.Own && from.ibgp(asn), Stale: p.Stale}
	for _, a := range p.Attrs {
		switch a := a.(type) {
		case *packet.PathAttributeNextHop:
			r.NextHop = a.Value
		case *packet.PathAttributeMpReachNLRI:
			r.NextHop = onLink(a.Nexthop, r.PeerAddr, r.IBGP)
		case *packet.PathAttributeLocalPref:
			r.LocalPref = a.Value
		case *packet.PathAttributeMultiExitDisc:
			r.MED = a.Value
		case *packet.PathAttributeOrigin:
			r.origin = a.Value
			r.Origin = []string{"IGP", "EGP", "incomplete"}[min(a.Value, 2)]
		case *packet.PathAttributeAsPath:
			r.ASPath = packet.AsPathString(a)
			for _, segment := range a.Value {
				r.path = append(r.path, segment.GetAS()...)
				r.length += segment.ASLen()
			}
		case *packet.PathAttributeOriginatorId:
			r.originator = a.Value
		case *packet.PathAttributeClusterList:
			r.clusters = a.Value
		case *packet.PathAttributeCommunities:
			r.LongLived = slices.Contains(a.Value, uint32(packet.COMMUNITY_LLGR_STALE))
			for _, v := range a.Value {
				r.Communities = append(r.Communities, fmt.Sprintf("%d:%d", v>>16, v&0xffff))
			}
		case *packet.PathAttributeLargeCommunities:
			for _, v := range a.Values {
				r.Communities = append(r.Communities, v.String())
			}
		}
	}
	return r, true
}
