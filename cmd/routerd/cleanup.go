package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/dataplane/sourceport"
	"github.com/routerd/routerd/dataplane/workload"
)

func newCleanupCommand() *cobra.Command {
	var file, protocols string
	var dryRun, yes, purge, calico bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that routerd put on this host",
		Long: `Remove everything that routerd put on this host, and nothing else: its routes
and next hops, its tunnel devices, the wires of workloads that carry its mark,
its nftables tables, its sockets, the CNI configuration of install-cni and the
name of its protocol, the last two only while they are as routerd wrote them.

The daemon must be stopped. Sysctls stay as they are, for what they were before
is not known; so does tunl0, which belongs to the kernel: it is set down without
addresses. The addresses that this host holds ready go back to the datastore, if
it is an external one and can be reached. State (the datastore and what is known
of workloads) stays too, unless --purge is given. Killed in the middle, run it
again.

With --calico it removes what Calico's agent Felix left in the packet filter of
a host that it does not run on any more, in iptables (legacy and nft), nftables
and ipsets, and nothing else. The daemon may run meanwhile.`,
		Example: `  routerd cleanup --dry-run
  routerd cleanup --yes
  routerd cleanup --yes --purge
  routerd cleanup --calico`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("routerd cleanup must be root: it removes routes, devices and rules; run it with sudo")
			}
			agreed := func(n int) bool { return yes || confirm(cmd.InOrStdin(), cmd.OutOrStdout(), n) }
			if dryRun {
				agreed = nil
			}
			if calico {
				return foreign.CleanFelix(cmd.Context(), cmd.OutOrStdout(), agreed)
			}
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			cl := &cleanup{cfg: c, purge: purge, protocols: protocols, out: cmd.OutOrStdout()}
			return cl.run(cmd.Context(), agreed)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&purge, "purge", false, "remove the state directory too: the datastore and every workload's address with it")
	cmd.Flags().BoolVar(&calico, "calico", false, "remove what Calico's Felix left in the packet filter, and nothing of routerd's")
	cmd.MarkFlagsMutuallyExclusive("calico", "purge")
	cmd.Flags().StringVar(&protocols, "rt-protos", "/etc/iproute2/rt_protos.d/routerd.conf", "file that names routerd's protocol for ip(8)")
	return cmd
}

// confirm asks whether n things are to be removed.
func confirm(in io.Reader, out io.Writer, n int) bool {
	fmt.Fprintf(out, "Remove these %d things? [y/N] ", n)
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false
	}
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes"
}

// cleanup removes what is routerd's from a host.
type cleanup struct {
	cfg       config.Config
	purge     bool
	protocols string // file
	out       io.Writer

	kernel *kernel.Kernel
	wire   *workload.Wire
}

// thing is something of routerd's on this host.
type thing struct {
	what   string
	remove func(context.Context) error // nil: goes with those of the kernel's tables
}

// run lists what there is, and removes it if agreed, called with the number,
// returns true. Without agreed nothing is removed.
func (cl *cleanup) run(ctx context.Context, agreed func(n int) bool) error {
	unlock, err := cl.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	cl.kernel, err = kernel.New(kernel.Config{
		Protocol: uint8(cl.cfg.Dataplane.RouteProtocol), Sysctls: cl.cfg.Dataplane.SysctlDir, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	defer cl.kernel.Close()
	if cl.wire, err = workload.New(workload.Config{Sysctls: cl.cfg.Dataplane.SysctlDir}); err != nil {
		return err
	}
	defer cl.wire.Close()

	things, err := cl.find(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(things) == 0:
		fmt.Fprintln(cl.out, "nothing of routerd's is on this host")
		return nil
	case agreed == nil:
		cl.list("would remove", things)
		return nil
	}
	cl.list("to be removed:", things)
	if !agreed(len(things)) {
		return errors.New("nothing was removed")
	}
	return cl.removeAll(ctx, things)
}

func (cl *cleanup) list(verb string, things []thing) {
	for _, t := range things {
		fmt.Fprintln(cl.out, verb, t.what)
	}
}

// find lists what there is of routerd's, in the order of removal.
func (cl *cleanup) find(ctx context.Context) ([]thing, error) {
	var things []thing
	objects, err := cl.kernel.Leftovers(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		things = append(things, thing{what: describeLeftover(o)})
	}
	wires, err := cl.wire.Marked(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range wires {
		things = append(things, thing{"link " + name + " type veth", func(ctx context.Context) error { return cl.wire.RemoveMarked(ctx, name) }})
	}
	for _, table := range []string{nft.TableName, nft.OffloadTable, sourceport.TableName} {
		found, err := cl.kernel.DeleteTable(table, true)
		if err != nil {
			return nil, err
		}
		if found {
			things = append(things, thing{"nftables table inet " + table, func(context.Context) error {
				_, err := cl.kernel.DeleteTable(table, false)
				return err
			}})
		}
	}
	protocol := uint8(cl.cfg.Dataplane.RouteProtocol)
	switch n, err := rule.Sweep(protocol, true); {
	case err != nil:
		return nil, err
	case n > 0:
		things = append(things, thing{fmt.Sprintf("rules that look into table %d: %d", rule.Table, n), func(context.Context) error {
			_, err := rule.Sweep(protocol, false)
			return err
		}})
	}
	held, err := cl.reserve(ctx)
	if err != nil {
		return nil, err
	}
	files, err := cl.files()
	return append(append(things, held...), files...), err
}

// describeLeftover shows an object as ip(8) does.
func describeLeftover(o dataplane.Object) string {
	what := o.Key().Kind().String() + " " + o.String()
	if l, ok := o.Key().(dataplane.LinkKey); ok && l.Name == "tunl0" {
		what += " (the kernel's own: it is set down and stays)"
	}
	return what
}

// files lists the files that routerd wrote.
func (cl *cleanup) files() ([]thing, error) {
	conflist, err := cni.Conflist(conflistOptions(cl.cfg))
	if err != nil {
		return nil, err
	}
	var things []thing
	add := func(path string) {
		things = append(things, thing{"file " + path, func(context.Context) error { return os.Remove(path) }})
	}
	for _, f := range []struct {
		path string
		ours func([]byte) bool
	}{
		{filepath.Join(cl.cfg.CNI.ConfDir, cni.ConflistName), func(b []byte) bool { return bytes.Equal(b, conflist) }},
		{cl.protocols, namesOurProtocol},
	} {
		switch b, err := os.ReadFile(f.path); {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
		case err != nil:
			return nil, err
		case f.ours(b):
			add(f.path)
		default:
			fmt.Fprintf(cl.out, "left alone: %s was changed since routerd wrote it\n", f.path)
		}
	}
	run := []string{startMark(cl.cfg.RunDir), bootMark(cl.cfg.RunDir), lockPath(cl.cfg.RunDir), reachState(cl.cfg.RunDir), policyMark(cl.cfg.RunDir), clusterFile(cl.cfg), previousPolicyFile(cl.cfg)}
	for _, socket := range []string{cl.cfg.CNISocket(), cl.cfg.OperatorSocket(), cl.cfg.EtcdSocket()} {
		// Each socket has a lock, and etcd makes a second one for HTTP.
		run = append(run, socket, socket+".lock", socket+".http")
	}
	marks, err := filepath.Glob(filepath.Join(cl.cfg.RunDir, "supports.*"))
	if err != nil {
		return nil, err
	}
	run = append(run, marks...)
	var left []string // of writes that a kill ended
	for _, path := range run {
		list, err := atomicfile.Leftovers(path)
		if err != nil {
			return nil, err
		}
		left = append(left, list...)
	}
	for _, path := range append(run, left...) {
		if _, err := os.Lstat(path); err == nil {
			add(path)
		}
	}
	if _, err := os.Stat(cl.cfg.StateDir); err == nil && cl.purge {
		things = append(things, thing{"directory " + cl.cfg.StateDir, func(context.Context) error { return os.RemoveAll(cl.cfg.StateDir) }})
	}
	return things, nil
}

// namesOurProtocol reports whether a file of rt_protos.d says nothing but the
// name of routerd's protocol.
func namesOurProtocol(b []byte) bool {
	found := false
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || strings.HasPrefix(f[0], "#"):
		case len(f) == 2 && f[1] == "routerd":
			found = true
		default:
			return false
		}
	}
	return found
}

// removeAll removes what was found. One thing that cannot be removed does not
// stop the others.
func (cl *cleanup) removeAll(ctx context.Context, things []thing) error {
	left, err := cl.kernel.Sweep(ctx)
	errs := []error{err}
	stays := map[string]bool{}
	for _, o := range left {
		stays[describeLeftover(o)] = true
	}
	n := 0
	for _, t := range things {
		if t.remove == nil {
			if stays[t.what] {
				continue
			}
		} else if err := t.remove(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove %s: %w", t.what, err))
			continue
		}
		n++
		fmt.Fprintln(cl.out, "removed", t.what)
	}
	// Whoever put something else there keeps it.
	_ = os.Remove(cl.cfg.RunDir)
	fmt.Fprintf(cl.out, "%d of %d things removed\n", n, len(things))
	return errors.Join(errs...)
}
