package bgp

import (
	"net/netip"

	"github.com/osrg/gobgp/v4/api"
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
const nothing = "255.255.255.255/32"

// martians are never accepted from anybody: the default route, this host,
// loopback, link-local, multicast and reserved space (RFC 6890, RFC 5771).
func martians() []*api.Prefix {
	l := []*api.Prefix{{IpPrefix: "0.0.0.0/0", MaskLengthMin: 0, MaskLengthMax: 0}}
	for _, s := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"} {
		l = append(l, inside(netip.MustParsePrefix(s)))
	}
	return l
}

// inside matches a prefix and all that lies in it.
func inside(p netip.Prefix) *api.Prefix {
	return &api.Prefix{IpPrefix: p.String(), MaskLengthMin: uint32(p.Bits()), MaskLengthMax: 32}
}

func prefixSet(name string, list []netip.Prefix) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: name}
	for _, p := range list {
		s.Prefixes = append(s.Prefixes, inside(p))
	}
	if len(s.Prefixes) == 0 {
		s.Prefixes = []*api.Prefix{inside(netip.MustParsePrefix(nothing))}
	}
	return s
}

func neighbourSet(name string, list []netip.Addr) *api.DefinedSet {
	s := &api.DefinedSet{DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: name}
	for _, a := range list {
		s.List = append(s.List, netip.PrefixFrom(a, a.BitLen()).String())
	}
	if len(s.List) == 0 {
		s.List = []string{nothing}
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
	return &api.SetPoliciesRequest{
		DefinedSets: []*api.DefinedSet{
			{DefinedType: api.DefinedType_DEFINED_TYPE_PREFIX, Name: setMartians, Prefixes: martians()},
			prefixSet(setPools, c.Pools), prefixSet(setOwn, c.Own), prefixSet(setLent, c.Lent),
			neighbourSet(setCluster, c.cluster()),
		},
		Policies: []*api.Policy{
			{Name: policyImport, Statements: []*api.Statement{
				// GoBGP asks the import policy about what we originate, too.
				statement("originated-here", accept, &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL}),
				statement("no-martian", reject, &api.Conditions{PrefixSet: anyOf(setMartians)}),
				statement("lent-to-a-node", accept, &api.Conditions{PrefixSet: anyOf(setLent), NeighborSet: anyOf(setCluster)}),
				statement("not-ours", reject, &api.Conditions{PrefixSet: anyOf(setOwn)}),
				statement("node-inside-pools", accept, &api.Conditions{PrefixSet: anyOf(setPools), NeighborSet: anyOf(setCluster)}),
				statement("node-nothing-else", reject, &api.Conditions{NeighborSet: anyOf(setCluster)}),
			}},
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
