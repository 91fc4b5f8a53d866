package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// target is an object to be deleted.
type target struct {
	key     store.Key
	version store.Revision // that a manifest asks for; 0: whatever is there
}

// deletion is a run of the delete command.
type deletion struct {
	store       store.Store
	out, notes  io.Writer
	skipMissing bool
	dryRun      bool
	force       bool
	settle      time.Duration
	patience    time.Duration // for nodes to do their part; 0: none
	every       time.Duration // between two looks at it
}

func (a resourceCommands) deleteCommand() *cobra.Command {
	var in input
	d := deletion{}
	c := &cobra.Command{
		Use:   "delete KIND NAME… | delete -f FILE|DIR|-",
		Short: "Delete resources",
		Long: `Delete resources by name or from manifests.

An IPPool from which workloads have addresses is refused unless --force is given; see
"routerctl pool drain". The pool is first disabled, nodes take other addresses for
their tunnel devices, the empty blocks are released, and then the pool is deleted.
With --force, as with calicoctl, blocks in use stay, and a note says how many
addresses they hold.

Deleting a Node also deletes its workload endpoints and their addresses, its tunnel
addresses, its block affinities, the BGPPeers that name it, and its own BGP and Felix
configurations. Delete a Node only after its daemon has stopped for good.

A Tier with policies is refused, unless the same command deletes them. Policies named
knp.default.… come from Kubernetes; delete them there.

ClusterInformation, the built-in tiers and the profile projectcalico-default-allow
cannot be deleted.` + store.DefaultAllowProfile + `
cannot be deleted.`,
		Example: `  routerctl delete ippool old-pool
  routerctl delete node node7
  routerctl delete -f peers.yaml --skip-not-exists`,
		RunE: func(cmd *cobra.Command, args []string) error {
			targets, err := a.targets(args, in)
			if err != nil {
				return err
			}
			if i := slices.IndexFunc(targets, func(t target) bool { return t.key.Kind == store.KindIPPool || t.key.Kind == store.KindNode }); i >= 0 && a.confirm > 0 {
				return usagef("--confirm: the deletion of %s takes several steps and cannot be undone; leave out --confirm", targets[i].key)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				if !d.force {
					if err := a.checkDeletion(ctx, targets); err != nil {
						return err
					}
				}
				d.store, d.out, d.notes = s, a.stdout, a.stderr
				d.settle, d.patience, d.every = a.settle, a.patience, a.every
				return d.run(ctx, targets)
			})
		},
	}
	f := c.Flags()
	in.flags(f)
	f.BoolVarP(&d.skipMissing, "skip-not-exists", "s", false, "ignore resources that do not exist")
	f.BoolVar(&d.force, "force", false, "delete a pool in use; allow nodes without any BGP session and the end of this SSH session")
	f.BoolVar(&d.dryRun, "dry-run", false, "print what would be deleted, but delete nothing")
	a.confirmFlag(f)
	return c
}

func (a resourceCommands) targets(args []string, in input) ([]target, error) {
	if len(in.files) > 0 {
		if len(args) > 0 {
			return nil, usagef("delete: give either a kind and names, or manifests with -f")
		}
		docs, err := in.read(a.stdin)
		if err != nil {
			return nil, err
		}
		return targetsOf(docs)
	}
	args, err := kindFirst(args)
	if err != nil {
		return nil, err
	}
	if len(args) < 2 {
		return nil, usagef("delete: give a kind and at least one name, or manifests with -f; kinds: %s", kindList())
	}
	kind, err := parseKind(args[0])
	if err != nil {
		return nil, err
	}
	namespace, err := namespaceOf(kind, in.namespace)
	if err != nil {
		return nil, err
	}
	var targets []target
	for _, name := range args[1:] {
		t := target{key: store.Key{Kind: kind, Namespace: namespace, Name: name}}
		if !slices.Contains(targets, t) {
			targets = append(targets, t)
		}
	}
	return targets, nil
}

func targetsOf(docs []manifest.Document) ([]target, error) {
	var targets []target
	for _, d := range docs {
		t := target{key: d.Object.Key}
		if v := store.Meta(d.Object.Value).ResourceVersion; v != "" {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return nil, refuse(d, "metadata.resourceVersion: %q: must be a number as `get -o yaml` prints it", v)
			}
			t.version = store.Revision(n)
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// run checks all targets before it deletes the first; what does not exist is an
// error, and keeps the others from nothing. Ordinary objects go in
// one transaction; pools and nodes, which need several steps, one by one after
// it.
func (d *deletion) run(ctx context.Context, targets []target) error {
	var present []store.Object
	var absent, errs []error
	for _, t := range targets {
		o, err := d.check(ctx, t)
		switch {
		case errors.Is(err, store.ErrNotFound) && d.skipMissing:
			fmt.Fprintf(d.out, "%s does not exist\n", t.key)
		case errors.Is(err, store.ErrNotFound):
			absent = append(absent, err)
		case err != nil:
			errs = append(errs, err)
		default:
			if err := errors.Join(d.unused(ctx, o), d.empty(ctx, o, targets)); err != nil {
				errs = append(errs, err)
			}
			present = append(present, o)
		}
	}
	if err := errors.Join(errs...); err != nil || len(present) == 0 {
		return errors.Join(append(absent, err)...)
	}
	if d.dryRun {
		for _, o := range present {
			fmt.Fprintf(d.out, "%s would be deleted\n", o.Key)
		}
		fmt.Fprintln(d.out, "Nothing was deleted (--dry-run)")
		return errors.Join(absent...)
	}
	return errors.Join(append(absent, d.delete(ctx, present))...)
}

func (d *deletion) check(ctx context.Context, t target) (store.Object, error) {
	if reason := undeletable(t.key); reason != "" {
		return store.Object{}, fmt.Errorf("delete %s: %s", t.key, reason)
	}
	o, err := d.store.Get(ctx, t.key)
	if errors.Is(err, store.ErrDecode) && o.Revision != 0 {
		o.Key, err = t.key, nil // what cannot be read can be deleted all the same
	}
	if errors.Is(err, store.ErrNotFound) {
		return store.Object{}, fmt.Errorf("delete %s: %w; see routerctl get %s", t.key, store.ErrNotFound, t.key.Kind.Plural())
	}
	if err != nil {
		return store.Object{}, fmt.Errorf("delete: %w", err)
	}
	if t.version != 0 && t.version != o.Revision {
		return store.Object{}, fmt.Errorf("delete %s: update conflict: the manifest has resourceVersion %d, the stored object %d: it has been changed since", t.key, t.version, o.Revision)
	}
	return o, nil
}

func undeletable(k store.Key) string {
	switch {
	case k.Kind == store.KindBlockAffinity:
		return unwritable(k)
	case k.Kind == store.KindClusterInformation:
		return "it is read-only: the cluster's daemons write it"
	case k.Kind == store.KindTier && slices.Contains([]string{store.DefaultName, store.TierKubeAdmin, store.TierKubeBaseline}, k.Name):
		return "the built-in tiers cannot be deleted"
	case k.Kind == store.KindNetworkPolicy && strings.HasPrefix(k.Name, store.PrefixNetworkPolicy):
		return "it is derived from a Kubernetes NetworkPolicy: delete that with kubectl"
	case k.Kind == store.KindGlobalNetworkPolicy && strings.HasPrefix(k.Name, store.PrefixClusterNetworkPolicy):
		return "it is derived from a Kubernetes ClusterNetworkPolicy: delete that with kubectl"
	case k.Kind == store.KindProfile && k.Name == store.DefaultAllowProfile:
		return "it is built in and cannot be deleted"
	}
	return ""
}

func (d *deletion) delete(ctx context.Context, objects []store.Object) error {
	var plain []store.Op
	var keys []store.Key
	for _, o := range objects {
		keys = append(keys, o.Key)
		if o.Key.Kind != store.KindIPPool && o.Key.Kind != store.KindNode {
			plain = append(plain, store.RemoveOp(o))
		}
	}
	if err := commit(ctx, d.store, d.out, plain); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	for _, o := range objects {
		var err error
		switch o.Key.Kind {
		case store.KindIPPool:
			err = d.pool(ctx, o)
		case store.KindNode:
			err = d.node(ctx, o.Key.Name)
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(d.out, "%s deleted\n", o.Key)
	}
	sum(d.out, "deleted", keys)
	return nil
}
