package main

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/store/embedded"
)

func newRestoreCommand() *cobra.Command {
	var file string
	var force bool
	cmd := &cobra.Command{
		Use:   "restore SNAPSHOT",
		Short: "Restore the embedded datastore from a snapshot",
		Long: `Replace this host's embedded datastore with a snapshot written by "routerctl cluster
snapshot" or "etcdctl snapshot save". The daemon must be stopped. The checksum is
verified first. The previous data are kept beside the new data.

Hosts that follow this datastore read everything again. Writes after the snapshot are
lost; "routerctl ipam check" names addresses that are in use without a record.

In a cluster of several members, use this if more than half of them are lost, or to
return all of them to the snapshot after stopping them. The host becomes the only
member; promote the others again. While the other members have the datastore, the
command is refused. A member that lost its data needs no snapshot: its routerd
continues as a client and can be promoted again.`,
		Example: `  systemctl stop routerd
  routerd restore /var/backups/routerd.db
  systemctl start routerd`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			if c.Datastore.Kind == config.DatastoreKubernetes {
				return errors.New("the datastore of this host is Kubernetes' API (datastore.kind): restore the etcd behind that")
			}
			is, err := member.LoadState(memberFile(c))
			if err != nil {
				return err
			}
			if !c.Datastore.Own() && !is.Role.IsMember() {
				return errors.New("the datastore of this host is an external etcd (datastore.endpoints): restore it there, with etcdutl")
			}
			name, err := c.Name()
			if err != nil {
				return err
			}
			if is.Peer.IsValid() && !force {
				log := slog.New(slog.DiscardHandler)
				others, err := member.Beside(cmd.Context(), membershipConfig(c, name, nil, log))
				if err != nil {
					return err
				}
				if len(others) > 0 {
					return fmt.Errorf("the other members of the datastore, %s, have it without this host: what is restored here would be a second one beside theirs. If this host has lost its data, move %s away, start routerd, and on %s: routerctl cluster promote %s. If all are to go back to the snapshot, stop routerd on them first. --force restores all the same",
						strings.Join(others, " and "), c.EtcdDir(), others[0], name)
				}
			}
			// A member of several is one no more, and not to be one between the two steps:
			// it would find itself removed from what was restored.
			if is.Peer.IsValid() {
				if err := (member.State{Role: member.Voter, Serve: is.Serve}).Save(memberFile(c)); err != nil {
					return err
				}
			}
			r, err := embedded.Restore(cmd.Context(), embedded.Config{
				Dir: c.EtcdDir(), Name: name,
				Logger: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)),
			}, args[0], time.Now())
			if err != nil {
				if is.Peer.IsValid() {
					err = errors.Join(err, is.Save(memberFile(c)))
				}
				return err
			}
			if is.Peer.IsValid() {
				fmt.Fprint(cmd.OutOrStdout(), "This host is the only member of the datastore now. On each other former member, before its routerd runs again: move <stateDir>/etcd away, and routerd join.\n")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "Restored %d keys as of revision %d.\n", r.Keys, r.Revision)
			if r.Previous != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "What was there before is in %s; remove it when all is well.\n", r.Previous)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "restore although the other members have the datastore")
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	return cmd
}
