package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
	"github.com/routerd/routerd/store/selector"
)

// shownSessions is how many sessions of a node, and prefixes, are shown unless all are asked for.
const shownSessions = 10

func (a resourceCommands) planCommand() *cobra.Command {
	var in input
	var all bool
	c := &cobra.Command{
		Use:   "plan -f FILE|DIR|-",
		Short: "Show what apply would change in resources, pools, BGP and kernels",
		Long: `Show what apply would do, without doing it:

  - resources: what would change, as shown by "routerctl diff";
  - pools: for each IPPool that would change, its addresses and blocks in use, the nodes
    that would start or stop taking addresses from it, and how its packets would be
    encapsulated;
  - BGP: for each node, the sessions that would be added, removed, restarted or changed
    without a restart, with the settings that differ, and the prefixes that the node would
    advertise or withdraw. This host's daemon computes this for all nodes, with the code
    that decides when the change is made;
  - kernel: what would be added (+), removed (-) or changed (~) in each host's kernel once
    all hosts have followed: routes with their next hops, devices, addresses; endpoints
    with changed rules, policies, sets; the addresses in use there; and changes of the
    annotations of the host's Node. Each host's daemon is asked over the datastore, and
    computes this with the code that would apply it. A host that cannot be asked is listed
    with the reason.

The exit code is 1 if apply would refuse the manifests; the reason is shown.

Not considered: the reaction of peers outside the cluster, password files, and neighbours
on a link, which only their host knows. If a host still has to take an address for a
tunnel, only the host is named. Peers that probes do not reach in a pool's new mode keep
the old one.`,
		Example: "  routerctl plan -f manifests/",
		Args:    func(_ *cobra.Command, args []string) error { return in.none("plan", args) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			docs, err := in.read(a.stdin)
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.plan(ctx, s, docs, all) })
		},
	}
	in.flags(c.Flags())
	c.Flags().BoolVar(&all, "all", false, fmt.Sprintf("show all changes of a node, not only %d of each kind", shownSessions))
	return c
}

func (a resourceCommands) plan(ctx context.Context, s store.Store, docs []manifest.Document, all bool) error {
	have, err := related(ctx, s, docs)
	if err != nil {
		return err
	}
	changes, err := plan(apply, docs, have, metav1.NewTime(time.Now().UTC().Truncate(time.Second)))
	if err != nil {
		return err
	}
	differs, err := diffs(ctx, s, a.stdout, docs)
	if err != nil {
		return err
	}
	if !differs {
		fmt.Fprintln(a.stdout, "Nothing would change.")
		return nil
	}
	if err := planPools(ctx, s, a.stdout, changes); err != nil {
		return err
	}
	if err := a.planBGP(ctx, changes, all); err != nil {
		return err
	}
	if err := a.planHosts(ctx, changes, all); err != nil {
		return err
	}
	if err := a.check(ctx, s, docs, checks{}); err != nil {
		return fmt.Errorf("apply would refuse this: %w", err)
	}
	return nil
}

// planPools says what becomes of pools that change.
func planPools(ctx context.Context, s store.Store, w io.Writer, changes []change) error {
	if !slices.ContainsFunc(changes, func(c change) bool { return !c.same && c.key.Kind == store.KindIPPool }) {
		return nil
	}
	lists := map[store.Kind][]store.Object{}
	for _, k := range []store.Kind{store.KindIPPool, store.KindIPAMBlock, store.KindNode} {
		list, _, err := s.List(ctx, k, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return err
		}
		lists[k] = list
	}
	fmt.Fprintln(w, "\nPools:")
	for _, c := range changes {
		next, ok := c.op.Object.Value.(*v3.IPPool)
		if c.same || !ok {
			continue
		}
		var old *v3.IPPool
		if i := slices.IndexFunc(lists[store.KindIPPool], func(o store.Object) bool { return o.Key == c.key }); i >= 0 {
			old, _ = lists[store.KindIPPool][i].Value.(*v3.IPPool)
		}
		for _, line := range planPool(old, next, lists[store.KindIPAMBlock], lists[store.KindNode]) {
			fmt.Fprintf(w, "  %s: %s\n", c.key, line)
		}
	}
	return nil
}

// planPool says what becomes of a pool; old is nil for one that is made.
func planPool(old, next *v3.IPPool, blocks, nodes []store.Object) []string {
	cidr, err := netip.ParsePrefix(next.Spec.CIDR)
	if err != nil {
		return nil
	}
	workloads, tunnels := split(holdings(cidr.Masked(), blocks))
	n := 0
	for _, b := range blocks {
		if cidr.Overlaps(b.Key.CIDR()) {
			n++
		}
	}
	lines := []string{fmt.Sprintf("addresses in use: %d of workloads, %d of tunnels; blocks: %d", len(workloads), len(tunnels), n)}
	was := &v3.IPPool{Spec: v3.IPPoolSpec{NodeSelector: "!all()"}} // no node takes addresses of what is not there
	if old != nil {
		was = store.Clone(old).(*v3.IPPool)
		store.SetDefaults(was)
	}
	will := store.Clone(next).(*v3.IPPool)
	store.SetDefaults(will)
	if from, to := store.EncapsulationOf(was), store.EncapsulationOf(will); old != nil && from != to {
		lines = append(lines, fmt.Sprintf("packets to and from its addresses, between all nodes: %s → %s", from, to))
	}
	if old != nil && was.Spec.NATOutgoing != will.Spec.NATOutgoing {
		lines = append(lines, fmt.Sprintf("source NAT of packets that leave the pools, on all nodes: %t → %t", was.Spec.NATOutgoing, will.Spec.NATOutgoing))
	}
	before, after := takers(was, nodes), takers(will, nodes)
	if gain := lacking(after, before); len(gain) > 0 {
		lines = append(lines, "nodes that will assign addresses from it: "+strings.Join(gain, ", "))
	}
	if loss := lacking(before, after); len(loss) > 0 {
		lines = append(lines, "nodes that will no longer assign addresses from it: "+strings.Join(loss, ", ")+"; workloads keep their addresses")
	}
	return lines
}

// takers names the nodes that may take addresses of a pool.
func takers(p *v3.IPPool, nodes []store.Object) []string {
	sel, err := selector.Parse(p.Spec.NodeSelector)
	if err != nil || p.Spec.Disabled {
		return nil
	}
	var out []string
	for _, o := range nodes {
		if n, ok := o.Value.(*store.Node); ok && sel.Matches(n.Labels) {
			out = append(out, n.Name)
		}
	}
	return out
}

// lacking returns those of a list that another one has not.
func lacking(list, other []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(other, s) })
}

// planBGP says what becomes of nodes' sessions and announcements.
func (a resourceCommands) planBGP(ctx context.Context, changes []change, all bool) error {
	send, err := plannedChanges(changes, func(k store.Kind) bool { return sessionsDependOn(k) || k == store.KindIPPool })
	if err != nil {
		return err
	}
	if len(send) == 0 {
		return nil
	}
	fmt.Fprintln(a.stdout, "\nBGP:")
	direct, err := a.direct()
	if err != nil {
		return err
	}
	if direct.isSet() {
		fmt.Fprintln(a.stdout, "  not checked: the datastore is used without a daemon; on a host with routerd, unset the datastore's variables")
		return nil
	}
	affected := 0
	err = ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
		stream, err := b.Plan(ctx)
		if err != nil {
			return err
		}
		return exchange(stream, send, func(part []*apiv1.BGPChange) *apiv1.BGPPlanRequest { return &apiv1.BGPPlanRequest{Changes: part} },
			func(p *apiv1.BGPPlanResponse) {
				affected++
				showPlan(a.stdout, p, all)
			})
	})
	switch {
	case status.Code(err) == codes.FailedPrecondition:
		fmt.Fprintln(a.stdout, "  BGP is not enabled on this host, so it is not checked")
		return nil
	case status.Code(err) == codes.Unimplemented:
		fmt.Fprintln(a.stdout, "  not checked: this host's routerd is an older version")
		return nil
	case err == nil && affected == 0:
		fmt.Fprintln(a.stdout, "  no node's sessions or announcements change")
	}
	return err
}

// showPlan prints what becomes of a node's part in BGP.
func showPlan(w io.Writer, p *apiv1.BGPPlanResponse, all bool) {
	fmt.Fprintf(w, "  %s\n", p.GetNode())
	for _, s := range p.GetSettings() {
		fmt.Fprintf(w, "    %s\n", s)
	}
	few := func(n int) int {
		if all {
			return n
		}
		return min(n, shownSessions)
	}
	sessions := p.GetSessions()
	for _, s := range sessions[:few(len(sessions))] {
		where := s.GetAddress()
		if s.GetInterface() != "" {
			where = strings.TrimSpace(where + " on " + s.GetInterface())
		}
		line := fmt.Sprintf("    session with %s %s, AS %d (%s) %s", s.GetName(), dash(where), s.GetAsn(), s.GetType(), s.GetFate())
		if len(s.GetWhy()) > 0 {
			line += ": " + strings.Join(s.GetWhy(), ", ")
		}
		fmt.Fprintln(w, line)
	}
	if more := len(sessions) - few(len(sessions)); more > 0 {
		fmt.Fprintf(w, "    and %d more sessions; --all shows them\n", more)
	}
	for _, l := range []struct {
		does     string
		prefixes []string
	}{{"announces", p.GetAnnounce()}, {"withdraws", p.GetWithdraw()}} {
		if n := len(l.prefixes); n > 0 {
			line := fmt.Sprintf("    %s %s", l.does, strings.Join(l.prefixes[:few(n)], " "))
			if more := n - few(n); more > 0 {
				line += fmt.Sprintf(" and %d more; --all shows them", more)
			}
			fmt.Fprintln(w, line)
		}
	}
}
