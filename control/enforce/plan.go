package enforce

import (
	"errors"
	"maps"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
)

// Plan returns the rules that this host has by what the datastore holds, and the step that a
// change of that leads to. A calculator like that of [Enforcer.Run] computes both.
func (e *Enforcer) Plan(holds, changes []*cluster.Change) (*filter.Ruleset, filter.Delta, error) {
	e.mu.Lock()
	known, underlay, seen := e.own != nil, e.underlay, maps.Clone(e.seen)
	e.mu.Unlock()
	if !known {
		return nil, filter.Delta{}, errors.New("this host's addresses are not known yet")
	}
	calc := e.calculator()
	addrs, links := interfaces(underlay)
	calc.SetHostLinks(links)
	calc.SetInterfaces(addrs)
	calc.HandleStore(cluster.Step{Changes: holds, Synced: true})
	for node, from := range seen {
		calc.SetSources(node, from)
	}
	calc.Flush()
	before := calc.Snapshot()
	calc.HandleStore(cluster.Step{Changes: changes})
	d, _ := calc.Flush()
	return before, d, nil
}
