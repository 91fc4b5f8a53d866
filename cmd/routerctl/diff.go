package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

func (a resourceCommands) validateCommand() *cobra.Command {
	var in input
	c := &cobra.Command{
		Use:   "validate -f FILE|DIR|-",
		Short: "Check manifests without a datastore",
		Long: `Check manifests, each on its own, without a datastore: kinds, fields, values. "apply
--dry-run" also checks them against the stored resources.`,
		Example: "  routerctl validate -f manifests/\n  routerctl validate -f - < pool.yaml",
		Args:    func(_ *cobra.Command, args []string) error { return in.none("validate", args) },
		RunE: func(*cobra.Command, []string) error {
			docs, err := in.read(a.stdin)
			if err != nil {
				return err
			}
			for _, d := range docs {
				if err := d.CheckUnknown(nil); err != nil {
					return err
				}
			}
			keys := make([]store.Key, len(docs))
			for i, d := range docs {
				keys[i] = d.Object.Key
			}
			sum(a.stdout, "validated", keys)
			return nil
		},
	}
	in.flags(c.Flags())
	return c
}

func (a resourceCommands) diffCommand() *cobra.Command {
	var in input
	c := &cobra.Command{
		Use:   "diff -f FILE|DIR|-",
		Short: "Show what apply would change in the stored resources",
		Long: `Show what apply would change in the stored resources, as a unified diff of their YAML.
The exit code is 0 if nothing would change, 1 if something would, and 2 if the command
line is wrong.`,
		Example: "  routerctl diff -f manifests/",
		Args:    func(_ *cobra.Command, args []string) error { return in.none("diff", args) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			docs, err := in.read(a.stdin)
			if err != nil {
				return err
			}
			differs := false
			err = a.withStore(cmd, func(ctx context.Context, s store.Store) (err error) {
				differs, err = diffs(ctx, s, a.stdout, docs)
				return err
			})
			if err == nil && differs {
				err = exitCode(1)
			}
			return err
		},
	}
	in.flags(c.Flags())
	return c
}

// diffs prints what apply would change, and reports whether it would.
func diffs(ctx context.Context, s store.Store, w io.Writer, docs []manifest.Document) (bool, error) {
	have, err := related(ctx, s, docs)
	if err != nil {
		return false, err
	}
	changes, err := plan(apply, docs, have, metav1.NewTime(time.Now().UTC().Truncate(time.Second)))
	if err != nil {
		return false, err
	}
	differs := false
	for _, c := range changes {
		if c.same {
			continue
		}
		differs = true
		var was []byte
		next := c.op.Object
		if i := slices.IndexFunc(have, func(o store.Object) bool { return o.Key == c.key }); i >= 0 {
			next.Revision = have[i].Revision // it is not what differs
			if was, err = yamlOf(have[i]); err != nil {
				return false, err
			}
		}
		will, err := yamlOf(next)
		if err != nil {
			return false, err
		}
		if _, err := w.Write(diff.Diff(shortName(c.key)+" stored", was, shortName(c.key)+" applied", will)); err != nil {
			return false, fmt.Errorf("print: %w", err)
		}
	}
	return differs, nil
}

func yamlOf(o store.Object) ([]byte, error) {
	raw, err := manifest.JSON(o)
	if err != nil {
		return nil, err
	}
	return manifest.YAML(raw)
}
