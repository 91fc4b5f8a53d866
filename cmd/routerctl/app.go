package main

import (
	"context"
	"fmt"
	"io"
	"strings"
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

// streams are where a run of the program reads and writes.
type streams struct {
	stdin          io.Reader
	stdout, stderr io.Writer // escape control characters, see [printable]
	rawOut, rawErr io.Writer // of the laboratory, whose programs may know the terminal
}

// waits are how long it waits for others.
type waits struct {
	settle   time.Duration
	patience time.Duration
	every    time.Duration // between two looks at what is waited for
}

// daemon is whom the program asks, by its flags and the environment.
type daemon struct {
	getenv func(string) string
	// resolveLab finds the socket of a host of a lab.
	resolveLab func(lab, host string) (socket string, err error)

	socket      string
	lab, host   string
	config      string // of calicoctl, in place of the environment
	kubeContext string
	plugin      bool   // of kubectl: see [app.asPlugin]
	kubeconfig  string // of --kubeconfig, which a plugin has
	timeout     time.Duration
}

// app is one run of the program: what every command has. Commands of a subject are a type
// of their own that embeds it.
type app struct {
	streams
	waits
	*daemon

	args    []string      // the command line
	confirm time.Duration // within which what is written is to be confirmed; 0: it stands
}

// The commands by subject.
type (
	bgpCommands        struct{ *app }
	clusterCommands    struct{ *app }
	completion         struct{ *app }
	datastoreCommands  struct{ *app }
	diagsCommands      struct{ *app }
	doctorCommands     struct{ *app }
	eventsCommands     struct{ *app }
	historyCommands    struct{ *app }
	ipamCommands       struct{ *app }
	kubernetesCommands struct{ *app }
	nodeCommands       struct{ *app }
	policyCommands     struct{ *app }
	poolCommands       struct{ *app }
	resourceCommands   struct{ *app }
	topCommands        struct{ *app }
)

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "routerctl",
		Short: "Manage routerd: resources, the state of this host, its routes and their reasons",
		Long: `routerctl reads and writes the cluster's resources, and shows what routerd does on
this host and why.

It connects to the daemon through its socket, which only root can open. With
ETCD_ENDPOINTS set (and ETCD_CA_CERT_FILE, ETCD_CERT_FILE, ETCD_KEY_FILE,
ETCD_USERNAME, ETCD_PASSWORD as needed), it reads and writes resources directly in
that etcd. With DATASTORE_TYPE=kubernetes it uses the Kubernetes API, configured by
KUBECONFIG, by K8S_API_ENDPOINT, K8S_CA_FILE, K8S_CERT_FILE, K8S_KEY_FILE and
K8S_API_TOKEN, or, in a pod, by its service account. A configuration file of calicoctl
(--config) can set the same.`,
		Example: `  routerctl node status
  routerctl get ippools -o wide
  routerctl apply -f pools.yaml
  routerctl routes 192.168.12.0/26`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return usagef("%v; see %s --help", err, c.CommandPath()) })
	f := root.PersistentFlags()
	f.StringVar(&a.socket, "socket", "", "the daemon's socket (default $ROUTERD_SOCKET, else "+defaultSocket+")")
	f.StringVar(&a.lab, "lab", "", "name of the lab; needs --host")
	f.StringVar(&a.host, "host", "", "host of the lab")
	f.StringVarP(&a.config, "config", "c", "", "configuration file of calicoctl (CalicoAPIConfig) to use instead of the environment")
	f.StringVar(&a.kubeContext, "context", "", "context of the kubeconfig, with the Kubernetes datastore")
	f.Bool("allow-version-mismatch", false, "does nothing: calicoctl's scripts give it")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "time limit of the command")
	resources, history, policies, events := resourceCommands{a}, historyCommands{a}, policyCommands{a}, eventsCommands{a}
	root.AddCommand(
		resources.getCommand(),
		resources.writeCommand(apply), resources.writeCommand(create), resources.writeCommand(replace),
		resources.validateCommand(), resources.convertCommand(), resources.diffCommand(), resources.planCommand(), resources.patchCommand(), resources.labelCommand(), resources.deleteCommand(),
		history.historyCommand(), history.confirmCommand(), history.undoCommand(),
		datastoreCommands{a}.datastoreCommand(), clusterCommands{a}.clusterCommand(),
		nodeCommands{a}.nodeCommand(), poolCommands{a}.poolCommand(), ipamCommands{a}.ipamCommand(), a.routesCommand(), bgpCommands{a}.bgpCommand(),
		policies.policyCommand(), policies.flowsCommand(), doctorCommands{a}.doctorCommand(), a.traceCommand(), topCommands{a}.topCommand(),
		events.eventsCommand(), events.logLevelCommand(), a.uiCommand(), a.cniCommand(), kubernetesCommands{a}.kubernetesCommand(), a.versionCommand(),
		man.Command("routerctl"),
	)
	for _, c := range append(a.extraCommands(), root.Commands()...) {
		if c.Parent() == nil {
			root.AddCommand(c)
		}
		requireSubcommand(c)
	}
	completion{a}.addCompletion(root)
	if a.plugin {
		a.asPlugin(root)
	}
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
		return unknownCommand(c, args[0])
	}
}

func unknownCommand(c *cobra.Command, name string) error {
	meant := ""
	if like := c.SuggestionsFor(name); len(like) > 0 {
		meant = fmt.Sprintf(": did you mean %s?", strings.Join(like, " or "))
	}
	return usagef("unknown command %q for %q%s; see %s --help", name, c.CommandPath(), meant, c.CommandPath())
}

// withDeadline bounds a command by --timeout.
func (a *daemon) withDeadline(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(cmd.Context(), a.timeout,
		fmt.Errorf("no answer within %s; check the datastore with `routerctl node status`, or allow more time with --timeout", a.timeout))
}

// withStore runs f with the datastore open and a deadline. What f changes of resources is
// recorded.
func (a *app) withStore(cmd *cobra.Command, f func(context.Context, store.Store) error) error {
	return withOpen(a.daemon, cmd, a.openStore, func(ctx context.Context, s store.Store) error {
		s, err := a.recorded(s)
		if err != nil {
			return err
		}
		return f(ctx, s)
	})
}

// withEtcd is withStore for what only etcd can do.
func (a *daemon) withEtcd(cmd *cobra.Command, f func(context.Context, *etcd.Store) error) error {
	return withOpen(a, cmd, a.openEtcd, f)
}

// withOpen runs f with what open opens, and a deadline.
func withOpen[S store.Store](a *daemon, cmd *cobra.Command, open func(context.Context) (S, error), f func(context.Context, S) error) error {
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
