package enforce

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// Plan returns the rules that this host has by what the datastore holds, and the step that a
// change of that leads to. A calculator like that of [Enforcer.Run] computes both. others returns the
// endpoints of other hosts, where these are not among what it holds, and is called if rules depend on them;
// nil: they are.
func (e *Enforcer) Plan(holds, changes []*cluster.Change, others func() ([]*cluster.Change, error)) (*filter.Ruleset, filter.Delta, error) {
	e.mu.Lock()
	known, underlay, seen, lacks := e.own != nil, e.underlay, maps.Clone(e.seen), e.lacks
	e.mu.Unlock()
	if !known {
		return nil, filter.Delta{}, errors.New("this host's addresses are not known yet")
	}
	before, d, asks := e.plan(underlay, seen, lacks, holds, changes)
	if !asks || others == nil {
		return before, d, nil
	}
	more, err := others()
	if err != nil {
		return nil, filter.Delta{}, fmt.Errorf("read the endpoints of other hosts, on which the rules depend: %w", err)
	}
	before, d, _ = e.plan(underlay, seen, lacks, slices.Concat(holds, more), changes)
	return before, d, nil
}

func (e *Enforcer) plan(underlay dataplane.Underlay, seen map[string][]netip.Addr, lacks []store.Kind, holds, changes []*cluster.Change) (before *filter.Ruleset, d filter.Delta, asksOthers bool) {
	calc := e.calculator()
	addrs, links := interfaces(underlay)
	calc.SetHostLinks(links)
	calc.SetInterfaces(addrs)
	calc.HandleStore(cluster.Step{Changes: holds, Synced: true, Lacks: lacks})
	for node, from := range seen {
		calc.SetSources(node, from)
	}
	calc.Flush()
	before, asked := calc.Snapshot(), calc.AsksOthers()
	calc.HandleStore(cluster.Step{Changes: changes, Lacks: lacks})
	d, _ = calc.Flush()
	return before, d, asked || calc.AsksOthers()
}
