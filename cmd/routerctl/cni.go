package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store/manifest"
)

func (a *app) cniCommand() *cobra.Command {
	c := &cobra.Command{Use: "cni", Short: "Show the CNI configuration", Example: "  routerctl cni config"}
	c.AddCommand(&cobra.Command{
		Use:   "config",
		Short: "Print the CNI network configuration of this host",
		Long: `Print the network configuration list with which a container runtime calls routerd-cni
on this host. "routerd install-cni" installs it.`,
		Example: "  routerctl cni config\n  routerctl cni config > /etc/cni/net.d/10-routerd.conflist",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
				r, err := op.CNIConfig(ctx, &apiv1.CNIConfigRequest{})
				if err != nil {
					return err
				}
				b, err := manifest.Indent(json.RawMessage(r.GetConflist()))
				if err != nil {
					return fmt.Errorf("routerd's CNI configuration is not JSON: %w", err)
				}
				_, err = a.stdout.Write(b)
				return err
			})
		},
	})
	return c
}
