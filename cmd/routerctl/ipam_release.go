package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/store"
)

func (a ipamCommands) ipamReleaseCommand() *cobra.Command {
	var ips, reports []string
	var force bool
	c := &cobra.Command{
		Use:   "release",
		Short: "Release unused addresses",
		Long: `Release addresses, or the leaks of a report of "routerctl ipam check -o".

An address held by an endpoint, a node or a host's reserve is refused without --force.
From a report, only addresses that it calls not in use are released, and only if they
were not assigned again since. With several reports, all of them must call an address
not in use.`,
		Example: "  routerctl ipam release --ip=192.168.12.5\n  routerctl ipam release --from-report=report.json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(ips) == 0 == (len(reports) == 0) {
				return usagef("give either --ip or --from-report")
			}
			var addrs []netip.Addr
			for _, s := range ips {
				addr, err := netip.ParseAddr(s)
				if err != nil {
					return usagef("--ip %q: must be an address such as 192.168.12.5", s)
				}
				addrs = append(addrs, addr)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				return releaseAddresses(ctx, s, a.stdout, addrs, reports, force)
			})
		},
	}
	c.Flags().StringSliceVar(&ips, "ip", nil, "address to release; repeatable")
	c.Flags().StringSliceVar(&reports, "from-report", nil, "release the leaks of this report; repeatable")
	c.Flags().BoolVar(&force, "force", false, "release an address in use")
	return c
}

func releaseAddresses(ctx context.Context, s store.Store, w io.Writer, addrs []netip.Addr, reports []string, force bool) error {
	r, err := audit.Read(ctx, s)
	if err != nil {
		return err
	}
	wanted, err := fromReports(reports, r)
	if err != nil {
		return err
	}
	given, _ := r.Check()
	byAddr := map[netip.Addr]audit.Allocation{}
	for _, a := range given {
		byAddr[a.Addr] = a
	}
	for _, a := range addrs {
		have, ok := byAddr[a]
		if !ok || !have.ReleasedAt.IsZero() {
			fmt.Fprintf(w, "%s is not assigned\n", a)
			continue
		}
		wanted[a] = have.Sequence
	}
	var errs []error
	n := 0
	for a, seq := range wanted {
		have, ok := byAddr[a]
		switch {
		case !ok || have.Sequence != seq:
			fmt.Fprintf(w, "%s was released or assigned again since the report\n", a)
			continue
		case len(have.Owners) > 0 && !force:
			errs = append(errs, fmt.Errorf("release %s: %s has it; delete that first, or give --force", a, strings.Join(have.Owners, ", ")))
			continue
		}
		freed, err := audit.Release(ctx, s, have.Allocation)
		n += freed
		if err != nil {
			errs = append(errs, fmt.Errorf("release %s: %w", a, err))
		}
	}
	fmt.Fprintf(w, "Released %d addresses.\n", n)
	return errors.Join(errs...)
}

// fromReports returns the leaks that all reports name, with their sequence
// numbers.
func fromReports(files []string, r *audit.Records) (map[netip.Addr]uint64, error) {
	out := map[netip.Addr]uint64{}
	for i, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read report: %w", err)
		}
		var rep ipamReport
		if err := json.Unmarshal(b, &rep); err != nil {
			return nil, fmt.Errorf("report %s: %w", file, err)
		}
		if r.Cluster != nil && rep.ClusterGUID != "" && rep.ClusterGUID != r.Cluster.Spec.ClusterGUID {
			return nil, fmt.Errorf("report %s is of another cluster (clusterGUID %s, here %s)", file, rep.ClusterGUID, r.Cluster.Spec.ClusterGUID)
		}
		leaks := map[netip.Addr]uint64{}
		for _, list := range rep.Allocations {
			for _, ip := range list {
				if a, err := netip.ParseAddr(ip.IP); err == nil && !ip.InUse {
					leaks[a] = ip.SequenceNumber
				}
			}
		}
		if i == 0 {
			out = leaks
			continue
		}
		for a, seq := range out {
			if have, ok := leaks[a]; !ok || have != seq {
				delete(out, a)
			}
		}
	}
	return out, nil
}
