package engine

import (
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// pathOf is a path as others see it.
func (c *core) pathOf(prefix wire.Prefix, p rib.Path) Path {
	out := Path{
		Prefix: prefix.Netip(), Set: p.Set, View: c.sets.View(p.Set), Best: p.Best, Multi: p.Multi, Stale: p.Stale, Accepted: p.Usable, Since: c.since(p.Since),
	}
	if from := c.numbers[p.Peer]; from != nil {
		out.Peer, out.RouterID, out.External = from.config.Addr, from.open.ID, from.external
	}
	return out
}

// news is events that wait to be read.
type news struct {
	events []pending
	taken  [wire.Families]int // changes, so far
}

// pending is an event, and how many changes of each family go before it.
type pending struct {
	Event
	after [wire.Families]int
}

// tell queues an event for the caller.
func (c *core) tell(e Event) {
	e.Time = c.now
	p := pending{Event: e}
	if e.Kind == EndOfRIB || e.Kind == Withdrawn {
		for f := range wire.Family(wire.Families) {
			p.after[f] = c.news.taken[f] + c.rib.Pending(forCaller, f)
		}
	}
	c.news.events = append(c.news.events, p)
}

// take hands on what the caller has not read; see [Engine.Take].
func (c *core) take(n int, event func(Event), change func(wire.Prefix, func(func(*Path) bool))) (more bool) {
	hand := func() {
		c.news.events = slices.DeleteFunc(c.news.events, func(p pending) bool {
			for f, after := range p.after {
				if c.news.taken[f] < after {
					return false
				}
			}
			if p.Kind != EndOfRIB || c.stands(p.Event) {
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
			c.path = c.pathOf(at, p)
			if !yield(&c.path) {
				return
			}
		}
	}
	c.rib.Changes(forCaller, n, func(prefix wire.Prefix, chosen rib.Paths) {
		c.news.taken[prefix.Family]++
		at, paths = prefix, chosen
		change(prefix, all)
	})
	hand()
	return c.unread()
}

// stands reports whether the session of an event is the one that its peer has: there may be another one by now, which
// has announced nothing yet.
func (c *core) stands(e Event) bool {
	p := c.peers[e.Peer]
	return p != nil && p.session == e.Session
}

// unread reports whether there is something to take.
func (c *core) unread() bool {
	return len(c.news.events) > 0 || c.rib.Pending(forCaller, wire.IPv4)+c.rib.Pending(forCaller, wire.IPv6) > 0
}

// matches reports whether a prefix is asked for.
func (q *Query) matches(p netip.Prefix) bool {
	return !q.Prefix.IsValid() || q.Prefix.Bits() <= p.Bits() && q.Prefix.Contains(p.Addr())
}

// query answers a query in steps: it returns what does the next one, and reports when
// all is said. A peer that is not known has no paths.
func (c *core) query(q Query, yield func(*Path) bool) (next func() (done bool)) {
	stopped := false
	hand := func(prefix wire.Prefix, all func(func(rib.Path) bool)) {
		if stopped {
			return
		}
		for p := range all {
			c.path = c.pathOf(prefix, p)
			path := &c.path
			if q.Table == Received {
				if !path.Peer.IsValid() || q.Peer.IsValid() && path.Peer != q.Peer {
					continue
				}
				path.Set = c.sets.Base(p.Set)
				path.View = c.sets.View(path.Set)
			}
			if !yield(path) {
				stopped = true
				return
			}
		}
	}
	advertise := func(prefix wire.Prefix, set attrs.Handle) {
		if p := prefix.Netip(); !stopped && q.matches(p) {
			stopped = !yield(&Path{Prefix: p, Set: set, View: c.sets.View(set), Accepted: true})
		}
	}
	exact := q.Exact && q.Prefix.IsValid()
	if q.Table == Advertised {
		var at group.Cursor
		return func() bool {
			p := c.peers[q.Peer]
			switch {
			case p == nil || p.member == nil:
				return true
			case exact:
				prefix := wire.FromNetip(q.Prefix)
				if h := p.updates.Lookup(p.number, prefix); h != 0 {
					advertise(prefix, h)
				}
				return true
			}
			return p.updates.Scan(&at, step, p.number, advertise) || stopped
		}
	}
	var at rib.Cursor
	return func() bool {
		if exact {
			prefix := wire.FromNetip(q.Prefix)
			hand(prefix, c.rib.Paths(prefix).All)
			return true
		}
		return c.rib.Scan(&at, step, func(prefix wire.Prefix, all rib.Paths) {
			if q.matches(prefix.Netip()) {
				hand(prefix, all.All)
			}
		}) || stopped
	}
}

// status is how a peer is, but for what its connections know.
func (c *core) status(p *peer) Status {
	s := Status{Addr: p.config.Addr, Session: p.session, RouterID: p.open.ID, Local: p.local, Limited: p.limited}
	for f := range wire.Family(wire.Families) {
		o := &s.Families[f]
		fresh, stale := c.rib.Count(p.number, f)
		o.Received, o.Stale, o.Accepted = fresh+stale, stale, fresh+stale-c.rib.Refused(p.number, f)
		if p.member != nil {
			o.Enabled, o.Advertised = p.session.Wire.Family[f].Enabled, p.updates.Advertised(p.number, f)
		}
	}
	return s
}

// ordered are the peers in the order of their addresses.
func (c *core) ordered() []*peer {
	out := make([]*peer, 0, len(c.peers))
	for _, p := range c.peers {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *peer) int { return a.config.Addr.Compare(b.config.Addr) })
	return out
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
				return concerns(c.numbers[path.Peer]) && in.has(prefix.Netip())
			}
		}
		w.Rewrite = func(prefix wire.Prefix, path rib.Path) (attrs.Handle, bool) {
			p := c.numbers[path.Peer]
			if !concerns(p) || !in.all && !in.has(prefix.Netip()) {
				c.sets.Retain(path.Set)
				return path.Set, path.Usable
			}
			return c.rewritten(p, prefix, path)
		}
		c.later(func(n int) bool { return c.rib.Step(w, n) }, nil)
	}
	if !s.Export {
		return
	}
	var at rib.Cursor
	c.later(func(n int) bool {
		var groups []*updates
		for _, u := range c.groups {
			if s.Peers == nil || slices.ContainsFunc(s.Peers, func(a netip.Addr) bool { p := c.peers[a]; return p != nil && (p.updates == u || p.moving == u) }) {
				u.forget(c.sets)
				groups = append(groups, u)
			}
		}
		return c.rib.Scan(&at, n, func(prefix wire.Prefix, all rib.Paths) {
			if in.all || in.has(prefix.Netip()) {
				for _, u := range groups {
					c.export(u, prefix, all)
				}
			}
		})
	}, nil)
}
