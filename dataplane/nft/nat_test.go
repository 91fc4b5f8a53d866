package nft

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
)

// open lets three workloads send and receive everything.
func openWorkloads(nat filter.NAT) filter.Delta {
	d := filter.Delta{
		PutSets: []filter.Set{{ID: filter.NATSources}, {ID: filter.NATExempt}},
		Members: []filter.MemberChange{
			{Set: filter.NATSources, Add: netMembers("10.1.0.0/31", "fd01::/127")},
			{Set: filter.NATExempt, Add: netMembers("10.1.0.0/16", "fd01::/64", "198.51.100.0/24")},
		},
		Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}, NAT: nat},
	}
	for _, name := range interfaces[:3] {
		e := filter.Endpoint{Interface: name, Ingress: filter.Path{Default: filter.Allow}, Egress: filter.Path{Default: filter.Allow}}
		for _, a := range addrs(name) {
			e.Sources = append(e.Sources, netip.PrefixFrom(a, a.BitLen()))
		}
		d.PutEndpoints = append(d.PutEndpoints, e)
	}
	return d
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// What leaves the cluster from a pool that is translated, and nothing else,
// comes from the host: as configured.
func TestOutgoing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ip(t, l.host, "addr add 192.0.2.99/32 dev eth0", "addr add fd02::99/128 dev eth0 nodad")
	masqueraded := map[bool]netip.Addr{true: addr("192.0.2.99"), false: addr("fd02::99")}
	tests := []struct {
		name     string
		flow     filter.Flow
		from     netip.Addr // zero: as it was sent
		low      uint16     // of the source port; 0: not looked at
		high     uint16
		settings filter.NAT
	}{
		{"IPv4", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), masqueraded[true], 0, 0, filter.NAT{}},
		{"IPv6", udp("cali1", "eth0", "fd01::1", "fd02::1"), masqueraded[false], 0, 0, filter.NAT{}},
		{"the port stays", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), masqueraded[true], 7000, 7000, filter.NAT{KeepPorts: true}},
		{"range of ports", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), masqueraded[true], 40000, 40100, filter.NAT{PortLow: 40000, PortHigh: 40100}},
		{"address", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), addr("203.0.113.7"), 0, 0, filter.NAT{Address: addr("203.0.113.7")}},
		{"address and ports", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), addr("203.0.113.7"), 40000, 40100, filter.NAT{Address: addr("203.0.113.7"), PortLow: 40000, PortHigh: 40100}},
		{"address of the other family", udp("cali1", "eth0", "fd01::1", "fd02::1"), masqueraded[false], 0, 0, filter.NAT{Address: addr("203.0.113.7")}},
		{"another interface", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), netip.Addr{}, 0, 0, filter.NAT{OutInterface: "eth1"}},
		{"interfaces by prefix", udp("cali1", "eth0", "10.1.0.1", "192.0.2.1"), masqueraded[true], 0, 0, filter.NAT{OutInterface: "et+"}},
		{"between workloads", udp("cali1", "cali2", "10.1.0.1", "10.1.0.2"), netip.Addr{}, 0, 0, filter.NAT{}},
		{"to an exempt net", udp("cali1", "eth1", "10.1.0.1", "198.51.100.1"), netip.Addr{}, 0, 0, filter.NAT{}},
		{"from another pool", udp("cali2", "eth0", "10.1.0.2", "192.0.2.1"), netip.Addr{}, 0, 0, filter.NAT{}},
		{"from elsewhere", udp("eth1", "cali1", "198.51.100.1", "10.1.0.1"), netip.Addr{}, 0, 0, filter.NAT{}},
	}
	for _, tt := range tests {
		table := openTable(t, l.host, Config{Shared: true})
		if err := table.Replace(rulesetOf(t, openWorkloads(tt.settings))); err != nil {
			t.Fatal(err)
		}
		l.forget(t)
		if got := l.try(t, []filter.Flow{tt.flow}, func(filter.Flow) bool { return true }); !got[0] {
			t.Errorf("%s: did not arrive\n%s", tt.name, listing(l.host))
		}
		from := l.sources[l.next]
		want := tt.from
		if !want.IsValid() {
			want = tt.flow.Packet.Src
		}
		if from.Addr() != want || tt.low != 0 && (from.Port() < tt.low || from.Port() > tt.high) {
			t.Errorf("%s: from %s, want %s and port %d-%d", tt.name, from, want, tt.low, tt.high)
		}
		table.Close()
	}
}

func udp(in, out, src, dst string) filter.Flow {
	return filter.Flow{In: in, Out: out, Packet: filter.Packet{Src: addr(src), Dst: addr(dst), Protocol: 17, SrcPort: 7000, DstPort: 80}}
}

// A floating address leads to its workload, which is seen by it from outside
// the pools and when it speaks to itself. Of two workloads that claim one, the
// later has it, and the other when that one is gone.
func TestFloating(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ip(t, l.host, "addr add 192.0.2.99/32 dev eth0", "addr add fd02::99/128 dev eth0 nodad", "route add 192.0.2.50/32 dev eth0")
	table := openTable(t, l.host, Config{})
	defer table.Close()
	d := openWorkloads(filter.NAT{})
	claim := func(e filter.Endpoint) filter.Endpoint {
		for _, net := range e.Sources {
			a, out := net.Addr(), addr("192.0.2.50")
			if a.Is6() {
				out = addr("fd02::50")
			}
			e.NAT = append(e.NAT, filter.Translation{External: out, Internal: a})
		}
		return e
	}
	first, second := claim(d.PutEndpoints[0]), claim(d.PutEndpoints[1])
	d.PutEndpoints[0], d.PutEndpoints[1] = first, second
	if err := table.Apply(d); err != nil {
		t.Fatal(err)
	}
	arrive := func(name string, f filter.Flow, from string) {
		t.Helper()
		l.forget(t)
		if got := l.try(t, []filter.Flow{f}, func(filter.Flow) bool { return true }); !got[0] {
			t.Errorf("%s: did not arrive", name)
		} else if got := l.sources[l.next].Addr(); got != addr(from) {
			t.Errorf("%s: from %s, want %s", name, got, from)
		}
	}
	arrive("in", udp("eth0", "cali2", "192.0.2.1", "192.0.2.50"), "192.0.2.1")
	arrive("in, IPv6", udp("eth0", "cali2", "fd02::1", "fd02::50"), "fd02::1")
	arrive("out", udp("cali2", "eth0", "10.1.0.2", "192.0.2.1"), "192.0.2.50")
	arrive("out, IPv6", udp("cali2", "eth0", "fd01::2", "fd02::1"), "fd02::50")
	arrive("between workloads", udp("cali2", "cali3", "10.1.0.2", "10.1.0.3"), "10.1.0.2")
	arrive("to itself", udp("cali2", "cali2", "10.1.0.2", "192.0.2.50"), "192.0.2.50")
	arrive("from the host", udp("", "cali2", "10.1.255.1", "192.0.2.50"), "10.1.255.1")
	if err := table.Apply(filter.Delta{DelEndpoints: []string{"cali2"}}); err != nil {
		t.Fatal(err)
	}
	arrive("in, to the other", udp("eth0", "cali1", "192.0.2.1", "192.0.2.50"), "192.0.2.1")
	first.NAT = nil
	if err := table.Apply(filter.Delta{PutEndpoints: []filter.Endpoint{first}}); err != nil {
		t.Fatal(err)
	}
	if got := table.Status(); got.Elements == 0 || table.desired.tally.floating != 0 {
		t.Errorf("%+v, %d endpoints with floating addresses", got, table.desired.tally.floating)
	}
	if got := l.try(t, []filter.Flow{udp("eth0", "cali1", "192.0.2.130", "192.0.2.50")}, func(filter.Flow) bool { return false }); got[0] {
		t.Error("nobody claims the address, and it leads somewhere")
	}
}

// What a rule met is counted for the rule of the policy, of whatever rules of
// the kernel it became; a staged policy counts and decides nothing. A rule
// that stays when its policy changes keeps its count.
func TestCounters(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := openTable(t, l.host, Config{FlowGroup: 7})
	defer table.Close()
	id := filter.PolicyID{Kind: "NetworkPolicy", Namespace: "ns1", Name: "web"}
	staged := filter.PolicyID{Kind: "StagedNetworkPolicy", Namespace: "ns1", Name: "no"}
	d := openWorkloads(filter.NAT{})
	d.PutSets = append(d.PutSets, filter.Set{ID: "s-clients"})
	d.Members = append(d.Members, filter.MemberChange{Set: "s-clients", Add: netMembers("10.1.0.1/32", "fd01::1/128")})
	web := filter.Policy{ID: id, Ingress: []filter.Rule{
		{Action: filter.Allow, Source: filter.Side{Set: "s-clients"}, Protocol: 17},
		{Action: filter.Deny, Protocol: 99},
	}}
	d.PutPolicies = []filter.Policy{web, {ID: staged, Ingress: []filter.Rule{{Action: filter.Deny}}}}
	d.PutEndpoints[1].Ingress = filter.Path{Tiers: []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{{ID: staged, Staged: true}, {ID: id}}}}}
	if err := table.Apply(d); err != nil {
		t.Fatal(err)
	}
	other := udp("cali1", "cali2", "10.1.0.1", "10.1.0.2")
	other.Packet.Protocol = 99
	nobody := udp("cali3", "cali2", "10.1.0.3", "10.1.0.2")
	forged := udp("cali1", "cali2", "10.1.0.3", "10.1.0.2")
	flows := []filter.Flow{udp("cali1", "cali2", "10.1.0.1", "10.1.0.2"), udp("cali1", "cali2", "fd01::1", "fd01::2"), other, nobody, forged}
	got := l.try(t, flows, func(f filter.Flow) bool { return f.Packet == flows[0].Packet || f.Packet == flows[1].Packet })
	if diff := cmp.Diff([]bool{true, true, false, false, false}, got); diff != "" {
		t.Error(diff)
	}
	counts := func() map[Counter]uint64 {
		t.Helper()
		list, err := table.Counters()
		if err != nil {
			t.Fatal(err)
		}
		out := make(map[Counter]uint64)
		for _, c := range list {
			if c.Packets > 0 && c.Bytes < c.Packets*20 {
				t.Errorf("%+v", c)
			}
			if c.Packets > 0 {
				out[c.key()] = c.Packets
			}
		}
		return out
	}
	rule := func(id filter.PolicyID, i int, a filter.Action, staged bool) Counter {
		return Counter{Policy: id, Direction: filter.Ingress, Hook: filter.Normal, Rule: i, Action: a, Staged: staged, Reason: filter.ByRule}
	}
	want := map[Counter]uint64{
		rule(id, 0, filter.Allow, false):   2,
		rule(id, 1, filter.Deny, false):    1,
		rule(staged, 0, filter.Deny, true): 4,
		{Direction: filter.Ingress, Hook: filter.Normal, Rule: filter.NoRule, Action: filter.Deny, Tier: "default", Reason: filter.ByTierEnd}: 1,
		{Direction: filter.Egress, Hook: filter.Normal, Rule: filter.NoRule, Action: filter.Allow, Reason: filter.ByPathEnd}:                  4,
		{Rule: filter.NoRule, Reason: filter.BySpoofing}: 1,
	}
	if l.resent {
		for key, n := range counts() {
			if n < want[key] {
				t.Errorf("%+v: %d, want %d at least", key, n, want[key])
			}
		}
		want = counts()
	}
	if diff := cmp.Diff(want, counts()); diff != "" {
		t.Error(diff)
	}
	web.Ingress = append(web.Ingress, filter.Rule{Action: filter.Allow, Protocol: 6})
	if err := table.Apply(filter.Delta{PutPolicies: []filter.Policy{web}}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, counts()); diff != "" {
		t.Errorf("after another rule: %s", diff)
	}
}
