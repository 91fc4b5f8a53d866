package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enrol"
	"github.com/routerd/routerd/control/join"
)

// hostSystemd is that of a real host.
func hostSystemd() enrol.Systemd {
	return enrol.Systemd{Booted: "/run/systemd/system", UnitReads: config.DefaultFile}
}

func newJoinCommand(sd enrol.Systemd) *cobra.Command {
	var file, token, tokenFile string
	var force, noStart bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "join [HOST]",
		Short: "Join this host to a cluster whose datastore another host keeps",
		Long: `Join this host to the cluster of a host that keeps the datastore and serves it to
others (datastore.embedded.listen). Run "routerctl cluster token" on that host: it
creates the token and prints the complete join command. HOST, or HOST:PORT, is an
address of that host other than the one in the token.

The token authenticates the other host before anything is sent. This host creates a
key, which never leaves it, and receives a certificate for it. Both are written below
stateDir, and the section "datastore" of the configuration is set to use them. Nothing
that somebody wrote is replaced: conflicts are named, and --force replaces them. Then,
on a host with systemd, the service is enabled and started, and the command waits for
it.

If the command is interrupted, run it again to continue where it stopped, as long as
the token is valid.`,
		Example: `  routerd join 10.1.0.11 --token rjt1.…
  ssh 10.1.0.11 routerctl cluster token -o token | routerd join --token-file -`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := readToken(token, tokenFile, cmd.InOrStdin())
			if err != nil {
				return err
			}
			t, err := join.ParseToken(text)
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if t, err = t.At(args[0]); err != nil {
					return err
				}
			}
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("routerd join must be root: it writes the configuration and starts the service; use sudo")
			}
			return enrol.Run(cmd.Context(), enrol.Config{
				Out: cmd.OutOrStdout(), Host: c, File: cmp.Or(file, config.DefaultFile), Token: t, Force: force,
				Identity: incarnationFile(c), Start: !noStart, Wait: wait, Systemd: sd, Health: askHealth,
			})
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file to write (default "+config.DefaultFile+")")
	cmd.Flags().StringVar(&token, "token", "", "token printed by \"routerctl cluster token\"")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "file with the token, to keep it out of the process list; - is standard input")
	cmd.Flags().BoolVar(&force, "force", false, "replace the datastore configuration and credentials of another cluster; abandon an embedded datastore")
	cmd.Flags().BoolVar(&noStart, "no-start", false, "write all files, but start nothing")
	cmd.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait until the daemon is ready")
	return cmd
}

// readToken returns the token, from wherever it comes.
func readToken(token, file string, stdin io.Reader) (string, error) {
	switch {
	case token != "" && file != "":
		return "", errors.New("--token and --token-file exclude each other")
	case file == "-":
		line, err := bufio.NewReader(io.LimitReader(stdin, 4096)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read the token: %w", err)
		}
		return line, nil
	case file != "":
		b, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("read the token: %w", err)
		}
		return string(b), nil
	}
	return token, nil
}
