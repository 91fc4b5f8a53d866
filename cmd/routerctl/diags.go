package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// ownQuestions are the command lines of routerctl that a bundle of a host has the
// answers of, by the names of the files.
func ownQuestions() [][2]string {
	return [][2]string{
		{"version.txt", "version"},
		{"node-status.txt", "node status"},
		{"node-status.json", "node status -o json"},
		{"node-paths.txt", "node paths"},
		{"node-tunnels.txt", "node tunnels"},
		{"events.txt", "events --limit 0"},
		{"log-level.txt", "log-level"},
		{"routes.txt", "routes --all"},
		{"bgp-peers.txt", "bgp peers"},
		{"bgp-routes.txt", "bgp routes"},
		{"bgp-inject.txt", "bgp inject list"},
		{"bgp-reflectors.txt", "bgp reflectors status"},
		{"policy.txt", "policy"},
		{"flows.txt", "flows"},
		{"cni-config.json", "cni config"},
	}
}

// clusterQuestions are those of a bundle of the cluster, beside the resources.
func clusterQuestions() [][2]string {
	return [][2]string{
		{"pool-status.txt", "pool status"},
		{"ipam-show.txt", "ipam show --show-blocks"},
		{"ipam-configuration.txt", "ipam show --show-configuration"},
		{"ipam-check.txt", "ipam check"},
		{"datastore-verify.txt", "datastore verify"},
	}
}

// hostQuestions are what programs of the host, and files of the kernel, say.
func hostQuestions() [][2]string {
	return [][2]string{
		{"host/uname.txt", "uname -a"},
		{"host/addresses.txt", "ip -details -statistics address"},
		{"host/routes.txt", "ip -details route show table all"},
		{"host/routes6.txt", "ip -6 -details route show table all"},
		{"host/next-hops.txt", "ip -details nexthop"},
		{"host/rules.txt", "ip rule"},
		{"host/rules6.txt", "ip -6 rule"},
		{"host/neighbours.txt", "ip -statistics neighbour show nud all"},
		{"host/forwarding-entries.txt", "bridge -details fdb"},
		{"host/nftables.txt", "nft --stateless list ruleset"},
		{"host/sysctls.txt", "sysctl --all --pattern ^net\\.(ipv[46]\\.(conf|ip_forward|neigh)|netfilter\\.nf_conntrack_(count|max))"},
		{"host/sockets.txt", "ss --numeric --listening --tcp --udp --processes"},
		{"host/snmp.txt", "cat /proc/net/snmp /proc/net/snmp6"},
		{"host/netstat.txt", "cat /proc/net/netstat"},
		{"host/softnet.txt", "cat /proc/net/softnet_stat"},
		{"host/modules.txt", "cat /proc/modules"},
		{"host/memory.txt", "cat /proc/meminfo"},
		{"host/disks.txt", "df --portability"},
		{"host/time.txt", "timedatectl"},
		{"host/unit.txt", "systemctl --no-pager --full status routerd"},
		{"host/journal.txt", "journalctl --no-pager --unit routerd --lines 20000"},
	}
}

func (a diagsCommands) nodeDiagsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "diags [FILE]",
		Short: "Collect diagnostics of this host in an archive",
		Long: `Collect the state of the daemon and the kernel of this host in an archive: state,
paths, events, routes, sessions, rules, devices, neighbours, counters, the log. If a
query fails, because the daemon or a program is missing, its file and index.txt hold
the reason and the rest is still collected. For a host of a lab, only the daemon is
queried.

FILE is routerd-diags-NODE-TIME.tar.gz by default; "-" is standard output. The archive
contains addresses and names of the cluster, but no password or key.`,
		Example: "  routerctl node diags\n  routerctl node diags /tmp/node1.tar.gz",
	}
	return a.bundling(c, a.hostName, func() []bundleFile {
		files := a.asFiles(ownQuestions())
		if a.lab != "" {
			return files // its hosts are no namespaces of this process
		}
		for _, q := range hostQuestions() {
			files = append(files, bundleFile{q[0], q[1], program(q[1])})
		}
		return files
	})
}

func (a diagsCommands) clusterDiagsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "diags [FILE]",
		Short: "Collect diagnostics of the cluster in an archive",
		Long: `Collect all resources of the cluster, the usage of pools and blocks, and the results
of the checks of IPAM and the datastore in an archive. For the state of a host, see
node diags.

FILE is routerd-diags-cluster-TIME.tar.gz by default; "-" is standard output. The
archive contains addresses and names of the cluster, but no password or key.`,
		Example: "  routerctl cluster diags\n  routerctl cluster diags - | tar tz",
	}
	return a.bundling(c, func(*cobra.Command) string { return "cluster" }, func() []bundleFile {
		var qs [][2]string
		for _, k := range store.Kinds() {
			q := "get " + k.Plural()
			if k.Namespaced() {
				q += " --all-namespaces"
			}
			qs = append(qs, [2]string{"resources/" + k.Plural() + ".yaml", q + " -o yaml"})
		}
		return a.asFiles(append(qs, clusterQuestions()...))
	})
}

// bundling has a command collect files in an archive that is named after their subject.
func (a diagsCommands) bundling(c *cobra.Command, subject func(*cobra.Command) string, files func() []bundleFile) *cobra.Command {
	c.Args = cobra.MaximumNArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		now := time.Now()
		dir := fmt.Sprintf("routerd-diags-%s-%s", subject(cmd), now.UTC().Format("20060102-150405"))
		name := dir + ".tar.gz"
		if len(args) == 1 {
			name = args[0]
		}
		b := bundle{dir: dir, at: now, patience: bundlePatience, limit: bundleLimit}
		list := files()
		var failed int
		err := a.writeFile(name, func(w io.Writer) (err error) { failed, err = b.write(cmd.Context(), w, list); return err })
		if err != nil || name == "-" {
			return err
		}
		fmt.Fprintf(a.stdout, "Collected %d files in %s", len(list), name)
		if failed > 0 {
			fmt.Fprintf(a.stdout, "; %d queries failed: see index.txt in it", failed)
		}
		fmt.Fprintln(a.stdout, ".")
		return nil
	}
	return c
}

// hostName is what this host is called: by its daemon, or, without one, by itself.
func (a diagsCommands) hostName(cmd *cobra.Command) string {
	name := ""
	err := a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
		r, err := op.Node(ctx, &apiv1.NodeRequest{})
		name = r.GetName()
		return err
	})
	if err != nil || name == "" {
		name, _ = os.Hostname()
	}
	return strings.Map(func(r rune) rune {
		if r == '/' || r < ' ' {
			return '_'
		}
		return r
	}, name)
}

// asFiles makes the answers of routerctl's own commands files of a bundle.
func (a diagsCommands) asFiles(qs [][2]string) []bundleFile {
	var files []bundleFile
	for _, q := range qs {
		files = append(files, bundleFile{q[0], "routerctl " + q[1], func(ctx context.Context, w io.Writer) error {
			return a.again(ctx, strings.Fields(q[1]), w)
		}})
	}
	return files
}

// again runs another command of this program, with the same daemon and datastore.
// A command that says by its exit code that something is not well has not failed.
func (a diagsCommands) again(ctx context.Context, args []string, w io.Writer) error {
	other, daemon := *a.app, *a.daemon // whose flags the other command sets
	other.daemon = &daemon
	other.stdin, other.stdout, other.stderr, other.rawOut, other.rawErr = strings.NewReader(""), w, w, w, w
	root := other.command()
	if a.kubeconfig != "" { // of a plugin
		args = append([]string{"--kubeconfig=" + a.kubeconfig}, args...)
	}
	root.SetArgs(append([]string{"--socket=" + a.socket, "--lab=" + a.lab, "--host=" + a.host, "--config=" + a.config, "--context=" + a.kubeContext, "--timeout=" + a.timeout.String()}, args...))
	root.SetOut(w)
	root.SetErr(w)
	err := root.ExecuteContext(ctx)
	if said := exitCode(0); errors.As(err, &said) {
		return nil
	}
	return err
}

// program runs a program of the host.
func program(line string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		args := strings.Fields(line)
		c := exec.CommandContext(ctx, args[0], args[1:]...)
		c.Stdout, c.Stderr = w, w
		c.WaitDelay = time.Second
		return c.Run()
	}
}
