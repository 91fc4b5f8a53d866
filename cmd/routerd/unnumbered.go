package main

import (
	"context"
	"time"

	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/dataplane/adjacent"
)

// adjacentRetry is between two attempts to listen to neighbours.
const adjacentRetry = 10 * time.Second

// newAdjacent makes what finds the neighbours of BGP sessions over link-local
// addresses.
func (d *router) newAdjacent() *adjacent.Tracker {
	return adjacent.New(d.log.With("component", "adjacent"), func(links map[string]adjacent.Link) {
		out := map[string]bgp.Link{}
		for name, l := range links {
			out[name] = bgp.Link(l)
		}
		d.bgp.SetAdjacent(out)
	})
}

// runAdjacent follows neighbours. That it cannot concerns those sessions alone.
func (d *router) runAdjacent(ctx context.Context) error {
	for {
		err := d.adjacent.Run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		d.log.Warn("neighbours over link-local addresses are not followed; trying again", "error", err, "pause", adjacentRetry)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(adjacentRetry):
		}
	}
}
