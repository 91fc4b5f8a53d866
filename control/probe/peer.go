package probe

import (
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// request is a probe that waits for its answer.
type request struct {
	nonce   uint64
	to      netip.AddrPort
	sent    time.Time
	anyPort bool
	size    int
}

// peer is what is known of a target.
type peer struct {
	wake
	key    peerKey
	target *dataplane.ProbeTarget

	cands     []*candidate // best first
	chosen    *candidate   // nil: none has answered yet
	up        bool         // it answers
	neighbour dataplane.Answer
	round     uint32    // of the last list of targets that had it
	out       []request // probes under way; nil: none, as nearly always
	search    *search   // nil: nothing was asked of a size, as of a peer that never answers
	seed      *known    // of the previous run, or of another encapsulation, until something is measured; nil: nothing

	clock    clock // as its latest answer says
	newest   int64 // time in the newest request, by the peer's clock
	newestAt time.Time
	learned  time.Time      // when a source was last learned
	seen     netip.AddrPort // this host, as the peer sees it
	sources  []source       // whence its packets come, the latest first

	reach dataplane.Reach
	pin   netip.AddrPort
}

// known is what outlives the daemon of a peer.
type known struct {
	Reach dataplane.Reach
	Pin   netip.AddrPort // where VXLAN must send from its own port; invalid: nowhere
}

func (k known) zero() bool { return k == known{} }

func (p *peer) known() known { return known{p.reach, p.pin} }

// setTarget sets the target as it is now. Addresses that stay keep what is
// known of them.
func (p *peer) setTarget(now time.Time, t *dataplane.ProbeTarget) {
	if localOf(p.target) != localOf(t) {
		// Other sockets, other mappings.
		p.cands = nil
		p.out = nil
		if p.target.Uplink == t.Uplink && p.target.Local.Addr() == t.Local.Addr() && p.target.Registered == t.Registered {
			p.changeEncap(t)
		} else {
			p.seen = netip.AddrPort{}
			p.neighbour, p.reach.Near = dataplane.Unknown, dataplane.Unknown
		}
	}
	p.target = t
	if !probed(t) {
		p.cands, p.chosen, p.reach, p.pin = nil, nil, dataplane.Reach{Near: p.reach.Near}, netip.AddrPort{}
		return
	}
	old := p.cands
	p.cands = nil
	keep := func(r rank, to netip.AddrPort) {
		if !to.Addr().IsValid() || p.find(to) != nil {
			return
		}
		c := &candidate{to: to, next: now, anyNext: now}
		if i := slices.IndexFunc(old, func(c *candidate) bool { return c.to == to }); i >= 0 {
			c = old[i]
		}
		c.rank = r
		p.cands = append(p.cands, c)
	}
	keep(registered, netip.AddrPortFrom(t.Registered, t.Encap.Port))
	keep(public, netip.AddrPortFrom(t.Public, t.Encap.Port))
	for _, c := range old {
		if c.rank == learned {
			keep(learned, c.to)
		}
	}
	p.start(keep)
	if p.chosen != nil && p.find(p.chosen.to) != p.chosen {
		p.chosen = nil
	}
	p.again(now)
}

// changeEncap carries over what is known to another encapsulation. The former one
// may carry packets still, and there is one result for both, so nothing moves
// before there are answers in the new one. Neighbours do not depend on it.
// Translators that kept the old port will keep the new one. A port that a
// translator gave stays, for the former one, until the peer's probes have opened
// another mapping; from then on it is that of the new one alone.
func (p *peer) changeEncap(t *dataplane.ProbeTarget) {
	old, now := p.target.Encap.Port, t.Encap.Port
	other := func(a netip.AddrPort) netip.AddrPort {
		if a.IsValid() && a.Port() == old {
			return netip.AddrPortFrom(a.Addr(), now)
		}
		return a
	}
	p.seen = other(p.seen)
	if !probed(p.target) || !probed(t) {
		return
	}
	seed := p.known()
	seed.Pin = other(seed.Pin)
	if now == 0 {
		seed.Reach.Port, seed.Pin = 0, netip.AddrPort{}
	}
	p.seed = &seed
}

// start begins where the previous run, or the encapsulation before, left off:
// neither changes anything while the first answers are on their way.
func (p *peer) start(keep func(rank, netip.AddrPort)) {
	s := p.seed
	p.seed = nil
	if s == nil || s.zero() {
		return
	}
	p.reach, p.pin, p.neighbour = s.Reach, s.Pin, s.Reach.Near
	if s.Reach.Addr.IsValid() {
		to := netip.AddrPortFrom(s.Reach.Addr, p.target.Encap.Port)
		if s.Reach.Port != 0 {
			to = netip.AddrPortFrom(s.Reach.Addr, s.Reach.Port)
		}
		keep(learned, to)
		p.chosen = p.find(to)
	} else if s.Pin.IsValid() {
		p.chosen = p.find(s.Pin)
	}
	if p.chosen != nil {
		p.chosen.up, p.chosen.ever = true, true
		p.chosen.any = dataplane.Yes
		if s.Pin.IsValid() {
			p.chosen.any = dataplane.No
		}
	}
	p.sizes().result = s.Reach.MTU
}

// sizes is the search for the largest packet.
func (p *peer) sizes() *search {
	if p.search == nil {
		p.search = new(search)
	}
	return p.search
}

// size is the largest packet; 0: the device's, or not known yet.
func (p *peer) size() int {
	if p.search == nil {
		return 0
	}
	return p.search.result
}

func (p *peer) find(to netip.AddrPort) *candidate {
	i := slices.IndexFunc(p.cands, func(c *candidate) bool { return c.to == to })
	if i < 0 {
		return nil
	}
	return p.cands[i]
}

// done ends a probe.
func (p *peer) done(nonce uint64) {
	p.out = slices.DeleteFunc(p.out, func(r request) bool { return r.nonce == nonce })
	if len(p.out) == 0 {
		p.out = nil // thousands of peers would keep room for some
	}
}

// again asks all addresses and the size anew.
func (p *peer) again(now time.Time) {
	for _, c := range p.cands {
		c.next, c.anyNext = now, now
	}
	if p.search != nil {
		p.search.to = netip.AddrPort{}
	}
}

// fresh reports whether a request is one of the last few seconds by the peer's
// own clock. A clock that was set back is believed after a minute.
func (p *peer) fresh(now time.Time, t int64) bool {
	const (
		window  = int64(5 * time.Second)
		believe = time.Minute
	)
	if t < p.newest-window && now.Sub(p.newestAt) < believe {
		return false
	}
	if t > p.newest || now.Sub(p.newestAt) >= believe {
		p.newest, p.newestAt = t, now
	}
	return true
}

// maxLearned is how many sources of a peer are kept beside its own addresses:
// the mapping in use and the one that replaces it.
const maxLearned = 2

// received notes where a request came from. It reports whether there is something
// to be asked at once: a peer that speaks is there again, and a
// source that is none of its addresses is where a translator may let us in.
// What is learned counts only after an answer from there.
func (p *peer) received(now time.Time, from netip.AddrPort) bool {
	if !probed(p.target) {
		return false
	}
	if c := p.find(from); c != nil {
		if c.up || now.Sub(c.asked) < retryEvery {
			return false
		}
		c.next = now
		return true
	}
	if now.Sub(p.learned) < retryEvery {
		return false
	}
	p.learned = now
	i := slices.IndexFunc(p.cands, func(c *candidate) bool { return c.rank == learned })
	if i < 0 {
		i = len(p.cands)
	}
	// The newest first: the mapping that it replaces is gone.
	p.cands = slices.Insert(p.cands, i, &candidate{rank: learned, to: from, next: now, anyNext: now})
	for len(p.cands)-i > maxLearned {
		drop := len(p.cands) - 1
		if p.cands[drop] == p.chosen {
			drop--
		}
		p.cands = slices.Delete(p.cands, drop, drop+1)
	}
	return true
}

// prefers reports whether c would be taken instead of the one in use.
func (p *peer) prefers(c *candidate) bool {
	return p.chosen == nil || slices.Index(p.cands, c) < slices.Index(p.cands, p.chosen)
}

// choose takes the best address that answers. One that works is left for a
// better one only after several answers; one that does not, for one that has
// answered since, never for none.
func (p *peer) choose() {
	for _, c := range p.cands {
		switch {
		case c == p.chosen && c.up:
			return
		case c.up && p.instead(c):
			p.chosen = c
			return
		case p.chosen == nil && c.rank == registered && c.misses < 2:
			return // the peer's own address has the first word
		}
	}
}

// instead reports whether to take c, which answers, in place of the one in use.
func (p *peer) instead(c *candidate) bool {
	switch old := p.chosen; {
	case old == nil:
		return true
	case !old.up:
		return c.last.After(old.failed)
	case c.rank == learned && old.rank == learned:
		return true // a translator's new mapping replaces the old
	}
	return c.answers >= answersPrefer
}

// judge derives the result. It reports whether that changed.
func (p *peer) judge() bool {
	r := dataplane.Reach{Near: p.reach.Near, MTU: p.size()}
	var pin netip.AddrPort
	if c := p.chosen; c != nil {
		if c.rank != registered {
			r.Addr = c.to.Addr()
			if c.to.Port() != p.target.Encap.Port {
				r.Port = c.to.Port()
			}
		}
		if c.pinned() {
			pin = c.to
		}
	}
	switch {
	case p.neighbour == dataplane.Yes:
		r.Near = dataplane.Yes
	case p.neighbour == dataplane.No && p.chosen != nil && p.chosen.up:
		// A peer that answers in the encapsulation and not as a neighbour is
		// elsewhere. One that does not answer at all is down,
		// which says nothing about where it is.
		r.Near = dataplane.No
	}
	if r == p.reach && pin == p.pin {
		return false
	}
	p.reach, p.pin = r, pin
	return true
}

// step does what is due for a peer and returns when to look at it again; the
// zero time: when something happens.
func (e *engine) step(p *peer, now time.Time) time.Time {
	if !probed(p.target) {
		return time.Time{}
	}
	e.expire(p, now)
	p.choose()
	if up := p.chosen != nil && p.chosen.up; up != p.up {
		p.up, e.reobserve = up, true
	}
	if e.probeAddresses(p, now) {
		e.probeSize(p, now)
	}
	if p.judge() {
		e.changed[p.key] = true
	}
	return p.next()
}

// expire counts the probes that had no answer.
func (e *engine) expire(p *peer, now time.Time) {
	late := func(pr request) bool { return now.Sub(pr.sent) >= probeTimeout }
	for i := slices.IndexFunc(p.out, late); i >= 0; i = slices.IndexFunc(p.out, late) {
		pr := p.out[i]
		p.done(pr.nonce)
		c := p.find(pr.to)
		switch {
		case c == nil || pr.size > 0:
		case pr.anyPort:
			c.missedAny(now, pr.sent, e.spread(slower*e.interval))
		default:
			c.missed(now, pr.sent, 2*e.interval, e.mute(p.key.node))
			if c == p.chosen && c.misses == 1 {
				// Does another address answer where this one does not?
				for _, o := range p.cands {
					o.next = now
				}
			}
		}
	}
}

// probeAddresses asks the addresses that are due. It reports false when the
// limit of packets was reached.
func (e *engine) probeAddresses(p *peer, now time.Time) bool {
	for _, c := range p.cands {
		any := p.target.Encap.Port != 0 && c.up && !now.Before(c.anyNext)
		if any && c.anyLost || !now.Before(c.next) { // the two together: see [candidate.missedAny]
			if !e.ask(p, now, request{to: c.to}) {
				return false
			}
			// Until the answer or the timeout sets another time.
			c.asked, c.next = now, now.Add(2*probeTimeout)
		}
		if any {
			if !e.ask(p, now, request{to: c.to, anyPort: true}) {
				return false
			}
			c.anyNext = now.Add(2 * probeTimeout)
		}
	}
	return true
}

// probeSize goes on with the search for the size of the path in use.
func (e *engine) probeSize(p *peer, now time.Time) {
	full := e.mtus[p.target.Uplink]
	if p.chosen == nil || full == 0 {
		return
	}
	s := p.sizes()
	pause := e.spread(slower * e.interval)
	switch {
	case !p.chosen.up:
		if s.active {
			s.stop(now, pause)
		}
		return
	case s.to != p.chosen.to || s.full != full:
		s.active = false
		if p.chosen.misses > 0 || p.chosen.last.IsZero() {
			return
		}
		s.start(now, p.chosen.to, full)
	case !s.active && !now.Before(s.next):
		s.check(now)
	}
	for s.settled(now) {
		if s.largest() == 0 && !p.chosen.last.After(s.began) {
			// Too large, or does nothing arrive at present? A small one tells.
			if p.chosen.misses > 0 {
				s.stop(now, pause)
			} else if p.chosen.asked.Before(s.next) {
				p.chosen.next = now
				s.next = now.Add(2 * probeTimeout)
			}
			return
		}
		s.advance(now, floor(p.key.fam), pause)
	}
	sizes := s.due(now)
	if len(sizes) == 0 || !e.sends.take(now, len(sizes)) {
		return
	}
	for _, n := range sizes {
		e.send(p, now, request{to: s.to, size: n})
	}
	s.sent(now)
}

// next is when the peer wants to be looked at again.
func (p *peer) next() time.Time {
	var at time.Time
	sooner := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	for _, pr := range p.out {
		sooner(pr.sent.Add(probeTimeout))
	}
	for _, c := range p.cands {
		sooner(c.next)
		if c.up && p.target.Encap.Port != 0 {
			sooner(c.anyNext)
		}
	}
	if s := p.search; s != nil && (s.active || p.chosen != nil && p.chosen.up && s.to == p.chosen.to) {
		sooner(s.next)
	}
	return at
}

// ask sends a probe if the limit allows it.
func (e *engine) ask(p *peer, now time.Time, pr request) bool {
	if !e.sends.take(now, 1) {
		return false
	}
	e.send(p, now, pr)
	return true
}

func (e *engine) send(p *peer, now time.Time, pr request) {
	pr.nonce, pr.sent = e.random(), now
	m := message{kind: kindRequest, from: e.self, to: p.key.node, nonce: pr.nonce, time: now.UnixNano()}
	if pr.anyPort {
		m.kind = kindAnyPort
	}
	p.out = append(p.out, pr)
	e.out = append(e.out, packet{local: localOf(p.target), to: pr.to, size: pr.size, msg: m})
}
