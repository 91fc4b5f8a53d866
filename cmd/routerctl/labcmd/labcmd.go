// Package labcmd is "routerctl lab": it brings labs up and down, works on
// their hosts and pods, and shows what routerd does in them.
package labcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// DefaultName is the name of a lab when none is given.
const DefaultName = "lab"

// ExitError carries the exit code of a command that was run in a lab. The
// caller should exit with it and print nothing.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// ExitCode returns the code.
func (e *ExitError) ExitCode() int { return e.Code }

// Socket returns the path of the socket on which the daemon of a lab's host
// answers operators.
func Socket(labName, host string) (string, error) {
	l, err := lab.Open(labName)
	if err != nil {
		return "", err
	}
	if slices.Contains(l.Hosts(), host) {
		return lab.Socket(labName, host), nil
	}
	return "", fmt.Errorf("host %q: not in lab %s; want one of %s", host, labName, strings.Join(l.Hosts(), ", "))
}

// commands holds what all of them share.
type commands struct {
	stdout, stderr io.Writer
	name           string
}

// New returns the command "lab".
func New(stdout, stderr io.Writer) *cobra.Command {
	c := &commands{stdout: stdout, stderr: stderr}
	root := &cobra.Command{
		Use:   "lab",
		Short: "Try routerd on this machine: hosts and pods in network namespaces",
		Long: `A lab is a small data centre on one machine: hosts and their pods are network
namespaces, racks are bridges, a spine joins them, and each host runs a real
routerd. Everything needs root.`,
		Example: `  routerctl lab up --encapsulation VXLAN
  routerctl lab exec node1/pod1 -- ip route
  routerctl --lab lab --host node1 node status
  routerctl lab down`,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.AddCommand(c.up(), c.down(), c.status(), c.list(), c.exec(), c.restart(), c.kill(),
		c.attach(), c.detach(), c.env(), c.demo())
	for _, sub := range root.Commands() {
		if sub.Name() != "list" && sub.Name() != "demo" {
			sub.Flags().StringVar(&c.name, "name", DefaultName, "name of the lab")
		}
		sub.SilenceUsage = true
	}
	return root
}

// untilSignal returns a context that ends when the user wants out.
func untilSignal(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
}

// topologyFlags are the flags that say what a lab consists of.
type topologyFlags struct {
	file          string
	nodes, pods   int
	encapsulation string
	underlay      string
	dualStack     bool
}

func (f *topologyFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVarP(&f.file, "filename", "f", "", "`file` with the topology, in YAML")
	fl.IntVar(&f.nodes, "nodes", lab.DefaultNodes, "number of hosts")
	fl.IntVar(&f.pods, "pods", lab.DefaultPods, "number of pods on each host")
	fl.StringVar(&f.encapsulation, "encapsulation", string(lab.DefaultEncapsulation), "encapsulation of the default pool: "+encapsulations())
	fl.StringVar(&f.underlay, "underlay", string(lab.UnderlayIPv4), "addresses of the racks and hosts: "+underlays())
	fl.BoolVar(&f.dualStack, "dual-stack", false, "also give pods IPv6 addresses")
	cmd.MarkFlagsMutuallyExclusive("filename", "nodes")
}

func encapsulations() string {
	var names []string
	for _, e := range store.Encapsulations() {
		names = append(names, string(e))
	}
	return strings.Join(names, ", ")
}

func underlays() string {
	var names []string
	for _, u := range lab.Underlays() {
		names = append(names, string(u))
	}
	return strings.Join(names, ", ")
}

// topology returns what the flags ask for. What is given beside a file counts
// more than the file.
func (f *topologyFlags) topology(cmd *cobra.Command) (lab.Topology, error) {
	var t lab.Topology
	if f.file != "" {
		var err error
		if t, err = lab.LoadTopology(f.file); err != nil {
			return t, err
		}
	} else {
		if f.nodes < 1 {
			return t, fmt.Errorf("--nodes %d: want 1 or more", f.nodes)
		}
		t = lab.DefaultTopology(f.nodes)
	}
	if f.file == "" || cmd.Flags().Changed("pods") {
		if f.pods < 0 {
			return t, fmt.Errorf("--pods %d: want 0 or more", f.pods)
		}
		t.Pods = &f.pods
		for i := range t.Nodes {
			t.Nodes[i].Pods = nil
		}
	}
	if f.file == "" || cmd.Flags().Changed("encapsulation") {
		e, err := store.ParseEncapsulation(f.encapsulation)
		if err != nil {
			return t, fmt.Errorf("--encapsulation: %w", err)
		}
		t.Pool.Encapsulation = e
	}
	if f.file == "" || cmd.Flags().Changed("underlay") {
		t.Underlay = lab.Underlay(f.underlay)
		if !slices.Contains(lab.Underlays(), t.Underlay) {
			return t, fmt.Errorf("--underlay %q: want one of %s", f.underlay, underlays())
		}
	}
	if f.dualStack && t.Pool6 == nil {
		t.Pool6 = &lab.Pool{}
	}
	return t, nil
}

// binDirFlag adds the flag that says where the daemon is: beside this program
// unless told otherwise.
func binDirFlag(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "bin-dir", "", "`directory` of routerd and routerd-cni (default: that of this program)")
}

func binDir(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	return filepath.Dir(self), nil
}

func (c *commands) up() *cobra.Command {
	var f topologyFlags
	var bin string
	var replace bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring up a lab and attach its pods",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := f.topology(cmd)
			if err != nil {
				return err
			}
			dir, err := binDir(bin)
			if err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd)
			defer stop()
			start := time.Now()
			p := newProgress(c.stderr)
			l, err := lab.Up(ctx, lab.Options{Name: c.name, Topology: t, BinDir: dir, Replace: replace, Progress: p.step})
			p.done()
			if err != nil {
				return err
			}
			fmt.Fprintf(c.stdout, "lab %s is up after %.1f s\n\n", c.name, time.Since(start).Seconds())
			return c.printStatus(ctx, l)
		},
	}
	f.register(cmd)
	binDirFlag(cmd, &bin)
	cmd.Flags().BoolVar(&replace, "replace", false, "remove an existing lab of this name first")
	return cmd
}

func (c *commands) down() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove a lab or what is left of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd)
			defer stop()
			names := []string{c.name}
			if all {
				var err error
				if names, err = lab.List(); err != nil {
					return err
				}
			}
			p := newProgress(c.stderr)
			defer p.done()
			var errs []error
			for _, n := range names {
				p.step("removing lab " + n)
				errs = append(errs, lab.Down(ctx, n))
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove every lab of this machine")
	return cmd
}

func (c *commands) status() *cobra.Command {
	return c.onLab("status", "Show a lab's hosts and pods", cobra.NoArgs, func(ctx context.Context, l *lab.Lab, _ []string) error {
		return c.printStatus(ctx, l)
	})
}

// onLab makes a command that works on a lab that is there.
func (c *commands) onLab(use, short string, args cobra.PositionalArgs, do func(context.Context, *lab.Lab, []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: args,
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Open(c.name)
			if err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd)
			defer stop()
			return do(ctx, l, args)
		},
	}
}

func (c *commands) list() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the labs of this machine", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			names, err := lab.List()
			if err != nil {
				return err
			}
			t := newTable("NAME", "ENCAPSULATION", "HOSTS", "PODS")
			for _, n := range names {
				l, err := lab.Open(n)
				if err != nil {
					t.add(n, "(half made)", "", "")
					continue
				}
				pods, err := l.Pods()
				if err != nil {
					return err
				}
				t.add(n, string(l.Topology().Pool.Encapsulation), strings.Join(l.Hosts(), ","), fmt.Sprint(len(pods)))
			}
			return t.print(c.stdout, "")
		},
	}
}

func (c *commands) exec() *cobra.Command {
	cmd := c.onLab("exec HOST[/POD] -- COMMAND [ARGUMENT…]", "Run a command on a host, in a pod or on the spine", cobra.MinimumNArgs(2),
		func(ctx context.Context, l *lab.Lab, args []string) error {
			// The terminal's signals reach the command by themselves, and its end
			// is ours; see untilSignal for what they would do here.
			code, err := l.Run(context.WithoutCancel(ctx), args[0], lab.Streams{In: os.Stdin, Out: c.stdout, Err: c.stderr}, args[1:]...)
			if err == nil && code != 0 {
				return &ExitError{code}
			}
			return err
		})
	cmd.Example = "  routerctl lab exec node1 -- ip route\n  routerctl lab exec node1/pod1 -- ping -c 3 192.168.1.2"
	cmd.SilenceErrors = true
	return cmd
}

func (c *commands) restart() *cobra.Command {
	return c.onLab("restart HOST…", "Restart the daemon of a host", cobra.MinimumNArgs(1),
		func(ctx context.Context, l *lab.Lab, hosts []string) error {
			p := newProgress(c.stderr)
			defer p.done()
			for _, h := range hosts {
				p.step("restarting routerd on " + h)
				if err := l.Restart(ctx, h); err != nil {
					return err
				}
			}
			return nil
		})
}

func (c *commands) kill() *cobra.Command {
	var name string
	cmd := c.onLab("kill HOST…", "Send a signal to the daemon of a host", cobra.MinimumNArgs(1),
		func(ctx context.Context, l *lab.Lab, hosts []string) error {
			sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
			if sig == 0 {
				return fmt.Errorf("--signal %q: want a signal's name, such as KILL, TERM or STOP", name)
			}
			for _, h := range hosts {
				if err := l.Kill(ctx, h, sig); err != nil {
					return err
				}
			}
			return nil
		})
	cmd.Flags().StringVar(&name, "signal", "KILL", "`name` of the signal")
	return cmd
}

func (c *commands) attach() *cobra.Command {
	return c.onLab("attach HOST/POD…", "Create pods and attach them as a container runtime would", cobra.MinimumNArgs(1),
		func(ctx context.Context, l *lab.Lab, where []string) error {
			pods, err := l.AttachPods(ctx, where...)
			if err != nil {
				return err
			}
			t := newTable("POD", "ADDRESS", "MTU", "NAMESPACE")
			for _, p := range pods {
				t.add(p.String(), joinAddrs(p.Addrs), fmt.Sprint(p.MTU), l.Space(p.String()))
			}
			return t.print(c.stdout, "")
		})
}

func (c *commands) detach() *cobra.Command {
	return c.onLab("detach HOST/POD…", "Detach pods and remove them", cobra.MinimumNArgs(1),
		func(ctx context.Context, l *lab.Lab, where []string) error { return l.DetachPods(ctx, where...) })
}

func (c *commands) env() *cobra.Command {
	cmd := c.onLab("env", "Print what etcd's clients need to reach the lab's store", cobra.NoArgs,
		func(_ context.Context, l *lab.Lab, _ []string) error {
			for _, v := range l.Env() {
				fmt.Fprintln(c.stdout, "export "+v)
			}
			return nil
		})
	cmd.Long = `Print the shell exports with which any client of etcd, and Calico's own tools, reach
the datastore of the lab from the namespace of its first host.`
	cmd.Example = `  eval "$(routerctl lab env)"
  ip netns exec lab-node1 calicoctl get nodes`
	return cmd
}
