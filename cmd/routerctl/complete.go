package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/history"
)

// completionTime is how long a shell waits for words at most.
const completionTime = 3 * time.Second

// words returns what may follow a command's arguments so far. It may ask the
// datastore or the daemon; what those do not answer is not offered.
type words func(cmd *cobra.Command, args []string) []string

// addCompletion has the shell offer names that the datastore or the daemon knows.
func (a completion) addCompletion(root *cobra.Command) {
	for path, w := range map[string]words{
		"get":            objectWords(a, many),
		"delete":         objectWords(a, many),
		"patch":          objectWords(a, 1),
		"label":          objectWords(a, 1),
		"pool status":    namesOf(a, store.KindIPPool, many),
		"pool drain":     namesOf(a, store.KindIPPool, 1),
		"pool enable":    namesOf(a, store.KindIPPool, 1),
		"node drain":     namesOf(a, store.KindNode, 1),
		"node undrain":   namesOf(a, store.KindNode, 1),
		"policy show":    a.endpointWords,
		"flows":          a.endpointWords,
		"bgp received":   a.peerWords,
		"bgp advertised": a.peerWords,
		"history":        a.changeWords,
		"confirm":        a.changeWords,
		"undo":           a.changeWords,
		"events":         a.partWords(func(part string) []string { return []string{part} }),
		"log-level":      a.partWords(levelWords),
	} {
		if c, _, err := root.Find(strings.Fields(path)); err == nil && root.Name()+" "+path == c.CommandPath() {
			c.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
				return w(cmd, args), cobra.ShellCompDirectiveNoFileComp
			}
		}
	}
	a.completeFlags(root)
}

// completeFlags has the shell offer the values of flags that many commands have.
func (a completion) completeFlags(c *cobra.Command) {
	for _, sub := range c.Commands() {
		a.completeFlags(sub)
	}
	offer := func(flag string, w words) {
		if f := c.LocalFlags().Lookup(flag); f == nil || flag == "output" && f.DefValue != "table" {
			return // elsewhere it names a file
		}
		// The only error is that a command has done so itself.
		_ = c.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return w(cmd, args), cobra.ShellCompDirectiveNoFileComp
		})
	}
	offer("namespace", a.namespaceWords)
	offer("level", fixed(logLevels()...))
	if c.Name() == "get" {
		var list []string
		for _, o := range outputs {
			list = append(list, strings.TrimSuffix(o, "…"))
		}
		offer("output", fixed(list...))
	} else {
		offer("output", fixed("table", "yaml", "json"))
	}
}

// many is no limit of names.
const many = 1 << 30

func fixed(list ...string) words { return func(*cobra.Command, []string) []string { return list } }

// objectWords offers kinds, then up to n names of that kind.
func objectWords(a completion, n int) words {
	return func(cmd *cobra.Command, args []string) []string {
		if len(args) == 0 {
			return strings.Split(kindList(), ", ")
		}
		kind, err := parseKind(args[0])
		if err != nil || len(args) > n {
			return nil
		}
		return a.names(cmd, kind, args[1:])
	}
}

// namesOf offers up to n names of objects of a kind.
func namesOf(a completion, kind store.Kind, n int) words {
	return func(cmd *cobra.Command, args []string) []string {
		if len(args) >= n {
			return nil
		}
		return a.names(cmd, kind, args)
	}
}

// names returns the names of objects of a kind in the namespace that the command
// line says, but for those that it has.
func (a completion) names(cmd *cobra.Command, kind store.Kind, but []string) (out []string) {
	given := ""
	if f := cmd.Flags().Lookup("namespace"); f != nil {
		given = f.Value.String()
	}
	namespace, err := namespaceOf(kind, given)
	if err != nil {
		return nil
	}
	a.fromStore(cmd, func(ctx context.Context, s store.Store) {
		objects, _, _ := list(ctx, s, kind, namespace) // with an error, those that could be read
		for _, o := range withBuiltIn(kind, objects) {
			if !slices.Contains(but, o.Key.Name) {
				out = append(out, o.Key.Name)
			}
		}
	})
	return out
}

// namespaceWords offers the namespaces that have objects of the kind that the
// command line names, or of any kind that lies in namespaces.
func (a completion) namespaceWords(cmd *cobra.Command, args []string) []string {
	kinds := []store.Kind{store.KindNetworkPolicy, store.KindNetworkSet, store.KindWorkloadEndpoint}
	if len(args) > 0 {
		if k, err := parseKind(args[0]); err == nil {
			kinds = []store.Kind{k}
		}
	}
	found := map[string]bool{}
	a.fromStore(cmd, func(ctx context.Context, s store.Store) {
		for _, k := range kinds {
			if !k.Namespaced() {
				continue
			}
			objects, _, _ := list(ctx, s, k, "")
			for _, o := range objects {
				found[o.Key.Namespace] = true
			}
		}
	})
	return slices.Sorted(maps.Keys(found))
}

// endpointWords offers the interfaces of this host's endpoints.
func (a completion) endpointWords(cmd *cobra.Command, args []string) (out []string) {
	if len(args) > 0 {
		return nil
	}
	a.fromOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) {
		r, err := op.Policy(ctx, &apiv1.PolicyRequest{})
		if err != nil {
			return
		}
		for _, e := range r.GetEndpoints() {
			out = append(out, e.GetInterface())
		}
	})
	return out
}

// peerWords offers the BGP peers of this host, as `routerctl bgp peers` names them.
func (a completion) peerWords(cmd *cobra.Command, args []string) (out []string) {
	if len(args) > 0 {
		return nil
	}
	a.fromOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) {
		r, err := op.Node(ctx, &apiv1.NodeRequest{})
		if err != nil {
			return
		}
		for _, p := range r.GetPeers() {
			if p.GetName() != "" {
				out = append(out, p.GetName())
			}
			out = append(out, p.GetAddress())
		}
	})
	return out
}

// changeWords offers the changes that the history has, newest first.
func (a completion) changeWords(cmd *cobra.Command, args []string) (out []string) {
	if len(args) > 0 {
		return nil
	}
	a.fromStore(cmd, func(ctx context.Context, s store.Store) {
		list, _ := history.List(ctx, s) // with an error there is none
		for _, o := range slices.Backward(list) {
			out = append(out, o.Key.Name+"\t"+o.Value.(*store.Change).Command)
		}
	})
	return out
}

// partWords offers what f makes of each part of the daemon.
func (a completion) partWords(f func(part string) []string) words {
	return func(cmd *cobra.Command, _ []string) (out []string) {
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
		defer cancel()
		// An error leaves nothing to offer.
		_ = ask(ctx, a.daemon, apiv1.NewEventsClient, func(from apiv1.EventsClient) error {
			r, err := from.Levels(ctx, &apiv1.LevelsRequest{})
			for _, p := range r.GetParts() {
				out = append(out, f(p.GetPart())...)
			}
			return err
		})
		return out
	}
}

func logLevels() []string { return []string{"debug", "info", "warn", "error"} }

func levelWords(part string) (out []string) {
	for _, l := range logLevels() {
		out = append(out, part+"="+l)
	}
	return out
}

// fromStore runs f with the datastore, if it can be opened in time.
func (a completion) fromStore(cmd *cobra.Command, f func(context.Context, store.Store)) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	s, err := a.openStore(ctx)
	if err != nil {
		return
	}
	f(ctx, s)
	s.Close() //nolint:errcheck,gosec // it was only read
}

// fromOperator runs f with the daemon, if it answers.
func (a completion) fromOperator(cmd *cobra.Command, f func(context.Context, apiv1.OperatorClient)) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	_ = a.askOperator(ctx, func(op apiv1.OperatorClient) error {
		f(ctx, op)
		return nil
	})
}
