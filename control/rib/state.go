package rib

import (
	"net/netip"
)

// State is what BGP said to a table: enough to make another one that chooses the
// same routes by the same nodes, pools and blocks.
type State struct {
	paths []Path
	down  []netip.Addr
}

// State returns what the table was given so far.
func (r *RIB) State() State {
	var s State
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

// Update is what BGP said.
func (s State) Update() Update { return Update{Put: s.paths, Down: s.down} }
