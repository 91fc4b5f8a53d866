package nft

import (
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

func run(t testing.TB, n *netnstest.Netns, command ...string) string {
	t.Helper()
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command(command[0], command[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// listing returns what nft(8) shows, or why it does not.
func listing(n *netnstest.Netns) string {
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command("nft", "list", "table", "inet", TableName).CombinedOutput()
		return err
	})
	return fmt.Sprint(string(out), err)
}

func openTable(t testing.TB, n *netnstest.Netns, cfg Config) *Table {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	var table *Table
	err := n.Do(func() (err error) {
		table, err = Open(cfg)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func prefixes(s ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func netMembers(s ...string) []filter.Member {
	var out []filter.Member
	for _, p := range prefixes(s...) {
		out = append(out, filter.Member{Prefix: p})
	}
	return out
}

// small is a ruleset with something of everything.
func small() filter.Delta {
	allow := filter.PolicyID{Kind: "NetworkPolicy", Namespace: "ns1", Name: "web"}
	admin := filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "admin"}
	staged := filter.PolicyID{Kind: "StagedNetworkPolicy", Namespace: "ns1", Name: "next"}
	profile := filter.PolicyID{Kind: "Profile", Name: "kns.ns1"}
	workload := func(name, addr string) filter.Endpoint {
		tier := func(name string, end filter.Action, refs ...filter.PolicyRef) filter.Tier {
			return filter.Tier{Name: name, Policies: refs, End: end}
		}
		return filter.Endpoint{
			Interface: name, Name: "WorkloadEndpoint(ns1/" + name + ")", Sources: prefixes(addr),
			Ingress: filter.Path{Tiers: []filter.Tier{
				tier("platform", filter.Pass, filter.PolicyRef{ID: admin}),
				tier("default", filter.Deny, filter.PolicyRef{ID: staged, Staged: true}, filter.PolicyRef{ID: allow}),
			}},
			Egress: filter.Path{Profiles: []filter.PolicyID{profile}},
		}
	}
	limited := workload("cali2", "10.1.0.2/32")
	limited.DSCP = filter.DSCP{Set: true, Value: 46}
	limited.Limits = filter.Limits{
		Ingress: filter.Limit{Bandwidth: 125_000, Burst: 1 << 20, Peak: 250_000, PeakBurst: 1500, Connections: 100},
		Egress:  filter.Limit{Packets: 1000, PacketBurst: 5, Bandwidth: 100e9}, // which no kernel counts
	}
	return filter.Delta{
		PutSets: []filter.Set{
			{ID: filter.NATSources},
			{ID: filter.NATExempt},
			{ID: filter.TunnelSources},
			{ID: "s-clients", Origin: `role == "client"`},
			{ID: "s-http", Type: filter.Ports, Origin: `ports ["http"]`},
		},
		Members: []filter.MemberChange{
			{Set: filter.NATSources, Add: netMembers("10.1.0.0/16", "fd00:1::/64")},
			{Set: filter.NATExempt, Add: netMembers("10.1.0.0/16", "fd00:1::/64")},
			{Set: filter.TunnelSources, Add: netMembers("192.0.2.1/32")},
			{Set: "s-clients", Add: netMembers("10.1.0.2/32", "10.1.1.0/24", "fd00:1::2/128")},
			{Set: "s-http", Add: []filter.Member{{Prefix: netip.MustParsePrefix("10.1.0.1/32"), Protocol: 6, Port: 8080}}},
		},
		PutPolicies: []filter.Policy{
			{ID: allow, Ingress: []filter.Rule{
				{Action: filter.Allow, Protocol: 6, Source: filter.Side{Set: "s-clients"}, Destination: filter.Side{Ports: []filter.PortRange{{Low: 80, High: 80}}, PortSet: "s-http"}},
				{Action: filter.Log},
				{Action: filter.Deny, Family: 4, Protocol: 1, ICMP: filter.ICMP{Set: true, Type: 8, CodeSet: true}},
			}},
			{ID: admin, Ingress: []filter.Rule{
				{Action: filter.Deny, Source: filter.Side{Nets: prefixes("203.0.113.0/24", "198.51.100.0/24", "198.51.100.128/25")}},
				{Action: filter.Pass, Protocol: 17, Destination: filter.Side{Ports: []filter.PortRange{{Low: 53, High: 53}, {Low: 1000, High: 2000}}}},
			}},
			{ID: staged, Ingress: []filter.Rule{{Action: filter.Deny}}},
			{ID: profile, Egress: []filter.Rule{{Action: filter.Allow}}},
		},
		PutEndpoints: []filter.Endpoint{
			workload("cali1", "10.1.0.1/32"), limited,
			{
				Interface: "eth0", Name: "HostEndpoint(a-eth0)", Host: true,
				Ingress: filter.Path{Default: filter.Deny}, Egress: filter.Path{Default: filter.Deny},
				ForwardIngress: filter.Path{Default: filter.Allow}, ForwardEgress: filter.Path{Default: filter.Allow},
				UntrackedIngress: filter.Path{Default: filter.Pass}, UntrackedEgress: filter.Path{Default: filter.Pass}, PreDNATIngress: filter.Path{Default: filter.Pass},
			},
		},
		Settings: &filter.Settings{
			WorkloadPrefixes: []string{"cali"}, LogPrefix: "calico-packet", VXLANPorts: []uint16{4789},
			FailsafeIn:     []filter.Failsafe{{Protocol: 6, Port: 22}},
			Guarded:        []filter.Tunnel{{Protocol: 6, Port: 179}},
			Tunnels:        []filter.Tunnel{{Protocol: 4}, {Protocol: 41}, {Protocol: 17, Port: 4789}},
			MaxConnections: 1000,
		},
	}
}

// update rewrites the golden file: go test ./dataplane/nft -run TestListing -update.
var update = flag.Bool("update", false, "rewrite testdata")

// What an operator sees of a small ruleset.
func TestListing(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table := openTable(t, n, Config{Shared: true})
	defer table.Close()
	if err := table.Apply(small()); err != nil {
		t.Fatal(err)
	}
	// By number: names are of the machine's /etc/protocols.
	got := run(t, n, "nft", "--numeric-protocol", "list", "table", "inet", "routerd")
	const golden = "testdata/small.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error(diff)
	}
	// It can be read back, as operators do who save their rules.
	saved := filepath.Join(t.TempDir(), "saved.nft")
	if err := os.WriteFile(saved, []byte(got), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, netnstest.New(t), "nft", "-f", saved)
}
