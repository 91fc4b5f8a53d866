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
		Short: "List the members of the datastore",
		Long: `List the members of the datastore's cluster: the hosts whose embedded etcds replicate
it. A voter counts towards the majority; a learner is still copying the data. Writes
need more than half of the voters: of three, one may be lost.

STATE is leader, follower, learning, "not started" (a learner that has never been up),
or unreachable. Problems are listed below the table with their remedy.`,
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
		Short: "Add a host to the members of the datastore",
		Long: `Make a host that has joined the cluster a member of its datastore. The host receives
the authority's key and a copy of the data, follows new writes, and becomes a voter
when it has caught up. Nothing is interrupted. Run the command on a member; it reports
progress.

Members reach each other at TCP port datastore.embedded.peerPort (2380); clients reach
them at the port of the first member. Three members survive the loss of one, five of
two; an even number has no advantage.

If the command is interrupted, run it again to continue. If a host disappears before
it is a voter, remove it with "routerctl cluster remove".`,
		Example: "  routerctl cluster promote host12\n  routerctl cluster promote host13 --timeout 5m",
		Args:    oneHost("cluster promote"),
	}
	return a.changing(c, true)
}

func (a clusterCommands) demoteCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "demote HOST",
		Short: "Turn a member of the datastore into a client",
		Long: `Turn a member of the datastore's cluster into a client. If it leads, another member
takes over; then it is removed, its data are set aside beside their directory, and it
continues as a client of the others. Its workloads, routes and sessions are
unaffected. Run the command on a member. The last member cannot be demoted.`,
		Example: "  routerctl cluster demote host12",
		Args:    oneHost("cluster demote"),
	}
	return a.changing(c, false)
}

func (a clusterCommands) leaveCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "leave",
		Short:   "Turn this host into a client of the datastore",
		Long:    `Do the same as "routerctl cluster demote", for this host.`,
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
			return fmt.Errorf("not complete after %s (last: %s): it continues in the background; run the same command to follow it, or see routerctl cluster members", timeout, dashed(last))
		}
		return explain(cmd.Context(), err)
	}
	c.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for completion")
	return c
}

func (a clusterCommands) removeMemberCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "remove HOST",
		Short: "Remove a lost member of the datastore",
		Long: `Remove a member whose host is lost for good, or a learner that never started, or
cancel a promotion or demotion that its host has not carried out. HOST may be the
member's ID. A member that is up is refused: use "routerctl cluster demote". If the
host comes back, it finds that it is no member, sets its data aside, and continues as
a client.`,
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
	c.Flags().BoolVar(&force, "force", false, "remove it although it is up")
	return c
}
