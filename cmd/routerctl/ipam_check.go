package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/store"
)

// checkOptions are the flags of ipam check.
type checkOptions struct {
	output        string
	all, problems bool
	fix           bool
}

func (a ipamCommands) ipamCheckCommand() *cobra.Command {
	var o checkOptions
	c := &cobra.Command{
		Use:   "check",
		Short: "Check the records of IPAM",
		Long: `Check the records of IPAM against endpoints, nodes and each other. Each problem is
listed with its reason and remedy.

The exit code is 0 if nothing is wrong, and 1 otherwise. --fix repairs what no host
would repair: records of nodes that do not exist, and handles that hold nothing.
Records of a living host are left to that host.`,
		Example: "  routerctl ipam check\n  routerctl ipam check --show-problem-ips -o report.json\n  routerctl ipam check --fix",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return checkIPAM(ctx, s, a.stdout, o) })
		},
	}
	f := c.Flags()
	f.StringVarP(&o.output, "output", "o", "", "write a report to this file, for \"routerctl ipam release --from-report\"")
	f.BoolVar(&o.all, "show-all-ips", false, "print every allocated address and who has it")
	f.BoolVar(&o.problems, "show-problem-ips", false, "print every address with a problem, not only their number")
	f.BoolVar(&o.fix, "fix", false, "remove records of nodes that do not exist, and empty handles")
	return c
}

func checkIPAM(ctx context.Context, s store.Store, w io.Writer, o checkOptions) error {
	r, err := audit.Read(ctx, s)
	if err != nil {
		return err
	}
	all, found := r.Check()
	printCheck(w, r, all, found, o)
	if o.output != "" {
		if err := writeReport(o.output, r, all); err != nil {
			return err
		}
	}
	left := len(found)
	if o.fix {
		mended, err := (&audit.Mender{Store: s}).Mend(ctx, found)
		fmt.Fprintf(w, "Mended %d problems.\n", mended)
		if err != nil {
			return fmt.Errorf("mend: %w", err)
		}
		left -= mended
	}
	fmt.Fprintf(w, "Check complete; found %d problems.\n", left)
	if left > 0 {
		return exitCode(1)
	}
	return nil
}

func printCheck(w io.Writer, r *audit.Records, all []audit.Allocation, found []audit.Finding, o checkOptions) {
	fmt.Fprintf(w, "Found %d IPAM blocks, %d IP pools, %d nodes, %d handles.\n", len(r.Blocks), len(r.Pools), len(r.Nodes), len(r.Handles))
	fmt.Fprintf(w, "Found %d node tunnel IPs and %d workload IPs; %d IPs are allocated.\n", r.Tunnels, r.Endpoints, len(all))
	perNode := map[string]int{}
	for _, a := range all {
		perNode[cmp.Or(a.Node, "(no node)")]++
	}
	nodes := slices.SortedFunc(maps.Keys(perNode), func(x, y string) int {
		return cmp.Or(cmp.Compare(perNode[y], perNode[x]), strings.Compare(x, y))
	})
	for _, n := range nodes[:min(len(nodes), 20)] {
		fmt.Fprintf(w, "  %s has %d allocations\n", n, perNode[n])
	}
	if o.all {
		for _, a := range all {
			state := strings.Join(a.Owners, ", ")
			switch {
			case a.Leaked:
				state = "leaked; handle " + cmp.Or(a.Handle, "none")
			case !a.ReleasedAt.IsZero():
				state = "resting since " + a.ReleasedAt.UTC().Format(time.DateTime)
			}
			fmt.Fprintf(w, "  %s: %s\n", a.Addr, state)
		}
	}
	count := map[string]int{}
	for _, f := range found {
		count[f.Problem]++
	}
	for _, p := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(w, "%s: %d\n", p, count[p])
		shown := 0
		for _, f := range found {
			if f.Problem != p {
				continue
			}
			if shown++; shown > 10 && !o.problems {
				fmt.Fprintf(w, "  … and %d more; --show-problem-ips shows all\n", count[p]-10)
				break
			}
			fmt.Fprintf(w, "  %s: %s; %s\n", f.What, f.Why, f.Cure)
		}
	}
}

// ipamReport is what ipam check writes and ipam release reads.
type ipamReport struct {
	ClusterGUID string                `json:"clusterGUID,omitempty"`
	Allocations map[string][]reportIP `json:"allocations"`
}

type reportIP struct {
	IP             string   `json:"ip"`
	Handle         string   `json:"handle,omitempty"`
	SequenceNumber uint64   `json:"sequenceNumber"`
	Node           string   `json:"node,omitempty"`
	InUse          bool     `json:"inUse"`
	Owners         []string `json:"owners,omitempty"`
}

func writeReport(file string, r *audit.Records, all []audit.Allocation) error {
	out := ipamReport{Allocations: map[string][]reportIP{}}
	if r.Cluster != nil {
		out.ClusterGUID = r.Cluster.Spec.ClusterGUID
	}
	for _, a := range all {
		if a.ReleasedAt.IsZero() {
			out.Allocations[a.Addr.String()] = []reportIP{{a.Addr.String(), a.Handle, a.Sequence, a.Node, !a.Leaked, a.Owners}}
		}
	}
	b, err := json.MarshalIndent(out, "", "  ")
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	if err := os.WriteFile(file, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
