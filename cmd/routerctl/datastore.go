package main

import (
	"context"
	"fmt"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
)

func (a datastoreCommands) datastoreCommand() *cobra.Command {
	c := &cobra.Command{Use: "datastore", Short: "Copy, check, lock and unlock the datastore", Example: "  routerctl datastore verify\n  routerctl datastore export -o backup.jsonl"}
	shared := func() []*cobra.Command {
		return []*cobra.Command{a.lockCommand(true), a.lockCommand(false), a.exportCommand(), a.importCommand()}
	}
	// As calicoctl has it.
	migrate := &cobra.Command{Use: "migrate", Short: "Same commands under the names of calicoctl", Example: "  routerctl datastore migrate lock"}
	migrate.AddCommand(shared()...)
	c.AddCommand(append(shared(), a.verifyCommand(), migrate)...)
	requireSubcommand(migrate)
	return c
}

func (a datastoreCommands) lockCommand(lock bool) *cobra.Command {
	c := &cobra.Command{
		Use: "unlock", Short: "Unlock the datastore",
		Long:    "Allow changes of the datastore again after `routerctl datastore lock`.",
		Example: "  routerctl datastore unlock",
	}
	if lock {
		c.Use, c.Short = "lock", "Lock the datastore"
		c.Long = `Stop the daemons from changing the datastore, to copy or move it or to split pools. No
workload is assigned an address, and released addresses are given back after the
unlock. Everything that runs keeps running. Calico's daemons respect the lock too.`
		c.Example = "  routerctl datastore lock\n  routerctl ipam split 4 --name=default-ipv4-ippool\n  routerctl datastore unlock"
	}
	c.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usagef("%s takes no arguments", cmd.CommandPath())
		}
		return nil
	}
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.setLocked(ctx, s, lock) })
	}
	return c
}

func (a datastoreCommands) setLocked(ctx context.Context, s store.Store, lock bool) error {
	did := "unlocked"
	if lock {
		did = "locked"
	}
	already := false
	key := clusterInformation()
	_, err := store.Modify(ctx, s, key, func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("%w: a daemon makes it when it starts", store.ErrNotFound)
		}
		info := store.Clone(cur.Value).(*v3.ClusterInformation)
		ready := !lock
		already = info.Spec.DatastoreReady != nil && *info.Spec.DatastoreReady == ready
		info.Spec.DatastoreReady = &ready
		return info, nil
	})
	if err != nil {
		return fmt.Errorf("datastore: %s: %w", key, err)
	}
	if already {
		fmt.Fprintf(a.stdout, "Datastore is %s already.\n", did)
		return nil
	}
	fmt.Fprintf(a.stdout, "Datastore %s.\n", did)
	return nil
}
