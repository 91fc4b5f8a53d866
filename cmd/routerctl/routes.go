package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a *app) routesCommand() *cobra.Command {
	req := &apiv1.RoutesRequest{}
	c := &cobra.Command{
		Use:   "routes [PREFIX|ADDRESS]",
		Short: "Show routerd's routes on this host and their reasons",
		Long: `Show every route that routerd knows on this host: its source, its encapsulation, and
the reason for it. Of several candidates for a prefix, the one marked * is in the
kernel; the others show why they lost.

With --all, also show the other objects that routerd keeps in the kernel: devices,
addresses, next hops, neighbours, forwarding entries and sysctls.`,
		Example: "  routerctl routes\n  routerctl routes 192.168.12.0/26\n  routerctl routes 192.168.12.5\n  routerctl routes --all -o json",
		Args: func(_ *cobra.Command, args []string) (err error) {
			req.Prefix, err = prefixArg(args)
			return err
		},
	}
	c.Flags().BoolVar(&req.AllObjects, "all", false, "also show devices, neighbours, forwarding entries and sysctls")
	return showing(a, c, apiv1.NewOperatorClient, func(ctx context.Context, op apiv1.OperatorClient) (*apiv1.RoutesResponse, error) {
		return op.Routes(ctx, req)
	},
		func(w io.Writer, r *apiv1.RoutesResponse) error {
			return printRoutes(w, r, req.Prefix, req.AllObjects, time.Now())
		})
}

func prefixArg(args []string) (string, error) {
	switch len(args) {
	case 0:
		return "", nil
	case 1:
	default:
		return "", usagef("routes: name at most one prefix or address")
	}
	if _, err := netip.ParsePrefix(args[0]); err == nil {
		return args[0], nil
	}
	if _, err := netip.ParseAddr(args[0]); err == nil {
		return args[0], nil
	}
	return "", usagef("routes: %q must be a prefix such as 192.168.12.0/26 or an address such as 192.168.12.5", args[0])
}

func printRoutes(w io.Writer, r *apiv1.RoutesResponse, prefix string, all bool, now time.Time) error {
	if len(r.GetRoutes()) == 0 {
		what := "routerd has no routes on this host."
		if prefix != "" {
			what = fmt.Sprintf("routerd has no route for %s on this host.", prefix)
		}
		fmt.Fprintln(w, what)
	} else {
		var rows [][]string
		for _, route := range r.GetRoutes() {
			rows = append(rows, routeRow(route, now))
		}
		if err := printTable(w, []string{"", "PREFIX", "VIA", "DEVICE", "SOURCE", "TYPE", "DRIVER", "POOL", "PEER", "STATE", "SINCE", "WHY"}, rows); err != nil {
			return err
		}
	}
	if !all {
		return nil
	}
	var rows [][]string
	for _, o := range r.GetObjects() {
		rows = append(rows, []string{o.GetKind(), o.GetObject(), dash(o.GetSource()), dash(o.GetState()), since(o.GetSince(), now), o.GetReason()})
	}
	fmt.Fprintln(w)
	return printTable(w, []string{"KIND", "OBJECT", "SOURCE", "STATE", "SINCE", "WHY"}, rows)
}

func routeRow(r *apiv1.Route, now time.Time) []string {
	mark, state := "", "not used"
	if r.GetBest() {
		mark, state = "*", dash(r.GetState())
	}
	via := r.GetVia()
	if via == "" {
		via = r.GetNextHop()
	}
	return []string{
		mark, r.GetPrefix(), dash(via), dash(r.GetDevice()), dash(r.GetSource()), dash(r.GetType()),
		dash(r.GetDriver()), dash(r.GetPool()), dash(r.GetPeer()), state, since(r.GetSince(), now), strings.TrimSpace(r.GetReason()),
	}
}
