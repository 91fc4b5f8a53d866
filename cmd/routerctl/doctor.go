package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/doctor/gather"
)

func (a doctorCommands) doctorCommand() *cobra.Command {
	var output string
	var all bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Diagnose this host's network and name the remedies",
		Long: `Check this host as it is now: its conditions, sessions, pools and workloads, objects
of other programs in the kernel that interfere, where the kernel sends packets, and
whether they get through the tunnels to other hosts. The check takes up to some
seconds, sends a few probes, and changes nothing.

With --all, also check the datastore: what other hosts publish of themselves, which of
them are missing, addresses that two nodes have, and the records of IPAM; and ask the
other hosts for the time of their clocks. Without --all, this host's clock is compared
with those of the hosts that tunnels lead to, from their latest answers to probes. For
everything else that only another host knows, run doctor on that host.

Each problem is one line: its severity, the host, the name of the check, what is
wrong, and the command that fixes it; the worst comes first. The exit code is 0 if
nothing is wrong, and 1 otherwise.`,
		Example: "  routerctl doctor\n  routerctl doctor --all\n  routerctl doctor -o json",
		Args:    noArgs,
	}
	outputFlag(c, &output)
	c.Flags().BoolVar(&all, "all", false, "check all hosts, from their records in the datastore")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		var r *apiv1.ExamineResponse
		err := ask(ctx, a.daemon, apiv1.NewDoctorClient, func(d apiv1.DoctorClient) (err error) {
			r, err = d.Examine(ctx, &apiv1.ExamineRequest{Hosts: all})
			return err
		})
		var none *notRunningError
		switch {
		case errors.As(err, &none):
			r = &apiv1.ExamineResponse{Findings: []*apiv1.Finding{doctor.Finding{
				Severity: doctor.Critical, Check: "daemon", Node: a.host, What: "routerd does not run: " + none.message,
				Cause: "it was stopped or it failed; journalctl -u routerd shows why", Cure: "systemctl restart routerd",
			}.Proto()}}
		case err != nil:
			return explain(ctx, err)
		}
		if all {
			a.examineCluster(ctx, r)
		}
		return a.showFindings(r, output)
	}
	return c
}

// examineCluster adds to an answer what the datastore shows to be wrong. Where it is not
// reached the answer says so.
func (a doctorCommands) examineCluster(ctx context.Context, r *apiv1.ExamineResponse) {
	facts, err := a.clusterFacts(ctx)
	if err != nil {
		r.Unknown = append(r.Unknown, fmt.Sprintf("other hosts: %v", explain(ctx, err)))
		return
	}
	gather.Add(r, facts)
}

// clusterFacts reads what the datastore has of all hosts.
func (a doctorCommands) clusterFacts(ctx context.Context) (doctor.Cluster, error) {
	s, err := a.openStore(ctx)
	if err != nil {
		return doctor.Cluster{}, err
	}
	defer s.Close()
	present, _ := s.(gather.Presences) // Kubernetes' API does not say who is there
	return gather.Cluster(ctx, s, present)
}

// showFindings prints what is wrong. The error carries the exit code.
func (a doctorCommands) showFindings(r *apiv1.ExamineResponse, output string) error {
	var err error
	if output != "table" {
		err = printProto(a.stdout, r, output)
	} else {
		err = printFindings(a.stdout, r)
	}
	if err == nil && len(r.GetFindings()) > 0 {
		err = exitCode(1)
	}
	return err
}

func printFindings(w io.Writer, r *apiv1.ExamineResponse) error {
	var rows [][]string
	for _, f := range r.GetFindings() {
		rows = append(rows, []string{f.GetSeverity(), dash(f.GetNode()), f.GetCheck(), f.GetWhat() + "; cure: " + f.GetCure()})
	}
	if len(rows) == 0 {
		rows = [][]string{{"well", r.GetNode(), "nothing is wrong"}}
	}
	if err := printTable(w, rows[0], rows[1:]); err != nil {
		return err
	}
	for _, u := range r.GetUnknown() {
		if _, err := fmt.Fprintf(w, "not examined: %s\n", u); err != nil {
			return err
		}
	}
	return nil
}
