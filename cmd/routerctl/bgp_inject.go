package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
)

func (a bgpCommands) bgpInjectCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "inject", Short: "Advertise routes of other programs on this host",
		Long: `Advertise by BGP what another program on this host offers, such as a load balancer's
address or a VPN's prefix. Each route has an owner and is withdrawn when the owner
ends.`,
		Example: "  routerctl bgp inject add 203.0.113.7/32 --owner haproxy --ttl 30s\n  routerctl bgp inject list",
	}
	c.AddCommand(a.injectAddCommand(), a.injectListCommand(), a.injectWithdrawCommand())
	return c
}

// injectOptions are the flags of `bgp inject add`.
type injectOptions struct {
	owner, nextHop string
	ttl, grace     time.Duration
	pid, localPref uint32
	communities    []string
	hold, all      bool
}

func (a bgpCommands) injectAddCommand() *cobra.Command {
	var o injectOptions
	c := &cobra.Command{
		Use: "add PREFIX... --owner NAME (--ttl TIME | --pid PID | --hold)", Short: "Advertise prefixes for an owner",
		Long: `Advertise prefixes for an owner. This replaces what the owner said of the same
prefixes before. They are withdrawn when the time is over and they were not added
again (--ttl), when a process ends (--pid), or when this command ends (--hold, which
stays in the foreground). A prefix has one owner. Prefixes inside a pool, a node's own
address and the default route are refused unless the daemon's bgp.inject.allow lists
them.`,
		Example: "  routerctl bgp inject add 203.0.113.7/32 --owner keepalived --pid 4711\n  routerctl bgp inject add 10.200.0.0/16 --owner vpn --ttl 1m --community 65000:7",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 && !o.all {
				return usagef("bgp inject add: name the prefixes, such as 203.0.113.7/32")
			}
			return prefixArgs(args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.owner == "":
				return usagef("bgp inject add: --owner: name the owner of the routes")
			case o.hold && (o.ttl != 0 || o.pid != 0):
				return usagef("bgp inject add: --hold stays until this command ends: leave --ttl and --pid out")
			case o.hold:
				return a.holdInjected(cmd.Context(), o, o.routes(args))
			case o.ttl == 0 && o.pid == 0:
				return usagef("bgp inject add: say when the routes end: --ttl 30s, --pid PID, or --hold")
			}
			ctx, cancel := a.withDeadline(cmd)
			defer cancel()
			return explain(ctx, ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
				_, err := b.Inject(ctx, &apiv1.BGPInjectRequest{Owner: o.owner, Ttl: durationpb.New(o.ttl), Pid: o.pid, Routes: o.routes(args), All: o.all})
				return err
			}))
		},
	}
	f := c.Flags()
	f.StringVar(&o.owner, "owner", "", "name of the owner, chosen freely")
	f.DurationVar(&o.ttl, "ttl", 0, "withdraw after this time, 1s to 24h, unless added again")
	f.Uint32Var(&o.pid, "pid", 0, "withdraw when this process ends")
	f.BoolVar(&o.hold, "hold", false, "stay in the foreground and withdraw at the end")
	f.DurationVar(&o.grace, "grace", 0, "with --hold: delay of the withdrawal after the end")
	f.BoolVar(&o.all, "all", false, "withdraw all other routes of the owner")
	f.StringVar(&o.nextHop, "next-hop", "", "next hop (default: this host)")
	f.Uint32Var(&o.localPref, "local-pref", 0, "LOCAL_PREF; 0: as this host's own routes")
	f.StringSliceVar(&o.communities, "community", nil, "communities, e.g. 65000:100 or 65000:1:2")
	return c
}

func prefixArgs(args []string) error {
	for _, s := range args {
		if p, err := netip.ParsePrefix(s); err != nil || p != p.Masked() {
			return usagef("%q must be a prefix without bits beyond its length, such as 203.0.113.7/32", s)
		}
	}
	return nil
}

func (o injectOptions) routes(prefixes []string) (out []*apiv1.BGPInjectedRoute) {
	for _, p := range prefixes {
		out = append(out, &apiv1.BGPInjectedRoute{Prefix: p, NextHop: o.nextHop, LocalPref: o.localPref, Communities: o.communities})
	}
	return out
}

// holdInjected keeps routes until ctx ends, over restarts of the daemon too.
func (a bgpCommands) holdInjected(ctx context.Context, o injectOptions, routes []*apiv1.BGPInjectedRoute) error {
	for {
		err := ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
			stream, err := b.Hold(ctx)
			if err != nil {
				return err
			}
			// Why it cannot be sent, Recv says.
			_ = stream.Send(&apiv1.BGPHoldRequest{Owner: o.owner, Grace: durationpb.New(o.grace), Routes: routes, All: o.all})
			answer, err := stream.Recv()
			if err != nil {
				return err
			}
			if answer.GetError() != "" {
				return status.Error(codes.FailedPrecondition, answer.GetError())
			}
			fmt.Fprintf(a.stdout, "Injected %d routes of %s.\n", len(routes), o.owner)
			_, err = stream.Recv() // there is nothing more to hear
			return err
		})
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // interrupted, as it is meant to be
		case status.Code(err) != codes.Unavailable:
			return explain(ctx, err)
		}
		fmt.Fprintf(a.stderr, "The daemon cannot be reached; will try again: %s\n", status.Convert(err).Message())
		if async.Sleep(ctx, time.Second) != nil {
			return nil
		}
	}
}

func (a bgpCommands) injectListCommand() *cobra.Command {
	req := &apiv1.BGPInjectedRequest{}
	c := &cobra.Command{
		Use: "list", Short: "List injected routes",
		Long: `List the routes that programs on this host inject, with their owners, what ends them,
and why a route is not advertised.`,
		Example: "  routerctl bgp inject list\n  routerctl bgp inject list --owner keepalived", Args: noArgs,
	}
	c = showing(a.app, c, apiv1.NewBGPClient, func(ctx context.Context, b apiv1.BGPClient) (*apiv1.BGPInjectedResponse, error) {
		return b.Injected(ctx, req)
	}, printInjected)
	c.Flags().StringVar(&req.Owner, "owner", "", "list only routes of this owner")
	return c
}

func printInjected(w io.Writer, r *apiv1.BGPInjectedResponse) error {
	if len(r.GetRoutes()) == 0 {
		fmt.Fprintln(w, "Nothing is injected.")
		return nil
	}
	var rows [][]string
	for _, i := range r.GetRoutes() {
		var until []string
		if i.GetStream() {
			until = append(until, "stream")
		}
		if i.GetPid() != 0 {
			until = append(until, fmt.Sprint("pid ", i.GetPid()))
		}
		if i.GetTtl() != nil {
			until = append(until, i.GetTtl().AsDuration().Round(time.Second).String())
		}
		pref := "-"
		if i.GetLocalPref() != 0 {
			pref = fmt.Sprint(i.GetLocalPref())
		}
		state := "advertised"
		if i.GetRefused() != "" {
			state = "not advertised: " + i.GetRefused()
		}
		rows = append(rows, []string{i.GetPrefix(), i.GetOwner(), strings.Join(until, ", "), dash(i.GetNextHop()), pref, dash(strings.Join(i.GetCommunities(), " ")), state})
	}
	return printTable(w, []string{"PREFIX", "OWNER", "UNTIL", "NEXT HOP", "PREF", "COMMUNITIES", "STATE"}, rows)
}

func (a bgpCommands) injectWithdrawCommand() *cobra.Command {
	var owner string
	var all bool
	c := &cobra.Command{
		Use: "withdraw [PREFIX...] --owner NAME", Short: "Withdraw injected routes",
		Long:    "Withdraw the named routes of an owner, or with --all every one.",
		Example: "  routerctl bgp inject withdraw 203.0.113.7/32 --owner keepalived\n  routerctl bgp inject withdraw --owner keepalived --all",
		Args: func(_ *cobra.Command, args []string) error {
			if (len(args) == 0) != all {
				return usagef("bgp inject withdraw: name prefixes, or --all for all of the owner")
			}
			return prefixArgs(args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if owner == "" {
				return usagef("bgp inject withdraw: --owner: name the owner of the routes; see routerctl bgp inject list")
			}
			ctx, cancel := a.withDeadline(cmd)
			defer cancel()
			return explain(ctx, ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
				r, err := b.Withdraw(ctx, &apiv1.BGPWithdrawRequest{Owner: owner, Prefixes: args})
				if err == nil {
					fmt.Fprintf(a.stdout, "Withdrew %d routes of %s.\n", r.GetWithdrawn(), owner)
				}
				return err
			}))
		},
	}
	c.Flags().StringVar(&owner, "owner", "", "name of the owner")
	c.Flags().BoolVar(&all, "all", false, "withdraw all routes of the owner")
	return c
}
