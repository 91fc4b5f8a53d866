package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// judged is what the policies see of a route.
type judged struct {
	prefix      netip.Prefix
	nextHop     netip.Addr
	asPath      []uint32
	communities []string
	localPref   uint32
	own         bool // originated here
	ibgp        bool // learned from an iBGP peer
	originator  netip.Addr
}

// looped says why a route of a peer is not looked at: it has been here before
// (RFC 4271 section 9.1.2, RFC 4456 section 8). Empty: it has not.
func (c *Config) looped(p Peer, r judged) string {
	own, n := p.localASN(c.ASN), 0
	for _, as := range r.asPath {
		if as == own {
			n++
		}
	}
	switch {
	case n > int(p.AllowOwnASN):
		return fmt.Sprintf("AS loop: AS %d, this node's own on the session, is in the AS path %d times, and numAllowedLocalASNumbers is %d", own, n, p.AllowOwnASN)
	case p.ibgp(c.ASN) && r.originator == c.RouterID && r.originator.IsValid():
		return fmt.Sprintf("ORIGINATOR_ID %s is this node's: the route began here", r.originator)
	}
	return ""
}

// judgeImport says why a route of a peer is let in or not. It is what BGP itself
// and [policies] ask of GoBGP, for people: a test holds the two together.
func (c *Config) judgeImport(p Peer, r judged) (accepted bool, reason string) {
	if loop := c.looped(p, r); loop != "" {
		return false, loop
	}
	switch {
	case inAny(martianRanges(r.prefix.Addr()), r.prefix):
		return false, "loopback, link-local, multicast or reserved"
	case p.PoolsOnly && inAny(c.Borrowed, r.prefix):
		return true, "an address of this node's block that another node borrowed"
	case inAny(c.Own, r.prefix):
		return false, "inside this node's own subnet, blocks or borrowed addresses, or a range of services"
	case p.PoolsOnly && !inAny(c.Pools, r.prefix):
		return false, "outside the pools, from a node of the cluster"
	}
	if accepted, reason, decided := c.judgeFilters(p, r, false); decided {
		return accepted, reason
	}
	if r.prefix.Bits() == 0 {
		return false, "the default route: only a filter that names exactly it lets it in"
	}
	return true, ""
}

// judgeExport says why a peer is told of a route or not, apart from BGP's own
// rules.
func (c *Config) judgeExport(p Peer, r judged) (accepted bool, reason string) {
	if accepted, reason, decided := c.judgeFilters(p, r, true); decided {
		return accepted, reason
	}
	switch {
	case inAny(c.Hidden, r.prefix):
		return false, "its pool has disableBGPExport"
	case r.own:
		return true, ""
	case p.Reflect && p.ibgp(c.ASN) && r.ibgp && inAny(c.Pools, r.prefix):
		return true, "reflected"
	}
	return false, "learned routes are not passed on"
}

func (c *Config) judgeFilters(p Peer, r judged, export bool) (accepted bool, reason string, decided bool) {
	direction := "import"
	if export {
		direction = "export"
	}
	family := "V4"
	if r.prefix.Addr().Is6() {
		family = "V6"
	}
	for i, f := range c.filtersOf(p) {
		for j, rule := range f.rules(export, r.prefix.Addr().Is6()) {
			if !c.matches(p, rule, r, export) {
				continue
			}
			verb := "rejects"
			if rule.Accept {
				verb = "accepts"
			}
			name := strings.Split(p.Filters, ",")[i]
			return rule.Accept, fmt.Sprintf("BGPFilter %s: %s%s[%d] %s it", name, direction, family, j, verb), true
		}
	}
	return false, "", false
}

// named is [Hop.Named] of a path that a peer sent and that was let in.
func (c *Config) named(p *Peer, path *apiutil.Path) int {
	if p.Filters == "" {
		return 0
	}
	nlri, ok := path.Nlri.(*packet.IPAddrPrefix)
	if !ok {
		return 0
	}
	var r judged // read once, and only if a rule holds the prefix
	for _, f := range c.filtersOf(*p) {
		for _, rule := range f.rules(false, nlri.Prefix.Addr().Is6()) {
			if !rule.names() || !rule.holds(nlri.Prefix) {
				continue
			}
			if !r.prefix.IsValid() {
				route, _ := c.route(map[netip.Addr]Peer{p.Addr: *p}, path)
				r = route.judged()
			}
			if c.matches(*p, rule.afterwards(), r, false) {
				return rule.CIDR.Bits()
			}
		}
	}
	return 0
}

// names reports whether a rule accepts what it names by a CIDR.
func (rule FilterRule) names() bool { return rule.Accept && rule.CIDR.IsValid() && !rule.Not }

// afterwards is the rule without the conditions that its own operations change the
// answers to.
func (rule FilterRule) afterwards() FilterRule {
	for _, op := range rule.Operations {
		if len(op.PrependAS) > 0 {
			rule.ASPath = nil
		}
		if op.SetPriority != 0 {
			rule.Priority = 0
		}
	}
	return rule
}

// sameNames reports whether the filters of all running peers let paths in by the same
// CIDRs in both.
func (c *Config) sameNames(d *Config) bool {
	was := runningPeers(c)
	for _, p := range d.Peers {
		if before, ok := was[p.Addr]; ok && p.runs() && !c.sameFilters(before, d, p, false) {
			return false
		}
	}
	return true
}

// matches reports whether all conditions of a rule hold.
func (c *Config) matches(p Peer, rule FilterRule, r judged, export bool) bool {
	isDefault := r.prefix.Bits() == 0
	exact := rule.CIDR.IsValid() && rule.CIDR.Bits() == 0 && rule.Max == 0 && !rule.Not
	switch {
	case isDefault && !export && rule.Accept && !exact:
		return false
	case rule.CIDR.IsValid() && rule.Not == rule.holds(r.prefix):
		return false
	case !rule.CIDR.IsValid() && (r.prefix.Bits() < rule.Min || r.prefix.Bits() > rule.Max):
		return false
	case rule.PeerType != "" && (rule.PeerType == "iBGP") != p.ibgp(c.ASN):
		return false
	case export && (rule.RemotePeers || rule.Interface != "") && r.own:
		return false
	case rule.Community != "" && !slices.Contains(r.communities, rule.Community):
		return false
	case len(rule.ASPath) > 0 && (len(r.asPath) < len(rule.ASPath) || !slices.Equal(r.asPath[:len(rule.ASPath)], rule.ASPath)):
		return false
	case rule.Priority != 0 && r.localPref != localPref(rule.Priority):
		return false
	case rule.Interface != "" && !c.leadsTo(rule.Interface, r.nextHop):
		return false
	}
	return true
}

// holds reports whether a prefix is what the rule's CIDR and lengths describe.
func (rule FilterRule) holds(p netip.Prefix) bool {
	return rule.CIDR.Contains(p.Addr()) && p.Bits() >= rule.CIDR.Bits() && p.Bits() >= rule.Min && p.Bits() <= rule.Max
}

// leadsTo reports whether a next hop is a peer on a device that a glob matches.
func (c *Config) leadsTo(glob string, nextHop netip.Addr) bool {
	on := func(s netip.Prefix) bool { return s.Contains(nextHop) }
	return slices.ContainsFunc(c.Peers, func(p Peer) bool {
		return p.runs() && p.Addr == nextHop && (p.onDevice(glob) || slices.ContainsFunc(subnetsOf(c.Links, glob), on))
	})
}

// inAny reports whether a prefix is one of a list or lies inside one.
func inAny(list []netip.Prefix, p netip.Prefix) bool {
	return slices.ContainsFunc(list, func(q netip.Prefix) bool {
		return q.Bits() <= p.Bits() && q.Contains(p.Addr())
	})
}

// martianRanges are those that [martians] refuses.
func martianRanges(a netip.Addr) []netip.Prefix {
	var out []netip.Prefix
	for _, m := range martians(familyOf(a)) {
		out = append(out, netip.MustParsePrefix(m.GetIpPrefix()))
	}
	return out
}
