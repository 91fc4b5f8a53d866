package bgp

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// Announcer is a node, and how it announces an address of a Service.
type Announcer struct {
	Node string
	service.Reach
}

// Announcers says of every node how it announces an address of a Service, as the datastore
// has it now. The error is [ErrNotSynced] while that is not known.
func (c *Controller) Announcers(of store.Key, a netip.Addr) ([]Announcer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.view.synced {
		return nil, ErrNotSynced
	}
	return c.view.announcers(of, a), nil
}

func (v *View) announcers(of store.Key, a netip.Addr) []Announcer {
	var out []Announcer
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		r := service.Reach{}
		switch n := v.nodes[name]; {
		case !v.speaks(name):
			r.Why = "it takes no part in BGP"
		case n.labels[excludeLabel] == "true":
			r.Why = "its label " + excludeLabel + " keeps Services' addresses off it"
		case name == v.self && v.held[a]:
			r.Why = "it is flapping, and is held back for now"
		default:
			r = v.services.Reach(name, of, a)
		}
		out = append(out, Announcer{name, r})
	}
	return out
}
