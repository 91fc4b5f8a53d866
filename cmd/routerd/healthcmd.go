package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
)

func newHealthCommand() *cobra.Command {
	var file string
	var live, ready bool
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Check whether the running daemon is live and ready",
		Long: `Check whether the running daemon is live (its loops run) and ready (this host's own
dataplane is programmed). The exit code is 0 if it is. The command is meant for probes
of containers. Peers are not considered: a dead peer does not make a healthy host
unready. "routerctl node status" shows everything.`,
		Example: `  routerd health
  routerd health --live
  routerd health --ready`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			h, err := askHealth(ctx, c.OperatorSocket())
			if err != nil {
				return err
			}
			var errs []error
			for _, q := range []struct {
				asked bool
				check *apiv1.Check
			}{{live, h.GetLive()}, {ready, h.GetReady()}} {
				if !q.asked && (live || ready) {
					continue
				}
				if q.check.GetOk() {
					fmt.Fprintln(cmd.OutOrStdout(), q.check.GetName())
					continue
				}
				errs = append(errs, fmt.Errorf("not %s: %s", q.check.GetName(), q.check.GetReason()))
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().BoolVar(&live, "live", false, "check only whether it is live")
	cmd.Flags().BoolVar(&ready, "ready", false, "check only whether it is ready")
	return cmd
}

func askHealth(ctx context.Context, socket string) (*apiv1.Health, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	resp, err := apiv1.NewOperatorClient(conn).Node(ctx, &apiv1.NodeRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the daemon at %s: no answer: is it running? (systemctl status routerd): %s", socket, status.Convert(err).Message())
	}
	return resp.GetHealth(), nil
}
