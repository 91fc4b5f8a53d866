package nft

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

func pick[T any](t *rapid.T, label string, list ...T) T {
	return list[rapid.IntRange(0, len(list)-1).Draw(t, label)]
}

func drawNets(t *rapid.T, label string) []netip.Prefix {
	all := prefixes("10.1.0.1/32", "10.1.0.0/30", "10.1.0.2/31", "0.0.0.0/0", "10.1.0.0/16", "192.0.2.0/25", "192.0.2.128/25", "198.51.100.1/32",
		"fd01::1/128", "fd01::/126", "fd02::/64", "::/0", "fd01::2/127")
	if rapid.IntRange(0, 3).Draw(t, label+"?") > 0 {
		return nil
	}
	list := rapid.SliceOfN(rapid.SampledFrom(all), 1, 4).Draw(t, label)
	return list
}

func drawRanges(t *rapid.T, label string) []filter.PortRange {
	if rapid.IntRange(0, 2).Draw(t, label+"?") > 0 {
		return nil
	}
	all := []filter.PortRange{{Low: 80, High: 80}, {Low: 80, High: 90}, {Low: 91, High: 8079}, {Low: 8080, High: 8080}, {Low: 0, High: 1023}, {Low: 53, High: 65535}}
	return rapid.SliceOfN(rapid.SampledFrom(all), 1, 3).Draw(t, label)
}

func drawSet(t *rapid.T, label string, ids ...filter.SetID) filter.SetID {
	if rapid.IntRange(0, 3).Draw(t, label+"?") > 0 {
		return ""
	}
	return pick(t, label, ids...)
}

func drawSide(t *rapid.T, label string) filter.Side {
	return filter.Side{
		Nets: drawNets(t, label+" nets"), NotNets: drawNets(t, label+" notNets"),
		Set: drawSet(t, label+" set", "s-a", "s-b", "s-p"), NotSet: drawSet(t, label+" notSet", "s-a", "s-b", "s-p"),
		Ports: drawRanges(t, label+" ports"), PortSet: drawSet(t, label+" portSet", "s-p", "s-q"),
		NotPorts: drawRanges(t, label+" notPorts"), NotPortSet: drawSet(t, label+" notPortSet", "s-p", "s-q"),
	}
}

func drawRule(t *rapid.T) filter.Rule {
	r := filter.Rule{
		Action: pick(t, "action", filter.Allow, filter.Allow, filter.Deny, filter.Deny, filter.Pass, filter.Log),
		Family: pick(t, "family", dataplane.Family(0), 0, 0, 4, 6),
	}
	switch rapid.IntRange(0, 6).Draw(t, "shape") {
	case 0:
		return r
	case 1:
		r.NotProtocol = pick(t, "notProtocol", uint8(6), 17, 1)
	case 2:
		r.Protocol = pick(t, "icmp", uint8(1), 58)
		m := filter.ICMP{Set: true, Type: pick(t, "type", uint8(8), 128, 13), CodeSet: rapid.Bool().Draw(t, "codeSet"), Code: pick(t, "code", uint8(0), 1)}
		if rapid.Bool().Draw(t, "notICMP") {
			r.NotICMP = m
		} else {
			r.ICMP = m
		}
	case 3:
		r.Protocol = pick(t, "other", uint8(99), 4, 41, 132, 136)
	default:
		r.Protocol = pick(t, "protocol", uint8(6), 17, 0)
	}
	// A side is often free, or else nothing would match.
	if rapid.Bool().Draw(t, "source?") {
		r.Source = drawSide(t, "source")
	}
	if rapid.Bool().Draw(t, "destination?") {
		r.Destination = drawSide(t, "destination")
	}
	return r
}

func policyIDs() []filter.PolicyID {
	var ids []filter.PolicyID
	for i := range 4 {
		ids = append(ids, filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: fmt.Sprintf("p%d", i)})
	}
	return ids
}

func drawPath(t *rapid.T, label string, ends []filter.Action, last filter.Action) filter.Path {
	p := filter.Path{Default: last}
	for i := range rapid.IntRange(0, 2).Draw(t, label+" tiers") {
		tier := filter.Tier{Name: fmt.Sprintf("t%d", i), End: pick(t, label+" end", ends...)}
		for range rapid.IntRange(1, 3).Draw(t, label+" policies") {
			ref := filter.PolicyRef{ID: pick(t, label+" policy", policyIDs()...), Staged: rapid.IntRange(0, 4).Draw(t, label+" staged") == 0}
			if !slices.ContainsFunc(tier.Policies, func(o filter.PolicyRef) bool { return o.ID == ref.ID }) {
				tier.Policies = append(tier.Policies, ref)
			}
		}
		p.Tiers = append(p.Tiers, tier)
	}
	if rapid.IntRange(0, 2).Draw(t, label+" profile") == 0 {
		p.Profiles = append(p.Profiles, filter.PolicyID{Kind: "Profile", Name: "x"})
	}
	return p
}

func drawEndpoint(t *rapid.T, name string, host bool) filter.Endpoint {
	e := filter.Endpoint{Interface: name, Name: name, Host: host}
	both := []filter.Action{filter.Deny, filter.Pass}
	e.Ingress, e.Egress = drawPath(t, name+" in", both, filter.Deny), drawPath(t, name+" out", both, filter.Deny)
	if !host {
		for _, a := range addrs(name) {
			e.Sources = append(e.Sources, netip.PrefixFrom(a, a.BitLen()))
		}
		if name == "cali3" {
			e.Sources = append(e.Sources[1:], netip.MustParsePrefix("10.9.0.0/24"))
		}
		return e
	}
	pass := []filter.Action{filter.Pass}
	e.ForwardIngress, e.ForwardEgress = drawPath(t, name+" fwd in", both, filter.Allow), drawPath(t, name+" fwd out", both, filter.Allow)
	e.UntrackedIngress, e.UntrackedEgress = filter.Path{Default: filter.Pass}, filter.Path{Default: filter.Pass}
	e.PreDNATIngress = filter.Path{Default: filter.Pass}
	if rapid.IntRange(0, 3).Draw(t, name+" early") == 0 {
		e.UntrackedIngress, e.UntrackedEgress = drawPath(t, name+" raw in", pass, filter.Pass), drawPath(t, name+" raw out", pass, filter.Pass)
		e.PreDNATIngress = drawPath(t, name+" pre-DNAT", pass, filter.Pass)
		e.UntrackedIngress.Profiles, e.UntrackedEgress.Profiles, e.PreDNATIngress.Profiles = nil, nil, nil
	}
	return e
}

// drawRuleset draws a ruleset whose sets and policies are all there, used or
// not.
func drawRuleset(t *rapid.T) *filter.Ruleset {
	rs := filter.NewRuleset()
	put := func(id filter.SetID, kind filter.SetType, members ...filter.Member) {
		rs.Sets[id], rs.Members[id] = filter.Set{ID: id, Type: kind, Origin: string(id)}, make(map[filter.Member]struct{})
		for _, m := range members {
			rs.Members[id][m] = struct{}{}
		}
	}
	hosts := netMembers("10.1.0.1/32", "10.1.0.2/32", "10.1.0.3/32", "192.0.2.1/32", "198.51.100.1/32", "fd01::1/128", "fd01::2/128", "fd02::1/128", "10.1.255.1/32")
	wide := netMembers("10.9.0.0/24", "192.0.2.128/25", "192.0.2.0/31", "fd03::/64", "224.0.0.0/4", "fd01::8/125")
	for _, id := range []filter.SetID{"s-a", "s-b", filter.NATSources, filter.NATExempt, filter.TunnelSources} {
		members := rapid.SliceOfNDistinct(rapid.SampledFrom(hosts), 0, 6, rapid.ID).Draw(t, string(id))
		if rapid.Bool().Draw(t, string(id)+" wide?") {
			for _, m := range rapid.SliceOfNDistinct(rapid.SampledFrom(wide), 0, 4, rapid.ID).Draw(t, string(id)+" wide") {
				if !slices.ContainsFunc(members, func(o filter.Member) bool { return o.Prefix.Overlaps(m.Prefix) }) {
					members = append(members, m)
				}
			}
		}
		put(id, filter.Nets, members...)
	}
	var ports []filter.Member
	for _, m := range hosts {
		ports = append(ports, filter.Member{Prefix: m.Prefix, Protocol: 6, Port: 80}, filter.Member{Prefix: m.Prefix, Protocol: 17, Port: 53}, filter.Member{Prefix: m.Prefix, Protocol: 17, Port: 80})
	}
	for _, id := range []filter.SetID{"s-p", "s-q"} {
		put(id, filter.Ports, rapid.SliceOfNDistinct(rapid.SampledFrom(ports), 0, 9, rapid.ID).Draw(t, string(id))...)
	}
	for _, id := range append(policyIDs(), filter.PolicyID{Kind: "Profile", Name: "x"}) {
		p := filter.Policy{ID: id}
		for range rapid.IntRange(0, 3).Draw(t, "ingress rules") {
			p.Ingress = append(p.Ingress, drawRule(t))
		}
		for range rapid.IntRange(0, 3).Draw(t, "egress rules") {
			p.Egress = append(p.Egress, drawRule(t))
		}
		rs.Policies[id] = p
	}
	for _, name := range []string{"cali1", "cali2", "cali3", "eth0", "*"} {
		host := name == "eth0" || name == filter.AnyInterface
		if rapid.IntRange(0, 3).Draw(t, name+"?") > 0 && !(host && rapid.Bool().Draw(t, name+"??")) {
			rs.Endpoints[name] = drawEndpoint(t, name, host)
		}
	}
	rs.Settings = drawSettings(t)
	return rs
}

func drawSettings(t *rapid.T) filter.Settings {
	s := filter.Settings{
		WorkloadPrefixes: []string{"cali"}, LogPrefix: "test", WorkloadToHost: pick(t, "to host", filter.HostDrop, filter.HostAccept, filter.HostReturn),
		Reject: rapid.Bool().Draw(t, "reject"), AllowInvalid: rapid.Bool().Draw(t, "invalid"),
		WorkloadIPIP: rapid.Bool().Draw(t, "ipip"), WorkloadVXLAN: rapid.Bool().Draw(t, "vxlan"), VXLANPorts: pick(t, "vxlan ports", nil, []uint16{4789}, []uint16{90, 4789}),
	}
	if rapid.Bool().Draw(t, "prefixes") {
		s.WorkloadPrefixes = []string{"calix", "cali2"} // the others are found by their endpoints
	}
	if rapid.Bool().Draw(t, "between hosts") {
		s.Guarded = pick(t, "guarded", nil, []filter.Tunnel{{Protocol: 6, Port: 90}}, []filter.Tunnel{{Protocol: 6, Port: 80}, {Protocol: 17, Port: 90}})
		s.HostTraffic = []filter.Tunnel{{Protocol: 4}, {Protocol: 41}, {Protocol: 17, Port: 4789}, {Protocol: 6, Port: 90}}
		s.Tunnels = pick(t, "tunnels", nil, []filter.Tunnel{{Protocol: 17, Port: 4789}}, []filter.Tunnel{{Protocol: 4}, {Protocol: 41}, {Protocol: 17, Port: 90}, {Protocol: 17, Port: 4789}})
	}
	if rapid.Bool().Draw(t, "failsafe") {
		s.FailsafeIn = []filter.Failsafe{{Protocol: 6, Port: 80}, {Protocol: 17, Port: 53, Net: netip.MustParsePrefix("192.0.2.0/25")}}
		s.FailsafeOut = []filter.Failsafe{{Protocol: 17, Port: 80}, {Protocol: 6, Port: 8080, Net: netip.MustParsePrefix("fd02::/64")}}
	}
	if rapid.Bool().Draw(t, "nat ports") {
		s.NAT = filter.NAT{PortLow: 40000, PortHigh: 50000, KeepPorts: true, OutInterface: "eth+"}
	}
	return s
}

// someFlows returns flows of which no two are one connection, whether or not the host
// translates them.
func someFlows(rng *rand.Rand, n int) []filter.Flow {
	type pair struct {
		a, b   netip.Addr
		p      uint8
		pa, pb uint16
	}
	seen := make(map[pair]bool)
	places := append(slices.Clone(interfaces), "")
	one := func(place string) netip.Addr {
		list := addrs(place)
		return list[rng.IntN(len(list))]
	}
	var flows []filter.Flow
	for range n * 3 {
		if len(flows) == n {
			break
		}
		f := filter.Flow{In: places[rng.IntN(len(places))], Out: places[rng.IntN(len(places))]}
		src, dst := one(f.In), one(f.Out)
		if f.In != "" && rng.IntN(10) == 0 {
			src = one(interfaces[rng.IntN(len(interfaces))]) // forged
		}
		if f.In == f.Out || src.Is4() != dst.Is4() || src == dst {
			continue
		}
		p := filter.Packet{Src: src, Dst: dst, Protocol: []uint8{6, 6, 17, 17, 17, 1, 4, 41, 99, 136}[rng.IntN(10)]}
		ports := []uint16{80, 53, 8080, 90, 4789, 30001} // none that translation picks
		switch p.Protocol {
		case 6, 17, 136:
			p.SrcPort, p.DstPort = ports[rng.IntN(len(ports))], ports[rng.IntN(len(ports))]
			if rng.IntN(2) == 0 {
				p.SrcPort = 1024 + uint16(rng.IntN(60000))
			}
		case 1:
			p.ICMPType = []uint8{8, 13}[rng.IntN(2)]
			if src.Is6() {
				p.Protocol, p.ICMPType = 58, 128
				// Neighbour discovery is of one link: nobody forwards it.
				if (f.In == "" || f.Out == "") && rng.IntN(2) == 0 {
					p.ICMPType = 135
					if f.In != "" && rng.IntN(2) == 0 {
						p.Src = netip.MustParseAddr("fe80::1")
					}
				}
			}
		}
		key, back := pair{p.Src, p.Dst, p.Protocol, p.SrcPort, p.DstPort}, pair{p.Dst, p.Src, p.Protocol, p.DstPort, p.SrcPort}
		// Out of eth0 and eth1 it may go as the host's own, from its port if that is free:
		// what comes to the host from there must not be the answer.
		own, answer := key, back
		if host := addrs(""); strings.HasPrefix(f.Out, "eth") {
			own.a, answer.b = host[0], host[0]
			if p.Src.Is6() {
				own.a, answer.b = host[1], host[1]
			}
		}
		if p.Protocol == 4 || p.Protocol == 41 || p.Protocol == 99 {
			// Without ports, translation can make two flows to one address the same.
			key, back = pair{a: p.Dst, p: p.Protocol}, pair{a: p.Src, p: p.Protocol}
			own, answer = key, back
			seen[back] = seen[back] || rng.IntN(2) == 0
		}
		if seen[key] || seen[back] || seen[own] || seen[answer] {
			continue
		}
		seen[key], seen[back], seen[own], seen[answer] = true, true, true, true
		f.Packet = p
		flows = append(flows, f)
	}
	return flows
}

// step returns the step from one ruleset to another.
func step(from, to *filter.Ruleset) filter.Delta {
	var d filter.Delta
	for id, s := range to.Sets {
		if _, ok := from.Sets[id]; !ok {
			d.PutSets = append(d.PutSets, s)
		}
		c := filter.MemberChange{Set: id}
		for m := range to.Members[id] {
			if _, ok := from.Members[id][m]; !ok {
				c.Add = append(c.Add, m)
			}
		}
		for m := range from.Members[id] {
			if _, ok := to.Members[id][m]; !ok {
				c.Del = append(c.Del, m)
			}
		}
		if len(c.Add)+len(c.Del) > 0 {
			d.Members = append(d.Members, c)
		}
	}
	for id, p := range to.Policies {
		if old, ok := from.Policies[id]; !ok || !cmp.Equal(old, p, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })) {
			d.PutPolicies = append(d.PutPolicies, p)
		}
	}
	for name, e := range to.Endpoints {
		if old, ok := from.Endpoints[name]; !ok || !cmp.Equal(old, e, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })) {
			d.PutEndpoints = append(d.PutEndpoints, e)
		}
	}
	for name := range from.Endpoints {
		if _, ok := to.Endpoints[name]; !ok {
			d.DelEndpoints = append(d.DelEndpoints, name)
		}
	}
	for id := range from.Policies {
		if _, ok := to.Policies[id]; !ok {
			d.DelPolicies = append(d.DelPolicies, id)
		}
	}
	for id := range from.Sets {
		if _, ok := to.Sets[id]; !ok {
			d.DelSets = append(d.DelSets, id)
		}
	}
	if !cmp.Equal(from.Settings, to.Settings, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		d.Settings = &to.Settings
	}
	return d
}

// differences says where the kernel's table is not what a fresh load of the
// ruleset would be.
func differences(t *Table, rs *filter.Ruleset) string {
	w := newDesired(t.cfg)
	d := whole(rs)
	if err := w.apply(&d); err != nil {
		return err.Error()
	}
	h, err := t.conn.dump()
	if err != nil {
		return err.Error()
	}
	j, _, ok := h.against(w)
	if !ok {
		return "another form"
	}
	return fmt.Sprint(slices.Sorted(maps.Keys(j.chains)), slices.Sorted(maps.Keys(j.sets)))
}

const same = "[] []"

// What the kernel does to packets is what Judge says, whatever the ruleset, and
// whatever was there before. After each step the table is what a fresh load
// would make it, and a restart finds nothing to do.
func TestKernelAgreesWithJudge(t *testing.T) {
	if os.Getenv("ROUTERD_STAGE") == "vm" {
		// An emulated processor takes ten times as long.
		if err := flag.Set("rapid.checks", "10"); err != nil {
			t.Fatal(err)
		}
	}
	t.Parallel()
	l := newLab(t)
	// With the rules that judge what is beyond the bound of the log.
	cfg := Config{Shared: true, FlowGroup: 7, LogRate: 1}
	probes, allowed := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		table := openTable(t, l.host, cfg)
		defer func() { table.Close() }()
		was := filter.NewRuleset()
		for range rapid.IntRange(1, 3).Draw(rt, "steps") {
			rs := drawRuleset(rt)
			if err := table.Apply(step(was, rs)); err != nil {
				rt.Fatal(err)
			}
			was = rs
			if rapid.IntRange(0, 7).Draw(rt, "list") == 0 {
				if out := listing(l.host); !strings.Contains(out, "chain "+snatOut) {
					rt.Fatalf("an operator cannot see it: %s", out)
				}
			}
			if diff := differences(table, rs); diff != same {
				rt.Fatalf("not what a fresh load gives: %s", diff)
			}
			if rapid.IntRange(0, 2).Draw(rt, "restart") == 0 {
				table.Close()
				table = openTable(t, l.host, cfg)
				if err := table.Replace(rs); err != nil {
					rt.Fatal(err)
				}
				if s := table.Status(); s.Messages != 0 {
					rt.Fatalf("%d messages after a restart in an unchanged world", s.Messages)
				}
			}
			l.forget(t)
			seed := rapid.Uint64().Draw(rt, "flows")
			flows := someFlows(rand.New(rand.NewPCG(seed, 1)), 150)
			verdict := func(f filter.Flow) bool { return rs.Judge(f).Allowed }
			for i, got := range l.try(t, flows, verdict) {
				probes++
				if got {
					allowed++
				}
				if want := rs.Judge(flows[i]); got != want.Allowed {
					rt.Fatalf("%+v arrived: %t, and is judged %+v\n%s", flows[i], got, want, listing(l.host))
				}
			}
		}
	})
	t.Logf("%d packets, of which %d were allowed", probes, allowed)
	if allowed*10 < probes || allowed*10 > 9*probes {
		t.Errorf("%d of %d allowed says little", allowed, probes)
	}
}
