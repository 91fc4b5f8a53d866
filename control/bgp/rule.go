package bgp

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/osrg/gobgp/v4/api"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// ruleRendering turns one rule of a filter into GoBGP's statements.
type ruleRendering struct {
	*rendering
	name       string
	rule       FilterRule
	family     wire.Family
	neighbours string
	export     bool
}

// statements makes the rule's statements: one, but where a condition of GoBGP's
// takes one of several values, or a list of AS numbers is prepended.
func (x ruleRendering) statements() []*api.Statement {
	x.sets = append(x.sets, x.prefixes())
	base := &api.Conditions{PrefixSet: anyOf(x.name), NeighborSet: anyOf(x.neighbours)}
	if x.rule.Not {
		base.PrefixSet = noneOf(x.name)
	}
	x.match(base)
	var out []*api.Statement
	for i, types := range x.routeTypes() {
		cond := &api.Conditions{
			PrefixSet: base.PrefixSet, NeighborSet: base.NeighborSet, AsPathSet: base.AsPathSet,
			CommunitySet: base.CommunitySet, LargeCommunitySet: base.LargeCommunitySet, LocalPrefEq: base.LocalPrefEq,
			NextHopInList: base.NextHopInList, RouteType: types,
		}
		out = append(out, x.actions(fmt.Sprintf("%s-%d", x.name, i), cond)...)
	}
	return out
}

// routeTypes are the sorts of route that the rule is for. A device leads only
// to the next hop of a route that was learned.
func (x ruleRendering) routeTypes() []api.Conditions_RouteType {
	if x.export && (x.rule.RemotePeers || x.rule.Interface != "") {
		return []api.Conditions_RouteType{api.Conditions_ROUTE_TYPE_INTERNAL, api.Conditions_ROUTE_TYPE_EXTERNAL}
	}
	return []api.Conditions_RouteType{api.Conditions_ROUTE_TYPE_UNSPECIFIED}
}

// prefixes is the rule's set. The default route is in it only where the rule
// names exactly that: who accepts everything inside 0.0.0.0/0 seldom means it.
func (x ruleRendering) prefixes() *api.DefinedSet {
	r := x.rule
	cidr := r.CIDR
	if !cidr.IsValid() {
		cidr = defaultRoute(x.family)
	}
	low, high := r.Min, r.Max
	exact := r.CIDR.IsValid() && low == high && low == r.CIDR.Bits()
	guarded := !x.export && r.Accept
	set := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: x.name}
	if guarded && !r.Not && !exact && cidr.Bits() == 0 {
		low = max(low, 1)
	}
	set.Prefixes = append(set.Prefixes, &api.Prefix{IpPrefix: cidr.String(), MaskLengthMin: uint32(low), MaskLengthMax: uint32(max(low, high))})
	if guarded && r.Not && (cidr.Bits() != 0 || low > 0) {
		set.Prefixes = append(set.Prefixes, &api.Prefix{IpPrefix: defaultRoute(x.family).String()})
	}
	return set
}

// match adds the conditions that need sets of their own.
func (x ruleRendering) match(c *api.Conditions) {
	set := func(t api.DefinedType, suffix, value string) *api.MatchSet {
		x.sets = append(x.sets, &api.DefinedSet{DefinedType: t, Name: x.name + suffix, List: []string{value}})
		return anyOf(x.name + suffix)
	}
	if len(x.rule.ASPath) > 0 {
		// Anchored at the left: the AS that the route came from last.
		var b strings.Builder
		for i, as := range x.rule.ASPath {
			if i > 0 {
				b.WriteByte('_')
			}
			fmt.Fprint(&b, as)
		}
		c.AsPathSet = set(api.DefinedType_DEFINED_TYPE_AS_PATH, "-as-path", "^"+b.String()+"_")
	}
	if com := x.rule.Community; com != "" {
		if isLarge(com) {
			c.LargeCommunitySet = set(api.DefinedType_DEFINED_TYPE_LARGE_COMMUNITY, "-community", "^"+com+"$")
		} else {
			c.CommunitySet = set(api.DefinedType_DEFINED_TYPE_COMMUNITY, "-community", "^"+com+"$")
		}
	}
	if x.rule.Priority != 0 {
		c.LocalPrefEq = &api.LocalPrefEq{Value: localPref(x.rule.Priority)}
	}
	if x.rule.Interface != "" {
		c.NextHopInList = x.nextHops()
	}
}

// nextHops lists the next hops that the rule's interface leads to. GoBGP takes
// single addresses only, so they are those of the peers on the interface's
// subnets: a route with another router's next hop matches no interface.
func (x ruleRendering) nextHops() []string {
	subnets := subnetsOf(x.c.Links, x.rule.Interface)
	var out []string
	for _, p := range x.c.Peers {
		on := func(s netip.Prefix) bool { return s.Contains(p.Addr) }
		if p.runs() && slices.Contains(p.carries(), x.family) && (slices.ContainsFunc(subnets, on) || p.onDevice(x.rule.Interface)) {
			out = append(out, p.Addr.WithZone("").String())
		}
	}
	if len(out) == 0 {
		out = append(out, nothing(x.family).Addr().String())
	}
	return out
}

// onDevice reports whether the session is over the link of a device that a glob
// matches.
func (p Peer) onDevice(glob string) bool {
	ok, err := path.Match(glob, p.Interface)
	return err == nil && ok && p.Interface != ""
}

// subnetsOf returns the subnets of the devices whose names match a glob.
func subnetsOf(links map[string][]netip.Prefix, glob string) []netip.Prefix {
	var out []netip.Prefix
	for name, prefixes := range links {
		if ok, err := path.Match(glob, name); err == nil && ok {
			for _, p := range prefixes {
				if p = p.Masked(); !slices.Contains(out, p) {
					out = append(out, p)
				}
			}
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// actions makes the statements that change the route and decide.
func (x ruleRendering) actions(name string, cond *api.Conditions) []*api.Statement {
	last := statement(name, reject, cond)
	if !x.rule.Accept {
		return []*api.Statement{last}
	}
	last.Actions.RouteAction = accept
	var out []*api.Statement
	for i, op := range x.rule.Operations {
		switch {
		case op.AddCommunity != "":
			add(last.Actions, op.AddCommunity)
		case op.SetPriority != 0:
			last.Actions.LocalPref = &api.LocalPrefAction{Value: localPref(op.SetPriority)}
		default:
			// The last of the list goes on first.
			for j, run := range slices.Backward(runs(op.PrependAS)) {
				s := statement(fmt.Sprintf("%s-prepend-%d-%d", name, i, j), pass, cond)
				s.Actions.AsPrepend = &api.AsPrependAction{Asn: run.as, Repeat: run.n}
				out = append(out, s)
			}
		}
	}
	return append(out, last)
}

func add(a *api.Actions, community string) {
	to := &a.Community
	if isLarge(community) {
		to = &a.LargeCommunity
	}
	if *to == nil {
		*to = &api.CommunityAction{Type: api.CommunityAction_TYPE_ADD}
	}
	(*to).Communities = append((*to).Communities, community)
}

// asRun is an AS number that stands n times in a row.
type asRun struct{ as, n uint32 }

func runs(list []uint32) []asRun {
	var out []asRun
	for _, as := range list {
		if len(out) > 0 && out[len(out)-1].as == as {
			out[len(out)-1].n++
		} else {
			out = append(out, asRun{as, 1})
		}
	}
	return out
}
