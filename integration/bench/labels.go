package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/policy/policytest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// MeasureLabelChange returns rows for one endpoint's label that changes on a
// host with n endpoints, all of which the same policies select: each lets in who
// has one value of the label, so the endpoint leaves the sources of one policy
// and joins those of another. Beside it is what moves one address from one chain
// of as many rules, or one set of as many elements, to another.
func MeasureLabelChange(ctx context.Context, n, policies int, log *slog.Logger) ([]Row, error) {
	const rounds = 20
	ours, err := labelByRouterd(ctx, n, policies, 10*rounds, log)
	if err != nil {
		return nil, err
	}
	var rows []Row
	what := fmt.Sprintf("one label change, %d endpoints × %d policies, p50", n, policies)
	restore := func(name string) labelTool {
		return labelTool{name + " --noflush", []string{name, "--noflush"}, labelIptables(n, policies), iptablesMove}
	}
	for _, tool := range []labelTool{
		{"nft -f", []string{"nft", "-f", "-"}, labelNFT(n, policies), nftMove},
		restore("iptables-nft-restore"),
		restore("iptables-legacy-restore"),
	} {
		theirs, err := tool.measure(ctx, policies, rounds)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", tool.name, err)
		}
		rows = append(rows, Row{what, ms(ours), ms(theirs), tool.name, Milliseconds})
	}
	return rows, nil
}

// labelled is the endpoint i when its label has a value.
func labelled(i, value int) store.Object {
	o := policytest.Endpoint(i, 0, value, 0)
	w := o.Value.(*store.WorkloadEndpoint)
	w.Spec.IPNetworks = []string{labelAddr(i).String() + "/32"} // tools change one family at a time
	return o
}

func labelAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) //nolint:gosec // some thousands at most
}

// labelByRouterd measures from what the datastore tells until the kernel has
// taken it, with all of the daemon that lies between.
func labelByRouterd(ctx context.Context, n, policies, rounds int, log *slog.Logger) (took time.Duration, err error) {
	first := store.Batch{Synced: true}
	put := func(o store.Object) store.Event { return store.Event{Key: o.Key, Object: o} }
	for i := range n {
		first.Events = append(first.Events, put(labelled(i, i%policies)))
	}
	udp := numorstring.ProtocolFromString("UDP")
	for i := range policies {
		p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{Selector: "all()", Types: []v3.PolicyType{v3.PolicyTypeIngress}, Ingress: []v3.Rule{{
			Action: v3.Allow, Protocol: &udp,
			Source:      v3.EntityRule{Selector: fmt.Sprintf("app == 'app%d'", i)},
			Destination: v3.EntityRule{Ports: []numorstring.Port{numorstring.SinglePort(labelPort(i))}},
		}}}}
		p.Name = fmt.Sprintf("p%d", i)
		first.Events = append(first.Events, put(store.Object{Key: store.ResourceKey(store.KindGlobalNetworkPolicy, p.Name), Value: p}))
	}
	err = ns.DoNew(func() (err error) {
		t, err := nft.Open(nft.Config{Log: log})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, t.Close()) }()
		table := told{t, make(chan applied, 1)}
		e := enforce.New(enforce.Config{Node: policytest.Node, Table: table, Connections: noConnections{}, Log: log})
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { _ = e.Run(ctx) }) // it ends with ctx alone
		change := func(b store.Batch) error {
			e.HandleStore(clustertest.Step(policytest.Node, b))
			select {
			case a := <-table.applied:
				if a.err == nil && a.members == 0 {
					return errors.New("no set changed")
				}
				return a.err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		e.HandleUnderlay(dataplane.Underlay{})
		if err := change(first); err != nil {
			return fmt.Errorf("first rules: %w", err)
		}
		to := func(value int) store.Batch { return store.Batch{Events: []store.Event{put(labelled(0, value))}} }
		took, err = alternate(rounds, to(1), to(0), change)
		return err
	})
	return took, err
}

func labelPort(policy int) uint16 { return 1000 + uint16(policy) } //nolint:gosec // some tens at most

// told is the kernel's table, and tells of each step that it took.
type told struct {
	*nft.Table
	applied chan applied
}

type applied struct {
	members int
	err     error
}

func (t told) Apply(d filter.Delta) error {
	a := applied{err: t.Table.Apply(d)}
	for _, c := range d.Members {
		a.members += len(c.Add) + len(c.Del)
	}
	t.applied <- a
	return a.err
}

// noConnections is a kernel without connections: they are cut after the rules
// are in force.
type noConnections struct{}

func (noConnections) Judge(context.Context, []netip.Addr, func(conntrack.Flow) conntrack.Verdict) (cut, renewed int, err error) {
	return 0, 0, nil
}

// labelTool is a program that changes rules, with what it needs for the rules of
// the endpoints and policies and for a move of the first endpoint's address from
// one policy to another.
type labelTool struct {
	name    string
	command []string
	rules   string
	move    func(from, to int) string
}

func (l labelTool) measure(ctx context.Context, policies, rounds int) (took time.Duration, err error) {
	if policies < 2 {
		return 0, fmt.Errorf("%d policies: an address moves between two", policies)
	}
	run := func(input string) error { return runTool(ctx, l.command, input) }
	err = ns.DoNew(func() error {
		if err := run(l.rules); err != nil {
			return err
		}
		took, err = alternate(rounds, l.move(0, 1), l.move(1, 0), run)
		return err
	})
	return took, err
}

// labelNFT is what nft(8) needs for the rules of labelByRouterd, at its best:
// endpoints share a chain, and addresses are in sets.
func labelNFT(n, policies int) string {
	var b strings.Builder
	b.WriteString("table inet bench {\n")
	for p := range policies {
		fmt.Fprintf(&b, " set s%d { type ipv4_addr; elements = {", p)
		for i := p; i < n; i += policies {
			fmt.Fprintf(&b, " %s,", labelAddr(i))
		}
		b.WriteString(" }\n }\n")
	}
	b.WriteString(" chain policies {\n")
	for p := range policies {
		fmt.Fprintf(&b, "  ip saddr @s%d udp dport %d counter accept\n", p, labelPort(p))
	}
	b.WriteString("  counter drop\n }\n map to { type ifname : verdict; elements = {\n")
	for i := range n {
		fmt.Fprintf(&b, "  \"cali%d\" : goto policies,\n", i)
	}
	b.WriteString(" }\n }\n chain forward { type filter hook forward priority 0\n ct state established,related accept\n oifname vmap @to\n }\n}\n")
	return b.String()
}

func nftMove(from, to int) string {
	return fmt.Sprintf("delete element inet bench s%d { %s }\nadd element inet bench s%[3]d { %[2]s }\n", from, labelAddr(0), to)
}

// labelIptables is what iptables needs, without ipset: a chain for each
// endpoint, which asks each policy's, and a rule there for each source.
func labelIptables(n, policies int) string {
	var b strings.Builder
	b.WriteString("*filter\n:FORWARD ACCEPT [0:0]\n")
	for p := range policies {
		fmt.Fprintf(&b, ":p%d - [0:0]\n", p)
	}
	for i := range n {
		fmt.Fprintf(&b, ":c%d - [0:0]\n", i)
	}
	b.WriteString("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n")
	for i := range n {
		b.WriteString(iptablesSource('A', i%policies, i))
	}
	for i := range n {
		fmt.Fprintf(&b, "-A FORWARD -o cali%d -j c%d\n", i, i)
		for p := range policies {
			fmt.Fprintf(&b, "-A c%d -j p%d\n", i, p)
		}
		fmt.Fprintf(&b, "-A c%d -j DROP\n", i)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// iptablesSource adds ('A') an endpoint to the sources of a policy, or deletes
// it ('D') from there.
func iptablesSource(verb rune, policy, endpoint int) string {
	return fmt.Sprintf("-%c p%d -s %s/32 -p udp -m udp --dport %d -j ACCEPT\n", verb, policy, labelAddr(endpoint), labelPort(policy))
}

func iptablesMove(from, to int) string {
	return "*filter\n" + iptablesSource('D', from, 0) + iptablesSource('A', to, 0) + "COMMIT\n"
}
