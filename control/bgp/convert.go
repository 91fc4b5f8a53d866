package bgp

import (
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// converter makes a Hop of GoBGP's path. Prefixes of one UPDATE share their
// attributes, so the text of the last AS path is kept. Not safe for concurrent
// use.
type converter struct {
	peerOf   func(netip.Addr) *Peer // nil: no session with it is configured
	cfg      *Config                // whose filters let paths in; nil: nobody's
	asn      uint32
	own      [2]netip.Addr // this host's addresses on the network; invalid: none
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
		out.Peer, out.IBGP = from.Name, from.ibgp(c.asn)
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
	if from != nil && c.cfg != nil {
		out.Named = c.cfg.named(from, p)
	}
	return nlri.Prefix, out, c.usable(out.NextHop)
}

// usable reports whether a next hop can be another host (RFC 4271 section 6.3):
// who says something else announces a prefix that leads nowhere.
func (c *converter) usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255}) && a != c.own[0] && a != c.own[1]
}
