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
		Long: `Remove everything that routerd put on this host, and nothing else: its routes
and next hops, its tunnel devices, the wires of workloads that carry its mark,
its nftables tables, its sockets, the CNI plugin and configuration of install-cni,
the name of its protocol, these two only while they are as routerd wrote them, and the
condition NetworkUnavailable that it wrote on its Node in Kubernetes.

The daemon must be stopped, and no workload attached, unless --force is given:
those have no network afterwards. Sysctls stay as they are, for what they were before
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
			of, err := cleanupConfig(c, protocols, purge, cmd.OutOrStdout())
			if err != nil {
				return err
			}
			of.Workloads = force
			return cleanup.Run(cmd.Context(), of, agreed)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&force, "force", false, "also while workloads are attached, which have no network then")
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
