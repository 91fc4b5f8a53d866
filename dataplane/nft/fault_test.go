package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

// A step that the kernel refuses leaves what was before in force, names what
// was refused, and is carried out when it can be.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table, _ := start(t, n, Config{}, small())
	id := filter.PolicyID{Kind: "NetworkPolicy", Namespace: "ns1", Name: "web"}
	broken := filter.Delta{PutPolicies: []filter.Policy{{ID: id, Ingress: []filter.Rule{{Action: filter.Allow, Source: filter.Side{Set: "s-missing"}}}}}}
	before := listing(n)
	err := table.Apply(broken)
	var refused *refusedError
	if !errors.As(err, &refused) || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "a rule of chain policy-inf-") {
		t.Errorf("error %v", err)
	}
	if s := table.Status(); !s.Pending || s.Err == "" || s.Since.IsZero() {
		t.Errorf("status %+v", s)
	}
	if after := listing(n); after != before {
		t.Errorf("a refused step changed the table:\n%s", after)
	}
	mend := filter.Delta{PutSets: []filter.Set{{ID: "s-missing"}}, Members: []filter.MemberChange{{Set: "s-missing", Add: netMembers("10.7.0.0/16")}}}
	if err := table.Apply(mend); err != nil {
		t.Fatal(err)
	}
	if diff := differences(table, rulesetOf(t, small(), mend, broken)); diff != same {
		t.Errorf("left %s", diff)
	}
	if s := table.Status(); s.Pending || s.Err != "" {
		t.Errorf("status %+v", s)
	}
}

// What was refused is tried again without a further step.
func TestRetry(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table, _ := start(t, n, Config{Shared: true}, small())
	// In the way: a chain of ours that others jump to cannot be deleted.
	run(t, n, "nft", "add chain inet routerd theirs; add rule inet routerd theirs jump failsafe-ingress")
	gone := filter.Delta{DelEndpoints: []string{"eth0"}}
	_ = table.Apply(gone) // it may be refused, or the repair was first
	rs := rulesetOf(t, small(), gone)
	await.Until(t, "what was refused", func() error {
		table.mu.Lock()
		defer table.mu.Unlock()
		if diff := differences(table, rs); diff != same || table.status.Pending {
			return fmt.Errorf("%s, status %+v", diff, table.status)
		}
		return nil
	})
}

// A step that does not fit is told from one that the kernel refuses: another
// ruleset is needed, and cures it.
func TestUnfit(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table := openTable(t, n, Config{})
	defer table.Close()
	if err := table.Apply(small()); err != nil {
		t.Fatal(err)
	}
	for _, d := range []filter.Delta{
		{DelEndpoints: []string{"cali9"}},
		{DelSets: []filter.SetID{"s-clients"}},
		{DelPolicies: []filter.PolicyID{{Kind: "Profile", Name: "kns.ns1"}}},
		{PutSets: []filter.Set{{ID: "s-clients"}}},
		{Members: []filter.MemberChange{{Set: "s-none"}}},
		{Members: []filter.MemberChange{{Set: "s-clients", Del: netMembers("10.3.0.0/16")}}},
	} {
		before := listing(n)
		if err := table.Apply(d); !errors.Is(err, ErrUnfit) {
			t.Errorf("%+v: %v", d, err)
		}
		if err := table.Apply(filter.Delta{}); !errors.Is(err, ErrUnfit) {
			t.Errorf("after %+v: %v", d, err)
		}
		if after := listing(n); after != before {
			t.Errorf("%+v changed the table:\n%s", d, after)
		}
		if err := table.Replace(rulesetOf(t, small())); err != nil {
			t.Fatal(err)
		}
	}
}

// Killed between the parts of a large change: at each point the old rules or
// the new ones are in force, never a mixture, and a restart ends at the new.
func TestKilledBetweenParts(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	next := filter.Delta{
		PutEndpoints: []filter.Endpoint{{Interface: "cali3", Name: "c", Sources: prefixes("10.1.0.3/32"), Ingress: filter.Path{Tiers: []filter.Tier{
			{Name: "other", End: filter.Deny, Policies: []filter.PolicyRef{{ID: filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "admin"}}}},
		}}}},
		DelEndpoints: []string{"cali1", "eth0"},
		Members:      []filter.MemberChange{{Set: "s-clients", Del: netMembers("10.1.1.0/24")}},
	}
	inForce := func() string {
		out := listing(n)
		return fmt.Sprint(strings.Contains(out, `"cali3" : goto`), strings.Contains(out, `"cali1" : goto`), strings.Contains(out, "@s-clients-4n"))
	}
	for parts := 0; ; parts++ {
		table := openTable(t, n, Config{Shared: true})
		if err := table.Replace(rulesetOf(t, small())); err != nil {
			t.Fatal(err)
		}
		if err := table.desired.apply(&next); err != nil {
			t.Fatal(err)
		}
		handles, err := table.handles()
		if err != nil {
			t.Fatal(err)
		}
		batches := table.desired.differ(&table.desired.journal, handles).batches(1)
		for _, b := range batches[:min(parts, len(batches))] {
			if err := table.conn.commit(b); err != nil {
				t.Fatal(err)
			}
		}
		table.Close()
		if got := inForce(); got != fmt.Sprint(false, true, true) && got != fmt.Sprint(true, false, false) {
			t.Errorf("after %d parts: %s", parts, got)
		}
		table = openTable(t, n, Config{Shared: true})
		rs := rulesetOf(t, small(), next)
		if err := table.Replace(rs); err != nil {
			t.Fatal(err)
		}
		if diff := differences(table, rs); diff != same {
			t.Errorf("after %d parts and a restart: %s", parts, diff)
		}
		table.Close()
		if parts > len(batches) {
			if len(batches) < 5 {
				t.Errorf("only %d parts", len(batches))
			}
			return
		}
	}
}

// A table that somebody else made under our name, or an older version of us,
// is made anew in one transaction.
func TestAnotherForm(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	run(t, n, "nft", "add table inet routerd; add set inet routerd workload-odd { type ipv4_addr ; }; "+
		"add chain inet routerd forward-from { type filter hook forward priority 7 ; }; add rule inet routerd forward-from ip saddr @workload-odd accept")
	table := openTable(t, n, Config{})
	defer table.Close()
	if err := table.Apply(small()); err != nil {
		t.Fatal(err)
	}
	if diff := differences(table, rulesetOf(t, small())); diff != same {
		t.Errorf("left %s", diff)
	}
}

// Sets of all sizes go in and out, in messages that the kernel can take.
func TestLargeSets(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table := openTable(t, n, Config{})
	defer table.Close()
	var many []filter.Member
	for i := range 20000 {
		many = append(many, filter.Member{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 32)})
	}
	first := filter.Delta{PutSets: []filter.Set{{ID: "s-many"}}, Members: []filter.MemberChange{{Set: "s-many", Add: many}}, Settings: &filter.Settings{}}
	wide := filter.Delta{Members: []filter.MemberChange{{Set: "s-many", Del: many[:256], Add: netMembers("11.0.0.0/24")}}}
	none := filter.Delta{Members: []filter.MemberChange{{Set: "s-many", Del: append(netMembers("11.0.0.0/24"), many[256:]...)}}}
	var all []filter.Delta
	for _, d := range []filter.Delta{first, wide, none} {
		all = append(all, d)
		if err := table.Apply(d); err != nil {
			t.Fatal(err)
		}
		if diff := differences(table, rulesetOf(t, all...)); diff != same {
			t.Errorf("left %s", diff)
		}
	}
}
