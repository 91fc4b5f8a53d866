package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/cleanup"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/control/hostlock"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/publish"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

func newCleanupCommand() *cobra.Command {
	var file, protocols string
	var dryRun, yes, force, purge, calico bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that routerd put on this host",
		Long: `Remove everything that routerd put on this host, and nothing else: its routes and next
hops, its tunnel devices, the interfaces of workloads that carry its mark, its
nftables tables, its sockets, the CNI plugin and configuration of install-cni, the
name of its protocol (these two only if they are unchanged since routerd wrote them),
and the condition NetworkUnavailable that it wrote on its Node in Kubernetes.

The daemon must be stopped, and no workload may be attached unless --force is given:
attached workloads lose their network. Sysctls are left as they are, because their
former values are unknown. tunl0, which belongs to the kernel, stays too: it is set
down and its addresses are removed. The addresses that this host reserves return to
the datastore, if that is external and reachable. State (the datastore and records of
workloads) is kept unless --purge is given. If the command is killed, run it again.

With --calico, remove only what Calico's agent Felix left in the packet filter of a
host that it no longer runs on: in iptables (legacy and nft), nftables and ipsets. The
daemon may be running.`,
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
			of, err := cleanupConfig(c, protocols, purge, cmd.OutOrStdout())
			if err != nil {
				return err
			}
			of.Workloads = force
			return cleanup.Run(cmd.Context(), of, agreed)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be removed, but remove nothing")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&force, "force", false, "proceed although workloads are attached, which lose their network")
	cmd.Flags().BoolVar(&purge, "purge", false, "also remove the state directory, with the datastore and every workload's address")
	cmd.Flags().BoolVar(&calico, "calico", false, "remove only what Calico's Felix left in the packet filter")
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

// cleanupConfig says what is routerd's on a host.
func cleanupConfig(c config.Config, protocols string, purge bool, out io.Writer) (cleanup.Config, error) {
	conflist, err := cni.Conflist(conflistOptions(c))
	if err != nil {
		return cleanup.Config{}, err
	}
	of := cleanup.Config{
		Protocol: uint8(c.Dataplane.RouteProtocol), Sysctls: c.Dataplane.SysctlDir, //nolint:gosec // Validate has checked it
		RunDir: c.RunDir, StateDir: c.StateDir, Purge: purge, JournalDir: c.WorkloadDir(),
		Files: []string{
			startMark(c.RunDir), bootMark(c.RunDir), hostlock.File(c.RunDir), reachState(c.RunDir), netpolicy.MarkFile(c.RunDir),
			clusterFile(c), previousPolicyFile(c),
		},
		Patterns: []string{publish.Marks(c.RunDir)},
		Written: []cleanup.File{
			{Path: filepath.Join(c.CNI.ConfDir, cni.ConflistName), Ours: func(b []byte) bool { return bytes.Equal(b, conflist) }},
			{Path: protocols, Ours: cleanup.NamesOurProtocol},
		},
		Node: c.Name, Out: out,
	}
	for _, socket := range []string{c.CNISocket(), c.OperatorSocket(), c.EtcdSocket()} {
		// Each socket has a lock, and etcd makes a second one for HTTP.
		of.Files = append(of.Files, socket, socket+".lock", socket+".http")
	}
	of.Files = append(of.Files, pluginFiles(c)...)
	if c.Datastore.Kind == config.DatastoreKubernetes || c.Kubernetes.Enabled {
		of.Condition = func(ctx context.Context, node string, remove bool) (string, error) {
			return networkCondition(ctx, c, node, remove)
		}
	}
	if !c.Datastore.Own() {
		of.Datastore = func(ctx context.Context, f func(context.Context, store.Store) error) error {
			return withDatastore(ctx, c, f)
		}
	}
	return of, nil
}

// pluginFiles are those of the CNI plugin, and of that of loopback if it is routerd's.
func pluginFiles(c config.Config) (files []string) {
	plugin, loopback := filepath.Join(c.CNI.BinDir, cni.PluginType), filepath.Join(c.CNI.BinDir, cni.LoopbackType)
	if to, err := os.Readlink(loopback); err == nil && to == cni.PluginType {
		files = append(files, loopback)
	}
	// Beside this program it is what a package or make install brought.
	if self, err := os.Executable(); err == nil && filepath.Dir(self) == filepath.Clean(c.CNI.BinDir) {
		return files
	}
	return append(files, plugin)
}

// networkCondition returns what a Node says of its network if a daemon wrote that, and takes it away if told to.
func networkCondition(ctx context.Context, c config.Config, node string, remove bool) (what string, err error) {
	kc, err := kubeConfig(c, slog.New(slog.DiscardHandler))
	if err != nil {
		return "", err
	}
	kc.NativeOnly = true
	s, err := kube.Open(kc)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	said, known, err := s.Network(ctx, node)
	if err != nil || !known || !nodenetwork.Ours(said) {
		return "", err
	}
	if remove {
		return "", s.ForgetNetwork(ctx, node)
	}
	return "NetworkUnavailable (" + said.Reason + ")", nil
}
