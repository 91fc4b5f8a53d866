package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// lookEvery is how often a drain that waits looks at the pool's blocks: the
// daemon's socket has no watch, and pods are made anew in seconds.
const lookEvery = time.Second

// unlimited is the time of a command that waits for people.
const unlimited = 365 * 24 * time.Hour

func (a poolCommands) poolCommand() *cobra.Command {
	c := &cobra.Command{Use: "pool", Short: "Show, drain and enable pools", Example: "  routerctl pool status\n  routerctl pool drain old-pool --wait"}
	c.AddCommand(a.poolStatusCommand(), a.drainCommand(), a.enableCommand())
	return c
}

func (a poolCommands) drainCommand() *cobra.Command {
	d := drain{}
	c := &cobra.Command{
		Use:   "drain NAME",
		Short: "Stop assigning addresses from a pool",
		Long: `Disable a pool, so that workloads get no more addresses from it, and list those that
still have some. Their packets are forwarded as before. A workload moves to another
pool when it is recreated.

Nodes whose tunnel devices have addresses of the pool take others automatically, if
another pool of the same encapsulation is enabled.

With --wait, wait until no workload has an address of the pool, and no tunnel that can
take another. There is no time limit unless --timeout is given. If the command is
interrupted, the pool stays disabled: run it again to continue, or enable the pool
with "routerctl pool enable".

The last pool that assigns addresses of its family to workloads is refused, because
recreated workloads would get none. --force drains it anyway.`,
		Example: `  routerctl pool drain old-pool --dry-run
  routerctl pool drain old-pool --wait
  routerctl delete ippool old-pool`,
		Args: onePool,
		RunE: func(cmd *cobra.Command, args []string) error {
			if d.wait && !cmd.Flags().Changed("timeout") {
				a.timeout = unlimited
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				d.store, d.out, d.every = s, a.stdout, a.every
				return d.run(ctx, args[0])
			})
		},
	}
	c.Flags().BoolVar(&d.wait, "wait", false, "wait until no address of the pool is in use")
	c.Flags().BoolVar(&d.dryRun, "dry-run", false, "show who has addresses, but do not disable the pool")
	c.Flags().BoolVar(&d.force, "force", false, "drain the pool although no other pool replaces it")
	return c
}

func (a poolCommands) enableCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "enable NAME",
		Short:   "Assign addresses from a disabled or drained pool again",
		Example: "  routerctl pool enable old-pool",
		Args:    onePool,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				key := store.ResourceKey(store.KindIPPool, args[0])
				if _, err := store.Modify(ctx, s, key, setDisabled(false)); err != nil {
					return fmt.Errorf("enable %s: %w", key, err)
				}
				fmt.Fprintf(a.stdout, "%s enabled\n", key)
				return nil
			})
		},
	}
}

func onePool(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s: name one pool; see routerctl get ippools", cmd.CommandPath())
	}
	return nil
}

// setDisabled returns a change of a pool.
func setDisabled(disabled bool) func(store.Object) (any, error) {
	return func(cur store.Object) (any, error) {
		if cur.Revision == 0 {
			return nil, fmt.Errorf("%w; see routerctl get ippools", store.ErrNotFound)
		}
		p, ok := store.Clone(cur.Value).(*v3.IPPool)
		if !ok {
			return nil, errors.New("its record cannot be decoded; correct it with routerctl replace, or delete it")
		}
		p.Spec.Disabled = disabled
		return p, nil
	}
}

// drain is a run of the drain command.
type drain struct {
	store               store.Store
	out                 io.Writer
	every               time.Duration
	wait, dryRun, force bool
}

func (d *drain) run(ctx context.Context, name string) error {
	key := store.ResourceKey(store.KindIPPool, name)
	o, err := d.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("drain %s: %w; see routerctl get ippools", key, store.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("drain %s: %w", key, err)
	}
	p, ok := o.Value.(*v3.IPPool)
	if !ok {
		return fmt.Errorf("drain %s: its record cannot be decoded", key)
	}
	st, err := d.look(ctx, p)
	if err != nil {
		return err
	}
	if len(st.successors) == 0 && len(st.workloads) > 0 && !d.force {
		return fmt.Errorf("drain %s: no other pool is enabled that gives addresses of this family to workloads, so that those made anew would get none: "+
			"make one first, or give --force", key)
	}
	switch {
	case d.dryRun:
		fmt.Fprintf(d.out, "%s would be disabled\n", key)
	case p.Spec.Disabled:
		fmt.Fprintf(d.out, "%s is disabled already\n", key)
	default:
		if _, err := store.Modify(ctx, d.store, key, setDisabled(true)); err != nil {
			return fmt.Errorf("drain %s: %w", key, err)
		}
		fmt.Fprintf(d.out, "%s disabled: no more addresses are given of it\n", key)
		if st, err = d.look(ctx, p); err != nil {
			return err
		}
	}
	if err := d.print(st); err != nil || d.dryRun || !d.wait {
		return err
	}
	return d.waitFor(ctx, p, st)
}

// drained is how far a drain has come.
type drained struct {
	workloads, tunnels []holding
	successors         []string
	tunnelsMove        bool // another pool takes the tunnels' addresses
}

func (s drained) done() bool { return len(s.workloads) == 0 && (len(s.tunnels) == 0 || !s.tunnelsMove) }

func (d *drain) look(ctx context.Context, p *v3.IPPool) (drained, error) {
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil {
		return drained{}, fmt.Errorf("drain IPPool(%s): spec.cidr: %q is no CIDR", p.Name, p.Spec.CIDR)
	}
	pools, _, err := d.store.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return drained{}, fmt.Errorf("drain IPPool(%s): %w", p.Name, err)
	}
	// A block that cannot be read might hold anything.
	blocks, _, err := d.store.List(ctx, store.KindIPAMBlock, "")
	if err != nil {
		return drained{}, fmt.Errorf("drain IPPool(%s): %w", p.Name, err)
	}
	st := drained{successors: successors(p, pools), tunnelsMove: takesTunnels(p, pools)}
	st.workloads, st.tunnels = split(holdings(cidr.Masked(), blocks))
	return st, nil
}

func (d *drain) print(st drained) error {
	if len(st.workloads) == 0 {
		fmt.Fprintln(d.out, "No workload has an address of it")
	} else {
		fmt.Fprintf(d.out, "Workloads that have addresses of it: %d; make them anew to move them to: %s\n", len(st.workloads), dash(strings.Join(st.successors, ", ")))
		var rows [][]string
		for _, h := range st.workloads {
			rows = append(rows, []string{h.node, dash(h.namespace), h.workload, h.addr.String()})
		}
		if err := printTable(d.out, []string{"NODE", "NAMESPACE", "WORKLOAD", "ADDRESS"}, rows); err != nil {
			return err
		}
	}
	if n := len(st.tunnels); n > 0 && st.tunnelsMove {
		fmt.Fprintf(d.out, "Tunnel addresses of it: %d; their nodes take others by themselves\n", n)
	} else if n > 0 {
		fmt.Fprintf(d.out, "Tunnel addresses of it: %d; they stay until the pool is deleted, for no other pool of its encapsulation is enabled\n", n)
	}
	return nil
}

// waitFor looks again and again until nothing is left, and says what changed.
func (d *drain) waitFor(ctx context.Context, p *v3.IPPool, st drained) error {
	printed := st
	for !st.done() {
		if err := async.Sleep(ctx, d.every); err != nil {
			return err
		}
		var err error
		if st, err = d.look(ctx, p); err != nil {
			return err
		}
		if len(st.workloads) == len(printed.workloads) && len(st.tunnels) == len(printed.tunnels) {
			continue
		}
		printed = st
		line := fmt.Sprintf("workloads: %d, tunnels: %d", len(st.workloads), len(st.tunnels))
		if len(st.workloads) > 0 {
			line += " (" + whose(st.workloads) + ")"
		}
		fmt.Fprintln(d.out, line)
	}
	fmt.Fprintf(d.out, "IPPool(%s) is drained; delete it with: routerctl delete ippool %s\n", p.Name, p.Name)
	return nil
}
