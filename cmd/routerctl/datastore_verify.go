package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/archive"
	"github.com/routerd/routerd/store/memory"
)

func (a datastoreCommands) verifyCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "verify",
		Short: "Check the datastore or an exported file",
		Long: `Read everything in the datastore and report what cannot be read, what fails the checks
of manifests, on its own or against the rest, and what "routerctl ipam check" finds.
With -f, check a file written by "routerctl datastore export" instead; no datastore is
needed.

The exit code is 0 if nothing is wrong, and 1 otherwise.`,
		Example: "  routerctl datastore verify\n  routerctl datastore verify -f cluster.jsonl",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("filename") {
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return verify(ctx, s, a.stdout) })
			}
			from, err := readArchive(a.stdin, file)
			if err != nil {
				return err
			}
			return a.verifyFile(cmd.Context(), from)
		},
	}
	c.Flags().StringVarP(&file, "filename", "f", "", "file written by export, or - for standard input")
	return c
}

func (a datastoreCommands) verifyFile(ctx context.Context, from *archive.Archive) error {
	s := memory.New()
	defer s.Close()
	unknown := 0
	for _, e := range from.Entries {
		if _, ok := store.ParsePath(e.Path); !ok {
			unknown++
		}
		s.PutRaw(e.Path, e.Value)
	}
	fmt.Fprintf(a.stdout, "The file is whole: %d keys of %s.\n", len(from.Entries), from.Time.Format("2006-01-02 15:04:05 MST"))
	if unknown > 0 {
		fmt.Fprintf(a.stdout, "%d keys are of kinds that routerd does not know; they are kept as they are.\n", unknown)
	}
	return verify(ctx, s, a.stdout)
}

// verify checks every object that a store holds.
func verify(ctx context.Context, s store.Store, w io.Writer) error {
	var all []store.Object
	wrong := 0
	problem := func(k store.Key, err error) {
		var fields store.FieldErrors
		if !errors.As(err, &fields) {
			wrong++
			fmt.Fprintf(w, "%s: %v\n", k, err)
			return
		}
		for _, f := range fields {
			wrong++
			fmt.Fprintf(w, "%s: %v\n", k, f)
		}
	}
	for _, kind := range store.AllKinds() {
		err := store.Pages(ctx, s, kind, "", func(objects []store.Object) error {
			for _, o := range objects {
				if o.Value == nil {
					_, err := store.Decode(o.Key, o.Raw)
					problem(o.Key, fmt.Errorf("%w; delete it, or repair its value in etcd", err))
					continue
				}
				if kind != store.KindChange && kind != store.KindUnconfirmed {
					all = append(all, o)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, o := range all {
		if store.Meta(o.Value) == nil {
			continue // a record: reading it has checked it
		}
		v := store.Clone(o.Value)
		store.SetDefaults(v)
		err := store.Validate(v)
		if err == nil {
			err = store.ValidateAgainst(v, beside(o, all))
		}
		if err != nil {
			problem(o.Key, err)
		}
	}
	records, err := audit.Read(ctx, s)
	if err != nil {
		return err
	}
	_, found := records.Check()
	for _, f := range found {
		fmt.Fprintf(w, "IPAM: %s: %s: %s; %s\n", f.Problem, f.What, f.Why, f.Cure)
	}
	wrong += len(found)
	if wrong > 0 {
		fmt.Fprintf(w, "Checked %d objects; found %d problems.\n", len(all), wrong)
		return exitCode(1)
	}
	fmt.Fprintf(w, "Checked %d objects; found no problems.\n", len(all))
	return nil
}

// beside returns the objects that one is checked against.
func beside(o store.Object, all []store.Object) []store.Object {
	related := map[store.Kind]bool{o.Key.Kind: true}
	for _, k := range store.RelatedKinds(o.Key.Kind) {
		related[k] = true
	}
	if len(related) == 1 {
		return nil
	}
	var others []store.Object
	for _, other := range all {
		if related[other.Key.Kind] && other.Key != o.Key {
			others = append(others, other)
		}
	}
	return others
}
