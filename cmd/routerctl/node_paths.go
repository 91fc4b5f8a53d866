package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// pathsCommand shows what this host measured of the underlay.
func (a nodeCommands) pathsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "paths",
		Short: "Show the underlay path to every other host: address, NAT, MTU",
		Long: `Show, for every other host and address family, the address to which tunnels send and
why, whether probes are answered there, and what was measured:

  ADDRESS  with a port where NAT changes VXLAN's port
  ANSWERS  to probes sent in the encapsulation of the tunnel
  SOURCE   any: packets from any source port arrive; fixed: only those from VXLAN's
           own port arrive, so data is sent from that port, over one network path
  MTU      the largest packet that arrives, if less than the uplink's MTU
  NEAR     whether the host itself answers as a neighbour on our own subnet

-o yaml shows every address that is tried, with its state.`,
		Example: "  routerctl node paths\n  routerctl node paths -o yaml\n  routerctl --lab demo --host node2 node paths",
		Args:    noArgs,
	}
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.PathsResponse, error) {
		return op.Paths(ctx, &apiv1.PathsRequest{})
	},
		func(w io.Writer, r *apiv1.PathsResponse) error { return printPaths(w, r, time.Now()) })
}

func printPaths(w io.Writer, r *apiv1.PathsResponse, now time.Time) error {
	if r.GetState() != "" {
		fmt.Fprintf(w, "No paths are measured now: %s\n", r.GetState())
	}
	if len(r.GetTunnelAddresses()) > 0 {
		fmt.Fprintf(w, "Hosts that cannot reach this host's own address use %s\n", strings.Join(r.GetTunnelAddresses(), ", "))
	}
	if len(r.GetPaths()) == 0 {
		_, err := fmt.Fprintln(w, "No other hosts.")
		return err
	}
	var rows [][]string
	for _, p := range r.GetPaths() {
		addr := dash(p.GetAddress())
		if p.GetPort() != 0 {
			addr += fmt.Sprintf(" port %d", p.GetPort())
		}
		answers, rtt, mtu := "no", "-", "-"
		if p.GetAnswers() {
			answers = "yes"
		}
		if p.GetRtt() != nil {
			rtt = p.GetRtt().AsDuration().Round(10 * time.Microsecond).String()
		}
		if p.GetMtu() != 0 {
			mtu = fmt.Sprint(p.GetMtu())
		}
		rows = append(rows, []string{
			p.GetNode(), p.GetFamily(), addr, answers, since(p.GetLastAnswer(), now), rtt, dash(p.GetSourcePort()), mtu, p.GetNear(), p.GetWhy(),
		})
	}
	return printTable(w, []string{"NODE", "FAMILY", "ADDRESS", "ANSWERS", "LAST", "RTT", "SOURCE", "MTU", "NEAR", "WHY"}, rows)
}
