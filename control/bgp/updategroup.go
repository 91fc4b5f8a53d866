package bgp

import (
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/apiutil"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// updateGroup is peers that are sent the same, but for what came from themselves:
// what is counted for one counts for all.
type updateGroup struct {
	Peer            // of which see [Peer.updateGroup]
	learned    bool // what others announced may be advertised to it
	advertised map[advertisedOf]int
}

// advertisedOf is the prefixes of a family; of those that were learned there is a
// second count by the router that they came from.
type advertisedOf struct {
	family wire.Family
	from   netip.Addr // router id; invalid: from anywhere
}

// updateGroup returns what of a peer decides on what is advertised to it.
func (p Peer) updateGroup() Peer {
	return Peer{ASN: p.ASN, LocalASN: p.LocalASN, Filters: p.Filters, Reflect: p.Reflect, ClusterID: p.ClusterID, StaleTime: p.StaleTime}
}

// updateGroups returns those of the peers that run.
func (c *Config) updateGroups() map[Peer]*updateGroup {
	out := map[Peer]*updateGroup{}
	for _, p := range c.Peers {
		key := p.updateGroup()
		if _, ok := out[key]; ok || !p.runs() {
			continue
		}
		a := &updateGroup{Peer: key, learned: p.Reflect && p.ibgp(c.ASN), advertised: map[advertisedOf]int{}}
		for _, f := range c.filtersOf(p) {
			accepts := func(r FilterRule) bool { return r.Accept }
			a.learned = a.learned || slices.ContainsFunc(slices.Concat(f.Export4, f.Export6), accepts)
		}
		out[key] = a
	}
	return out
}

// countAdvertised counts the best path of a prefix for the groups that it is
// advertised to. Most paths were learned and go to none: those are not even read.
func (c *Config) countAdvertised(to map[Peer]*updateGroup, peers map[netip.Addr]Peer, best *apiutil.Path) {
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
		if !c.advertises(a.Peer, peers[best.PeerAddress], *r) {
			continue
		}
		a.advertised[advertisedOf{family: fromPacket(best.Family)}]++
		if !r.Own {
			a.advertised[advertisedOf{fromPacket(best.Family), best.PeerID}]++
		}
	}
}

// advertises reports whether a peer is sent a best path from another router: by
// BGP's own rules (RFC 4271 sections 9.1.2 and 9.2, RFC 4456, RFC 9494 section
// 4.3), then by the policies.
func (c *Config) advertises(to, from Peer, r Route) bool {
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

// advertisedTo returns how many prefixes of a family a router of the group is
// sent.
func (a *updateGroup) advertisedTo(f wire.Family, router netip.Addr) int {
	if a == nil {
		return 0 // the peer came after the count
	}
	n := a.advertised[advertisedOf{family: f}]
	if router.IsValid() {
		n -= a.advertised[advertisedOf{f, router}]
	}
	return n
}
