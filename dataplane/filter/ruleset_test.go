package filter

import (
	"net/netip"
	"strings"
	"testing"
)

func member(s string) Member { return Member{Prefix: netip.MustParsePrefix(s)} }

func built(t *testing.T, deltas ...Delta) *Ruleset {
	t.Helper()
	r := NewRuleset()
	for i := range deltas {
		if err := r.Apply(&deltas[i]); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestApplyRefusesWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	start := Delta{
		PutSets:      []Set{{ID: "a"}},
		Members:      []MemberChange{{Set: "a", Add: []Member{member("10.0.0.0/8")}}},
		PutPolicies:  []Policy{{ID: PolicyID{Name: "p"}}},
		PutEndpoints: []Endpoint{{Interface: "eth0"}},
	}
	for _, tt := range []struct {
		delta Delta
		want  string
	}{
		{Delta{PutSets: []Set{{ID: "a"}}}, "put set a: it exists"},
		{Delta{Members: []MemberChange{{Set: "b"}}}, "change set b: there is none"},
		{Delta{Members: []MemberChange{{Set: "a", Add: []Member{member("10.0.0.0/8")}}}}, "change set a: add 10.0.0.0/8: it is a member"},
		{Delta{Members: []MemberChange{{Set: "a", Del: []Member{member("10.0.0.0/9")}}}}, "change set a: delete 10.0.0.0/9: it is no member"},
		{Delta{DelSets: []SetID{"b"}}, "delete set b: there is none"},
		{Delta{DelPolicies: []PolicyID{{Kind: "Profile", Name: "q"}}}, "delete policy Profile(q): there is none"},
		{Delta{DelEndpoints: []string{"eth1"}}, "delete endpoint eth1: there is none"},
		{Delta{DelEndpoints: []string{"eth0"}, DelPolicies: []PolicyID{{Name: "p"}}, DelSets: []SetID{"a"}, Settings: &Settings{LogPrefix: "x"}}, ""},
	} {
		got := ""
		if err := built(t, start).Apply(&tt.delta); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.delta, got, tt.want)
		}
		if tt.delta.Empty() {
			t.Errorf("%+v is called empty", tt.delta)
		}
	}
	if empty := (Delta{}); !empty.Empty() {
		t.Error("an empty delta is not called so")
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	id := PolicyID{Kind: "Profile", Name: "p"}
	rule := Policy{ID: id, Ingress: []Rule{{Source: Side{Set: "a"}}}}
	endpoint := Endpoint{Interface: "eth0", Ingress: Path{Tiers: []Tier{{Policies: []PolicyRef{{ID: id}}}}, Profiles: []PolicyID{id}}}
	for _, tt := range []struct {
		delta Delta
		want  string
	}{
		{Delta{PutSets: []Set{{ID: "a"}}, PutPolicies: []Policy{rule}, PutEndpoints: []Endpoint{endpoint}}, ""},
		{Delta{PutEndpoints: []Endpoint{endpoint}}, "endpoint eth0 names Profile(p), which is not there"},
		{Delta{PutSets: []Set{{ID: "a"}}, PutPolicies: []Policy{rule}}, "no endpoint names Profile(p)"},
		{Delta{PutPolicies: []Policy{rule}, PutEndpoints: []Endpoint{endpoint}}, "Profile(p) names the set a, which is not there"},
		{Delta{PutSets: []Set{{ID: NATExempt}, {ID: "b"}}}, "no rule names the set b"},
		{
			Delta{PutSets: []Set{{ID: NATExempt}}, Members: []MemberChange{{Set: NATExempt, Add: []Member{member("10.0.0.0/8"), member("9.0.0.0/8"), member("10.1.0.0/16")}}}},
			"set nat-exempt: 10.0.0.0/8 and 10.1.0.0/16 overlap",
		},
	} {
		got := ""
		if err := built(t, tt.delta).Check(); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.delta, got, tt.want)
		}
	}
}

// What a writer to the kernel must get right about one side of a rule, family
// by family.
func TestSideOfARule(t *testing.T) {
	t.Parallel()
	r := built(t, Delta{
		PutSets: []Set{{ID: "nets"}, {ID: "ports", Type: Ports}},
		Members: []MemberChange{
			{Set: "nets", Add: []Member{member("10.0.0.0/24"), member("fd00::1/128")}},
			{Set: "ports", Add: []Member{{Prefix: netip.MustParsePrefix("10.0.0.1/32"), Protocol: 6, Port: 80}}},
		},
	})
	four, six := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, []netip.Prefix{netip.MustParsePrefix("fd00::/16")}
	for _, tt := range []struct {
		name string
		side Side
		addr string
		port uint16
		want bool
	}{
		{"nothing asked", Side{}, "192.0.2.1", 1, true},
		{"net", Side{Nets: four}, "10.1.1.1", 1, true},
		{"net of the other family", Side{Nets: four}, "fd00::1", 1, false},
		{"not in a net", Side{NotNets: four}, "192.0.2.1", 1, true},
		{"not in a net of the other family", Side{NotNets: six}, "192.0.2.1", 1, false},
		{"set", Side{Set: "nets"}, "10.0.0.77", 1, true},
		{"set, the other family", Side{Set: "nets"}, "fd00::1", 1, true},
		{"set, outside", Side{Set: "nets"}, "10.0.1.1", 1, false},
		{"not in a set", Side{NotSet: "nets"}, "10.0.1.1", 1, true},
		{"set of ports", Side{Set: "ports"}, "10.0.0.1", 80, true},
		{"set of ports, another port", Side{Set: "ports"}, "10.0.0.1", 81, false},
		{"ports or a set of them: port", Side{Ports: []PortRange{{22, 23}}, PortSet: "ports"}, "192.0.2.1", 23, true},
		{"ports or a set of them: set", Side{Ports: []PortRange{{22, 23}}, PortSet: "ports"}, "10.0.0.1", 80, true},
		{"ports or a set of them: neither", Side{Ports: []PortRange{{22, 23}}, PortSet: "ports"}, "10.0.0.2", 80, false},
		{"neither ports nor a set of them", Side{NotPorts: []PortRange{{22, 23}}, NotPortSet: "ports"}, "10.0.0.2", 80, true},
		{"neither ports nor a set of them: port", Side{NotPorts: []PortRange{{22, 23}}, NotPortSet: "ports"}, "10.0.0.2", 22, false},
		{"neither ports nor a set of them: set", Side{NotPorts: []PortRange{{22, 23}}, NotPortSet: "ports"}, "10.0.0.1", 80, false},
	} {
		if got := r.side(&tt.side, netip.MustParseAddr(tt.addr), 6, tt.port); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, s := range []any{
		Allow, Deny, Pass, Log, Ingress, Egress, Untracked, PreDNAT, Normal, Forward, Nets, Ports,
	} {
		b.WriteString(s.(interface{ String() string }).String() + " ")
	}
	b.WriteString(PolicyID{"NetworkPolicy", "ns", "p"}.String() + " " + PortRange{1, 1}.String() + " " + PortRange{1, 2}.String() + " ")
	b.WriteString(Member{netip.MustParsePrefix("10.0.0.1/32"), 6, 80}.String())
	const want = "Allow Deny Pass Log ingress egress untracked pre-DNAT normal forward nets ports NetworkPolicy(ns/p) 1 1-2 10.0.0.1 protocol 6 port 80"
	if b.String() != want {
		t.Errorf("got %q", b.String())
	}
}

// Whatever an endpoint names, on whichever path, it is found by.
func TestNamesAny(t *testing.T) {
	t.Parallel()
	pid := func(name string) PolicyID { return PolicyID{Kind: "NetworkPolicy", Name: name} }
	by := func(name string) Path {
		return Path{
			Tiers:    []Tier{{Name: "empty"}, {Name: "t", Policies: []PolicyRef{{ID: pid("both")}, {ID: pid(name)}}}},
			Profiles: []PolicyID{pid("profile of " + name)},
		}
	}
	e := Endpoint{
		Ingress: by("in"), Egress: by("out"), ForwardIngress: by("forward in"), ForwardEgress: by("forward out"),
		UntrackedIngress: by("untracked in"), UntrackedEgress: by("untracked out"), PreDNATIngress: by("pre-DNAT"),
	}
	named := e.Policies()
	if len(named) != 15 {
		t.Errorf("%d are named, want 15: %v", len(named), named)
	}
	for _, id := range named {
		if !e.NamesAny(map[PolicyID]bool{pid("other"): true, id: true}) {
			t.Errorf("%s is named, and not found", id)
		}
	}
	for _, ids := range []map[PolicyID]bool{nil, {pid("other"): true}, {pid("in"): false}} {
		if e.NamesAny(ids) {
			t.Errorf("one of %v is found, and none is named", ids)
		}
	}
}
