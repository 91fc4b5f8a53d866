package bgp

import (
	"net/netip"

	"github.com/osrg/gobgp/v4/api"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// Names of GoBGP's policies and sets.
const (
	setMartians = "martians"
	setPools    = "pools"
	setOwn      = "own"
	setLent     = "lent"
	setCluster  = "cluster"

	policyImport = "import"
	policyExport = "export"
)

// nothing stands in sets that would be empty: GoBGP takes an empty set of
// neighbours for all of them, and an empty prefix set has no family. It matches
// no route, because what it would match is refused before.
func nothing(f packet.Family) netip.Prefix {
	if f == packet.RF_IPv4_UC {
		return netip.MustParsePrefix("255.255.255.255/32")
	}
	return netip.MustParsePrefix("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128")
}

// martians are never accepted from anybody: the default route, this host,
// loopback, link-local, multicast and reserved space (RFC 6890, RFC 5771), and
// IPv4 addresses in IPv6's clothes.
func martians(f packet.Family) []*api.Prefix {
	deflt, ranges := "0.0.0.0/0", []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"}
	if f == packet.RF_IPv6_UC {
		deflt, ranges = "::/0", []string{"::/127", "::ffff:0:0/96", "fe80::/10", "ff00::/8"}
	}
	l := []*api.Prefix{{IpPrefix: deflt, MaskLengthMin: 0, MaskLengthMax: 0}}
	for _, s := range ranges {
		l = append(l, inside(netip.MustParsePrefix(s)))
	}
	return l
}

// inside matches a prefix and all that lies in it.
func inside(p netip.Prefix) *api.Prefix {
	return &api.Prefix{IpPrefix: p.String(), MaskLengthMin: uint32(p.Bits()), MaskLengthMax: uint32(p.Addr().BitLen())}
}

// named is the name of a family's part of a set or of a statement: GoBGP's sets
// of prefixes are of one family.
func named(name string, f packet.Family) string {
	if f == packet.RF_IPv4_UC {
		return name
	}
	return name + "-v6"
}

// prefixSet is a family's part of a list.
func prefixSet(name string, f packet.Family, list []netip.Prefix) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: named(name, f)}
	for _, p := range list {
		if familyOf(p.Addr()) == f {
			s.Prefixes = append(s.Prefixes, inside(p))
		}
	}
	if len(s.Prefixes) == 0 {
		s.Prefixes = []*api.Prefix{inside(nothing(f))}
	}
	return s
}

func neighbourSet(name string, list []netip.Addr) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: name}
	for _, a := range list {
		s.List = append(s.List, netip.PrefixFrom(a, a.BitLen()).String())
	}
	if len(s.List) == 0 {
		s.List = []string{nothing(packet.RF_IPv4_UC).String()}
	}
	return s
}

// policies renders what the package's comment says about import and export in
// GoBGP's terms. The first statement that matches decides.
func policies(c *Config) *api.SetPoliciesRequest {
	anyOf := func(set string) *api.MatchSet { return &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: set} }
	statement := func(name string, action api.RouteAction, cond *api.Conditions) *api.Statement {
		return &api.Statement{Name: name, Conditions: cond, Actions: &api.Actions{RouteAction: action}}
	}
	const accept, reject = api.RouteAction_ROUTE_ACTION_ACCEPT, api.RouteAction_ROUTE_ACTION_REJECT
	sets := []*api.DefinedSet{neighbourSet(setCluster, c.cluster())}
	// GoBGP asks the import policy about what we originate, too.
	judge := []*api.Statement{statement("originated-here", accept, &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL})}
	for _, f := range families() {
		sets = append(sets,
			&api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: named(setMartians, f), Prefixes: martians(f)},
			prefixSet(setPools, f, c.Pools), prefixSet(setOwn, f, c.Own), prefixSet(setLent, f, c.Lent))
		in := func(set string) *api.MatchSet { return anyOf(named(set, f)) }
		judge = append(judge,
			statement(named("no-martian", f), reject, &api.Conditions{PrefixSet: in(setMartians)}),
			statement(named("lent-to-a-node", f), accept, &api.Conditions{PrefixSet: in(setLent), NeighborSet: anyOf(setCluster)}),
			statement(named("not-ours", f), reject, &api.Conditions{PrefixSet: in(setOwn)}),
			statement(named("node-inside-pools", f), accept, &api.Conditions{PrefixSet: in(setPools), NeighborSet: anyOf(setCluster)}))
	}
	judge = append(judge, statement("node-nothing-else", reject, &api.Conditions{NeighborSet: anyOf(setCluster)}))
	return &api.SetPoliciesRequest{
		DefinedSets: sets,
		Policies: []*api.Policy{
			{Name: policyImport, Statements: judge},
			{Name: policyExport, Statements: []*api.Statement{
				statement("only-our-own", accept, &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL}),
			}},
		},
	}
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
