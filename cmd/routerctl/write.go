package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/history"
	"github.com/routerd/routerd/store/manifest"
)

const (
	// maxOps is how many objects one transaction takes, with the history's record.
	maxOps = history.MaxOps

	// writeTries is how often a plan is made again because somebody else
	// wrote meanwhile; calicoctl tries as often.
	writeTries = 5
)

func (a resourceCommands) writeCommand(v verb) *cobra.Command {
	var in input
	var c checks
	var w writing
	cmd := &cobra.Command{
		Args: func(_ *cobra.Command, args []string) error { return in.none(v, args) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			docs, err := in.read(a.stdin)
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				if err := a.check(ctx, s, docs, c); err != nil {
					return err
				}
				if c.force {
					forcePools(docs)
				}
				return writeAndFollow(ctx, s, a.stdout, v, docs, w)
			})
		},
	}
	const whole = `

All manifests are checked before anything is written: each on its own, against the
others, and against the stored resources. If a check fails, nothing is written. All
resources are written in one transaction; only more than 126 objects need several.

A new IPPool must not overlap other pools, the ranges of services, the networks of any
node, or the addresses and routes of this host. A mode that a node reports it cannot
accept (its kernel has no such tunnel) is refused, and the node is named. So is a
change that leaves a node without any configured BGP session, or after which the rules
or pools of this host would end the SSH session in which the command runs.

After a change of an IPPool's mode, the command waits some seconds for the nodes to
report. Peers that probes do not reach in the new mode keep the old one; they are
named with the reason.`
	switch v {
	case apply:
		cmd.Use = "apply -f FILE|DIR|-"
		cmd.Short = "Create or update resources from manifests"
		cmd.Long = "Create or update resources so that they match the manifests. Resources that match already\nare not written. A manifest with a resourceVersion updates only that version." + whole
		cmd.Example = "  routerctl apply -f pools.yaml\n  routerctl apply -f manifests/ --dry-run\n  routerctl get ippool a -o yaml | sed s/Always/CrossSubnet/ | routerctl apply -f -"
	case create:
		cmd.Use = "create -f FILE|DIR|-"
		cmd.Short = "Create resources that do not exist yet"
		cmd.Long = "Create resources. A resource that exists already is an error, and so is a manifest with a\nresourceVersion." + whole
		cmd.Example = "  routerctl create -f pools.yaml\n  routerctl create -f - < peer.yaml"
	case replace:
		cmd.Use = "replace -f FILE|DIR|-"
		cmd.Short = "Replace resources that exist"
		cmd.Long = "Replace existing resources with the manifests. A resource that does not exist is an error." + whole
		cmd.Example = "  routerctl replace -f pools.yaml"
	}
	f := cmd.Flags()
	in.flags(f)
	if v != replace {
		f.BoolVar(&c.ignoreRoutes, "ignore-host-routes", false, "allow a pool that overlaps an address or route of this host")
	}
	if v == create {
		f.BoolVar(&w.skipExists, "skip-exists", false, "skip resources that exist already")
	}
	f.BoolVar(&c.force, "force", false, "allow a pool mode that a node cannot accept or that probes fail in, nodes without any BGP session, and the end of this SSH session")
	f.BoolVar(&w.dryRun, "dry-run", false, "check everything and print what would be done, but write nothing")
	a.confirmFlag(f)
	return cmd
}

// checks says which of what the daemon knows is not asked before a write.
type checks struct{ ignoreRoutes, force bool }

// check asks this host, what nodes publish and the daemon whether a write would do
// harm.
func (a *app) check(ctx context.Context, s store.Store, docs []manifest.Document, c checks) error {
	if !c.ignoreRoutes {
		if err := a.checkHost(ctx, s, docs); err != nil {
			return err
		}
	}
	if c.force {
		return nil
	}
	if err := checkRefused(ctx, s, docs); err != nil {
		return err
	}
	return a.checkWrites(ctx, docs)
}

// writing says how a verb is carried out.
type writing struct {
	dryRun     bool
	skipExists bool // what exists is left alone
}

// write carries out a verb.
func write(ctx context.Context, s store.Store, w io.Writer, v verb, docs []manifest.Document, how writing) error {
	var changes []change
	for try := 1; ; try++ {
		have, err := related(ctx, s, docs)
		if err != nil {
			return err
		}
		if how.skipExists {
			docs = missing(docs, have)
		}
		now := metav1.NewTime(time.Now().UTC().Truncate(time.Second))
		if changes, err = plan(v, docs, have, now); err != nil {
			return err
		}
		if how.dryRun {
			break
		}
		err = commit(ctx, s, w, opsOf(changes))
		if err == nil {
			break
		}
		// The plan is made again from what is there now, and refused if that
		// does not allow it any more.
		if !errors.Is(err, store.ErrConflict) || try == writeTries {
			return fmt.Errorf("%s: %w", v, err)
		}
	}
	report(w, v, changes, how.dryRun)
	return nil
}

// missing returns the documents of objects that do not exist.
func missing(docs []manifest.Document, have []store.Object) []manifest.Document {
	present := map[store.Key]bool{}
	for _, o := range have {
		present[o.Key] = true
	}
	return slices.DeleteFunc(slices.Clone(docs), func(d manifest.Document) bool { return present[d.Object.Key] })
}

func opsOf(changes []change) []store.Op {
	var ops []store.Op
	for _, c := range changes {
		if !c.same {
			ops = append(ops, c.op)
		}
	}
	return ops
}

// commit writes ops in one transaction; only where the datastore cannot take so
// many at once, in several, and then it says so. One that writes one object at a
// time is asked first whether it would take all of them.
func commit(ctx context.Context, s store.Store, w io.Writer, ops []store.Op) error {
	most := maxOps
	if p, ok := s.(store.Piecewise); ok && len(ops) > 1 {
		most = 1
		for chunk := range slices.Chunk(ops, maxOps) {
			if err := p.Try(ctx, chunk...); err != nil {
				return fmt.Errorf("nothing is written: %w", err)
			}
		}
	} else if len(ops) > maxOps {
		fmt.Fprintf(w, "%d objects are more than one transaction can hold (%d): writing them in several\n", len(ops), maxOps)
	}
	done := 0
	for chunk := range slices.Chunk(ops, most) {
		if _, err := s.Txn(ctx, chunk...); err != nil {
			if done > 0 {
				err = fmt.Errorf("after %d of %d objects were written, up to %s: %w", done, len(ops), ops[done-1].Object.Key, err)
			}
			return err
		}
		done += len(chunk)
	}
	return nil
}

// related reads what a plan for docs depends on: the present state of their
// kinds, and the other kinds that they are checked against.
func related(ctx context.Context, s store.Store, docs []manifest.Document) ([]store.Object, error) {
	kinds := map[store.Kind]bool{}
	for _, d := range docs {
		kinds[d.Object.Key.Kind] = true
		for _, k := range store.RelatedKinds(d.Object.Key.Kind) {
			kinds[k] = true
		}
	}
	var have []store.Object
	for _, k := range slices.Sorted(maps.Keys(kinds)) {
		objects, _, err := s.List(ctx, k, "")
		if err != nil {
			return nil, err
		}
		have = append(have, objects...)
	}
	return have, nil
}

// report prints a line for each object, then the sum as calicoctl does.
func report(w io.Writer, v verb, changes []change, dryRun bool) {
	var keys []store.Key
	for _, c := range changes {
		keys = append(keys, c.key)
		did := c.did
		if dryRun && !c.same {
			did = "would be " + did
		}
		fmt.Fprintf(w, "%s %s\n", c.key, did)
	}
	if dryRun {
		fmt.Fprintln(w, "Nothing was written (--dry-run)")
		return
	}
	sum(w, v.past(), keys)
}

func sum(w io.Writer, past string, keys []store.Key) {
	kind := ""
	for i, k := range keys {
		switch {
		case i == 0:
			kind = fmt.Sprintf(" '%s'", k.Kind)
		case kind != fmt.Sprintf(" '%s'", k.Kind):
			kind = ""
		}
	}
	fmt.Fprintf(w, "Successfully %s %d%s resource(s)\n", past, len(keys), kind)
}
