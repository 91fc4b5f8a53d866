package bgp

import (
	"context"
	"errors"
	"net/netip"
	"slices"
)

// Hidden is a prefix of this node's that is not advertised to a peer because a BGPFilter refuses it.
type Hidden struct {
	Prefix netip.Prefix
	Peer   Peer
	Filter string // the BGPFilter
	Reason string // which of its rules
}

// Hidden lists which of these prefixes, where this node announces them, BGPFilters keep
// from peers whose sessions are up. Peers without filters cost nothing.
func (c *Controller) Hidden(ctx context.Context, prefixes []netip.Prefix) ([]Hidden, error) {
	return c.speaker.hidden(ctx, prefixes)
}

func (s *Speaker) hidden(ctx context.Context, prefixes []netip.Prefix) ([]Hidden, error) {
	e, policy, peers := s.snapshot()
	if e == nil {
		return nil, nil
	}
	type judge struct {
		Peer
		of func(*judged) verdict
	}
	var filtered []judge
	for a, p := range peers {
		if p.Filters != "" && s.silent(a) == "" {
			filtered = append(filtered, judge{p, policy.exportsOf(p)})
		}
	}
	if len(filtered) == 0 {
		return nil, nil
	}
	slices.SortFunc(filtered, func(a, b judge) int { return a.id().Compare(b.id()) })
	var out []Hidden
	for _, prefix := range prefixes {
		err := s.Query(ctx, Query{Table: TableBest, Prefix: prefix, Exact: true}, func(r Route) bool {
			for _, p := range filtered {
				v := p.of(r.judged())
				if r.Own && !v.accept && v.rule != nil && p.carriesOf(prefix) {
					out = append(out, Hidden{Prefix: prefix, Peer: p.Peer, Filter: v.rule.filter, Reason: v.reason()})
				}
			}
			return false
		})
		if err != nil && !errors.Is(err, ErrNoPeer) {
			return nil, err
		}
	}
	return out, nil
}
