package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a clusterCommands) membersCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "members",
		Short: "List the members of the datastore's cluster",
		Long: `List the members of the datastore's cluster: the hosts with an embedded etcd that
replicate it to each other. A voter counts; a learner gets the data first. More than half
of the voters must be up for anything to be written: with three, one may be lost.

STATE is leader, follower, learning, "not started" (a learner that has never been up), or
unreachable. Below the table is what is to be done about what is wrong.`,
		Example: "  routerctl cluster members\n  routerctl cluster members -o json",
		Args:    noArgs,
	}
	return showing(a.app, c, apiv1.NewClusterClient,
		func(ctx context.Context, from apiv1.ClusterClient) (*apiv1.MembersResponse, error) {
			return from.Members(ctx, &apiv1.MembersRequest{})
		}, printMembers)
}

func printMembers(w io.Writer, r *apiv1.MembersResponse) error {
	var rows [][]string
	for _, m := range r.GetMembers() {
		size := ""
		if m.GetSize() > 0 {
			size = fmt.Sprintf("%.1f MiB", float64(m.GetSize())/(1<<20))
		}
		state := m.GetState()
		if m.GetBehind() > 0 {
			state += ", " + strconv.FormatUint(m.GetBehind(), 10) + " behind"
		}
		rows = append(rows, []string{dashed(m.GetHost()), m.GetId(), m.GetRole(), state, dashed(m.GetEndpoint()), dashed(m.GetVersion()), dashed(size)})
	}
	if err := printTable(w, []string{"HOST", "ID", "ROLE", "STATE", "ENDPOINT", "ETCD", "SIZE"}, rows); err != nil {
		return err
	}
	for _, m := range r.GetMembers() {
		if m.GetProblem() != "" {
			if _, err := fmt.Fprintf(w, "%s: %s\n", orID(m), m.GetProblem()); err != nil {
				return err
			}
		}
	}
	return printWarning(w, r.GetWarning())
}

func orID(m *apiv1.ClusterMember) string {
	if m.GetHost() != "" {
		return m.GetHost()
	}
	return m.GetId()
}

func dashed(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func printWarning(w io.Writer, warning string) error {
	if warning == "" {
		return nil
	}
	_, err := fmt.Fprintf(w, "Warning: %s.\n", warning)
	return err
}

func (a clusterCommands) promoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "promote HOST",
		Short: "Make a host a member of the datastore's cluster",
		Long: `Make a host that has joined the cluster a member of its datastore: it gets the
authority's key and a copy of the data, learns what comes in meanwhile, and has a vote
when it has caught up. Nothing stops for it. The command is given on a member, and tells
of the way.

Members reach each other at TCP datastore.embedded.peerPort (2380), clients reach them at
the port of the first one. Three members stand the loss of one, five of two; an even
number is of no use.

Whatever ended it, the same command goes on. A host that is never seen again before it
has its vote is taken out by "routerctl cluster remove".`,
		Example: "  routerctl cluster promote host12\n  routerctl cluster promote host13 --timeout 5m",
		Args:    oneHost("cluster promote"),
	}
	return a.changing(c, true)
}

func (a clusterCommands) demoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "demote HOST",
		Short: "Make a member of the datastore's cluster a client again",
		Long: `Have a member leave the cluster of the datastore in order: another one leads, it is
removed, its data are put away beside their place, and it goes on as a client of the
others, with its workloads, routes and sessions as they are. The command is given on a
member. The last member stays.`,
		Example: "  routerctl cluster demote host12",
		Args:    oneHost("cluster demote"),
	}
	return a.changing(c, false)
}

func (a clusterCommands) leaveCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "leave",
		Short:   "Have this host leave the datastore's cluster",
		Long:    `As "routerctl cluster demote", of the host on which it is given.`,
		Example: "  routerctl cluster leave",
		Args:    noArgs,
	}
	return a.changing(c, false)
}

func oneHost(command string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s: name one host", command)
		}
		return nil
	}
}

// changing completes a command that has a host become a member, or a client.
func (a clusterCommands) changing(c *cobra.Command, toMember bool) *cobra.Command {
	var timeout time.Duration
	c.RunE = func(cmd *cobra.Command, args []string) error {
		q := &apiv1.ChangeMemberRequest{Member: toMember}
		if len(args) > 0 {
			q.Host = args[0]
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		last := ""
		err := ask(ctx, a.daemon, apiv1.NewClusterClient, func(from apiv1.ClusterClient) error {
			stream, err := from.ChangeMember(ctx, q)
			if err != nil {
				return err
			}
			return eachPart(stream.Recv, func(p *apiv1.ChangeMemberProgress) error {
				last = p.GetMessage()
				fmt.Fprintln(a.stdout, last)
				return printWarning(a.stdout, p.GetWarning())
			})
		})
		if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("after %s it is not done (last: %s): it goes on while the order holds; the same command follows it again, and routerctl cluster members shows how far it is", timeout, dashed(last))
		}
		return explain(cmd.Context(), err)
	}
	c.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to follow it")
	return c
}

func (a clusterCommands) removeMemberCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "remove HOST",
		Short: "Remove a member of the datastore that is lost for good",
		Long: `Remove a member whose host is lost for good from the datastore's cluster, or a learner
that never started, or take back an order that its host has not carried out. HOST may be
the member's ID. A member that is up is refused: "routerctl cluster demote" has it leave
in order. If the host comes back it finds that it is no member, puts its data away, and
goes on as a client.`,
		Example: "  routerctl cluster remove host12",
		Args:    oneHost("cluster remove"),
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		return explain(ctx, ask(ctx, a.daemon, apiv1.NewClusterClient, func(from apiv1.ClusterClient) error {
			r, err := from.RemoveMember(ctx, &apiv1.RemoveMemberRequest{Host: args[0], Force: force})
			if err != nil {
				return err
			}
			fmt.Fprintln(a.stdout, r.GetMessage())
			return printWarning(a.stdout, r.GetWarning())
		}))
	}
	c.Flags().BoolVar(&force, "force", false, "although it is up")
	return c
}
