package main

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a *app) versionCommand() *cobra.Command {
	var client bool
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of routerctl and the daemon",
		Example: "  routerctl version\n  routerctl version --client",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(a.stdout, "Client Version:  %s\n", buildVersion())
			if client {
				return nil
			}
			return a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
				r, err := op.Node(ctx, &apiv1.NodeRequest{})
				if err != nil {
					return err
				}
				fmt.Fprintf(a.stdout, "Daemon Version:  %s\n", dash(r.GetVersion()))
				return nil
			})
		},
	}
	c.Flags().BoolVar(&client, "client", false, "print only routerctl's version; do not ask the daemon")
	return c
}

// version is set by the linker (-X main.version=…).
var version string

// buildVersion is the linker's, else what the go command stamped into the
// binary.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
