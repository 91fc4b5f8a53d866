package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a policyCommands) policyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "policy",
		Short: "Show and explain the policy rules of this host",
		Example: `  routerctl policy show
  routerctl policy explain --from blue --to red --proto tcp --port 80`,
	}
	c.AddCommand(a.policyShowCommand(), a.policyExplainCommand())
	return c
}

// endpointArg takes at most one argument, the name of an endpoint.
func endpointArg(to *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return usagef("%s: name at most one endpoint", strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" "))
		}
		if len(args) == 1 {
			*to = args[0]
		}
		return nil
	}
}

func (a policyCommands) policyShowCommand() *cobra.Command {
	req := &apiv1.PolicyRequest{}
	c := &cobra.Command{
		Use:   "show [ENDPOINT]",
		Short: "Show the rules of an endpoint and their counters",
		Long: `Show the rules for the packets of an endpoint of this host, in the order of
evaluation, with the kernel's counters. Without ENDPOINT, list the endpoints. ENDPOINT
is an interface, an address, a resource's name, NAMESPACE/POD or a container.

Counters count first packets: later packets of an allowed connection are not evaluated
again. Endpoints with the same policies share the counters of a policy.`,
		Example: "  routerctl policy show\n  routerctl policy show default/web-0\n  routerctl policy show cali1234567890a -o yaml",
		Args:    endpointArg(&req.Endpoint),
	}
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.PolicyResponse, error) {
		return op.Policy(ctx, req)
	},
		func(w io.Writer, r *apiv1.PolicyResponse) error { return printPolicy(w, r, req.Endpoint != "") })
}

func printPolicy(w io.Writer, r *apiv1.PolicyResponse, rules bool) error {
	if r.GetState() != "" {
		fmt.Fprintf(w, "Attention: %s\n\n", r.GetState())
	}
	if !rules {
		fmt.Fprintf(w, "%d endpoints, %d policies and profiles, %d sets with %d members; %d changes brought into force, %d connections cut\n\n",
			len(r.GetEndpoints()), r.GetPolicies(), r.GetSets(), r.GetMembers(), r.GetSteps(), r.GetCutConnections())
		var rows [][]string
		for _, e := range r.GetEndpoints() {
			rows = append(rows, []string{e.GetInterface(), e.GetName(), dash(strings.Join(e.GetSources(), ","))})
		}
		if err := printTable(w, []string{"INTERFACE", "ENDPOINT", "ADDRESSES"}, rows); err != nil {
			return err
		}
	}
	for i, e := range r.GetEndpoints() {
		if !rules {
			break
		}
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := printEndpoint(w, e); err != nil {
			return err
		}
	}
	for _, p := range r.GetProblems() {
		fmt.Fprintf(w, "\n%s cannot be used as it is: %s\n", p.GetObject(), p.GetReason())
	}
	return nil
}

func printEndpoint(w io.Writer, e *apiv1.PolicyEndpoint) error {
	fmt.Fprintf(w, "%s on %s\n", e.GetName(), e.GetInterface())
	if len(e.GetSources()) > 0 {
		fmt.Fprintf(w, "sends from %s only\n", strings.Join(e.GetSources(), ", "))
	}
	for _, p := range e.GetPaths() {
		title := p.GetDirection()
		if e.GetHost() {
			title += " (" + p.GetHook() + ")"
		}
		fmt.Fprintf(w, "\n%s\n", title)
		var rows [][]string
		list := func(place string, rules *apiv1.PolicyRules) {
			name := rules.GetPolicy()
			if rules.GetStaged() {
				name += " (staged)"
			}
			if len(rules.GetRules()) == 0 {
				rows = append(rows, []string{place, name, "-", "-", "no rules", "-", "-"})
			}
			for _, rule := range rules.GetRules() {
				packets, bytes := "-", "-"
				if rule.GetCounted() {
					packets, bytes = strconv.FormatUint(rule.GetPackets(), 10), strconv.FormatUint(rule.GetBytes(), 10)
				}
				rows = append(rows, []string{place, name, strconv.Itoa(int(rule.GetIndex())), rule.GetAction(), rule.GetMatch(), packets, bytes})
			}
		}
		for _, t := range p.GetTiers() {
			for _, rules := range t.GetPolicies() {
				list("tier "+t.GetName(), rules)
			}
			rows = append(rows, []string{"tier " + t.GetName(), "-", "-", t.GetEnd(), "what is left", "-", "-"})
		}
		for _, rules := range p.GetProfiles() {
			list("profiles", rules)
		}
		rows = append(rows, []string{"end", "-", "-", p.GetDefault(), "what is left", "-", "-"})
		if err := printTable(w, []string{"WHERE", "POLICY", "RULE", "ACTION", "MATCHES", "PACKETS", "BYTES"}, rows); err != nil {
			return err
		}
	}
	return nil
}

func (a policyCommands) policyExplainCommand() *cobra.Command {
	req := &apiv1.PolicyExplainRequest{}
	c := &cobra.Command{
		Use:   "explain --from A --to B",
		Short: "Explain whether rules allow a packet, on the hosts of both ends",
		Long: `Explain whether the first packet of a connection would pass, and which rules decide,
on the hosts of both ends: on this host from the rules in force, on others from what
the datastore says now. A and B are endpoints anywhere in the cluster (given by
NAMESPACE/POD, container, resource or address), nodes, "host" for this host, or any
address. Address translation is ignored.

With --trace, also send such a packet from A, which must be a workload of this host,
and show from the kernel's connection tracking whether it passed.`,
		Example: `  routerctl policy explain --from default/client --to default/web-0 --protocol tcp --port 80
  routerctl policy explain --from 198.51.100.7 --to 192.168.12.5 --protocol udp --port 53
  routerctl policy explain --from default/client --to 192.168.12.5 --protocol icmp --icmp-type 8 --trace`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if req.From == "" || req.To == "" {
				return usagef("policy explain: --from and --to are required: an endpoint, a node, host, or an address")
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&req.From, "from", "", "source of the packet")
	f.StringVar(&req.To, "to", "", "destination of the packet")
	f.StringVar(&req.Protocol, "protocol", "tcp", "protocol: tcp, udp, icmp, icmpv6, sctp, udplite or a number")
	f.StringVar(&req.Protocol, "proto", "tcp", "same as --protocol")
	f.Uint32Var(&req.Port, "port", 0, "destination port")
	f.Uint32Var(&req.SourcePort, "source-port", 0, "source port")
	f.Uint32Var(&req.IcmpType, "icmp-type", 0, "ICMP type")
	f.Uint32Var(&req.IcmpCode, "icmp-code", 0, "ICMP code")
	f.BoolVar(&req.Trace, "trace", false, "also send such a packet and compare")
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.PolicyExplainResponse, error) {
		return op.PolicyExplain(ctx, req)
	},
		printExplanation)
}

func printExplanation(w io.Writer, r *apiv1.PolicyExplainResponse) error {
	fmt.Fprintf(w, "%s: %s\n", r.GetPacket(), allowedOrDenied(r.GetAllowed()))
	for _, e := range r.GetEnds() {
		fmt.Fprintf(w, "\non %s, from %s to %s: %s\n", e.GetNode(), e.GetFrom(), e.GetTo(), allowedOrDenied(e.GetAllowed()))
		var rows [][]string
		for _, s := range e.GetSteps() {
			rule, why := "-", s.GetReason()
			if s.GetRule() >= 0 {
				rule, why = fmt.Sprintf("%s rule %d", s.GetPolicy(), s.GetRule()), s.GetMatch()
			}
			rows = append(rows, []string{dash(s.GetEndpoint()), s.GetDirection(), s.GetHook(), dash(s.GetTier()), rule, s.GetAction(), why})
		}
		if err := printTable(w, []string{"ENDPOINT", "DIRECTION", "HOOK", "TIER", "RULE", "ACTION", "WHY"}, rows); err != nil {
			return err
		}
	}
	if r.GetTrace() != "" {
		fmt.Fprintf(w, "\ntraced: %s\n", r.GetTrace())
	}
	if r.GetTraceDiffers() {
		return fmt.Errorf("the kernel does not do what the rules say; please report this with the output of \"nft list table inet routerd\"")
	}
	return nil
}

func allowedOrDenied(ok bool) string {
	if ok {
		return "allowed"
	}
	return "DENIED"
}

func (a policyCommands) flowsCommand() *cobra.Command {
	req := &apiv1.FlowsRequest{}
	c := &cobra.Command{
		Use:   "flows [ENDPOINT]",
		Short: "Show recent verdicts of the rules on this host",
		Long: `Show the last connections that rules on this host allowed, denied or logged, or that
staged rules would have judged, oldest first. The daemon keeps the last 4096. In a
burst the kernel may drop records; their number is shown.`,
		Example: "  routerctl flows\n  routerctl flows --denied --limit 20\n  routerctl flows default/web-0",
		Args:    endpointArg(&req.Endpoint),
	}
	f := c.Flags()
	f.Uint32Var(&req.Limit, "limit", 100, "number of newest connections to show; 0: all that are kept")
	f.BoolVar(&req.Denied, "denied", false, "show only denied connections")
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.FlowsResponse, error) {
		return op.Flows(ctx, req)
	},
		printFlows)
}

func printFlows(w io.Writer, r *apiv1.FlowsResponse) error {
	if r.GetState() != "" {
		fmt.Fprintf(w, "Attention: %s\n\n", r.GetState())
	}
	end := func(addr string, port uint32) string {
		switch {
		case port == 0:
			return addr
		case strings.Contains(addr, ":"):
			return fmt.Sprintf("[%s]:%d", addr, port)
		}
		return fmt.Sprintf("%s:%d", addr, port)
	}
	var rows [][]string
	for _, f := range r.GetFlows() {
		action := f.GetAction()
		if f.GetStaged() {
			action = "would " + strings.ToLower(action)
		}
		rows = append(rows, []string{
			f.GetTime().AsTime().Local().Format("15:04:05.000"), action, f.GetProtocol(), end(f.GetSource(), f.GetSourcePort()),
			end(f.GetDestination(), f.GetDestinationPort()), dash(f.GetIn()), dash(f.GetOut()), dash(f.GetDirection()), f.GetBy(),
		})
	}
	if err := printTable(w, []string{"TIME", "ACTION", "PROTOCOL", "FROM", "TO", "IN", "OUT", "DIRECTION", "BY"}, rows); err != nil {
		return err
	}
	if r.GetUnlogged()+r.GetMissed() > 0 {
		fmt.Fprintf(w, "\nnot shown: %d packets beyond policy.logRate of their rules, %d more than could be handed over at once\n", r.GetUnlogged(), r.GetMissed())
	}
	return nil
}
