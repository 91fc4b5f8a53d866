package bgp

import (
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// audience is peers that are told the same, but for what came from themselves:
// what is counted for one counts for all.
type audience struct {
	Peer         // of which see [Peer.audience]
	learned bool // it may be told of what others announced
	told    map[toldOf]int
}

// toldOf is the prefixes of a family; of those that were learned there is a
// second count by the router that they came from.
type toldOf struct {
	family packet.Family
	from   netip.Addr // router id; invalid: from anywhere
}

// audience returns what of a peer decides on what it is told.
func (p Peer) audience() Peer {
	return Peer{ASN: p.ASN, LocalASN: p.LocalASN, Filters: p.Filters, Reflect: p.Reflect, ClusterID: p.ClusterID, StaleTime: p.StaleTime}
}

// audiences returns those of the peers that run.
func (c *Config) audiences() map[Peer]*audience {
	out := map[Peer]*audience{}
	for _, p := range c.Peers {
		key := p.audience()
		if _, ok := out[key]; ok || !p.runs() {
			continue
		}
		a := &audience{Peer: key, learned: p.Reflect && p.ibgp(c.ASN), told: map[toldOf]int{}}
		for _, f := range c.filtersOf(p) {
			accepts := func(r FilterRule) bool { return r.Accept }
			a.learned = a.learned || slices.ContainsFunc(slices.Concat(f.Export4, f.Export6), accepts)
		}
		out[key] = a
	}
	return out
}

// countTold counts the best path of a prefix for those who are told of it. Most
// paths were learned, and nobody is told: then they are not even read.
func (c *Config) countTold(to map[Peer]*audience, peers map[netip.Addr]Peer, best *apiutil.Path) {
	var r *Route
	for _, a := range to {
		if best.PeerAddress.IsValid() && !a.learned {
			continue
		}
		if r == nil {
			read, ok := c.route(peers, best)
			if !ok {
				return
			}
			r = &read
		}
		if !c.tells(a.Peer, peers[best.PeerAddress], *r) {
			continue
		}
		a.told[toldOf{family: best.Family}]++
		if !r.Own {
			a.told[toldOf{best.Family, best.PeerID}]++
		}
	}
}

// tells reports whether a peer is told of a best path from another router: by
// BGP's own rules (RFC 4271 sections 9.1.2 and 9.2, RFC 4456, RFC 9494 section
// 4.3), then by the policies.
func (c *Config) tells(to, from Peer, r Route) bool {
	switch {
	case r.Own:
	case slices.Contains(r.path, to.ASN), r.LongLived && to.StaleTime == 0:
		return false
	case !to.ibgp(c.ASN) || from.ASN != to.ASN:
	case slices.Contains(r.clusters, to.ClusterID), !to.ClusterID.IsValid() && !from.ClusterID.IsValid():
		return false
	}
	accepted, _ := c.judgeExport(to, r.judged())
	return accepted
}

// toldTo returns how many prefixes of a family a router is told, given what its
// audience is.
func (a *audience) toldTo(f packet.Family, router netip.Addr) int {
	if a == nil {
		return 0 // the peer came after the count
	}
	n := a.told[toldOf{family: f}]
	if router.IsValid() {
		n -= a.told[toldOf{f, router}]
	}
	return n
}
