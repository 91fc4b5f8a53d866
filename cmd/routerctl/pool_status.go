package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

func (a poolCommands) poolStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status [NAME...]",
		Short: "Show the mode of pools and the progress of a mode change",
		Long: `Show the mode that each pool asks for and, for each node, whether the node accepts
what the mode needs, in which mode it sends, and what it waits for.

A mode change proceeds node by node without packet loss. Each node first accepts the
new encapsulation, then sends in it to the nodes that also accept it, and drops the
old one when no node sends in it any more. A node that cannot accept the new
encapsulation stops the change for packets to and from it; the reason is shown. Peers
that probes do not reach in the new mode keep the old one, and are named with the
reason. A pool whose change was forced is marked: its peers are moved whatever probes
find.`,
		Example: "  routerctl pool status\n  routerctl pool status default-ipv4-ippool",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				c, err := readPoolFacts(ctx, s)
				if err != nil {
					return err
				}
				return c.print(a.stdout, args)
			})
		},
	}
}

// poolFacts is what the mode of a pool depends on.
type poolFacts struct {
	pools []*v3.IPPool
	nodes []*store.Node
	felix *v3.FelixConfigurationSpec // default; nil: there is none
}

func readPoolFacts(ctx context.Context, s store.Store) (poolFacts, error) {
	var c poolFacts
	for _, k := range []store.Kind{store.KindIPPool, store.KindNode, store.KindFelixConfiguration} {
		objs, _, err := s.List(ctx, k, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return c, fmt.Errorf("list %s: %w", k, err)
		}
		for _, o := range objs {
			switch v := o.Value.(type) {
			case *v3.IPPool:
				c.pools = append(c.pools, v)
			case *store.Node:
				c.nodes = append(c.nodes, v)
			case *v3.FelixConfiguration:
				if v.Name == store.DefaultName {
					c.felix = &v.Spec
				}
			}
		}
	}
	slices.SortFunc(c.pools, func(a, b *v3.IPPool) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(c.nodes, func(a, b *store.Node) int { return cmp.Compare(a.Name, b.Name) })
	return c, nil
}

func (c poolFacts) modeOf(p *v3.IPPool) store.Mode {
	vni, port := store.VXLANNumbers(c.felix)
	return store.NewMode(store.EncapsulationOf(p), vni, port)
}

func (c poolFacts) print(w io.Writer, names []string) error {
	for _, n := range names {
		if !slices.ContainsFunc(c.pools, func(p *v3.IPPool) bool { return p.Name == n }) {
			return fmt.Errorf("IPPool(%s): %w", n, store.ErrNotFound)
		}
	}
	first := true
	for _, p := range c.pools {
		if len(names) > 0 && !slices.Contains(names, p.Name) {
			continue
		}
		if !first {
			fmt.Fprintln(w)
		}
		first = false
		rows, moved, of := c.rows(p)
		forced := ""
		if store.Forced(p) {
			forced = ", by --force: packets to a peer that it does not reach are lost"
		}
		fmt.Fprintf(w, "IPPool(%s) %s: %s; %d of %d nodes have moved to it%s\n", p.Name, p.Spec.CIDR, c.modeOf(p), moved, of, forced)
		if len(rows) == 0 {
			continue
		}
		if err := printTable(w, []string{"NODE", "TAKES IN", "SENDS", "NOTE"}, rows); err != nil {
			return err
		}
	}
	return nil
}

// rows has a line for each node, and the number of those that have moved to
// the pool's mode, of those that say so.
func (c poolFacts) rows(p *v3.IPPool) (rows [][]string, moved, of int) {
	m := c.modeOf(p)
	var waitFor []string
	for _, n := range c.nodes {
		if f := store.NodeEncapsOf(n); f.Published && !accepts(f, m.EncapsAt(n, p)) {
			waitFor = append(waitFor, n.Name)
		}
	}
	for _, n := range c.nodes {
		f := store.NodeEncapsOf(n)
		if !f.Published {
			rows = append(rows, []string{n.Name, "-", "-", "publishes no encapsulation, like nodes without routerd; it is assumed to follow the pool at once"})
			continue
		}
		of++
		forms := m.EncapsAt(n, p)
		takes, sends, note := "yes", cmp.Or(f.Sends[p.Name], "-"), "-"
		switch {
		case !accepts(f, forms):
			takes, note = "no", whyNot(f, forms)
		case sends == m.String():
		case f.Stays[p.Name] != "":
			note = f.Stays[p.Name]
		case len(waitFor) > 0:
			note = "waits for " + strings.Join(waitFor, ", ")
		default:
			note = "is moving; \"routerctl routes\" on the node shows what it waits for"
		}
		if sends == m.String() {
			moved++
		}
		rows = append(rows, []string{n.Name, takes, sends, note})
	}
	return rows, moved, of
}

func accepts(f store.NodeEncaps, encaps []string) bool {
	return !slices.ContainsFunc(encaps, func(e string) bool { return !slices.Contains(f.Accepts, e) })
}

// whyNot says why a node does not accept what a mode needs.
func whyNot(f store.NodeEncaps, forms []string) string {
	for _, form := range forms {
		if slices.Contains(f.Accepts, form) {
			continue
		}
		if why, ok := f.Refuses[form]; ok {
			return form + ": " + why
		}
		return "has not published yet that it accepts " + form
	}
	return "-"
}

// checkRefused refuses pools whose mode some node cannot accept.
func checkRefused(ctx context.Context, s store.Store, docs []manifest.Document) error {
	var pools []manifest.Document
	for _, d := range docs {
		if d.Object.Key.Kind == store.KindIPPool {
			pools = append(pools, d)
		}
	}
	if len(pools) == 0 {
		return nil
	}
	c, err := readPoolFacts(ctx, s)
	if err != nil {
		return err
	}
	var errs []error
	for _, d := range pools {
		p, ok := d.Object.Value.(*v3.IPPool)
		if !ok || c.unchanged(p) {
			continue
		}
		for _, err := range store.Refused(p, c.modeOf(p), c.nodes) {
			errs = append(errs, refuse(d, "%w; repair the node, choose another mode, or use --force", err))
		}
	}
	return errors.Join(errs...)
}

// unchanged reports whether a pool is stored with the same encapsulation.
func (c poolFacts) unchanged(p *v3.IPPool) bool {
	return slices.ContainsFunc(c.pools, func(o *v3.IPPool) bool {
		return o.Name == p.Name && store.EncapsulationOf(o) == store.EncapsulationOf(p)
	})
}
