package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/lab/ns"
)

// rulesPerEndpoint is how many rules the policy of each endpoint has.
const rulesPerEndpoint = 10

// MeasureRules returns rows for the rules of n endpoints, each with a policy of
// its own of ten rules: the load, beside the tools that load as much; one
// member that comes to or goes from a set of 10,000; one endpoint that comes or
// goes; and the first packets of flows through 1, 100 and 1,000 endpoints.
func MeasureRules(ctx context.Context, n int, log *slog.Logger) ([]Row, error) {
	const rounds = 5
	ruleset := endpointRules(n, false)
	ours, err := best(rounds, func() (time.Duration, error) { return loadByRouterd(ruleset, log) })
	if err != nil {
		return nil, err
	}
	shared := endpointRules(n, true)
	oursShared, err := best(rounds, func() (time.Duration, error) { return loadByRouterd(shared, log) })
	if err != nil {
		return nil, err
	}
	var rows []Row
	what := fmt.Sprintf("rules loaded, %d endpoints × %d", n, rulesPerEndpoint)
	for _, tool := range []struct {
		name, input string
		command     []string
	}{
		{"nft -f", nftRules(n), []string{"nft", "-f", "-"}},
		{"iptables-nft-restore", iptablesRules(n), []string{"iptables-nft-restore"}},
		{"iptables-legacy-restore", iptablesRules(n), []string{"iptables-legacy-restore"}},
	} {
		theirs, err := best(rounds, func() (time.Duration, error) { return loadByTool(ctx, tool.command, tool.input) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", tool.name, err)
		}
		rows = append(rows, Row{what, ms(ours), ms(theirs), tool.name, Milliseconds})
	}
	rows = append(rows, Row{what + " shared", ms(oursShared), rows[0].Reference, "nft -f, one chain each", Milliseconds})
	changes, err := changeRows(ctx, ruleset, log)
	if err != nil {
		return nil, err
	}
	packets, err := forwardRows(ctx, log)
	return slices.Concat(rows, changes, packets), err
}

// best returns the shortest of several measurements: what is more is the
// machine's noise.
func best(rounds int, measure func() (time.Duration, error)) (time.Duration, error) {
	var least time.Duration
	for i := range rounds {
		took, err := measure()
		if err != nil {
			return 0, err
		}
		if i == 0 || took < least {
			least = took
		}
	}
	return least, nil
}

// endpointRules is n workloads, each with ten rules: of a policy of its own, or
// of one of all.
func endpointRules(n int, shared bool) filter.Delta {
	member := func(s string) filter.Member { return filter.Member{Prefix: netip.MustParsePrefix(s)} }
	d := filter.Delta{
		PutSets:  []filter.Set{{ID: "s-peers"}},
		Members:  []filter.MemberChange{{Set: "s-peers", Add: []filter.Member{member("10.1.0.1/32"), member("10.1.0.2/32")}}},
		Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}},
	}
	policies := n
	if shared {
		policies = 1
	}
	for i := range policies {
		p := filter.Policy{ID: filter.PolicyID{Kind: "NetworkPolicy", Namespace: "bench", Name: fmt.Sprint(i)}}
		for j := range uint16(rulesPerEndpoint) {
			p.Ingress = append(p.Ingress, filter.Rule{
				Action: filter.Allow, Family: 4, Protocol: 17, Source: filter.Side{Set: "s-peers"},
				Destination: filter.Side{Ports: []filter.PortRange{{Low: 1000 + j, High: 1000 + j}}},
			})
		}
		d.PutPolicies = append(d.PutPolicies, p)
	}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) //nolint:gosec // some thousands at most
		tiers := []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{{ID: d.PutPolicies[i%policies].ID}}}}
		d.PutEndpoints = append(d.PutEndpoints, filter.Endpoint{
			Interface: fmt.Sprintf("cali%d", i), Sources: []netip.Prefix{netip.PrefixFrom(a, a.BitLen())},
			Ingress: filter.Path{Tiers: tiers}, Egress: filter.Path{Default: filter.Allow},
		})
	}
	return d
}

// nftRules is what nft(8) needs for the same: a map from interfaces to chains.
func nftRules(n int) string {
	var b strings.Builder
	b.WriteString("table inet bench {\n set peers { type ipv4_addr; elements = { 10.1.0.1, 10.1.0.2 }\n }\n")
	for i := range n {
		fmt.Fprintf(&b, " chain c%d {\n", i)
		for j := range rulesPerEndpoint {
			fmt.Fprintf(&b, "  ip saddr @peers udp dport %d counter accept\n", 1000+j)
		}
		b.WriteString("  counter drop\n }\n")
	}
	b.WriteString(" map to { type ifname : verdict; elements = {\n")
	for i := range n {
		fmt.Fprintf(&b, "  \"cali%d\" : goto c%d,\n", i, i)
	}
	b.WriteString(" }\n }\n chain forward { type filter hook forward priority 0\n ct state established,related accept\n oifname vmap @to\n }\n}\n")
	return b.String()
}

// iptablesRules is what iptables needs: a chain for each endpoint, and a rule
// for each that leads there. Without ipset the sources are nets.
func iptablesRules(n int) string {
	var b strings.Builder
	b.WriteString("*filter\n:FORWARD ACCEPT [0:0]\n")
	for i := range n {
		fmt.Fprintf(&b, ":c%d - [0:0]\n", i)
	}
	b.WriteString("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n")
	for i := range n {
		fmt.Fprintf(&b, "-A FORWARD -o cali%d -j c%d\n", i, i)
		for j := range rulesPerEndpoint {
			fmt.Fprintf(&b, "-A c%d -s 10.1.0.0/30 -p udp -m udp --dport %d -j ACCEPT\n", i, 1000+j)
		}
		fmt.Fprintf(&b, "-A c%d -j DROP\n", i)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// loadByRouterd loads a ruleset into a namespace where there is none.
func loadByRouterd(d filter.Delta, log *slog.Logger) (took time.Duration, err error) {
	err = ns.DoNew(func() error {
		t, err := nft.Open(nft.Config{Log: log})
		if err != nil {
			return err
		}
		start := time.Now()
		err = t.Apply(d)
		took = time.Since(start)
		return errors.Join(err, t.Close())
	})
	return took, err
}

func loadByTool(ctx context.Context, command []string, input string) (took time.Duration, err error) {
	err = ns.DoNew(func() error {
		start := time.Now()
		err := runTool(ctx, command, input)
		took = time.Since(start)
		return err
	})
	return took, err
}

// runTool runs a program that reads rules, in the caller's namespace.
func runTool(ctx context.Context, command []string, input string) error {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdin = strings.NewReader(input)
	// The lock of iptables is one for all namespaces.
	cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE=/dev/null")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// changeRows measures single changes beside nft(8), which starts a process
// for each.
func changeRows(ctx context.Context, ruleset filter.Delta, log *slog.Logger) (rows []Row, err error) {
	const members, rounds = 10_000, 200
	many := make([]filter.Member, members)
	for i := range many {
		a := netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}) //nolint:gosec // 10,000
		many[i] = filter.Member{Prefix: netip.PrefixFrom(a, a.BitLen())}
	}
	one := filter.Member{Prefix: netip.MustParsePrefix("12.0.0.1/32")}
	ruleset.PutSets = append(ruleset.PutSets, filter.Set{ID: "s-many"})
	ruleset.Members = append(ruleset.Members, filter.MemberChange{Set: "s-many", Add: many})
	err = ns.DoNew(func() error {
		t, err := nft.Open(nft.Config{Log: log, Shared: true})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, t.Close()) }()
		if err := t.Apply(ruleset); err != nil {
			return err
		}
		e := ruleset.PutEndpoints[0]
		e.Interface = "cali-new"
		member, err := alternate(rounds,
			filter.Delta{Members: []filter.MemberChange{{Set: "s-many", Add: []filter.Member{one}}}},
			filter.Delta{Members: []filter.MemberChange{{Set: "s-many", Del: []filter.Member{one}}}}, t.Apply)
		if err != nil {
			return err
		}
		endpoint, err := alternate(rounds, filter.Delta{PutEndpoints: []filter.Endpoint{e}}, filter.Delta{DelEndpoints: []string{e.Interface}}, t.Apply)
		if err != nil {
			return err
		}
		tool := func(command string) error {
			return exec.CommandContext(ctx, "nft", command).Run()
		}
		nftMember, err := alternate(rounds/10, "add element inet routerd s-many-4 { 12.0.0.1 }", "delete element inet routerd s-many-4 { 12.0.0.1 }", tool)
		if err != nil {
			return err
		}
		nftEndpoint, err := alternate(rounds/10, "add element inet routerd workload-to { cali-new : accept }", "delete element inet routerd workload-to { cali-new }", tool)
		rows = []Row{
			{"one member of a set of 10000, p50", ms(member), ms(nftMember), "nft add element", Milliseconds},
			{fmt.Sprintf("one endpoint beside %d, p50", len(ruleset.PutEndpoints)), ms(endpoint), ms(nftEndpoint), "nft add element, to one map", Milliseconds},
		}
		return err
	})
	return rows, err
}

// alternate does one thing and then the other, again and again, and returns
// the median of how long each took.
func alternate[T any](rounds int, there, back T, do func(T) error) (time.Duration, error) {
	var took []time.Duration
	for range rounds {
		for _, v := range []T{there, back} {
			start := time.Now()
			if err := do(v); err != nil {
				return 0, err
			}
			took = append(took, time.Since(start))
		}
	}
	return Percentile(took, 50), nil
}
