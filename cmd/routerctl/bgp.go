package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a bgpCommands) bgpCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "bgp", Short: "Show and control BGP on this host",
		Example: "  routerctl bgp peers\n  routerctl bgp explain 10.9.0.0/16",
	}
	c.AddCommand(a.bgpPeersCommand(), a.bgpExplainCommand(), a.bgpInjectCommand(), a.bgpReflectorsCommand(), a.bgpKeyCommand(), a.bgpWatchCommand(), a.bgpDumpCommand(),
		a.bgpTableCommand("routes [PREFIX]", "Show the BGP table: accepted paths and what this host originates",
			"Show every path that filters accepted, and the routes that this host originates. The best\npath of a prefix is marked *; the others show at which step of the selection they lost.",
			"  routerctl bgp routes\n  routerctl bgp routes 10.0.0.0/8", apiv1.BGPTable_BGP_TABLE_BEST),
		a.bgpTableCommand("received PEER [PREFIX]", "Show the routes received from a peer",
			"Show the routes received from a peer before import filters (Adj-RIB-In), and why a route\nwas filtered. PEER is an address, or the name of a node or BGPPeer.",
			"  routerctl bgp received tor-rack-1", apiv1.BGPTable_BGP_TABLE_RECEIVED),
		a.bgpTableCommand("advertised PEER [PREFIX]", "Show the routes advertised to a peer",
			"Show the routes advertised to a peer (Adj-RIB-Out). PEER is an address, or the name of a\nnode or BGPPeer. `routerctl bgp explain PREFIX` shows why a route is not advertised.",
			"  routerctl bgp advertised 10.1.0.1", apiv1.BGPTable_BGP_TABLE_ADVERTISED))
	return c
}

func (a bgpCommands) bgpPeersCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "peers", Short: "Show BGP sessions and their prefix counts",
		Long: `Show the BGP sessions, the number of prefixes received, accepted and advertised in
each, and why a session is down. Where the number of prefixes is limited, the limit
follows the number received, for each address family: 12 of 100. An unknown number is
shown as -. BMP collectors, which receive the Adj-RIB-In and the Loc-RIB, are listed
below the sessions.`,
		Example: "  routerctl bgp peers", Args: noArgs,
	}
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.NodeResponse, error) {
		r, err := op.Node(ctx, &apiv1.NodeRequest{})
		return &apiv1.NodeResponse{AsNumber: r.GetAsNumber(), RouterId: r.GetRouterId(), BgpError: r.GetBgpError(), BgpSigning: r.GetBgpSigning(), Peers: r.GetPeers(), Collectors: r.GetCollectors()}, err
	},
		func(w io.Writer, r *apiv1.NodeResponse) error { return printBGPPeers(w, r, time.Now()) })
}

func printBGPPeers(w io.Writer, r *apiv1.NodeResponse, now time.Time) error {
	if r.GetBgpError() != "" {
		fmt.Fprintf(w, "BGP does not run: %s\n", r.GetBgpError())
	}
	if len(r.GetPeers()) == 0 {
		fmt.Fprintln(w, "No BGP sessions are configured for this host.")
		return printCollectors(w, r.GetCollectors(), now)
	}
	head := []string{"ADDRESS", "NAME", "TYPE", "AS", "STATE", "SINCE", "RECEIVED", "ACCEPTED", "ADVERTISED"}
	withBFD := slices.ContainsFunc(r.GetPeers(), func(p *apiv1.BGPPeer) bool { return p.GetBfd() != "" })
	if withBFD {
		head = append(head, "BFD")
	}
	var rows [][]string
	for _, p := range r.GetPeers() {
		row := []string{
			dash(p.GetAddress()), p.GetName(), p.GetType(), fmt.Sprint(p.GetAsNumber()), p.GetState(), since(p.GetSince(), now),
			receivedPrefixes(p), prefixes(p, p.GetAccepted()), prefixes(p, p.GetAdvertised()),
		}
		if withBFD {
			row = append(row, dash(p.GetBfd()))
		}
		rows = append(rows, append(row, p.GetInfo()))
	}
	if err := printTable(w, append(head, "INFO"), rows); err != nil {
		return err
	}
	if s := r.GetBgpSigning(); s != "" {
		fmt.Fprintf(w, "\nSessions with other nodes: %s.\n", s)
	}
	return printCollectors(w, r.GetCollectors(), now)
}

// printCollectors shows the collectors of BMP, if there are any.
func printCollectors(w io.Writer, list []*apiv1.BMPCollector, now time.Time) error {
	if len(list) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	var rows [][]string
	for _, c := range list {
		rows = append(rows, []string{c.GetAddress(), c.GetState(), since(c.GetSince(), now), fmt.Sprintf("%d KiB", c.GetSent()>>10), c.GetInfo()})
	}
	return printTable(w, []string{"BMP COLLECTOR", "STATE", "SINCE", "SENT", "INFO"}, rows)
}

// receivedPrefixes is what a peer announces, and of how many that it may: of each
// family, for each has the limit for itself.
func receivedPrefixes(p *apiv1.BGPPeer) string {
	limit := p.GetMaxPrefixes()
	switch {
	case limit == 0 || !p.GetCounted():
		return prefixes(p, p.GetReceived())
	case len(p.GetFamilies()) < 2:
		return fmt.Sprintf("%d of %d", p.GetReceived(), limit)
	}
	var each []string
	for _, f := range p.GetFamilies() {
		each = append(each, fmt.Sprintf("%s %d of %d", f.GetFamily(), f.GetReceived(), limit))
	}
	return strings.Join(each, ", ")
}

// prefixes is a number of prefixes, if it is known.
func prefixes(p *apiv1.BGPPeer, n uint32) string {
	if !p.GetCounted() {
		return "-"
	}
	return fmt.Sprint(n)
}

// bgpTableCommand makes a command that shows a table; that of a peer takes the
// peer first.
func (a bgpCommands) bgpTableCommand(use, short, long, example string, table apiv1.BGPTable) *cobra.Command {
	ofPeer := table != apiv1.BGPTable_BGP_TABLE_BEST
	req := &apiv1.BGPRoutesRequest{Table: table}
	c := &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: func(cmd *cobra.Command, args []string) error {
			if ofPeer {
				if len(args) == 0 {
					return usagef("%s: name the peer by its address, or as `routerctl bgp peers` names it", cmd.CommandPath())
				}
				req.Peer, args = args[0], args[1:]
			}
			var err error
			req.Prefix, err = prefixArg(args)
			return err
		},
	}
	return showing(a.app, c, apiv1.NewBGPClient, func(ctx context.Context, b apiv1.BGPClient) (*apiv1.BGPRoutesResponse, error) {
		return receive(ctx, b, req)
	},
		printBGPRoutes)
}

// receive collects the parts of an answer.
func receive(ctx context.Context, b apiv1.BGPClient, req *apiv1.BGPRoutesRequest) (*apiv1.BGPRoutesResponse, error) {
	stream, err := b.Routes(ctx, req)
	if err != nil {
		return nil, err
	}
	all := &apiv1.BGPRoutesResponse{}
	err = eachPart(stream.Recv, func(part *apiv1.BGPRoutesResponse) error {
		all.Routes = append(all.Routes, part.GetRoutes()...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

func (a bgpCommands) bgpExplainCommand() *cobra.Command {
	req := &apiv1.BGPExplainRequest{}
	c := &cobra.Command{
		Use: "explain PREFIX", Short: "Explain path selection, filtering and advertisement of a prefix",
		Long: `Show every path of a prefix and the step of the best-path selection at which it lost,
the paths that filters rejected, and for each peer whether the prefix is advertised to
it, or why not.`,
		Example: "  routerctl bgp explain 10.9.0.0/16",
		Args: func(_ *cobra.Command, args []string) error {
			var err error
			if req.Prefix, err = prefixArg(args); err == nil && req.Prefix == "" {
				err = usagef("bgp explain: name a prefix such as 10.9.0.0/16")
			}
			return err
		},
	}
	return showing(a.app, c, apiv1.NewBGPClient, func(ctx context.Context, b apiv1.BGPClient) (*apiv1.BGPRoutesResponse, error) {
		return b.Explain(ctx, req)
	},
		printBGPRoutes)
}

func printBGPRoutes(w io.Writer, r *apiv1.BGPRoutesResponse) error {
	if len(r.GetRoutes()) == 0 {
		fmt.Fprintln(w, "No routes.")
		return nil
	}
	var rows [][]string
	for _, route := range r.GetRoutes() {
		rows = append(rows, bgpRow(route, time.Now()))
	}
	return printTable(w, []string{"", "PREFIX", "NEXT HOP", "PEER", "AS PATH", "PREF", "MED", "COMMUNITIES", "STATE", "SINCE", "WHY"}, rows)
}

func bgpRow(r *apiv1.BGPRoute, now time.Time) []string {
	mark, state := "", r.GetState()
	if state == "best" {
		mark = "*"
	}
	if r.GetStale() {
		state += ", stale"
	}
	peer := r.GetPeer()
	if r.GetOwn() && peer == "" {
		if peer = "this host"; r.GetOwner() != "" {
			peer += " for " + r.GetOwner()
		}
	}
	number := func(n uint32) string {
		if n == 0 {
			return "-"
		}
		return fmt.Sprint(n)
	}
	return []string{
		mark, r.GetPrefix(), dash(r.GetNextHop()), dash(peer), dash(r.GetAsPath()), number(r.GetLocalPref()), number(r.GetMed()),
		dash(strings.Join(r.GetCommunities(), " ")), state, since(r.GetSince(), now), r.GetReason(),
	}
}

func (a bgpCommands) bgpWatchCommand() *cobra.Command {
	return &cobra.Command{
		Use: "watch", Short: "Show changes of best paths and of sessions as they happen",
		Long:    "Show changes of best paths and sessions as they happen, one line each, until interrupted.\nChanges that come too fast to be shown are counted.",
		Example: "  routerctl bgp watch", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			err := ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
				stream, err := b.Watch(ctx, &apiv1.BGPWatchRequest{})
				if err != nil {
					return err
				}
				return eachPart(stream.Recv, func(e *apiv1.BGPEvent) error {
					fmt.Fprintln(a.stdout, strings.TrimSpace(fmt.Sprintf("%s %s %s %s",
						e.GetTime().AsTime().Local().Format("15:04:05.000"), e.GetWhat(), e.GetSubject(), e.GetDetail())))
					return nil
				})
			})
			if ctx.Err() != nil {
				return nil //nolint:nilerr // interrupted, as it is meant to be
			}
			return explain(ctx, err)
		},
	}
}
