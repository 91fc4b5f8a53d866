package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a nodeCommands) nodeTunnelsCommand() *cobra.Command {
	var retry []string
	var all bool
	c := &cobra.Command{
		Use:   "tunnels",
		Short: "Show what probes measured of the tunnels to each node",
		Long: `Show, for each node and each encapsulation that is or will be used towards it, whether
probes arrive through the tunnel, the largest packet that arrives, the speed of a
short TCP transfer, and which offloads of the tunnel's device are off because they
corrupt packets.

An offload stays off until the kernel, the network card or the node's address changes.
After fixing the cause, use --retry to measure the tunnels to a node again, with every
offload on that no other node needs off. If the fault persists, packets are lost for a
moment.`,
		Example: "  routerctl node tunnels\n  routerctl node tunnels -o json\n  routerctl node tunnels --retry node2",
		Args:    noArgs,
	}
	c.Flags().StringSliceVar(&retry, "retry", nil, "discard the results for these nodes and measure their tunnels again")
	c.Flags().BoolVar(&all, "retry-all", false, "discard all results and measure every tunnel again")
	return showing(a.app, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.TunnelsResponse, error) {
		return op.Tunnels(ctx, &apiv1.TunnelsRequest{Retry: retry, RetryAll: all})
	},
		printTunnels)
}

func printTunnels(w io.Writer, r *apiv1.TunnelsResponse) error {
	if r.GetState() != "" {
		fmt.Fprintf(w, "Nothing is measured: %s\n", r.GetState())
	}
	if len(r.GetTunnels()) == 0 {
		if r.GetState() == "" {
			fmt.Fprintln(w, "No packets go to other nodes in tunnels.")
		}
		return nil
	}
	var rows [][]string
	var notes []string
	off := map[string]string{}
	for _, t := range r.GetTunnels() {
		used := "no"
		if t.GetInUse() {
			used = "yes"
		}
		rows = append(rows, []string{
			t.GetNode(), t.GetForm(), t.GetInner(), t.GetDevice(), used, cmp.Or(t.GetDelivers(), "not measured yet"),
			number(t.GetMtu()), goodput(t.GetBytesPerSecond()), dash(t.GetNeedsOff()),
		})
		if t.GetReason() != "" {
			notes = append(notes, fmt.Sprintf("  %s, %s: %s", t.GetNode(), t.GetForm(), t.GetReason()))
		}
		if t.GetDeviceOff() != "" {
			off[t.GetDevice()] = t.GetDeviceOff()
		}
	}
	if err := printTable(w, []string{"NODE", "FORM", "INNER", "DEVICE", "IN USE", "DELIVERS", "MTU", "TCP TEST", "NEEDS"}, rows); err != nil {
		return err
	}
	for _, t := range r.GetTunnels() {
		if s, ok := off[t.GetDevice()]; ok {
			notes = append(notes, fmt.Sprintf("  %s has, for all nodes: %s", t.GetDevice(), s))
			delete(off, t.GetDevice())
		}
	}
	if len(notes) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(w, "\nNotes\n%s\n", strings.Join(notes, "\n"))
	return err
}

func number(n uint32) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// goodput is a speed as networks have it.
func goodput(bytes float64) string {
	switch bits := 8 * bytes; {
	case bits == 0:
		return "-"
	case bits < 1e6:
		return fmt.Sprintf("%.0f kbit/s", bits/1e3)
	default:
		return fmt.Sprintf("%.0f Mbit/s", bits/1e6)
	}
}
