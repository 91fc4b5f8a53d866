package engine

import (
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/group"
	"github.com/routerd/routerd/control/bgp/engine/rib"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// stage is why a peer's stale paths of a family are kept.
type stage uint8

const (
	nothing    stage = iota // there are none, or they are going
	awaited                 // the peer may come back within its restart time (RFC 4724)
	longLived               // it has not (RFC 9494)
	announcing              // it announces all of them again
)

// announcingTime bounds for how long a peer may announce its table anew until what
// it has not announced goes.
const announcingTime = 6 * time.Minute

// familyState is how far a peer's restart is, for a family.
type familyState struct {
	stage stage
	until time.Time
	ended bool // End-of-RIB came since the session is up
}

// llgrStale is the community of RFC 9494.
const llgrStale = 0xffff0006

// retention keeps what peers have announced over their restarts.
type retention struct {
	table  *table
	agenda *agenda
	events *events
}

// up applies that a session is established.
func (c *core) up(p *peer, s *fsm.Session, wake func()) {
	if p.removed {
		return
	}
	known := p.open.ID
	p.session, p.open = s, s.Peer
	p.decoder = wire.Decoder{Session: s.Wire}
	p.context = attrs.Context{External: p.external, AS4: s.AS4, Reachable: true, Local: Remote(p.config.Addr).IsLoopback()}
	c.table.rib.SetPeer(p.number, p.info())
	c.events.add(p, Event{Kind: Up, Session: s})
	c.tap.up(p)
	held := false
	for f := range wire.Family(wire.Families) {
		p.families[f].ended = false
		_, stale := c.table.rib.Count(p.number, f)
		if held = held || stale > 0; stale == 0 {
			p.families[f] = familyState{}
			continue
		}
		t := &s.Peer.Family[f]
		// F is not asked for, unlike in RFC 4724 section 4.2: BIRD's dynamic neighbours
		// come back without it though their host forwards as before.
		kept := s.GracefulRestart && t.Restart
		if p.families[f].stage == longLived {
			kept = kept || t.StaleTime > 0 && t.LongLivedForwarding
		}
		if !s.Wire.Family[f].Enabled || !kept {
			c.kept.sweep(p, f)
			continue
		}
		c.kept.keep(p, f, announcing, announcingTime)
	}
	for _, u := range c.groups.list {
		u.forget() // the router id is in what was reflected
	}
	if held && known != p.open.ID {
		w := &rib.Walk{Peer: p.number, Task: rib.Choose}
		c.agenda.walk(c.table, w, nil)
	}
	c.groups.join(p, group.MemberOptions{HoldEOR: c.starting.on, Wake: wake})
	if !c.starting.on {
		c.agenda.order(orderForwarding, p)
	}
	c.checkRestarted()
	c.settle()
}

// down applies that a session has ended.
func (c *core) down(p *peer, s *fsm.Session, r fsm.Reason) {
	if p.session != s {
		return
	}
	c.tap.down(p, r)
	c.groups.leave(p)
	p.session = nil
	retained, kept := r.Retains(s), [wire.Families]bool{}
	for f := range kept {
		kept[f] = retained && !p.limited && s.Peer.Family[f].Restart
	}
	if !p.removed {
		c.events.add(p, Event{Kind: Down, Session: s, Reason: r, Retained: kept != [wire.Families]bool{}, Limited: p.limited})
	}
	for f := range wire.Family(wire.Families) {
		c.table.rib.Restart(p.number, f)
		switch {
		case !kept[f]:
			c.kept.sweep(p, f)
		case s.Peer.RestartTime > 0:
			c.kept.keep(p, f, awaited, s.Peer.RestartTime)
		default:
			c.kept.expire(p, f)
		}
	}
	if kept == [wire.Families]bool{} {
		c.kept.withdrawn(p)
	}
	if p.limited {
		c.agenda.order(orderPause, p)
	}
	c.settle()
}

// keep notes why and for how long stale paths are kept.
func (r *retention) keep(p *peer, f wire.Family, why stage, time time.Duration) {
	p.families[f].stage, p.families[f].until = why, r.table.now.Add(time)
	r.agenda.poke()
}

// withdrawn reports, after what is under way, that what a peer had announced is gone: also of
// a peer that has been removed meanwhile, for the end of its session was reported.
func (r *retention) withdrawn(p *peer) {
	r.agenda.after(func() { r.events.add(p, Event{Kind: Withdrawn}) })
}

// sweep removes a peer's stale paths of a family, in steps.
func (r *retention) sweep(p *peer, f wire.Family) {
	p.families[f].stage, p.families[f].until = nothing, time.Time{}
	if _, stale := r.table.rib.Count(p.number, f); stale == 0 {
		return
	}
	w := r.table.rib.Sweep(p.number, f)
	r.agenda.walk(r.table, w, nil)
}

// expire ends the time within which a peer was to come back: its paths are kept for
// longer, as the last choice, or go.
func (r *retention) expire(p *peer, f wire.Family) {
	own, theirs := p.config.Families[f].StaleTime, p.open.Family[f].StaleTime
	_, stale := r.table.rib.Count(p.number, f)
	if own == 0 || theirs == 0 || stale == 0 {
		r.sweep(p, f)
		return
	}
	r.keep(p, f, longLived, min(own, theirs))
	r.table.rib.SetLongLived(p.number, f)
	w := &rib.Walk{Peer: p.number, Task: rib.Rewrite, Family: f, OneFamily: true}
	w.Rewrite = func(_ wire.Prefix, path rib.Path) (attrs.Handle, bool) {
		flags := r.table.sets.Summary(path.Set).Flags
		switch {
		case !r.table.rib.LongLived(p.number, f): // the session has come and gone again
		case path.Stale && flags&attrs.NoLLGR != 0:
			return 0, false
		case path.Stale && flags&attrs.LLGRStale == 0:
			return r.table.tagStale(path.Set), path.Usable
		}
		r.table.sets.Retain(path.Set)
		return path.Set, path.Usable
	}
	r.agenda.walk(r.table, w, nil)
}

// lapse lets a peer's times run out.
func (r *retention) lapse(p *peer) {
	expired := false
	for f := range wire.Family(wire.Families) {
		s := &p.families[f]
		if s.stage == nothing || r.table.now.Before(s.until) {
			continue
		}
		if s.stage != awaited {
			r.sweep(p, f)
			r.goneIfDown(p)
			continue
		}
		if !expired {
			r.events.add(p, Event{Kind: Expired})
		}
		expired = true
		if r.expire(p, f); s.stage == nothing {
			r.goneIfDown(p)
		}
	}
}

// goneIfDown reports that nothing is kept of a peer any more, once that is so.
func (r *retention) goneIfDown(p *peer) {
	if p.session != nil {
		return
	}
	for f := range p.families {
		if p.families[f].stage != nothing {
			return
		}
	}
	r.withdrawn(p)
}

// unreachable removes what is kept of a peer whose session has ended: it does not forward any more.
func (r *retention) unreachable(p *peer) {
	if p.session != nil {
		return
	}
	reported := false
	for f := range wire.Family(wire.Families) {
		if p.families[f].stage == nothing {
			continue
		}
		if !reported {
			r.events.add(p, Event{Kind: Lost})
			reported = true
		}
		r.sweep(p, f)
		r.goneIfDown(p)
	}
}

// endOfRIB applies that a peer has announced all of a family: what it has not, goes.
func (c *core) endOfRIB(p *peer, f wire.Family) {
	p.families[f].ended = true
	if p.families[f].stage == announcing {
		c.kept.sweep(p, f)
	}
	s := p.session
	c.agenda.after(func() { c.events.add(p, Event{Kind: EndOfRIB, Session: s, Family: f}) })
	c.checkRestarted()
}

// tick lets times run out.
func (c *core) tick() {
	for _, p := range c.ordered() {
		c.kept.lapse(p)
	}
	if c.starting.on && !c.table.now.Before(c.starting.until) {
		c.restarted()
	}
	c.settle()
}

// next is when tick has to be called; zero: no time is running.
func (c *core) next() (at time.Time) {
	earliest := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	for _, p := range c.peers {
		for _, s := range p.families {
			if s.stage != nothing {
				earliest(s.until)
			}
		}
	}
	if c.starting.on {
		earliest(c.starting.until)
	}
	return at
}

// restarting is the time after a restart of this side in which no peer is sent
// End-of-RIB, which says that it has all that there is.
type restarting struct {
	on         bool
	until      time.Time
	incomplete int // how many know of peers or paths that are yet to come
}

// checkRestarted ends it early, when every peer has announced all it has, and that is judged and advertised.
func (c *core) checkRestarted() {
	if !c.starting.on {
		return
	}
	all := len(c.peers) > 0
	for _, p := range c.peers {
		p.complete = p.complete || p.announcedAll()
		all = all && p.complete
	}
	if all && c.starting.incomplete == 0 && c.agenda.idle() {
		c.restarted()
	}
}

// incomplete counts who knows of peers or paths that are yet to come.
func (c *core) incomplete(n int) {
	c.starting.incomplete += n
	c.checkRestarted()
}

// announcedAll reports whether a peer has announced all it has.
func (p *peer) announcedAll() bool {
	if p.session == nil {
		return false
	}
	for f := range p.families {
		if p.session.Wire.Family[f].Enabled && p.open.GracefulRestart && !p.families[f].ended {
			return false
		}
	}
	return true
}

// restarted ends it.
func (c *core) restarted() {
	c.starting.on = false
	c.settle()
	for _, p := range c.ordered() {
		if p.member != nil {
			p.member.AllowEOR()
			c.agenda.order(orderForwarding, p)
		}
	}
	c.agenda.order(orderRestarted, nil)
}
