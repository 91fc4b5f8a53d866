package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store/manifest"
)

func (a nodeCommands) nodeCommand() *cobra.Command {
	c := &cobra.Command{Use: "node", Short: "Show and control this host", Example: "  routerctl node status"}
	var output string
	status := &cobra.Command{
		Use:   "status",
		Short: "Show the status of this host: BGP sessions, address, datastore, pools",
		Long: `Show this host's BGP sessions as calicoctl does, then its address and the source of
that, the datastore, the daemon's health, and every pool that this host cannot serve,
with the reason and the remedy.

The exit code is 0 if the host is live and ready, and 1 otherwise. A BGP session that
is down does not make a host unready.`,
		Example: "  routerctl node status\n  routerctl node status -o json\n  routerctl --lab demo --host node2 node status",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			return a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
				r, err := op.Node(ctx, &apiv1.NodeRequest{})
				if err != nil {
					return err
				}
				if output != "table" {
					err = printProto(a.stdout, r, output)
				} else {
					err = printNode(a.stdout, r, time.Now())
				}
				if err == nil && !well(r) {
					err = exitCode(1)
				}
				return err
			})
		},
	}
	outputFlag(status, &output)
	c.AddCommand(status, a.pathsCommand(), a.nodeTunnelsCommand(), a.nodeDrainCommand(), a.nodeUndrainCommand(), diagsCommands(a).nodeDiagsCommand(), a.nodeChecksystemCommand())
	return c
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, but got %q", cmd.CommandPath(), args)
	}
	return nil
}

func outputFlag(c *cobra.Command, output *string) {
	c.Flags().StringVarP(output, "output", "o", "table", "table, yaml or json")
}

func checkOutput(output string) error {
	switch output {
	case "table", "yaml", "json":
		return nil
	}
	return usagef("--output %q: must be one of table, yaml, json", output)
}

// printProto prints a daemon's answer as it came.
func printProto(w io.Writer, m proto.Message, output string) error {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return err
	}
	var b []byte
	if output == "yaml" {
		b, err = manifest.YAML(raw)
	} else {
		// protojson varies its white space on purpose; Indent settles it.
		b, err = manifest.Indent(raw)
	}
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

func well(r *apiv1.NodeResponse) bool {
	h := r.GetHealth()
	return h.GetLive().GetOk() && h.GetReady().GetOk()
}

func printNode(w io.Writer, r *apiv1.NodeResponse, now time.Time) error {
	fmt.Fprintf(w, "routerd process is running: %s, pid %d, since %s.\n", versionText(r.GetVersion()), r.GetPid(), since(r.GetStarted(), now))
	if r.GetBgpError() != "" {
		fmt.Fprintf(w, "\nBGP does not run: %s\n", r.GetBgpError())
	}
	var v4, v6 []*apiv1.BGPPeer
	for _, p := range r.GetPeers() {
		if isIPv6(p.GetAddress()) {
			v6 = append(v6, p)
		} else {
			v4 = append(v4, p)
		}
	}
	if err := printPeers(w, "IPv4", v4, now); err != nil {
		return err
	}
	if err := printPeers(w, "IPv6", v6, now); err != nil {
		return err
	}
	adviseReflectors(w, r.GetPeers())
	printHost(w, r)
	printHealth(w, r.GetHealth(), now)
	for i, n := range r.GetNotes() {
		if i == 0 {
			fmt.Fprintln(w, "\nNotes")
		}
		fmt.Fprintf(w, "  %s\n", n)
	}
	return printPools(w, r)
}

func versionText(v string) string {
	if v == "" {
		return "unknown version"
	}
	return "version " + v
}

// isIPv6 reports the family of a peer's address, which may come with a port.
func isIPv6(s string) bool {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().Is6()
	}
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6()
}

func printPeers(w io.Writer, family string, peers []*apiv1.BGPPeer, now time.Time) error {
	fmt.Fprintf(w, "\n%s BGP status\n", family)
	if len(peers) == 0 {
		fmt.Fprintf(w, "No %s peers found.\n", family)
		return nil
	}
	var rows [][]string
	for _, p := range peers {
		rows = append(rows, []string{p.GetAddress(), p.GetType(), p.GetState(), since(p.GetSince(), now), p.GetInfo()})
	}
	return printBox(w, []string{"PEER ADDRESS", "PEER TYPE", "STATE", "SINCE", "INFO"}, rows)
}

// since is a time as BIRD shows it: of the last day the time, else the date.
func since(t *timestamppb.Timestamp, now time.Time) string {
	if t == nil {
		return "-"
	}
	at := t.AsTime().Local()
	if age := now.Sub(at); age >= 0 && age < 24*time.Hour {
		return at.Format(time.TimeOnly)
	}
	return at.Format(time.DateOnly)
}

// labelWidth fits the longest label, which is a condition's name.
const labelWidth = len("DataplaneProgrammed:")

func printHost(w io.Writer, r *apiv1.NodeResponse) {
	fmt.Fprintf(w, "\nHost %s\n", r.GetName())
	for _, l := range [][2]string{
		{"IPv4 address", hostAddress(r.GetIpv4Address(), r.GetUplink(), r.GetAddressMethod())},
		{"IPv6 address", hostAddress(r.GetIpv6Address(), r.GetIpv6Uplink(), r.GetIpv6AddressMethod())},
		{"AS number", fmt.Sprint(r.GetAsNumber())},
		{"Router ID", dash(r.GetRouterId())},
		{"Tunnel addresses", tunnels(r)},
		{"Datastore", dash(r.GetDatastore())},
		{"Workloads", fmt.Sprintf("%d, MTU %d", r.GetWorkloads(), r.GetWorkloadMtu())},
		{"Blocks", blocks(r)},
	} {
		fmt.Fprintf(w, "  %-*s %s\n", labelWidth, l[0]+":", l[1])
	}
}

// hostAddress says what address a host has of a family, and where it is from.
func hostAddress(address, uplink, method string) string {
	if address == "" {
		return "none"
	}
	return fmt.Sprintf("%s on %s (%s)", address, dash(uplink), dash(method))
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func tunnels(r *apiv1.NodeResponse) string {
	var parts []string
	for _, t := range [][2]string{
		{"IPIP", r.GetIpipTunnelAddress()},
		{"VXLAN", r.GetVxlanTunnelAddress()},
		{"IPIP", r.GetIpipTunnelAddressV6()},
		{"VXLAN", r.GetVxlanTunnelAddressV6()},
	} {
		if t[1] != "" {
			parts = append(parts, t[0]+" "+t[1])
		}
	}
	return dash(strings.Join(parts, ", "))
}

func blocks(r *apiv1.NodeResponse) string {
	var parts []string
	for _, b := range r.GetBlocks() {
		parts = append(parts, fmt.Sprintf("%s (%d of %d in use)", b.GetCidr(), b.GetInUse(), b.GetSize()))
	}
	return dash(strings.Join(parts, ", "))
}

func printHealth(w io.Writer, h *apiv1.Health, now time.Time) {
	fmt.Fprintln(w, "\nHealth")
	line := func(name string, c *apiv1.Check) {
		state := "no"
		if c.GetOk() {
			state = "yes"
		}
		fmt.Fprintf(w, "  %-*s %s%s\n", labelWidth, name+":", state, because(c, now))
	}
	line("Live", h.GetLive())
	line("Ready", h.GetReady())
	for _, c := range h.GetConditions() {
		if !strings.HasPrefix(c.GetName(), "Pool/") { // pools have a table of their own
			line(c.GetName(), c)
		}
	}
}

func because(c *apiv1.Check, now time.Time) string {
	s := ""
	if c.GetSince() != nil {
		s += ", since " + since(c.GetSince(), now)
	}
	if c.GetReason() != "" {
		s += ": " + c.GetReason()
	}
	return s
}

// printPools prints the pools that this host cannot serve, which is what an
// operator must act on.
func printPools(w io.Writer, r *apiv1.NodeResponse) error {
	var rows [][]string
	for _, p := range r.GetPools() {
		if !p.GetUsable() {
			rows = append(rows, []string{p.GetName(), p.GetCidr(), p.GetEncapsulation(), p.GetReason()})
		}
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintf(w, "\nPools: %d, all served on this host\n", len(r.GetPools()))
		for _, p := range r.GetPools() {
			if p.GetReason() != "" {
				fmt.Fprintf(w, "Pool %s: %s\n", p.GetName(), p.GetReason())
			}
		}
		return err
	}
	fmt.Fprintf(w, "\nPools: %d, of which this host cannot serve %d:\n", len(r.GetPools()), len(rows))
	return printTable(w, []string{"POOL", "CIDR", "ENCAPSULATION", "WHY, AND WHAT TO DO"}, rows)
}
