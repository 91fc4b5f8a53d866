package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

func (a *app) doctorCommand() *cobra.Command {
	var output string
	var all bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with this host's network, and which command mends it",
		Long: `Examine this host as it is now: its conditions, sessions, pools and workloads, what
other programs have in the kernel that stands in the way, where the kernel sends
packets, and whether they get through the tunnels to other hosts. It takes up to
some seconds, sends a few probes, and changes nothing.

With --all it looks at the records of the datastore too: what other hosts publish of
themselves, which of them are not there, addresses that two nodes have, and IPAM's
records. What a host knows alone, that host's own doctor says.

Each thing that is wrong is a line: how bad it is, the host, the name of the check,
what is wrong, and the command that mends it; the worst comes first. The exit code
is 0 when nothing is wrong and 1 otherwise.`,
		Example: "  routerctl doctor\n  routerctl doctor --all\n  routerctl doctor -o json",
		Args:    noArgs,
	}
	outputFlag(c, &output)
	c.Flags().BoolVar(&all, "all", false, "all hosts, by what the datastore has of them")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		var r *apiv1.ExamineResponse
		err := ask(ctx, a, apiv1.NewDoctorClient, func(d apiv1.DoctorClient) (err error) {
			r, err = d.Examine(ctx, &apiv1.ExamineRequest{})
			return err
		})
		var none *notRunningError
		switch {
		case errors.As(err, &none):
			r = &apiv1.ExamineResponse{Findings: []*apiv1.Finding{doctor.Finding{
				Severity: doctor.Critical, Check: "daemon", Node: a.host, What: "routerd does not run: " + none.message,
				Cause: "it was stopped, or ended by itself: journalctl -u routerd says why", Cure: "systemctl restart routerd",
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
func (a *app) examineCluster(ctx context.Context, r *apiv1.ExamineResponse) {
	facts, err := a.clusterFacts(ctx)
	if err != nil {
		r.Unknown = append(r.Unknown, fmt.Sprintf("other hosts: %v", explain(ctx, err)))
		return
	}
	facts.Self = r.GetNode()
	var found []*apiv1.Finding
	for _, f := range doctor.ExamineCluster(facts) {
		found = append(found, f.Proto())
	}
	r.Findings = append(found, r.GetFindings()...) // a host that is not there is the cause of sessions that are down
	slices.SortStableFunc(r.Findings, func(x, y *apiv1.Finding) int {
		return doctor.CompareSeverity(doctor.Severity(x.GetSeverity()), doctor.Severity(y.GetSeverity()))
	})
}

// clusterFacts reads what the datastore has of all hosts.
func (a *app) clusterFacts(ctx context.Context) (doctor.Cluster, error) {
	var out doctor.Cluster
	s, err := a.openStore(ctx)
	if err != nil {
		return out, err
	}
	defer s.Close()
	err = store.Pages(ctx, s, store.KindNode, "", func(page []store.Object) error {
		for _, o := range page {
			if n, ok := o.Value.(*store.Node); ok {
				out.Members = append(out.Members, memberOf(o, n))
			}
		}
		return nil
	})
	if err != nil {
		return out, fmt.Errorf("read the nodes: %w", err)
	}
	if e, ok := s.(*etcd.Store); ok {
		once, cancel := context.WithCancel(ctx)
		e.Presences(once, func(nodes []string) {
			out.Present = map[string]bool{}
			for _, n := range nodes {
				out.Present[n] = true
			}
			cancel() // who comes and goes later is not asked for
		})
	}
	out.Records, err = lastingRecords(ctx, s)
	return out, err
}

// auditAgain is after how long what an audit finds is looked for again: a host writes
// the record of an address and the endpoint that uses it one after the other.
const auditAgain = time.Second

// lastingRecords returns what is wrong with IPAM's records, and still is a moment later.
func lastingRecords(ctx context.Context, s store.Store) ([]doctor.Record, error) {
	var last map[doctor.Record]bool
	for {
		r, err := audit.Read(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("read IPAM's records: %w", err)
		}
		_, found := r.Check()
		var out []doctor.Record
		now := map[doctor.Record]bool{}
		for _, f := range found {
			rec := doctor.Record{Problem: f.Problem, What: f.What, Why: f.Why, Cure: f.Cure}
			now[rec] = true
			if last[rec] {
				out = append(out, rec)
			}
		}
		if len(found) == 0 || last != nil {
			return out, nil
		}
		last = now
		if err := async.Sleep(ctx, auditAgain); err != nil {
			return nil, err
		}
	}
}

// memberOf reads what a node has published of itself.
func memberOf(o store.Object, n *store.Node) doctor.Member {
	m := doctor.Member{Name: n.Name}
	if read, ok := cluster.Decode("", store.Event{Key: o.Key, Object: o}).Value.(*cluster.Node); ok {
		m.Addrs = read.Addrs()
		for _, a := range []netip.Addr{read.VXLANAddr.IPv4, read.VXLANAddr.IPv6, read.IPIPAddr.IPv4, read.IPIPAddr.IPv6} {
			if a.IsValid() {
				m.Tunnels = append(m.Tunnels, a)
			}
		}
	}
	for _, c := range n.Status.Conditions {
		if name, ok := strings.CutPrefix(c.Type, "routerd.io/"); ok {
			m.Conditions = append(m.Conditions, &apiv1.Check{Name: name, Ok: c.Status == metav1.ConditionTrue, Reason: c.Message})
		}
	}
	return m
}

// showFindings prints what is wrong. The error carries the exit code.
func (a *app) showFindings(r *apiv1.ExamineResponse, output string) error {
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
