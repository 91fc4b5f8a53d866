package engine

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// matches reports whether a prefix is asked for.
func (q *Query) matches(p netip.Prefix) bool {
	return !q.Prefix.IsValid() || q.Prefix.Bits() <= p.Bits() && q.Prefix.Contains(p.Addr())
}

func (q *Query) exact() bool { return q.Exact && q.Prefix.IsValid() }

// query answers a query in steps: it returns what does the next one, and reports when
// all is said. A peer that is not known has no paths.
func (c *core) query(q Query, yield func(*Path) bool) (next func() (done bool)) {
	if q.Table != Advertised {
		return c.table.query(q, yield)
	}
	stopped := false
	hand := func(prefix wire.Prefix, set attrs.Handle) {
		if p := prefix.Netip(); !stopped && q.matches(p) {
			stopped = !yield(&Path{Prefix: p, Set: set, View: c.table.sets.View(set), Accepted: true})
		}
	}
	var at group.Cursor
	return func() bool {
		p := c.peers[q.Peer]
		switch {
		case p == nil || p.member == nil:
			return true
		case q.exact():
			prefix := wire.FromNetip(q.Prefix)
			if h := p.updates.Lookup(p.number, prefix); h != 0 {
				hand(prefix, h)
			}
			return true
		}
		return p.updates.Scan(&at, step, p.number, hand) || stopped
	}
}

// query answers a query of what was received.
func (t *table) query(q Query, yield func(*Path) bool) (next func() (done bool)) {
	stopped := false
	hand := func(prefix wire.Prefix, all func(func(rib.Path) bool)) {
		if stopped {
			return
		}
		for p := range all {
			t.path = t.pathOf(prefix, p)
			path := &t.path
			if q.Table == Received {
				if !path.Peer.IsValid() || q.Peer.IsValid() && path.Peer != q.Peer {
					continue
				}
				path.Set = t.sets.Base(p.Set)
				path.View = t.sets.View(path.Set)
			}
			if !yield(path) {
				stopped = true
				return
			}
		}
	}
	var at rib.Cursor
	return func() bool {
		if q.exact() {
			prefix := wire.FromNetip(q.Prefix)
			hand(prefix, t.rib.Paths(prefix).All)
			return true
		}
		return t.rib.Scan(&at, step, func(prefix wire.Prefix, all rib.Paths) {
			if q.matches(prefix.Netip()) {
				hand(prefix, all.All)
			}
		}) || stopped
	}
}

// within says whether prefixes lie inside one of a list.
type within struct {
	all     bool
	lengths []int
	set     map[netip.Prefix]bool
}

func newWithin(list []netip.Prefix) within {
	w := within{all: list == nil, set: map[netip.Prefix]bool{}}
	for _, p := range list {
		w.set[p.Masked()] = true
		if !slices.Contains(w.lengths, p.Bits()) {
			w.lengths = append(w.lengths, p.Bits())
		}
	}
	return w
}

func (w *within) has(p netip.Prefix) bool {
	if w.all {
		return true
	}
	for _, n := range w.lengths {
		if n > p.Bits() {
			continue
		}
		if q, err := p.Addr().Prefix(n); err == nil && w.set[q] {
			return true
		}
	}
	return false
}

// rejudge judges again what is there, in steps.
func (c *core) rejudge(s Scope) {
	in := newWithin(s.Within)
	concerns := func(p *peer) bool {
		return p != nil && !p.removed && (s.Peers == nil || slices.Contains(s.Peers, p.config.Addr))
	}
	if s.Import {
		w := &rib.Walk{All: true, Task: rib.Rewrite}
		if len(s.Peers) == 1 {
			p := c.peers[s.Peers[0]]
			if p == nil {
				return
			}
			w.All, w.Peer = false, p.number
		}
		if s.Notify {
			w.Notify = func(prefix wire.Prefix, path rib.Path) bool {
				return concerns(c.table.peers[path.Peer]) && in.has(prefix.Netip())
			}
		}
		w.Rewrite = func(prefix wire.Prefix, path rib.Path) (attrs.Handle, bool) {
			p := c.table.peers[path.Peer]
			if !concerns(p) || !in.all && !in.has(prefix.Netip()) {
				c.table.sets.Retain(path.Set)
				return path.Set, path.Usable
			}
			return c.inbound.rewritten(p, prefix, path)
		}
		c.agenda.walk(c.table, w, nil)
	}
	if !s.Export {
		return
	}
	var at rib.Cursor
	c.agenda.later(func(n int) bool {
		var groups []*updates
		for _, u := range c.groups.list {
			if s.Peers == nil || slices.ContainsFunc(s.Peers, func(a netip.Addr) bool { p := c.peers[a]; return p != nil && (p.updates == u || p.moving == u) }) {
				u.forget()
				groups = append(groups, u)
			}
		}
		return c.table.rib.Scan(&at, n, func(prefix wire.Prefix, all rib.Paths) {
			if in.all || in.has(prefix.Netip()) {
				for _, u := range groups {
					u.export(prefix, all)
				}
			}
		})
	}, nil)
}
