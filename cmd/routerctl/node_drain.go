package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// drainOptions are the flags of `node drain`.
type drainOptions struct {
	wait    bool
	timeout time.Duration
	quiet   time.Duration
}

func (a nodeCommands) nodeDrainCommand() *cobra.Command {
	var o drainOptions
	c := &cobra.Command{
		Use:   "drain [NODE]",
		Short: "Move traffic away from a host before it stops",
		Long: `Move traffic away from a host: this one, or NODE. No new workload starts there, and
its routes are advertised with the community GRACEFUL_SHUTDOWN and the lowest
LOCAL_PREF (RFC 8326), so that BGP peers prefer another path if they have one.
Workloads keep running, and nothing is withdrawn.

With --wait, which works only on the host itself, wait until its workloads have
received nothing for a while, then withdraw its routes. If they still receive traffic
after --wait-timeout, the host stays drained without withdrawal and the exit code is
1. After a successful wait, stop the daemon.`,
		Example: "  routerctl node drain --wait && systemctl stop routerd\n  routerctl node drain node3\n  routerctl node undrain node3",
		Args:    cobra.MaximumNArgs(1),
		RunE:    func(cmd *cobra.Command, args []string) error { return a.drain(cmd, args, o) },
	}
	f := c.Flags()
	f.BoolVar(&o.wait, "wait", false, "wait until this host's workloads receive nothing, then withdraw its routes")
	f.DurationVar(&o.timeout, "wait-timeout", 5*time.Minute, "maximum time to wait")
	f.DurationVar(&o.quiet, "quiet", 5*time.Second, "time without traffic after which the host counts as idle")
	return c
}

func (a nodeCommands) nodeUndrainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "undrain [NODE]",
		Short: "Return a drained host to service",
		Long: `Return a drained host to service: this one, or NODE. Workloads may start there again,
and the host advertises its routes as before.`,
		Example: "  routerctl node undrain\n  routerctl node undrain node3",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withNodeName(cmd, args, func(name string) error {
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.setDrain(ctx, s, name, "") })
			})
		},
	}
}

func (a nodeCommands) drain(cmd *cobra.Command, args []string, o drainOptions) error {
	if o.wait && len(args) > 0 {
		return usagef("node drain: --wait counts packets on the host itself: run it there, without NODE")
	}
	return a.withNodeName(cmd, args, func(name string) error {
		set := func(to store.Drain) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.setDrain(ctx, s, name, to) })
		}
		if err := set(store.DrainShift); err != nil || !o.wait {
			return err
		}
		// Longer than a command may take otherwise.
		if err := a.askOperator(cmd.Context(), func(op apiv1.OperatorClient) error { return a.awaitQuiet(cmd.Context(), op, o) }); err != nil {
			return err
		}
		return set(store.DrainWithdrawn)
	})
}

// withNodeName calls f with the node that the arguments name, or this host's.
func (a nodeCommands) withNodeName(cmd *cobra.Command, args []string, f func(name string) error) error {
	if len(args) > 0 {
		return f(args[0])
	}
	var name string
	err := a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
		r, err := op.Node(ctx, &apiv1.NodeRequest{})
		name = r.GetName()
		return err
	})
	if err != nil {
		return err
	}
	return f(name)
}

// setDrain writes how far a node is drained; empty: not at all.
func (a nodeCommands) setDrain(ctx context.Context, s store.Store, name string, to store.Drain) error {
	key := store.ResourceKey(store.KindNode, name)
	_, err := store.Modify(ctx, s, key, func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("%w; see routerctl get nodes", store.ErrNotFound)
		}
		value := store.Clone(cur.Value)
		m := store.Meta(value)
		if to == "" {
			delete(m.Annotations, store.AnnotationDrain)
			return value, nil
		}
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		m.Annotations[store.AnnotationDrain] = string(to)
		return value, nil
	})
	if err != nil {
		return fmt.Errorf("drain %s: %w", key, err)
	}
	says := map[store.Drain]string{
		"":                   "is in service again",
		store.DrainShift:     "is drained: no workload starts there, and BGP peers are asked to prefer other paths",
		store.DrainWithdrawn: "advertises no routes",
	}
	fmt.Fprintf(a.stdout, "Node %s %s.\n", name, says[to])
	return nil
}

// awaitQuiet waits until the host's workloads have been sent nothing for a while.
func (a nodeCommands) awaitQuiet(ctx context.Context, op apiv1.OperatorClient, o drainOptions) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	err := async.Still(ctx, o.quiet, func() (n uint64, known bool, err error) {
		r, err := op.Node(ctx, &apiv1.NodeRequest{Delivered: true})
		// The daemon keeps the deadline too, and may say so first.
		if ctx.Err() != nil || status.Code(err) == codes.DeadlineExceeded {
			return 0, false, nil
		}
		return r.GetDeliveredPackets(), true, err
	}, func(by uint64, took time.Duration) {
		fmt.Fprintf(a.stderr, "Workloads still receive packets: %d in the last %v.\n", by, took.Round(time.Second))
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("workloads of this host still receive packets after %v; list them with `routerctl get workloadendpoints -o wide`, move them, and run this again, or return the host to service with `routerctl node undrain`", o.timeout)
	}
	return err
}
