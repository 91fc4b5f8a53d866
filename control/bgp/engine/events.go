package engine

import (
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// events is what waits to be read, together with the changes of the table.
type events struct {
	table *table
	list  []pending
	taken [wire.Families]int // changes, so far
}

// pending is an event, and how many changes of each family go before it.
type pending struct {
	Event
	peer  *peer
	after [wire.Families]int
}

// add queues an event of a peer for the caller.
func (v *events) add(of *peer, e Event) {
	e.Peer, e.Time = of.config.Addr, v.table.now
	p := pending{Event: e, peer: of}
	if e.Kind == EndOfRIB || e.Kind == Withdrawn {
		for f := range wire.Family(wire.Families) {
			p.after[f] = v.taken[f] + v.table.rib.Pending(forCaller, f)
		}
	}
	v.list = append(v.list, p)
}

// take hands on what the caller has not read; see [Engine.Take].
func (v *events) take(n int, event func(Event), change func(wire.Prefix, func(func(*Path) bool))) (more bool) {
	hand := func() {
		v.list = slices.DeleteFunc(v.list, func(p pending) bool {
			for f, after := range p.after {
				if v.taken[f] < after {
					return false
				}
			}
			// There may be another session by now, which has announced nothing yet.
			if p.Kind != EndOfRIB || p.peer.session == p.Session {
				event(p.Event)
			}
			return true
		})
	}
	hand()
	// One function and one path for all prefixes: they are many.
	var at wire.Prefix
	var paths rib.Paths
	all := func(yield func(*Path) bool) {
		for p := range paths.All {
			v.table.path = v.table.pathOf(at, p)
			if !yield(&v.table.path) {
				return
			}
		}
	}
	v.table.rib.Changes(forCaller, n, func(prefix wire.Prefix, chosen rib.Paths) {
		v.taken[prefix.Family]++
		at, paths = prefix, chosen
		change(prefix, all)
	})
	hand()
	return v.unread()
}

// unread reports whether there is something to take.
func (v *events) unread() bool {
	return len(v.list) > 0 || v.table.rib.Pending(forCaller, wire.IPv4)+v.table.rib.Pending(forCaller, wire.IPv6) > 0
}
