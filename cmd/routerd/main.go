// Command routerd makes a Linux host a vRouter for its workloads.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cmd/internal/man"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/control/node"
)

// version is set by the build.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "routerd:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "routerd",
		Short:         "Routing daemon that makes a Linux host the vRouter of its workloads",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version,
	}
	root.AddCommand(newRunCommand(), newInstallCNICommand(), newHealthCommand(), newCleanupCommand(), newRestoreCommand(), newJoinCommand(hostSystemd()), man.Command("routerd"), newBFDCommand())
	return root
}

func newRunCommand() *cobra.Command {
	var file, nodeName, logLevel string
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon in the foreground.

Without any configuration, the daemon keeps its own datastore on this host, registers
the host with the first address that it finds, creates a default pool, and serves the
CNI plugin. On SIGTERM it stops and leaves the kernel as it is: packets keep flowing,
and the next start takes over the existing state. If systemd stops it for good, not
for a restart, it first asks BGP peers to use other paths.`,
		Example: `  routerd run
  routerd run --config /etc/routerd/routerd.yaml
  ROUTERD_DATASTORE_ENDPOINTS=https://10.0.0.1:2379 routerd run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			if nodeName != "" {
				c.NodeName = nodeName
			}
			if logLevel != "" {
				c.LogLevel = logLevel
			}
			if err := c.Validate(); err != nil {
				return err
			}
			if err := node.CheckMethods(addressMethods(c)); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("routerd run must be root: it writes routes and opens the network namespaces of workloads; start it with sudo or as the systemd service")
			}
			err = run(cmd.Context(), c, newLog(c))
			if errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().StringVar(&nodeName, "node-name", "", "name of this host in the datastore; overrides nodeName")
	cmd.Flags().StringVar(&logLevel, "log-level", "", "log level: debug, info, warn or error; overrides logLevel")
	return cmd
}

func newLog(c config.Config) *events.Log {
	var level slog.Level
	// Validate has checked the value; the zero level is info.
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		level = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: slog.LevelDebug}
	if c.LogFormat == "json" {
		return events.New(slog.NewJSONHandler(os.Stderr, opts), level)
	}
	return events.New(slog.NewTextHandler(os.Stderr, opts), level)
}
