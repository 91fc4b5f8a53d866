package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cmd/internal/man"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

const (
	defaultSocket  = "/run/routerd/routerd.sock"
	defaultTimeout = 30 * time.Second

	// settleTime is how long a pool stays disabled before its blocks are
	// looked at, so that allocations that had chosen it end. calicoctl waits
	// as long.
	settleTime = 500 * time.Millisecond

	// patience is how long the deletion of a pool waits for nodes to take
	// other tunnel addresses, and then to give up their blocks: they keep an
	// address for five seconds after its successor is published.
	patience = 10 * time.Second
)

// app is one run of the program: where it reads and writes, and the global
// flags.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer // escape control characters, see [printable]
	rawOut, rawErr io.Writer // of the laboratory, whose programs may know the terminal
	getenv         func(string) string
	settle         time.Duration
	patience       time.Duration
	every          time.Duration // between two looks at what is waited for

	// resolveLab finds the socket of a host of a lab.
	resolveLab func(lab, host string) (socket string, err error)

	socket    string
	lab, host string
	timeout   time.Duration

	args    []string      // the command line
	confirm time.Duration // within which what is written is to be confirmed; 0: it stands
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "routerctl",
		Short: "Look after routerd: resources, this host's state, routes and why they are there",
		Long: `routerctl reads and writes the cluster's resources, and shows what the routerd
of this host does and why.

It talks to the daemon through its socket, which only root can open. With
ETCD_ENDPOINTS set (and ETCD_CA_CERT_FILE, ETCD_CERT_FILE, ETCD_KEY_FILE,
ETCD_USERNAME, ETCD_PASSWORD as needed), resources are read and written in that
etcd directly; with DATASTORE_TYPE=kubernetes in Kubernetes' API, as KUBECONFIG or
K8S_API_ENDPOINT, K8S_CA_FILE, K8S_CERT_FILE, K8S_KEY_FILE and K8S_API_TOKEN say, or
in a pod as its service account.`,
		Example: `  routerctl node status
  routerctl get ippools -o wide
  routerctl apply -f pools.yaml
  routerctl routes 192.168.12.0/26`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usagef("%v", err) })
	f := root.PersistentFlags()
	f.StringVar(&a.socket, "socket", "", "the daemon's socket (default $ROUTERD_SOCKET, else "+defaultSocket+")")
	f.StringVar(&a.lab, "lab", "", "talk to a host of this lab; needs --host")
	f.StringVar(&a.host, "host", "", "the host in the lab")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "how long a command may take")
	root.AddCommand(
		a.getCommand(),
		a.writeCommand(apply), a.writeCommand(create), a.writeCommand(replace),
		a.validateCommand(), a.convertCommand(), a.diffCommand(), a.planCommand(), a.patchCommand(), a.labelCommand(), a.deleteCommand(), a.historyCommand(), a.confirmCommand(), a.undoCommand(), a.datastoreCommand(), a.clusterCommand(),
		a.nodeCommand(), a.poolCommand(), a.ipamCommand(), a.routesCommand(), a.bgpCommand(), a.policyCommand(), a.flowsCommand(), a.doctorCommand(), a.traceCommand(), a.topCommand(), a.eventsCommand(), a.logLevelCommand(), a.uiCommand(), a.cniCommand(), a.kubernetesCommand(), a.versionCommand(), man.Command("routerctl"),
	)
	for _, c := range append(a.extraCommands(), root.Commands()...) {
		if c.Parent() == nil {
			root.AddCommand(c)
		}
		requireSubcommand(c)
	}
	a.addCompletion(root)
	return root
}

// requireSubcommand makes a command that only holds others say which, instead
// of printing help with exit code 0 for a mistyped one.
func requireSubcommand(c *cobra.Command) {
	if c.Runnable() || !c.HasSubCommands() {
		return
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return usagef("unknown command %q for %q; see %s --help", args[0], c.CommandPath(), c.CommandPath())
	}
}

// withDeadline bounds a command by --timeout.
func (a *app) withDeadline(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(cmd.Context(), a.timeout,
		fmt.Errorf("no answer within %s; see whether the datastore is well with `routerctl node status`, or allow more with --timeout", a.timeout))
}

// withStore runs f with the datastore open and a deadline. What f changes of resources is
// recorded.
func (a *app) withStore(cmd *cobra.Command, f func(context.Context, store.Store) error) error {
	return withOpen(a, cmd, a.openStore, func(ctx context.Context, s store.Store) error {
		s, err := a.recorded(s)
		if err != nil {
			return err
		}
		return f(ctx, s)
	})
}

// withEtcd is withStore for what only etcd can do.
func (a *app) withEtcd(cmd *cobra.Command, f func(context.Context, *etcd.Store) error) error {
	return withOpen(a, cmd, a.openEtcd, f)
}

// withOpen runs f with what open opens, and a deadline.
func withOpen[S store.Store](a *app, cmd *cobra.Command, open func(context.Context) (S, error), f func(context.Context, S) error) error {
	ctx, cancel := a.withDeadline(cmd)
	defer cancel()
	s, err := open(ctx)
	if err != nil {
		return explain(ctx, err)
	}
	err = f(ctx, s)
	if closeErr := s.Close(); err == nil && closeErr != nil {
		err = fmt.Errorf("close the datastore: %w", closeErr)
	}
	return explain(ctx, err)
}
