package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
)

// watch prints what get prints, and then each object that changes, until it is
// interrupted.
func (a resourceCommands) watch(cmd *cobra.Command, q query) error {
	if slices.Contains([]string{"template", "columns", "jsonpath"}, q.output.format) {
		return usagef("--watch goes with -o table, wide, name, yaml and json")
	}
	if slices.Contains(q.kinds, store.KindBlockAffinity) {
		return usagef("--watch: blockaffinities cannot be followed; see routerctl ipam show --show-blocks")
	}
	// The datastore must answer in time; what follows may take for ever.
	opening, cancel := a.withDeadline(cmd)
	defer cancel()
	s, err := a.openStore(opening)
	if err != nil {
		return explain(opening, err)
	}
	defer s.Close() //nolint:errcheck // it was only read
	ctx, stop := context.WithCancel(cmd.Context())
	defer stop()
	as := ""
	if slices.Contains(q.kinds, store.KindNode) && q.output.format == "wide" {
		if as, err = globalAS(opening, s); err != nil {
			return explain(opening, err)
		}
	}
	widths := map[store.Kind][]int{}
	for batch := range s.Watch(ctx, q.kinds...) {
		if batch.Err != nil {
			fmt.Fprintf(a.stderr, "routerctl: %v; still watching\n", batch.Err)
			continue
		}
		for _, ev := range batch.Events {
			if err := a.printEvent(q, ev, as, widths); err != nil {
				return err
			}
		}
	}
	return nil
}

// printEvent prints a change of an object that the query is about.
func (a resourceCommands) printEvent(q query, ev store.Event, as string, widths map[store.Kind][]int) error {
	k := ev.Key
	switch {
	case k.Kind.Namespaced() && !q.allNamespaces && q.keys == nil && k.Namespace != q.namespace,
		len(q.names) > 0 && !slices.Contains(q.names, k.Name),
		q.keys != nil && !slices.Contains(q.keys, k):
		return nil
	case ev.Err != nil:
		fmt.Fprintf(a.stderr, "routerctl: %s: %v\n", k, ev.Err)
		return nil
	case ev.Object.Value == nil:
		fmt.Fprintf(a.stdout, "%s deleted\n", k)
		return nil
	case q.labels != nil && !q.labels.Matches(store.Meta(ev.Object.Value).Labels):
		return nil
	}
	f := found{kind: k.Kind, objects: []store.Object{ev.Object}}
	switch q.output.format {
	case "name":
		fmt.Fprintln(a.stdout, shortName(k))
		return nil
	case "yaml", "json":
		q.keys = []store.Key{k} // one object, not a list
		if q.output.format == "yaml" {
			fmt.Fprintln(a.stdout, "---")
		}
		return printObjects(a.stdout, q, []found{f})
	}
	head, rows, err := tableOf(q, f, as)
	if err != nil {
		return err
	}
	if widths[k.Kind] == nil {
		widths[k.Kind] = tableWidths(head, rows)
		rows = append([][]string{head}, rows...)
	}
	return printRows(a.stdout, rows, widths[k.Kind])
}
