package enforce

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// table is a kernel that takes what it is given, unless it refuses.
type table struct {
	mu      sync.Mutex
	refuse  error
	have    *filter.Ruleset
	applied int
	errs    []error
	hold    chan struct{} // not nil: a step is taken when it is closed
}

func (t *table) Apply(d filter.Delta) error {
	t.mu.Lock()
	hold := t.hold
	t.mu.Unlock()
	if hold != nil {
		<-hold
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refuse != nil {
		return t.refuse
	}
	if err := t.have.Apply(&d); err != nil {
		t.errs = append(t.errs, err)
	}
	t.applied++
	return nil
}

func (t *table) Replace(r *filter.Ruleset) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refuse != nil {
		return t.refuse
	}
	t.have = &filter.Ruleset{
		Sets: maps.Clone(r.Sets), Members: make(map[filter.SetID]map[filter.Member]struct{}),
		Policies: maps.Clone(r.Policies), Endpoints: maps.Clone(r.Endpoints), Settings: r.Settings,
	}
	for id, m := range r.Members {
		t.have.Members[id] = maps.Clone(m)
	}
	t.applied++
	return nil
}

func (t *table) set(refuse error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refuse = refuse
}

// connections is a table of connections.
type connections struct {
	mu    sync.Mutex
	flows []conntrack.Flow
	looks [][]netip.Addr // what was asked for
	fail  error
	hold  chan struct{} // not nil: a look ends when it is closed
}

func (c *connections) Judge(_ context.Context, of []netip.Addr, judge func(conntrack.Flow) conntrack.Verdict) (cut, renewed int, err error) {
	c.mu.Lock()
	hold := c.hold
	c.mu.Unlock()
	if hold != nil {
		<-hold
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortFunc(of, netip.Addr.Compare)
	c.looks = append(c.looks, of)
	if c.fail != nil {
		return 0, 0, c.fail
	}
	c.flows = slices.DeleteFunc(c.flows, func(f conntrack.Flow) bool {
		gone := f.Cut() && judge(f) == conntrack.Renew
		if gone {
			renewed++
		}
		return gone
	})
	for i, f := range c.flows {
		if judge(f) == conntrack.Cut && !f.Cut() {
			c.flows[i].Mark |= filter.CutMark
			cut++
		}
	}
	return cut, renewed, nil
}

func (c *connections) set(fail error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = fail
}

// cut lists the connections that are cut.
func (c *connections) cut() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, f := range c.flows {
		if f.Cut() {
			out = append(out, f.String())
		}
	}
	return out
}

type world struct {
	t       *testing.T
	table   *table
	conns   *connections
	e       *Enforcer
	ownOnly bool   // of workloads only this host's are told
	asked   []bool // what AskOthers was called with
}

// start runs an Enforcer of node1, which has no addresses, until the test ends.
func start(t *testing.T) *world {
	t.Helper()
	w := startUnknown(t)
	w.e.HandleUnderlay(dataplane.Underlay{})
	return w
}

// startUnknown runs an Enforcer that is not told of the host's addresses.
func startUnknown(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, table: &table{have: filter.NewRuleset()}, conns: &connections{}}
	w.e = New(Config{
		Node: "node1", Table: w.table, Connections: w.conns, Log: slog.New(slog.DiscardHandler),
		AskOthers: func(asks bool) { w.asked = append(w.asked, asks) },
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.e.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
		if len(w.table.errs) > 0 {
			t.Errorf("steps that do not fit: %v", w.table.errs)
		}
	})
	return w
}

func (w *world) store(values ...any) {
	w.t.Helper()
	b := store.Batch{Synced: true, OwnOnly: w.ownOnly}
	for _, v := range values {
		store.SetDefaults(v)
		key, err := store.KeyOf(v)
		if err != nil {
			w.t.Fatal(err)
		}
		b.Events = append(b.Events, store.Event{Key: key, Object: store.Object{Key: key, Value: v}})
	}
	w.e.HandleStore(clustertest.Step("", b, policy.Kinds()...))
	synctest.Wait()
}

func (w *world) remove(k store.Key) {
	w.e.HandleStore(clustertest.Step("", store.Batch{Events: []store.Event{{Key: k, Object: store.Object{Key: k}}}}, policy.Kinds()...))
	synctest.Wait()
}

func pod(name, addr string, labels map[string]string) *store.WorkloadEndpoint {
	spec := store.WorkloadEndpointSpec{
		Orchestrator: "k8s", Node: "node1", Pod: name, Endpoint: "eth0", InterfaceName: "cali" + name,
		Profiles: []string{store.DefaultAllowProfile}, IPNetworks: []string{addr + "/32"},
	}
	full, err := store.WorkloadEndpointName(&spec)
	if err != nil {
		panic(err) // a test's own fault
	}
	return &store.WorkloadEndpoint{ObjectMeta: metav1.ObjectMeta{Name: full, Namespace: "default", Labels: labels}, Spec: spec}
}

func denyFrom(selector string) *v3.GlobalNetworkPolicy {
	p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{
		Selector: "app == 'web'",
		Ingress:  []v3.Rule{{Action: v3.Deny, Source: v3.EntityRule{Selector: selector}}, {Action: v3.Allow}},
	}}
	p.Name = "deny"
	return p
}

func flow(src, dst string) conntrack.Flow {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	there := conntrack.Tuple{Src: s.Addr(), Dst: d.Addr(), SrcPort: s.Port(), DstPort: d.Port()}
	return conntrack.Flow{Protocol: 6, Orig: there, Reply: conntrack.Tuple{Src: there.Dst, Dst: there.Src, SrcPort: there.DstPort, DstPort: there.SrcPort}}
}

// An ADD's wait ends when the kernel has the endpoint's rules with all of its
// addresses, and says until then what is missing.
func TestWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		addrs := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
		refused := func(want string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			err := w.e.Wait(ctx, "calia", addrs)
			if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("wait: %v, want the deadline and %q", err, want)
			}
		}
		w.e.HandleStore(clustertest.Step("", store.Batch{Events: nil}, policy.Kinds()...))
		refused("state is not complete yet")
		w.store()
		refused("has not sent the endpoint yet")
		w.store(pod("a", "10.0.0.9", nil))
		refused("without the address 10.0.0.1")
		got := make(chan error, 1)
		go func() { got <- w.e.Wait(t.Context(), "calia", addrs) }()
		synctest.Wait()
		w.store(pod("a", "10.0.0.1", nil))
		if err := <-got; err != nil {
			t.Errorf("wait with the rules in force: %v", err)
		}
		w.table.set(errors.New("no memory"))
		w.store(pod("a", "10.0.0.2", nil))
		refused("no memory")
	})
}

// TestOthersAreAskedFor: a policy that selects is in force when the workloads of other hosts are all
// known. Until then what runs has the rules from before, and a workload that it is for does not start; others do.
func TestOthersAreAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		web := map[string]string{"app": "web"}
		w.ownOnly = true
		w.store(pod("a", "10.0.0.1", web))
		wait := func(name, addr, want string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := w.e.Wait(ctx, "cali"+name, []netip.Addr{netip.MustParseAddr(addr)}); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("wait for %s: %v, want %q", name, err, want)
			}
		}
		wait("a", "10.0.0.1", "")
		if len(w.asked) > 0 {
			t.Errorf("others are asked for without a policy: %v", w.asked)
		}
		w.store(denyFrom("app == 'client'"))
		w.store(pod("b", "10.0.0.2", web), pod("c", "10.0.0.3", nil))
		wait("b", "10.0.0.2", "has not yet sent all those of other hosts")
		wait("c", "10.0.0.3", "")
		if n := len(w.table.have.Policies); !slices.Equal(w.asked, []bool{true}) || n != 1 { // the profile
			t.Errorf("asked %v, and %d policies are in force", w.asked, n)
		}
		if s := w.e.Status(); !s.InForce || s.Held == 0 {
			t.Errorf("status %+v", s)
		}
		far := pod("far", "10.0.1.1", map[string]string{"app": "client"})
		far.Spec.Node, far.Name = "node2", strings.Replace(far.Name, "node1", "node2", 1)
		w.ownOnly = false
		w.store(far)
		wait("b", "10.0.0.2", "")
		members := 0
		for _, m := range w.table.have.Members {
			members += len(m)
		}
		if s := w.e.Status(); s.Held != 0 || len(w.table.have.Policies) != 2 || members != 1 {
			t.Errorf("status %+v, %d policies, %d members", s, len(w.table.have.Policies), members)
		}
		// They are not followed any more though the policy is: what is known of them holds.
		w.ownOnly = true
		w.remove(store.Key{Kind: store.KindGlobalNetworkPolicy, Name: "none"})
		w.store()
		if n := len(w.table.have.Policies); n != 2 {
			t.Errorf("%d policies are in force", n)
		}
		w.ownOnly = false
		w.remove(store.Key{Kind: store.KindGlobalNetworkPolicy, Name: "deny"})
		if !slices.Equal(w.asked, []bool{true, false}) {
			t.Errorf("asked %v", w.asked)
		}
	})
}

// Nothing is judged before the host's own addresses are known, and everything
// is judged anew when they change.
func TestOwnAddresses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := startUnknown(t)
		w.store(pod("a", "10.0.0.1", nil))
		if w.table.applied != 0 || w.e.Status().InForce {
			t.Errorf("%d steps were applied before the host's addresses were known", w.table.applied)
		}
		own := func(addrs ...string) {
			var u dataplane.Underlay
			for _, a := range addrs {
				u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: "eth0", Prefix: netip.MustParsePrefix(a)})
			}
			w.e.HandleUnderlay(u)
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			synctest.Wait()
		}
		own("192.0.2.1/24")
		if !w.e.Status().InForce {
			t.Error("no rules with the addresses known")
		}
		for _, c := range []struct {
			addrs []string
			looks int
		}{
			{[]string{"192.0.2.1/24"}, 1},
			{[]string{"192.0.2.1/24", "192.0.2.2/24"}, 2},
			{[]string{"192.0.2.1/24", "192.0.2.2/24"}, 2},
		} {
			own(c.addrs...)
			w.conns.mu.Lock()
			if len(w.conns.looks) != c.looks {
				t.Errorf("%d looks at the connections with %v, want %d", len(w.conns.looks), c.addrs, c.looks)
			}
			w.conns.mu.Unlock()
		}
	})
}

// What is looked at are the connections of endpoints that a step changed, and
// of no others; what changes while the table is looked at comes in one look.
func TestLooksAtWhatChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		looked := func(want ...[]netip.Addr) {
			t.Helper()
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			synctest.Wait()
			w.conns.mu.Lock()
			defer w.conns.mu.Unlock()
			if d := cmp.Diff(want, w.conns.looks, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("looked at (-want +got):\n%s", d)
			}
			w.conns.looks = nil
		}
		a, b, c, d := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.4")
		w.store(pod("a", "10.0.0.1", map[string]string{"app": "web"}), pod("b", "10.0.0.2", nil), denyFrom("app == 'bad'"))
		looked([]netip.Addr{a, b})
		w.store(pod("c", "10.0.0.3", nil))
		looked([]netip.Addr{c})
		w.store(pod("b", "10.0.0.2", map[string]string{"app": "bad"})) // of a set that the rules of a name
		looked([]netip.Addr{a})
		hold := make(chan struct{})
		w.conns.mu.Lock()
		w.conns.hold = hold
		w.conns.mu.Unlock()
		w.store(pod("d", "10.0.0.4", nil))
		time.Sleep(200 * time.Millisecond) //nolint:forbidigo // virtual time, until it is looked at
		synctest.Wait()
		w.store(pod("c", "10.0.0.3", map[string]string{"app": "web"}))
		w.store(pod("b", "10.0.0.2", map[string]string{"app": "web"}))
		close(hold)
		looked([]netip.Addr{d}, []netip.Addr{a, b, c})
	})
}

// After a step that does not fit, the next try brings all rules into force, not
// half of a step.
func TestUnfitStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		a, b := pod("a", "10.0.0.1", nil), pod("b", "10.0.0.2", map[string]string{"app": "web"})
		w.store(a, b, denyFrom("app == 'bad'"))
		w.e.rules.Lock()
		delete(w.e.have.Endpoints, "calia") // somebody's fault
		w.e.rules.Unlock()
		key, err := store.KeyOf(a)
		if err != nil {
			t.Fatal(err)
		}
		policyKey, err := store.KeyOf(denyFrom(""))
		if err != nil {
			t.Fatal(err)
		}
		w.e.HandleStore(clustertest.Step("", store.Batch{Events: []store.Event{{Key: key}, {Key: policyKey}}}, policy.Kinds()...))
		time.Sleep(20 * time.Second) //nolint:forbidigo // virtual time
		synctest.Wait()
		w.table.mu.Lock()
		defer w.table.mu.Unlock()
		if err := w.e.Status().Err; err != nil {
			t.Errorf("status: %v", err)
		}
		if _, ok := w.table.have.Policies[filter.PolicyID{Kind: "GlobalNetworkPolicy", Name: "deny"}]; ok || len(w.table.have.Endpoints) != 1 {
			t.Errorf("the kernel has the policies %v and the endpoints %v", w.table.have.Policies, w.table.have.Endpoints)
		}
	})
}

// A step that the kernel is still taking is not in force.
func TestWaitForTheKernel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		w.store(pod("a", "10.0.0.9", nil))
		hold := make(chan struct{})
		w.table.mu.Lock()
		w.table.hold = hold
		w.table.mu.Unlock()
		w.store(pod("a", "10.0.0.1", nil), pod("b", "10.0.0.2", nil))
		got := make(chan error, 2)
		for device, addr := range map[string]string{"calia": "10.0.0.1", "calib": "10.0.0.2"} {
			go func() { got <- w.e.Wait(t.Context(), device, []netip.Addr{netip.MustParseAddr(addr)}) }()
		}
		synctest.Wait()
		if len(got) != 0 {
			t.Errorf("a wait ended before the kernel had the rules: %v", <-got)
		}
		close(hold)
		synctest.Wait()
		for range 2 {
			if err := <-got; err != nil {
				t.Errorf("wait: %v", err)
			}
		}
	})
}

// What the kernel refuses is tried again by itself, and nothing of it is lost.
func TestRefusedStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		w.store(pod("a", "10.0.0.1", nil))
		w.table.set(errors.New("no memory"))
		w.store(pod("b", "10.0.0.2", nil))
		w.store(pod("c", "10.0.0.3", nil))
		if s := w.e.Status(); s.Err == nil || !s.InForce {
			t.Errorf("status %+v, want the kernel's error, and the older rules in force", s)
		}
		w.table.set(nil)
		time.Sleep(20 * time.Second) //nolint:forbidigo // virtual time
		if s := w.e.Status(); s.Err != nil || s.Endpoints != 3 {
			t.Errorf("status %+v, want 3 endpoints in force", s)
		}
		w.e.View(func(r *filter.Ruleset) {
			if d := cmp.Diff(r, w.table.have, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("rules (-wanted +in the kernel):\n%s", d)
			}
		})
		n := w.table.applied
		time.Sleep(time.Hour) //nolint:forbidigo // virtual time
		if w.table.applied != n {
			t.Errorf("%d steps were taken though nothing changed", w.table.applied-n)
		}
	})
}

// A policy that tightens cuts the connections that it denies now, and no other;
// one that allows them again renews them.
func TestCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		w.e.HandleUnderlay(dataplane.Underlay{Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("192.0.2.1/24")}}})
		w.conns.flows = []conntrack.Flow{
			flow("10.0.0.2:1000", "10.0.0.1:80"),     // between workloads, to be denied
			flow("10.0.0.3:1000", "10.0.0.1:80"),     // stays allowed
			flow("10.0.0.2:1001", "10.0.0.3:80"),     // of the denied one, elsewhere
			flow("192.0.2.1:1002", "10.0.0.1:80"),    // from the host itself
			flow("198.51.100.7:9", "198.51.100.8:9"), // passes by
			flow("198.51.100.7:9", "10.0.0.1:80"),    // from elsewhere
		}
		w.store(pod("a", "10.0.0.1", map[string]string{"app": "web"}), pod("b", "10.0.0.2", map[string]string{"app": "bad"}), pod("c", "10.0.0.3", nil))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		if got := w.conns.cut(); len(got) > 0 {
			t.Fatalf("cut before anything was denied: %v", got)
		}
		w.store(denyFrom("app == 'bad'"))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		want := []string{"protocol 6 10.0.0.2:1000 → 10.0.0.1:80"}
		if d := cmp.Diff(want, w.conns.cut()); d != "" {
			t.Errorf("cut (-want +got):\n%s", d)
		}
		// A label is enough: one member of one set.
		w.store(pod("c", "10.0.0.3", map[string]string{"app": "bad"}))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		want = append(want, "protocol 6 10.0.0.3:1000 → 10.0.0.1:80")
		if d := cmp.Diff(want, w.conns.cut()); d != "" {
			t.Errorf("cut after a label changed (-want +got):\n%s", d)
		}
		w.remove(store.ResourceKey(store.KindGlobalNetworkPolicy, "deny"))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		if got := w.conns.cut(); len(got) > 0 {
			t.Errorf("still cut though all is allowed again: %v", got)
		}
		if len(w.conns.flows) != 4 {
			t.Errorf("%d connections are left, want the 4 that were never cut", len(w.conns.flows))
		}
		looks := len(w.conns.looks)
		w.store(&v3.GlobalNetworkSet{ObjectMeta: metav1.ObjectMeta{Name: "nobody"}, Spec: v3.GlobalNetworkSetSpec{Nets: []string{"203.0.113.0/24"}}})
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		if len(w.conns.looks) != looks {
			t.Error("connections were looked at though no rule changed")
		}
	})
}

// A connection through a host endpoint is judged at the workload only: its
// packets are no more what the host endpoint judged, and came in by an interface
// that nobody knows.
func TestCutBehindHostEndpoints(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := func(name, selector string, rules ...v3.Rule) *v3.GlobalNetworkPolicy {
			p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{Selector: selector, Ingress: rules}}
			p.Name = name
			return p
		}
		hostEndpoint := func(name, iface string) *v3.HostEndpoint {
			h := &v3.HostEndpoint{Spec: v3.HostEndpointSpec{Node: "node1", InterfaceName: iface}}
			h.Name, h.Labels = name, map[string]string{"host": name}
			return h
		}
		ports := []numorstring.Port{numorstring.SinglePort(30080)}
		nodePort := policy("node-port", "host == 'any'",
			v3.Rule{Action: v3.Allow, Protocol: new(numorstring.ProtocolFromString("TCP")), Destination: v3.EntityRule{Ports: ports}}, v3.Rule{Action: v3.Deny})
		nodePort.Spec.PreDNAT, nodePort.Spec.ApplyOnForward = true, true
		forward := policy("forward", "host == 'any'", v3.Rule{Action: v3.Deny})
		forward.Spec.ApplyOnForward = true
		forward.Spec.Egress = forward.Spec.Ingress
		translated := flow("198.51.100.7:1000", "192.0.2.1:30080") // to 10.0.0.1:8080
		translated.Reply.Src, translated.Reply.SrcPort = netip.MustParseAddr("10.0.0.1"), 8080

		for name, host := range map[string][]any{
			"before the destination was translated": {hostEndpoint("any", filter.AnyInterface), nodePort},
			"of another interface":                  {hostEndpoint("any", filter.AnyInterface), hostEndpoint("uplink", "eth0"), forward},
		} {
			w := start(t)
			w.e.HandleUnderlay(dataplane.Underlay{Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("192.0.2.1/24")}}})
			w.conns.flows = []conntrack.Flow{translated, flow("10.0.0.1:1001", "198.51.100.7:443")}
			w.store(append(host, pod("a", "10.0.0.1", nil))...)
			w.store(pod("a", "10.0.0.1", map[string]string{"app": "web"}))
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			if got := w.conns.cut(); len(got) > 0 {
				t.Errorf("%s: cut though the workload's rules allow it: %v", name, got)
			}
			w.store(policy("own", "app == 'web'", v3.Rule{Action: v3.Deny}))
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			if d := cmp.Diff([]string{translated.String()}, w.conns.cut()); d != "" {
				t.Errorf("%s: cut after the workload's rules deny it (-want +got):\n%s", name, d)
			}
		}
	})
}

// The connections of a workload that ends, or that has other addresses, are cut
// before anybody else is given the address, and judged by the rules of who is
// given it. What it might only pretend is left alone.
func TestCutOfTheGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		w.e.HandleUnderlay(dataplane.Underlay{Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: netip.MustParsePrefix("192.0.2.1/24")}}})
		spoofing := &v3.FelixConfiguration{Spec: v3.FelixConfigurationSpec{WorkloadSourceSpoofing: "Any"}}
		spoofing.Name = "default"
		a, b := pod("a", "10.0.0.1", nil), pod("b", "10.0.0.2", nil)
		a.Spec.AllowSpoofedSourcePrefixes = []string{"198.51.100.9/32"}
		w.conns.flows = []conntrack.Flow{
			flow("198.51.100.7:1000", "10.0.0.1:80"), // from elsewhere
			flow("10.0.0.1:1001", "10.0.0.2:80"),     // to a workload that stays
			flow("192.0.2.1:1002", "10.0.0.1:80"),    // from the host
			flow("10.0.0.2:1003", "198.51.100.9:80"), // to what was pretended
			flow("198.51.100.7:1004", "10.0.0.2:80"), // of another
		}
		w.store(spoofing, a, b)
		wait := func(what string, want ...string) {
			t.Helper()
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			synctest.Wait()
			if d := cmp.Diff(want, w.conns.cut()); d != "" {
				t.Errorf("%s (-want +got):\n%s", what, d)
			}
		}
		wait("cut of what is there")
		w.conns.set(errors.New("no buffer space"))
		key, err := store.KeyOf(a)
		if err != nil {
			t.Fatal(err)
		}
		w.remove(key)
		wait("cut though nothing can be")
		w.conns.set(nil)
		ofA := []string{"protocol 6 198.51.100.7:1000 → 10.0.0.1:80", "protocol 6 10.0.0.1:1001 → 10.0.0.2:80", "protocol 6 192.0.2.1:1002 → 10.0.0.1:80"}
		wait("cut after the workload ended", ofA...)
		// The address is given again: what the rules allow may begin anew.
		c := pod("c", "10.0.0.1", map[string]string{"app": "web"})
		w.store(denyFrom("app == 'nobody'"), c)
		wait("cut after the address was given again")
		w.conns.mu.Lock()
		if len(w.conns.flows) != 2 {
			t.Errorf("%d connections are left, want the 2 of others", len(w.conns.flows))
		}
		// It ends and is there again before anybody looks.
		w.conns.flows = append(w.conns.flows, flow("198.51.100.7:1005", "10.0.0.1:80"))
		w.conns.mu.Unlock()
		if key, err = store.KeyOf(c); err != nil {
			t.Fatal(err)
		}
		w.remove(key)
		w.store(c)
		wait("cut of a workload that is there")
		w.store(pod("c", "10.0.0.3", nil))
		wait("cut after it has another address", "protocol 6 198.51.100.7:1005 → 10.0.0.1:80")
	})
}

// A look that fails is repeated, also when nothing changes any more.
func TestCutIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := start(t)
		w.conns.flows = []conntrack.Flow{flow("10.0.0.2:1000", "10.0.0.1:80")}
		w.store(pod("a", "10.0.0.1", map[string]string{"app": "web"}), pod("b", "10.0.0.2", map[string]string{"app": "bad"}))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		w.conns.set(errors.New("no buffer space"))
		w.store(denyFrom("app == 'bad'"))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		if s := w.e.Status(); s.CutErr == nil {
			t.Errorf("status %+v does not tell that connections were not cut", s)
		}
		w.conns.set(nil)
		time.Sleep(time.Second) //nolint:forbidigo // virtual time
		if got := w.conns.cut(); len(got) != 1 {
			t.Errorf("cut %v, want the one connection", got)
		}
		if s := w.e.Status(); s.CutErr != nil || s.Cut != 1 {
			t.Errorf("status %+v, want one connection cut and no error", s)
		}
	})
}
