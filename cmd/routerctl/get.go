package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
	"github.com/routerd/routerd/store/selector"
)

// query is what `get` asks for.
type query struct {
	kinds         []store.Kind
	names         []string
	namespace     string
	allNamespaces bool
	keys          []store.Key        // of manifests, in place of names; nil: none
	labels        *selector.Selector // nil: any
	output        output
	export        bool // without what belongs to this cluster
}

func (a resourceCommands) getCommand() *cobra.Command {
	var q query
	var in input
	var labels, format string
	var watch bool
	c := &cobra.Command{
		Use:   "get KIND[,KIND…] [NAME…] | get -f FILE|DIR|-",
		Short: "Print resources",
		Long: `Print resources as a table, or with -o yaml or -o json in a form that apply
accepts. Kinds: ` + kindList() + `.

Workload endpoints, network policies and network sets are namespaced: -n names a
namespace, -A prints all of them. With -f, print the resources that manifests name.

-o custom-columns accepts headings of -o wide, or HEADING:.path.to.field. -o jsonpath
works as in kubectl, on the output of -o json. -o go-template is executed on a list of
lists (.Kind, .Items), or with names given, on a list of objects.`,
		Example: `  routerctl get ippools
  routerctl get nodes -o wide
  routerctl get ippool default-ipv4-ippool -o yaml --export > pool.yaml
  routerctl get workloadendpoints -A
  routerctl get bgppeers,bgpfilters
  routerctl get nodes -l "rack == 'r1'"
  routerctl get ippools -o custom-columns=NAME,CIDR,VXLAN:.spec.vxlanMode
  routerctl get nodes -o go-template='{{range .}}{{range .Items}}{{.Name}} {{end}}{{end}}'
  routerctl get nodes -o jsonpath='{.items[*].spec.bgp.ipv4Address}'
  routerctl get nodes --watch`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(in.files) > 0 && len(args) > 0:
				return usagef("get: give either a kind and names, or manifests with -f")
			case len(in.files) == 0 && len(args) == 0:
				return usagef("get: name a kind: one of %s", kindList())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if q.output, err = parseOutput(format); err != nil {
				return err
			}
			if labels != "" {
				if q.labels, err = selector.Parse(labels); err != nil {
					return usagef("--selector: %v", err)
				}
			}
			if len(in.files) > 0 {
				err = q.readKeys(a.stdin, in)
			} else {
				err = q.readArgs(args, in.namespace)
			}
			if err != nil {
				return err
			}
			if watch {
				return a.watch(cmd, q)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return get(ctx, s, a.stdout, q) })
		},
	}
	f := c.Flags()
	in.flags(f)
	f.StringVarP(&format, "output", "o", "table", strings.Join(outputs, ", "))
	f.StringVarP(&labels, "selector", "l", "", "only objects whose labels match, e.g. \"rack == 'r1'\"")
	f.BoolVarP(&q.allNamespaces, "all-namespaces", "A", false, "print objects of all namespaces")
	f.BoolVar(&q.export, "export", false, "omit fields of this cluster: uid, resourceVersion, creationTimestamp, …")
	f.BoolVarP(&watch, "watch", "w", false, "print changes until interrupted")
	return c
}

// readArgs reads kinds and names.
func (q *query) readArgs(args []string, namespace string) error {
	args, err := kindFirst(args)
	if err != nil {
		return err
	}
	if q.kinds, err = parseKinds(args[0]); err != nil {
		return err
	}
	q.names = args[1:]
	if len(q.names) > 0 && len(q.kinds) > 1 {
		return usagef("get: names need exactly one kind, not %d", len(q.kinds))
	}
	if slices.ContainsFunc(q.kinds, store.Kind.Namespaced) {
		q.namespace = cmp.Or(namespace, store.DefaultName)
		return nil
	}
	if q.allNamespaces {
		return usagef("--all-namespaces: %s have no namespace; leave it out", q.kinds[0].Plural())
	}
	_, err = namespaceOf(q.kinds[0], namespace)
	return err
}

// readKeys reads which objects manifests name.
func (q *query) readKeys(stdin io.Reader, in input) error {
	docs, err := in.read(stdin)
	if err != nil {
		return err
	}
	q.keys = []store.Key{}
	for _, d := range docs {
		q.keys = append(q.keys, d.Object.Key)
		if !slices.Contains(q.kinds, d.Object.Key.Kind) {
			q.kinds = append(q.kinds, d.Object.Key.Kind)
		}
	}
	return nil
}

// named reports whether the command line says which objects.
func (q *query) named() bool { return len(q.names) > 0 || q.keys != nil }

// found is what a store holds of one kind.
type found struct {
	kind     store.Kind
	objects  []store.Object
	revision store.Revision
}

// get prints what matches. What could be read is printed even when something
// else could not; the error names the latter.
func get(ctx context.Context, s store.Store, w io.Writer, q query) error {
	var results []found
	var errs []error
	for _, k := range q.kinds {
		f, err := find(ctx, s, k, q)
		if err != nil {
			errs = append(errs, err)
			if !errors.Is(err, store.ErrDecode) && !errors.Is(err, store.ErrNotFound) {
				return errors.Join(errs...)
			}
			if q.named() && len(f.objects) == 0 {
				continue // a head without rows, or an empty list, says nothing more
			}
		}
		results = append(results, f)
	}
	if len(results) > 0 || len(errs) == 0 {
		if err := printFound(ctx, s, w, q, results); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func find(ctx context.Context, s store.Store, kind store.Kind, q query) (found, error) {
	namespace := q.namespace
	if q.allNamespaces || !kind.Namespaced() || q.keys != nil {
		namespace = ""
	}
	objects, rev, err := list(ctx, s, kind, namespace)
	objects = withBuiltIn(kind, objects)
	var errs []error
	switch {
	case q.keys != nil:
		objects, errs = byKey(kind, objects, q.keys)
	case len(q.names) > 0:
		objects, errs = byName(kind, namespace, objects, q.names)
	}
	if q.labels != nil {
		objects = slices.DeleteFunc(slices.Clone(objects), func(o store.Object) bool {
			return !q.labels.Matches(store.Meta(o.Value).Labels)
		})
	}
	return found{kind, objects, rev}, errors.Join(append(errs, err)...)
}

// byName picks objects in the order in which they were asked for.
func byName(kind store.Kind, namespace string, objects []store.Object, names []string) ([]store.Object, []error) {
	var picked []store.Object
	var errs []error
	for _, n := range names {
		before := len(picked)
		for _, o := range objects {
			if o.Key.Name == n {
				picked = append(picked, o)
			}
		}
		if len(picked) == before {
			k := store.Key{Kind: kind, Namespace: namespace, Name: n}
			errs = append(errs, fmt.Errorf("%s: %w; see routerctl get %s", k, store.ErrNotFound, kind.Plural()))
		}
	}
	return picked, errs
}

// byKey picks the objects of a kind that keys name, in their order.
func byKey(kind store.Kind, objects []store.Object, keys []store.Key) ([]store.Object, []error) {
	var picked []store.Object
	var errs []error
	for _, k := range keys {
		if k.Kind != kind {
			continue
		}
		i := slices.IndexFunc(objects, func(o store.Object) bool { return o.Key == k })
		if i < 0 {
			errs = append(errs, fmt.Errorf("%s: %w", k, store.ErrNotFound))
			continue
		}
		picked = append(picked, objects[i])
	}
	return picked, errs
}

// withBuiltIn adds what exists without being stored, and sorts tiers as they
// apply.
func withBuiltIn(kind store.Kind, objects []store.Object) []store.Object {
	switch kind {
	case store.KindProfile:
		if slices.ContainsFunc(objects, func(o store.Object) bool { return o.Key.Name == store.DefaultAllowProfile }) {
			return objects
		}
		return append([]store.Object{store.DefaultAllow()}, objects...)
	case store.KindTier:
		objects = slices.Clone(objects)
		slices.SortStableFunc(objects, func(a, b store.Object) int { return cmp.Compare(orderOf(a), orderOf(b)) })
	}
	return objects
}

func orderOf(o store.Object) float64 {
	if order := o.Value.(*v3.Tier).Spec.Order; order != nil {
		return *order
	}
	return math.Inf(1)
}

func printFound(ctx context.Context, s store.Store, w io.Writer, q query, results []found) error {
	switch q.output.format {
	case "name":
		for _, f := range results {
			for _, o := range f.objects {
				fmt.Fprintln(w, shortName(o.Key))
			}
		}
		return nil
	case "yaml", "json", "jsonpath":
		return printObjects(w, q, results)
	case "template":
		return q.output.render(w, q.named(), results)
	}
	var errs []error
	for i, f := range results {
		if i > 0 {
			fmt.Fprintln(w)
		}
		as := ""
		if f.kind == store.KindNode && (q.output.format == "wide" || q.output.format == "columns") {
			var err error
			if as, err = globalAS(ctx, s); err != nil {
				errs = append(errs, err) // and all else is shown
			}
		}
		if err := printKind(w, q, f, as); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	return errors.Join(errs...)
}

func shortName(k store.Key) string {
	s := strings.ToLower(string(k.Kind)) + "/"
	if k.Namespace != "" {
		s += k.Namespace + "/"
	}
	return s + k.Name
}

func printKind(w io.Writer, q query, f found, as string) error {
	head, rows, err := tableOf(q, f, as)
	if err != nil {
		return err
	}
	return printTable(w, head, rows)
}

// tableOf makes the table of a kind.
func tableOf(q query, f found, as string) (head []string, rows [][]string, err error) {
	c := columnsOf(f.kind, as)
	head, paths, err := q.output.heads(f.kind, c)
	if err != nil {
		return nil, nil, err
	}
	if f.kind.Namespaced() && q.allNamespaces && q.output.format != "columns" {
		head = append([]string{"NAMESPACE"}, head...)
	}
	rows = make([][]string, 0, len(f.objects))
	for _, o := range f.objects {
		v := store.Clone(o.Value)
		store.SetDefaults(v) // as when an older object is read
		cells := c.cells(v)
		var object json.RawMessage
		if len(paths) > 0 {
			if object, err = manifest.JSON(o); err != nil {
				return nil, nil, err
			}
		}
		row := make([]string, len(head))
		for i, h := range head {
			switch path := paths[h]; {
			case path != nil:
				row[i] = at(object, path)
			case h == "NAME":
				row[i] = o.Key.Name
			case h == "NAMESPACE":
				row[i] = o.Key.Namespace
			default:
				row[i] = cells[h]
			}
		}
		rows = append(rows, row)
	}
	return head, rows, nil
}

// globalAS returns the AS number of nodes that have none of their own.
func globalAS(ctx context.Context, s store.Store) (string, error) {
	const builtIn = "64512"
	o, err := s.Get(ctx, store.ResourceKey(store.KindBGPConfiguration, store.DefaultName))
	if errors.Is(err, store.ErrNotFound) {
		return builtIn, nil
	}
	if err != nil {
		return "unknown", fmt.Errorf("read the global AS number: %w", err)
	}
	if as := o.Value.(*v3.BGPConfiguration).Spec.ASNumber; as != nil {
		return as.String(), nil
	}
	return builtIn, nil
}
