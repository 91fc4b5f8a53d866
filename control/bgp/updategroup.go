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
	judge      func(*judged) verdict
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
func (p *policy) updateGroups() map[Peer]*updateGroup {
	c := p.c
	out := map[Peer]*updateGroup{}
	for _, q := range c.Peers {
		key := q.updateGroup()
		if _, ok := out[key]; ok || !q.runs() {
			continue
		}
		a := &updateGroup{Peer: key, learned: q.Reflect && q.ibgp(c.ASN), advertised: map[advertisedOf]int{}, judge: p.exportsOf(q)}
		for _, f := range c.filtersOf(q) {
			accepts := func(r FilterRule) bool { return r.Accept }
			a.learned = a.learned || slices.ContainsFunc(slices.Concat(f.Export4, f.Export6), accepts)
		}
		out[key] = a
	}
	return out
}

// countAdvertised counts the best path of a prefix for the groups that it is
// advertised to. Most paths were learned and go to none: those are not even read.
func countAdvertised(to map[Peer]*updateGroup, peers map[netip.Addr]Peer, best *apiutil.Path, asn uint32) {
	var r *Route
	for _, a := range to {
		if best.PeerAddress.IsValid() && !a.learned {
			continue
		}
		if r == nil {
			from := peers[best.PeerAddress]
			read, ok := readPath(best, &from, asn)
			if !ok {
				return
			}
			r = &read
		}
		if !a.advertises(peers[best.PeerAddress], *r, asn) {
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
func (a *updateGroup) advertises(from Peer, r Route, asn uint32) bool {
	switch to := a.Peer; {
	case r.Own:
	case slices.Contains(r.path, to.ASN), r.LongLived && to.StaleTime == 0:
		return false
	case !to.ibgp(asn) || from.ASN != to.ASN:
	case slices.Contains(r.clusters, to.ClusterID), !to.ClusterID.IsValid() && !from.ClusterID.IsValid():
		return false
	}
	return a.judge(r.judged()).accept
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
