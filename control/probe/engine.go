package probe

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// packet is a message to be sent.
type packet struct {
	local localEnd
	to    netip.AddrPort
	size  int // of the whole outer packet in bytes; 0: as small as it gets
	msg   message
}

// engine decides what to send over the underlay and what to make of answers. It knows no sockets
// and no clock: every call says what time it is. One goroutine uses it.
type engine struct {
	self     string
	interval time.Duration
	// random is for nonces and for spreading probes in time.
	random func() uint64
	// mute reports whether a node is known to have no prober.
	mute func(node string) bool

	peers map[peerKey]*peer
	round uint32 // of lists of targets
	queue schedule[*peer]
	gone  map[peerKey]remembered // peers that are not targets at present
	mtus  map[string]int         // of uplinks, bytes

	out, sent []packet                        // by the next tick, and by the last
	changed   map[peerKey]bool                // of whom something else may be known than was published
	moved     map[string]bool                 // nodes whose packets come from other addresses than was published
	public    map[dataplane.Family]netip.Addr // this host's address behind a 1:1 NAT
	observed  map[dataplane.Family]bool       // some peer said how it sees this host
	reobserve bool                            // that may have changed

	sends, replies *bucket

	// What arrived and was of no use.
	unknown, replayed, unasked uint64
}

func newEngine(self string, interval time.Duration, now time.Time) *engine {
	return &engine{
		self: self, interval: interval, random: rand.Uint64, mute: func(string) bool { return false },
		peers: map[peerKey]*peer{}, gone: map[peerKey]remembered{}, mtus: map[string]int{},
		changed: map[peerKey]bool{}, moved: map[string]bool{}, public: map[dataplane.Family]netip.Addr{},
		observed: map[dataplane.Family]bool{},
		sends:    newBucket(sendRate, sendRate, now), replies: newBucket(replyRate, replyRate, now),
	}
}

// How many packets a second this host sends at most, of its own accord and in
// answer to others: with the usual interval probes of 7,500 peers.
const (
	sendRate  = 500
	replyRate = 2000
	// shortPause lets some tokens come together.
	shortPause = 20 * time.Millisecond
)

// spread returns a time between nine tenths of d and d: probes to many peers
// do not stay in step, and a mapping is never held longer than d.
func (e *engine) spread(d time.Duration) time.Duration {
	return d - time.Duration(e.random()%uint64(d/10+1))
}

// setTargets replaces the targets. What was measured of those that stay, and of
// addresses that stay, is kept. Nobody changes the list any more: what is in it
// is kept there, once.
func (e *engine) setTargets(now time.Time, targets []dataplane.ProbeTarget) {
	e.round++
	n := 0
	for i := range targets {
		t := &targets[i]
		if t.Tunnel != (dataplane.ProbeTunnel{}) {
			continue
		}
		k := peerKey{t.Node, t.Family}
		p := e.peers[k]
		if p == nil {
			p = &peer{key: k, target: &dataplane.ProbeTarget{ProbePath: &dataplane.ProbePath{}}}
			e.peers[k] = p
			if m, ok := e.gone[k]; ok {
				known := m.known
				p.seed, p.sources = &known, m.sources
				delete(e.gone, k)
			}
			e.changed[k] = true
		}
		if p.round != e.round {
			p.round = e.round
			n++
		}
		if p.target.Equal(*t) {
			p.target = t // and no older list is kept
		} else {
			before := p.known()
			p.setTarget(now, t)
			if p.known() != before {
				e.changed[k] = true
			}
			e.wake(p, now)
		}
	}
	if n < len(e.peers) {
		e.forgetOthers(now)
	}
	e.reobserve = true
}

// forgetOthers drops the peers that the last list of targets did not have.
func (e *engine) forgetOthers(now time.Time) {
	for k, p := range e.peers {
		if p.round == e.round {
			continue
		}
		delete(e.peers, k)
		e.queue.drop(p)
		if known := p.known(); !known.zero() || len(p.sources) > 0 {
			e.gone[k] = remembered{known, p.sources, now.Add(remember)}
		}
		e.changed[k] = true
	}
}

// setUplink sets the MTU of a device. Sizes are measured anew when it changes.
func (e *engine) setUplink(now time.Time, name string, mtu int) {
	if e.mtus[name] == mtu {
		return
	}
	e.mtus[name] = mtu
	for _, p := range e.peers {
		if p.target.Uplink == name {
			p.again(now)
			e.wake(p, now)
		}
	}
}

// again asks everything anew at once, because the network around the host
// changed. What is known stays until the answers say otherwise.
func (e *engine) again(now time.Time) {
	for _, p := range e.peers {
		p.again(now)
		e.wake(p, now)
	}
}

// wake makes sure that the peer is looked at by then.
func (e *engine) wake(p *peer, at time.Time) {
	if p.place == 0 || at.Before(p.at) {
		e.queue.set(p, at)
	}
}

// remembered is what is known of a peer that is not a target: at the start, where
// targets come one after the other, or one whose Node was removed and may be back.
type remembered struct {
	known
	sources []source
	until   time.Time
}

// remember is how long that counts.
const remember = time.Minute

// seed starts from what the previous run knew.
func (e *engine) seed(now time.Time, saved map[peerKey]saved) {
	for k, v := range saved {
		e.gone[k] = remembered{v.known, seeded(now, v.sources), now.Add(remember)}
		e.changed[k] = true
	}
}

// forget ends what was remembered long enough.
func (e *engine) forget(now time.Time) {
	for k, m := range e.gone {
		if !now.Before(m.until) {
			delete(e.gone, k)
			e.changed[k], e.moved[k.node] = true, true
		}
	}
}

// tick does what is due. It returns the packets to be sent, which are valid until the
// next call, and when to call again; the zero time: when something happens.
func (e *engine) tick(now time.Time) ([]packet, time.Time) {
	e.forget(now)
	short := false
	p, ok := e.queue.first()
	for ; ok && !short && !p.at.After(now); p, ok = e.queue.first() {
		next := e.step(p, now)
		switch {
		case next.IsZero():
			e.queue.drop(p)
		case next.After(now):
			e.queue.set(p, next)
		default:
			// At the limit of packets: it keeps its place in the queue.
			short = true
		}
	}
	if e.reobserve {
		e.reobserve = false
		e.findPublic()
	}
	out := e.out
	e.out, e.sent = e.sent[:0], out
	switch {
	case !ok:
		return out, time.Time{}
	case short:
		return out, now.Add(shortPause)
	}
	return out, p.at
}

// arrived handles an authenticated message that came from an address and port
// in the encapsulation of l.
func (e *engine) arrived(now time.Time, l localEnd, from netip.AddrPort, m message) {
	p := e.peers[peerKey{m.from, l.encap.Outer}]
	if m.to != e.self || p == nil {
		e.unknown++
		return
	}
	if m.kind == kindAnswer {
		e.answer(p, now, from, m)
		return
	}
	if !p.fresh(now, m.time) {
		e.replayed++
		return
	}
	e.noteSource(p, now, from.Addr())
	if e.replies.take(now, 1) {
		e.out = append(e.out, packet{local: l, to: from, msg: message{
			kind: kindAnswer, from: e.self, to: m.from, nonce: m.nonce, time: now.UnixNano(), seen: from,
		}})
	}
	if m.kind == kindRequest && l == localOf(p.target) && p.received(now, from) {
		e.wake(p, now)
	}
}

// answer handles the answer to a probe.
func (e *engine) answer(p *peer, now time.Time, from netip.AddrPort, m message) {
	i := slices.IndexFunc(p.out, func(r request) bool { return r.nonce == m.nonce })
	if i < 0 || p.out[i].to.Addr() != from.Addr() {
		// Late, made up, or from an address that nobody asked.
		e.unasked++
		return
	}
	pr := p.out[i]
	p.done(m.nonce)
	p.clock = clock{said: time.Unix(0, m.time), heard: now, within: now.Sub(pr.sent)}
	e.noteSource(p, now, from.Addr())
	c := p.find(pr.to)
	switch {
	case c == nil:
	case pr.anyPort:
		c.answeredAny(now, e.spread(slower*e.interval))
	case pr.size > 0:
		p.sizes().got(pr.size)
	default:
		c.answered(now, now.Sub(pr.sent))
		c.next = now.Add(e.pace(p, c))
		// Another address may lead through another translator.
		if c == p.chosen && p.seen != m.seen {
			p.seen, e.reobserve = m.seen, true
		}
	}
	e.wake(p, now)
}

// pace is the time until the next probe of an address that answers.
func (e *engine) pace(p *peer, c *candidate) time.Duration {
	switch {
	case c == p.chosen:
		return e.spread(e.interval)
	case c.answers < answersPrefer && p.prefers(c):
		return retryEvery
	}
	return e.spread(slower * e.interval)
}

// findPublic finds out as which address peers see this host, where that is not
// its own. What peers say that answer at present counts. Silence says nothing
// about a translator: without such a peer what was found stays, until those who
// said it say something else. An address at which some peer saw another port
// is one that many hosts share; it is not published.
func (e *engine) findPublic() {
	for _, f := range dataplane.Families() {
		delete(e.observed, f)
		now, ever := map[netip.Addr]int{}, map[netip.Addr]int{}
		shared := map[netip.Addr]bool{}
		for k, p := range e.peers {
			if k.fam != f || !p.seen.IsValid() {
				continue
			}
			e.observed[f] = true
			a := p.seen.Addr()
			if a == p.target.Local.Addr() {
				continue
			}
			ever[a]++
			if p.up {
				now[a]++
			}
			if p.seen.Port() != p.target.Encap.Port {
				shared[a] = true
			}
		}
		old := e.public[f]
		var best netip.Addr
		for a, n := range now {
			switch {
			case shared[a]:
			case !best.IsValid(), n > now[best], n == now[best] && a.Less(best):
				best = a
			}
		}
		// The one that was published stays while any peer sees it.
		if !shared[old] && (now[old] > 0 || !best.IsValid() && ever[old] > 0) {
			best = old
		}
		if best.IsValid() {
			e.public[f] = best
		} else {
			delete(e.public, f)
		}
	}
}

// setNear sets whether the peer answers as a neighbour.
func (e *engine) setNear(k peerKey, a dataplane.Answer) {
	p := e.peers[k]
	if p == nil {
		return
	}
	p.neighbour = a
	if p.judge() {
		e.changed[k] = true
	}
}

// reachOf returns what is known of a peer; zero: nothing.
func (e *engine) reachOf(k peerKey) dataplane.Reach {
	if p := e.peers[k]; p != nil {
		return p.reach
	}
	return e.gone[k].Reach
}

// known returns what the next run is to start from, of those peers of which
// anything is known.
func (e *engine) known() map[peerKey]saved {
	out := map[peerKey]saved{}
	for k, m := range e.gone {
		out[k] = saved{m.known, addrsOf(m.sources)}
	}
	for k, p := range e.peers {
		if known := p.known(); !known.zero() || len(p.sources) > 0 {
			out[k] = saved{known, addrsOf(p.sources)}
		}
	}
	return out
}

// pins returns where VXLAN must send from its own port, because packets from
// others do not pass, in order.
func (e *engine) pins() []netip.AddrPort {
	var out []netip.AddrPort
	for _, m := range e.gone {
		if m.Pin.IsValid() {
			out = append(out, m.Pin)
		}
	}
	for _, p := range e.peers {
		if p.pin.IsValid() {
			out = append(out, p.pin)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// port is VXLAN's port; 0: no peer is probed in VXLAN.
func (e *engine) port() uint16 {
	for _, p := range e.peers {
		if port := p.target.Encap.Port; port != 0 {
			return port
		}
	}
	return 0
}
