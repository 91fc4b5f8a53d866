package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a clusterCommands) tokenCommand() *cobra.Command {
	var output, address string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "token",
		Short: "Create a token for a new host to join",
		Long: `Create a token with which one new host joins the cluster of this host. This host must
keep the datastore and serve it to others (datastore.embedded.listen). The token is
printed with the command to run on the new host.

Until a host has joined with the token, or it expires, this host listens at port
datastore.embedded.joinPort (7748) of the same address. The token is a secret: whoever
uses it first joins the cluster with all rights of a host. "-o token" prints the token
alone.`,
		Example: `  routerctl cluster token
  routerctl cluster token --ttl 10m --address 10.1.0.11
  routerctl cluster token -o token | ssh 10.1.0.12 routerd join --token-file -`,
		Args: noArgs,
	}
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if output != "token" {
			if err := checkOutput(output); err != nil {
				return usagef("--output %q: must be one of table, token, yaml, json", output)
			}
		}
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		return explain(ctx, ask(ctx, a.daemon, apiv1.NewClusterClient, func(from apiv1.ClusterClient) error {
			return a.printToken(ctx, from, &apiv1.JoinTokenRequest{Ttl: durationpb.New(ttl), Address: address}, output)
		}))
	}
	c.Flags().StringVarP(&output, "output", "o", "table", "table, token, yaml or json")
	c.Flags().DurationVar(&ttl, "ttl", time.Hour, "validity of the token, 1m to 24h")
	c.Flags().StringVar(&address, "address", "", "address at which the new host reaches this one (default: that of datastore.embedded.listen, else the node's)")
	return c
}

func (a clusterCommands) printToken(ctx context.Context, from apiv1.ClusterClient, q *apiv1.JoinTokenRequest, output string) error {
	r, err := from.JoinToken(ctx, q)
	if err != nil {
		return err
	}
	switch output {
	case "token":
		fmt.Fprintln(a.stdout, r.GetToken())
	case "table":
		fmt.Fprintf(a.stdout, "On the new host, as root, until %s:\n\n  routerd join %s --token %s\n\nThe token is good for one host. Keep it secret until then.\n",
			r.GetExpires().AsTime().Local().Format(time.DateTime), r.GetHost(), r.GetToken())
	default:
		return printProto(a.stdout, r, output)
	}
	return nil
}
