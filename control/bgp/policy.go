package bgp

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/osrg/gobgp/v4/api"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Names of GoBGP's policies and sets.
const (
	setMartians = "martians"
	setPools    = "pools"
	setOwn      = "own"
	setBorrowed = "borrowed"
	setCluster  = "cluster"
	setHidden   = "hidden"
	setDefault  = "default-route"
	setReflect  = "reflect-to"

	policyImport = "import"
	policyExport = "export"
)

// nothing stands in every set of prefixes and in sets of neighbours that would
// be empty: GoBGP takes an empty set of neighbours for all of them, and an empty
// prefix set has no family. It matches no route, because what it would match is
// refused before.
func nothing(f wire.Family) netip.Prefix {
	if f == wire.IPv4 {
		return netip.MustParsePrefix("255.255.255.255/32")
	}
	return netip.MustParsePrefix("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128")
}

// martians are [martianRanges] of a family.
func martians(f wire.Family) []*api.Prefix {
	var l []*api.Prefix
	for _, p := range martianRanges() {
		if familyOf(p.Addr()) == f {
			l = append(l, inside(p))
		}
	}
	return l
}

// defaultRoute is 0.0.0.0/0 or ::/0.
func defaultRoute(f wire.Family) netip.Prefix {
	return netip.PrefixFrom(nothing(f).Addr(), 0).Masked()
}

// inside matches a prefix and all that lies in it.
func inside(p netip.Prefix) *api.Prefix {
	return &api.Prefix{IpPrefix: p.String(), MaskLengthMin: uint32(p.Bits()), MaskLengthMax: uint32(p.Addr().BitLen())}
}

// named is the name of a family's part of a set or of a statement: GoBGP's sets
// of prefixes are of one family.
func named(name string, f wire.Family) string {
	if f == wire.IPv4 {
		return name
	}
	return name + "-v6"
}

// prefixSet is a family's part of a list, never empty.
func prefixSet(name string, f wire.Family, list []netip.Prefix) *api.DefinedSet {
	s := part(name, f, list)
	s.Prefixes = append(s.Prefixes, inside(nothing(f)))
	return s
}

// part is a family's part of a list.
func part(name string, f wire.Family, list []netip.Prefix) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: named(name, f)}
	for _, p := range list {
		if familyOf(p.Addr()) == f {
			s.Prefixes = append(s.Prefixes, inside(p))
		}
	}
	return s
}

func neighbourSet(name string, list []netip.Addr) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: name}
	for _, a := range list {
		s.List = append(s.List, netip.PrefixFrom(a, a.BitLen()).String())
	}
	if len(s.List) == 0 {
		s.List = []string{nothing(wire.IPv4).String()}
	}
	return s
}

// rendering collects sets and statements; GoBGP wants the names of both to be
// unique.
type rendering struct {
	c       *Config
	sets    []*api.DefinedSet
	imports []*api.Statement
	exports []*api.Statement
}

const (
	accept = api.RouteAction_ROUTE_ACTION_ACCEPT
	reject = api.RouteAction_ROUTE_ACTION_REJECT
	pass   = api.RouteAction_ROUTE_ACTION_UNSPECIFIED // to the next statement
)

func anyOf(set string) *api.MatchSet { return &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: set} }

func noneOf(set string) *api.MatchSet {
	return &api.MatchSet{Type: api.MatchSet_TYPE_INVERT, Name: set}
}

func statement(name string, action api.RouteAction, cond *api.Conditions) *api.Statement {
	return &api.Statement{Name: name, Conditions: cond, Actions: &api.Actions{RouteAction: action}}
}

// policies renders what the package's comment says about import and export in
// GoBGP's terms. The first statement that decides ends the judgement.
func policies(c *Config) *api.SetPoliciesRequest {
	r := &rendering{c: c}
	r.sets = append(r.sets, neighbourSet(setCluster, c.cluster()), neighbourSet(setReflect, c.reflectTo()))
	for _, f := range families() {
		r.sets = append(r.sets,
			&api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: named(setMartians, f), Prefixes: martians(f)},
			&api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: named(setDefault, f), Prefixes: []*api.Prefix{{IpPrefix: defaultRoute(f).String()}}},
			prefixSet(setPools, f, c.Pools), prefixSet(setOwn, f, c.Own), prefixSet(setBorrowed, f, c.Borrowed), prefixSet(setHidden, f, c.Hidden))
	}
	groups := c.groups()
	r.importRules(groups)
	r.exportRules(groups)
	return &api.SetPoliciesRequest{
		DefinedSets: r.sets,
		Policies:    []*api.Policy{{Name: policyImport, Statements: r.imports}, {Name: policyExport, Statements: r.exports}},
	}
}

// importRules: what no peer may say comes first, then the filters of each
// group of peers, then the default route, which only a filter lets in.
func (r *rendering) importRules(groups []group) {
	// GoBGP asks the import policy about what we originate, too.
	r.imports = append(r.imports, statement("originated-here", accept, &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL}))
	for _, f := range families() {
		in := func(set string) *api.MatchSet { return anyOf(named(set, f)) }
		r.imports = append(r.imports,
			statement(named("no-martian", f), reject, &api.Conditions{PrefixSet: in(setMartians)}),
			statement(named("borrowed-by-a-node", f), accept, &api.Conditions{PrefixSet: in(setBorrowed), NeighborSet: anyOf(setCluster)}),
			statement(named("not-ours", f), reject, &api.Conditions{PrefixSet: in(setOwn)}),
			statement(named("node-nothing-else", f), reject, &api.Conditions{PrefixSet: noneOf(named(setPools, f)), NeighborSet: anyOf(setCluster)}))
	}
	for i, g := range groups {
		r.imports = append(r.imports, r.filters(fmt.Sprintf("import-%d", i), g, false)...)
	}
	for _, f := range families() {
		r.imports = append(r.imports, statement(named("no-default-route", f), reject, &api.Conditions{PrefixSet: anyOf(named(setDefault, f))}))
	}
}

func (r *rendering) exportRules(groups []group) {
	for i, g := range groups {
		name := fmt.Sprintf("export-%d", i)
		r.sets = append(r.sets, neighbourSet(name, g.addrs))
		if g.mode != NextHopAuto {
			s := statement(name+"-next-hop", pass, &api.Conditions{NeighborSet: anyOf(name)})
			s.Actions.Nexthop = &api.NexthopAction{Self: g.mode == NextHopSelf, Unchanged: g.mode == NextHopKeep}
			r.exports = append(r.exports, s)
		}
		// The node's own address means nothing to a neighbour that knows of this
		// node by the link alone, and its IPv4 address nothing to one that speaks
		// IPv6: the session's own address is the next hop.
		for _, f := range g.ownHop {
			s := statement(fmt.Sprintf("%s-own-%s", name, f), pass, &api.Conditions{
				NeighborSet: anyOf(name), RouteType: api.Conditions_ROUTE_TYPE_LOCAL, AfiSafiIn: []*api.Family{apiFamily(f)},
			})
			s.Actions.Nexthop = &api.NexthopAction{Self: true}
			r.exports = append(r.exports, s)
		}
		r.exports = append(r.exports, r.filters(name, g, true)...)
	}
	for _, f := range families() {
		r.exports = append(r.exports, statement(named("hidden", f), reject, &api.Conditions{PrefixSet: anyOf(named(setHidden, f))}))
	}
	r.exports = append(r.exports, statement("only-our-own", accept, &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL}))
	for _, f := range families() {
		r.exports = append(r.exports, statement(named("reflected", f), accept, &api.Conditions{
			PrefixSet: anyOf(named(setPools, f)), NeighborSet: anyOf(setReflect), RouteType: api.Conditions_ROUTE_TYPE_INTERNAL,
		}))
	}
}

// group is peers that are judged by the same filters in the same way.
type group struct {
	filters []Filter
	ibgp    bool
	mode    NextHopMode
	ownHop  []wire.Family // whose own routes carry the session's address
	addrs   []netip.Addr
}

// groups sorts the peers that run by what they have in common. Statements are
// per group, so that a thousand peers with one filter cost what one costs.
func (c *Config) groups() []group {
	var out []group
	at := map[string]int{}
	for _, p := range c.Peers {
		own := p.ownHop()
		if !p.runs() || p.Filters == "" && p.NextHopMode == NextHopAuto && own == nil {
			continue
		}
		key := fmt.Sprintf("%s %t %d %v", p.Filters, p.ibgp(c.ASN), p.NextHopMode, own)
		i, ok := at[key]
		if !ok {
			i = len(out)
			at[key] = i
			out = append(out, group{filters: c.filtersOf(p), ibgp: p.ibgp(c.ASN), mode: p.NextHopMode, ownHop: own})
		}
		out[i].addrs = append(out[i].addrs, p.Addr)
	}
	return out
}

// ownHop lists the families of which the node's own routes carry the session's
// address as their next hop, not the node's.
func (p Peer) ownHop() []wire.Family {
	switch {
	case p.Interface != "":
		return p.carries()
	case p.ExtendedNextHop:
		return []wire.Family{wire.IPv4}
	}
	return nil
}

// reflectTo lists the peers to which routes of other iBGP peers are passed on.
func (c *Config) reflectTo() []netip.Addr {
	var l []netip.Addr
	for _, p := range c.Peers {
		if p.runs() && p.Reflect && p.ibgp(c.ASN) {
			l = append(l, p.Addr)
		}
	}
	return l
}

// filters renders the rules of a group's filters in order. The set of
// neighbours has the group's export name.
func (r *rendering) filters(name string, g group, export bool) []*api.Statement {
	var out []*api.Statement
	neighbours := "export-" + name[strings.LastIndexByte(name, '-')+1:]
	for i, filter := range g.filters {
		for _, f := range families() {
			for j, rule := range filter.rules(export, f == wire.IPv6) {
				if rule.PeerType != "" && (rule.PeerType == "iBGP") != g.ibgp {
					continue
				}
				x := ruleRendering{rendering: r, name: fmt.Sprintf("%s-%d-%s-%d", name, i, named("v4", f), j), rule: rule, family: f, neighbours: neighbours, export: export}
				out = append(out, x.statements()...)
			}
		}
	}
	return out
}

// assignments puts the policies in force: import lets through what no
// statement refuses, export only what a statement lets through.
func assignments() []*api.PolicyAssignment {
	return []*api.PolicyAssignment{
		{
			Name: "global", Direction: api.PolicyDirection_POLICY_DIRECTION_IMPORT,
			Policies: []*api.Policy{{Name: policyImport}}, DefaultAction: api.RouteAction_ROUTE_ACTION_ACCEPT,
		},
		{
			Name: "global", Direction: api.PolicyDirection_POLICY_DIRECTION_EXPORT,
			Policies: []*api.Policy{{Name: policyExport}}, DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT,
		},
	}
}
