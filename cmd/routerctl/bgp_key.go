package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

func (a bgpCommands) bgpKeyCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "key", Short: "Manage the key with which nodes sign their BGP sessions",
		Long: `Manage the mesh key, with which nodes sign their BGP sessions with each other (RFC
2385), so that no workload can pose as its host. A cluster that starts with routerd
has a key; any other cluster gets its first by rotate. Sessions with Calico's nodes
are not signed.`,
		Example: "  routerctl bgp key status\n  routerctl bgp key rotate",
	}
	c.AddCommand(a.bgpKeyStatusCommand(), a.bgpKeyRotateCommand(), a.bgpKeyOffCommand())
	return c
}

// bgpKeyState is the key and who has it.
type bgpKeyState struct {
	key    *store.Secret
	former []string // nodes that have published a key, and not the newest one
	none   []string // those of routerd's that have published none
	others []string // those that do not run routerd
	have   int
}

// newest is the id of the newest key.
func (s bgpKeyState) newest() string { return s.key.KeyIDs()[0] }

func readBGPKeyState(ctx context.Context, s store.Store) (st bgpKeyState, err error) {
	if st.key, err = store.BGPKey(ctx, s); err != nil {
		return st, err
	}
	nodes, _, err := s.List(ctx, store.KindNode, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return st, fmt.Errorf("list nodes: %w", err)
	}
	ids := st.key.KeyIDs()
	for _, o := range nodes {
		n, ok := o.Value.(*store.Node)
		if !ok {
			continue
		}
		has := store.BGPKeysOf(n.Annotations[store.AnnotationBGPKeys])
		switch {
		case !store.NodeEncapsOf(n).Published:
			st.others = append(st.others, n.Name)
		case len(has) == 0:
			st.none = append(st.none, n.Name)
		case len(ids) > 0 && slices.Contains(has, ids[0]):
			st.have++
		default:
			st.former = append(st.former, n.Name)
		}
	}
	return st, nil
}

func (a bgpCommands) bgpKeyStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the mesh key and which nodes have it",
		Long: `Show the id of the mesh key, whether it is being replaced, and which nodes lack it.
The key itself is not shown.`,
		Example: "  routerctl bgp key status", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				st, err := readBGPKeyState(ctx, s)
				if err != nil {
					return err
				}
				a.printBGPKey(st)
				return nil
			})
		},
	}
}

func (a bgpCommands) printBGPKey(st bgpKeyState) {
	if st.key == nil {
		fmt.Fprintln(a.stdout, "There is no key: sessions between nodes are not signed. routerctl bgp key rotate creates one.")
		return
	}
	ids := st.key.KeyIDs()
	switch {
	case len(ids) > 1:
		fmt.Fprintf(a.stdout, "Key %s, which replaces %s.\n", ids[0], ids[1])
	case st.key.Open():
		fmt.Fprintf(a.stdout, "Key %s, the first one, is being distributed to all nodes.\n", ids[0])
	default:
		fmt.Fprintf(a.stdout, "Key %s.\n", ids[0])
	}
	fmt.Fprintf(a.stdout, "Nodes that have it: %d.\n", st.have)
	for _, l := range []struct {
		what  string
		names []string
	}{
		{"Nodes with an older key only", st.former},
		{"Nodes of routerd without a key, whose sessions are not signed (an earlier version, no BGP, or a kernel that cannot sign)", st.none},
		{"Nodes that do not run routerd, whose sessions are not signed", st.others},
	} {
		if len(l.names) > 0 {
			fmt.Fprintf(a.stdout, "%s: %s.\n", l.what, someNames(l.names))
		}
	}
}

// someNames joins names, and only counts those beyond the first few.
func someNames(names []string) string {
	if n := len(names) - maxWaitingShown; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxWaitingShown], ", "), n)
	}
	return strings.Join(names, ", ")
}

// bgpKeyPoll is how often it is looked whether all nodes have a key.
const bgpKeyPoll = 500 * time.Millisecond

func (a bgpCommands) bgpKeyRotateCommand() *cobra.Command {
	var wait, settle time.Duration
	var force bool
	c := &cobra.Command{
		Use: "rotate", Short: "Replace the mesh key without ending a session",
		Long: `Replace the mesh key, or create the first one, without ending a session. All nodes
receive the new key, two nodes use it as soon as both have it, and the former key ends
when all have it. If a node is down, the command ends with an error; run it again to
continue. With --force the former key ends anyway: a node without a newer key gets its
sessions back once it reaches the datastore.`,
		Example: "  routerctl bgp key rotate\n  routerctl bgp key rotate --force", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.timeout += wait + settle // longer than a command may take otherwise
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				return a.rotateBGPKey(ctx, s, wait, settle, force)
			})
		},
	}
	f := c.Flags()
	f.DurationVar(&wait, "wait-timeout", time.Minute, "how long to wait for all nodes to have the new key")
	f.DurationVar(&settle, "settle", 10*time.Second, "how long both keys remain valid after that, so that each node sees that the others have the new one")
	f.BoolVar(&force, "force", false, "end the former key even if nodes lack the new one")
	return c
}

func (a bgpCommands) rotateBGPKey(ctx context.Context, s store.Store, wait, settle time.Duration, force bool) error {
	key, err := store.RotateBGPKey(ctx, s)
	if err != nil {
		return err
	}
	st := bgpKeyState{key: key}
	id := st.newest()
	fmt.Fprintf(a.stdout, "Key %s is given to the nodes.\n", id)
	for end := time.Now().Add(wait); ; {
		if st, err = readBGPKeyState(ctx, s); err != nil {
			return err
		}
		if st.key == nil || st.newest() != id {
			return fmt.Errorf("bgp key rotate: another command changed the key meanwhile; see routerctl bgp key status")
		}
		// Who has none may be about to get its first.
		behind := st.former
		if st.key.Open() {
			behind = slices.Concat(behind, st.none)
		}
		switch {
		case len(behind) == 0:
		case time.Now().Before(end):
			if err := async.Sleep(ctx, bgpKeyPoll); err != nil {
				return err
			}
			continue
		case len(st.former) > 0 && !force:
			return fmt.Errorf("bgp key rotate: %s does not have key %s yet, so both keys stay valid: run the command again when it is back, or with --force to end the former key without it", someNames(st.former), id)
		case len(st.former) > 0:
			fmt.Fprintf(a.stdout, "Without waiting for %s.\n", someNames(st.former))
		}
		break
	}
	if st.have > 0 {
		fmt.Fprintf(a.stdout, "Nodes that have it: %d. The former state stays valid for another %s.\n", st.have, settle)
		if err := async.Sleep(ctx, settle); err != nil {
			return fmt.Errorf("bgp key rotate: interrupted; run it again to end the former key: %w", err)
		}
	}
	if _, err := store.FinishBGPKey(ctx, s, id); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "Only key %s is valid now.\n", id)
	return nil
}

func (a bgpCommands) bgpKeyOffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "off", Short: "Delete the mesh key",
		Long: `Delete the mesh key, so that nodes do not sign their sessions with each other.
Sessions stay up. A node that cannot reach the datastore continues to sign, and its
sessions end with their hold time.

Run this, or remove the annotation routerd.io/bgpKeys of the host's Node, before a
host returns to a version of routerd without mesh keys, or to Calico: the other nodes
rely on what its Node says it has.`,
		Example: "  routerctl bgp key off", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				if err := store.DropBGPKey(ctx, s); err != nil {
					return err
				}
				fmt.Fprintln(a.stdout, "Sessions between nodes are no longer signed.")
				return nil
			})
		},
	}
}
