package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store/etcd"
)

func (a clusterCommands) clusterCommand() *cobra.Command {
	c := &cobra.Command{Use: "cluster", Short: "Add hosts, and replicate and back up the datastore", Example: "  routerctl cluster token\n  routerctl cluster promote host12\n  routerctl cluster snapshot backup.db"}
	c.AddCommand(a.snapshotCommand(), diagsCommands(a).clusterDiagsCommand(), a.tokenCommand(),
		a.membersCommand(), a.promoteCommand(), a.demoteCommand(), a.leaveCommand(), a.removeMemberCommand())
	return c
}

func (a clusterCommands) snapshotCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "snapshot FILE",
		Short: "Save a snapshot of the datastore",
		Long: `Save the database of the daemon's etcd, embedded or external, to a file, as "etcdctl
snapshot save" does: with a checksum, which is verified, and readable by etcdutl.
Nothing is locked or delayed. "-" is standard output.

"routerd restore FILE" restores it on a host with the embedded datastore while the
daemon is stopped. The file contains the secrets of the cluster: keep it safe.`,
		Example: "  routerctl cluster snapshot /var/backups/routerd.db\n  systemctl stop routerd && routerd restore /var/backups/routerd.db && systemctl start routerd",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("cluster snapshot: name the file to write")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withEtcd(cmd, func(ctx context.Context, s *etcd.Store) error {
				var n int64
				err := a.writeFile(args[0], func(w io.Writer) (err error) { n, err = s.Snapshot(ctx, w); return err })
				if err == nil && args[0] != "-" {
					fmt.Fprintf(a.stdout, "Saved %d bytes to %s.\n", n, args[0])
				}
				return err
			})
		},
	}
}
