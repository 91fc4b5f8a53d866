package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// How long a write waits for what nodes say of a pool's new mode, and how often it looks.
const (
	followFor   = 8 * time.Second
	followEvery = 200 * time.Millisecond
)

// forcePools has nodes move the pools' packets whatever their probes say.
func forcePools(docs []manifest.Document) {
	for _, d := range docs {
		if p, ok := d.Object.Value.(*v3.IPPool); ok {
			if p.Annotations == nil {
				p.Annotations = map[string]string{}
			}
			p.Annotations[store.AnnotationForce] = string(store.EncapsulationOf(p))
		}
	}
}

// writeAndFollow writes, and then says what nodes say of the pools that are to be carried
// in another way: which peers they cannot move, and why.
func writeAndFollow(ctx context.Context, s store.Store, w io.Writer, v verb, docs []manifest.Document, how writing) error {
	before, err := readPoolFacts(ctx, s)
	if err != nil {
		return err
	}
	if err := write(ctx, s, w, v, docs, how); err != nil || how.dryRun {
		return err
	}
	var pools []string
	for _, d := range docs {
		if p, ok := d.Object.Value.(*v3.IPPool); ok && before.has(p.Name) && !before.unchanged(p) {
			pools = append(pools, p.Name)
		}
	}
	if len(pools) == 0 {
		return nil
	}
	return follow(ctx, s, w, pools)
}

func (c poolFacts) has(pool string) bool { return c.pool(pool) != nil }

func (c poolFacts) pool(name string) *v3.IPPool {
	for _, p := range c.pools {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// follow waits, for a moment, until each node has moved the pools or says why it has not.
func follow(ctx context.Context, s store.Store, w io.Writer, pools []string) error {
	end := time.NewTimer(followFor)
	defer end.Stop()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		c, err := readPoolFacts(ctx, s)
		if err != nil {
			return err
		}
		open := 0
		for _, name := range pools {
			if p := c.pool(name); p != nil {
				open += c.open(p)
			}
		}
		over := open == 0
		if !over {
			select {
			case <-tick.C:
				continue
			case <-end.C:
			case <-ctx.Done():
			}
		}
		for _, name := range pools {
			if p := c.pool(name); p != nil {
				c.report(w, p)
			}
		}
		if err := ctx.Err(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	}
}

// open counts the nodes that have not moved a pool and do not say why.
func (c poolFacts) open(p *v3.IPPool) (n int) {
	m := c.modeOf(p)
	for _, node := range c.nodes {
		f := store.NodeEncapsOf(node)
		if f.Published && f.Sends[p.Name] != m.String() && f.Stays[p.Name] == "" {
			n++
		}
	}
	return n
}

// report says which nodes stay as they were, and why.
func (c poolFacts) report(w io.Writer, p *v3.IPPool) {
	stay := 0
	for _, node := range c.nodes {
		if why := store.NodeEncapsOf(node).Stays[p.Name]; why != "" {
			stay++
			fmt.Fprintf(w, "IPPool(%s) on node %s: %s\n", p.Name, node.Name, why)
		}
	}
	if stay > 0 {
		fmt.Fprintf(w, "Packets to and from them keep their present encapsulation, and none are lost. They move when probes succeed, or with --force.\n")
	}
	if n := c.open(p); n > 0 {
		fmt.Fprintf(w, "IPPool(%s): %d nodes have not moved to %s yet; see routerctl pool status\n", p.Name, n, c.modeOf(p))
	}
}
