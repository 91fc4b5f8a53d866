package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

func (a bgpCommands) bgpReflectorsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "reflectors", Short: "Manage automatic route reflectors",
		Long: `Manage route reflectors that the nodes choose among themselves. They replace the mesh,
in which each node has a session with every other node.`,
		Example: "  routerctl bgp reflectors auto --count 2\n  routerctl bgp reflectors status",
	}
	c.AddCommand(a.reflectorsAutoCommand(), a.reflectorsOffCommand(), a.reflectorsStatusCommand())
	return c
}

func (a bgpCommands) reflectorsAutoCommand() *cobra.Command {
	var count, perRack, perZone int
	var per string
	c := &cobra.Command{
		Use: "auto (--count N [--per LABEL] | --per-rack N | --per-zone N)", Short: "Replace the mesh with automatic route reflectors",
		Long: `Have the nodes choose this many route reflectors among themselves, in all or for each
value of a label. A node with the label routerd.io/reflector: never is not chosen, nor
is a drained node. A session of the mesh or a reflector ends only when every node that
needs it has its routes from others. A reflector that fails is replaced within seconds
or, with the Kubernetes datastore, when its Node reports that it is gone. The setting
is stored in the annotation routerd.io/reflectors of the BGPConfiguration named
default.`,
		Example: "  routerctl bgp reflectors auto --count 2\n  routerctl bgp reflectors auto --per-rack 2",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var asked []store.Reflectors
			for _, r := range []store.Reflectors{{Count: count, Per: per}, {Count: perRack, Per: store.LabelRack}, {Count: perZone, Per: store.LabelZone}} {
				if r.Count != 0 {
					asked = append(asked, r)
				}
			}
			if len(asked) != 1 {
				return usagef("bgp reflectors auto: give the number: one of --count, --per-rack and --per-zone")
			}
			if _, err := store.ParseReflectors(asked[0].String()); err != nil {
				return usagef("bgp reflectors auto: %v", err)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				if err := refuseConfiguredReflectors(ctx, s); err != nil {
					return err
				}
				if err := setReflectors(ctx, s, asked[0].String(), false); err != nil {
					return err
				}
				fmt.Fprintf(a.stdout, "The nodes choose %s reflectors; see routerctl bgp reflectors status.\n", asked[0])
				return nil
			})
		},
	}
	f := c.Flags()
	f.IntVar(&count, "count", 0, "number of reflectors, in all or in each group, 1 to 16")
	f.StringVar(&per, "per", "", "with --count: label that groups the nodes")
	f.IntVar(&perRack, "per-rack", 0, "number of reflectors for each value of the label rack, or without that label of "+store.LabelZone)
	f.IntVar(&perZone, "per-zone", 0, "number of reflectors for each value of the label "+store.LabelZone)
	return c
}

func (a bgpCommands) reflectorsOffCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "off", Short: "Return to the node-to-node mesh",
		Long: `Return to the node-to-node mesh. Reflectors that the nodes have chosen end when the
sessions of the mesh are up.`,
		Example: "  routerctl bgp reflectors off", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				if err := setReflectors(ctx, s, "", force); err != nil {
					return err
				}
				fmt.Fprintln(a.stdout, "The nodes return to the mesh; see routerctl bgp reflectors status.")
				return nil
			})
		},
	}
	c.Flags().BoolVar(&force, "force", false, "proceed although the mesh is disabled (nodeToNodeMeshEnabled)")
	return c
}

// refuseConfiguredReflectors names a node that Calico's configuration makes a reflector: then nobody is chosen.
func refuseConfiguredReflectors(ctx context.Context, s store.Store) error {
	nodes, _, err := s.List(ctx, store.KindNode, "")
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	for _, o := range nodes {
		if n, ok := o.Value.(*store.Node); ok && n.Spec.BGP != nil && n.Spec.BGP.RouteReflectorClusterID != "" {
			return fmt.Errorf("node %s has a spec.bgp.routeReflectorClusterID: configured reflectors exclude automatic ones; remove that field first", n.Name)
		}
	}
	return nil
}

// setReflectors writes the annotation; empty: takes it away.
func setReflectors(ctx context.Context, s store.Store, value string, force bool) error {
	key := store.ResourceKey(store.KindBGPConfiguration, store.DefaultName)
	_, err := store.Modify(ctx, s, key, func(cur store.Object) (any, error) {
		c := &v3.BGPConfiguration{ObjectMeta: metav1.ObjectMeta{Name: store.DefaultName}}
		if cur.Value != nil {
			c = store.Clone(cur.Value).(*v3.BGPConfiguration)
		}
		if on := c.Spec.NodeToNodeMeshEnabled; value == "" && on != nil && !*on && !force {
			return nil, fmt.Errorf("nodeToNodeMeshEnabled is false: without reflectors nodes would have no sessions with each other; enable the mesh first, or use --force")
		}
		delete(c.Annotations, store.AnnotationReflectors)
		if value != "" {
			if c.Annotations == nil {
				c.Annotations = map[string]string{}
			}
			c.Annotations[store.AnnotationReflectors] = value
		}
		return c, nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

func (a bgpCommands) reflectorsStatusCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show the reflectors and the progress of a change",
		Long: `Show the reflectors of each group, how many sessions of the mesh remain, and which
nodes lack the routes of some of their reflectors.`,
		Example: "  routerctl bgp reflectors status", Args: noArgs,
	}
	return showing(a.app, c, apiv1.NewBGPClient, func(ctx context.Context, b apiv1.BGPClient) (*apiv1.BGPReflectorsResponse, error) {
		return b.Reflectors(ctx, &apiv1.BGPReflectorsRequest{})
	}, printReflectors)
}

func printReflectors(w io.Writer, r *apiv1.BGPReflectorsResponse) error {
	some := false
	for _, g := range r.GetGroups() {
		some = some || len(g.GetReflectors()) > 0
	}
	switch {
	case r.GetProblem() != "":
		fmt.Fprintf(w, "No reflectors are chosen now: %s.\n", r.GetProblem())
	case r.GetSetting() == "" && some:
		fmt.Fprintln(w, "The nodes return to the mesh.")
	case r.GetSetting() == "":
		fmt.Fprintln(w, "No reflectors are configured: routerctl bgp reflectors auto has the nodes choose some.")
	default:
		fmt.Fprintf(w, "Reflectors asked for: %s.\n", r.GetSetting())
	}
	if some || r.GetSetting() != "" {
		var rows [][]string
		for _, g := range r.GetGroups() {
			var list []string
			for _, name := range g.GetReflectors() {
				if slices.Contains(g.GetLeaving(), name) {
					name += " (leaving)"
				}
				list = append(list, name)
			}
			rows = append(rows, []string{dash(g.GetName()), fmt.Sprint(g.GetNodes()), dash(strings.Join(list, ", "))})
		}
		if err := printTable(w, []string{"GROUP", "NODES", "REFLECTORS"}, rows); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "Sessions of the mesh: %d, of %d nodes.\n", r.GetMesh(), r.GetNodes())
	if n := len(r.GetWaiting()); n > 0 {
		shown := r.GetWaiting()
		more := ""
		if n > maxWaitingShown {
			shown, more = shown[:maxWaitingShown], fmt.Sprintf(" and %d more", n-maxWaitingShown)
		}
		fmt.Fprintf(w, "Without the routes of all their reflectors: %s%s.\n", strings.Join(shown, ", "), more)
	}
	return nil
}

// maxWaitingShown is how many nodes are named.
const maxWaitingShown = 10

// meshLimit is from how many nodes on the mesh costs more than reflectors do: each of its sessions is one of every node's, and
// each route is sent on all of them.
const meshLimit = 100

// adviseReflectors says that a mesh is too large.
func adviseReflectors(w io.Writer, peers []*apiv1.BGPPeer) {
	names := map[string]bool{}
	for _, p := range peers {
		if p.GetType() == "node-to-node mesh" {
			names[p.GetName()] = true
		}
	}
	if n := len(names) + 1; n > meshLimit {
		fmt.Fprintf(w, "\nThe mesh has %d nodes, and %d sessions; from %d nodes on, use route reflectors: routerctl bgp reflectors auto --count 2\n", n, n*(n-1)/2, meshLimit)
	}
}
