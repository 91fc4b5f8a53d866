package rib

import (
	"iter"
	"maps"
	"net/netip"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// State is what a table was given: enough to make another one that chooses the
// same routes.
type State struct {
	blocks map[store.Key]*cluster.Block
	paths  []Path
	down   []netip.Addr
}

// State returns what the table was given so far.
func (r *RIB) State() State {
	s := State{blocks: maps.Clone(r.blocks)}
	for _, rec := range r.prefixes.All() {
		if rec.path != 0 {
			s.paths = append(s.paths, Path{Prefix: rec.prefix(), Announced: r.said.Value(rec.path).Announced})
		}
	}
	for a, is := range r.down {
		if is {
			s.down = append(s.down, a)
		}
	}
	return s
}

// Blocks yields the blocks.
func (s State) Blocks() iter.Seq2[store.Key, *cluster.Block] { return maps.All(s.blocks) }

// Update is what BGP said.
func (s State) Update() Update { return Update{Put: s.paths, Down: s.down} }
