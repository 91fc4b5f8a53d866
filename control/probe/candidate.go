package probe

import (
	"net/netip"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// peerKey identifies a peer in a family of the underlay.
type peerKey struct {
	node string
	fam  dataplane.Family
}

// localEnd is where this host sends from, towards a target.
type localEnd struct {
	addr  netip.Addr
	encap dataplane.Encap // without the VNI
}

func localOf(t *dataplane.ProbeTarget) localEnd {
	return localEnd{t.Local.Addr(), dataplane.Encap{Driver: t.Encap.Driver, Outer: t.Family, Port: t.Encap.Port}}
}

// probed reports whether probes go to the target. Else only the neighbour table
// is asked.
func probed(t *dataplane.ProbeTarget) bool {
	return t.Encap.Driver == dataplane.DriverVXLAN || t.Encap.Driver == dataplane.DriverIPIP
}

// The pace of probes.
const (
	probeTimeout = time.Second
	retryEvery   = time.Second // while it is not clear whether an address answers
	silentMax    = time.Minute // between probes of an address that never answered

	// The same for a peer whose Node does not say that it has a prober. Should it get
	// one, that one's probes have the peer asked at once.
	mutePause = time.Minute // after the first probe
	muteMax   = 15 * time.Minute

	// What makes an address that answered one that does not, and the reverse;
	// and what makes of "any port passes" that it does not any more.
	missesDown    = 5
	missesAny     = 6
	answersUp     = 2
	answersPrefer = 3 // before leaving an address that works for a better one

	// How much slower those probes go that only look for something better: of
	// addresses that are not in use, from any port, of a packet's full size.
	slower = 4
	// raiseEvery is the number of checks of the size between attempts at a
	// larger one.
	raiseEvery = 10
)

// rank orders a peer's addresses: lower is preferred.
type rank uint8

const (
	registered rank = iota
	public
	learned // where authenticated requests of the peer come from
)

// candidate is an address and port to which tunnels might send.
type candidate struct {
	rank rank
	up   bool // answers, with hysteresis
	ever bool // answered once
	// any says whether packets from any source port get there, as VXLAN's do.
	any     dataplane.Answer
	anyLost bool // the last had no answer

	to      netip.AddrPort // port 0 where the encapsulation has none
	answers int            // in a row
	misses  int            // in a row
	failed  time.Time      // when the first of them was sent
	next    time.Time
	asked   time.Time
	last    time.Time // of the last answer
	rtt     time.Duration

	anyMisses int
	anyNext   time.Time
}

// answered counts an answer to a probe from the tunnel's own port.
func (c *candidate) answered(now time.Time, rtt time.Duration) {
	c.answers++
	c.misses = 0
	c.last, c.rtt = now, rtt
	if !c.ever || c.answers >= answersUp {
		c.up = true
	}
	c.ever = true
}

// missed counts that such a probe had no answer. pause is the longest that
// an address which answered once is left alone; of mute peers no answer is
// expected.
func (c *candidate) missed(now, sent time.Time, pause time.Duration, mute bool) {
	if c.misses == 0 {
		c.failed = sent
	}
	c.answers = 0
	c.misses++
	if c.misses >= missesDown {
		c.up = false
	}
	c.next = now
	switch {
	case mute && !c.ever:
		c.next = now.Add(min(muteMax, mutePause<<min(c.misses-1, 10)))
	case !c.up && c.misses >= missesDown:
		limit := pause
		if !c.ever {
			limit = silentMax
		}
		c.next = now.Add(min(limit, retryEvery<<min(c.misses-missesDown, 10)))
	}
}

// answeredAny counts an answer to a probe from any port.
func (c *candidate) answeredAny(now time.Time, pause time.Duration) {
	c.any, c.anyMisses, c.anyLost, c.anyNext = dataplane.Yes, 0, false, now.Add(pause)
}

// missedAny counts that a probe from any port, sent at that time, had no answer. It is
// a loss only beside an answer to one from the tunnel's own port that left with
// it or later, and while none of those is lost: else the address as a whole may have been
// away, as it is while the peer's daemon starts.
func (c *candidate) missedAny(now, sent time.Time, pause time.Duration) {
	c.anyLost = true
	if c.misses > 0 || !c.up || c.last.Add(-c.rtt).Before(sent) {
		c.anyNext = now.Add(retryEvery)
		return
	}
	c.anyNext = now
	if c.anyMisses++; c.anyMisses >= missesAny {
		c.any, c.anyMisses, c.anyNext = dataplane.No, 0, now.Add(pause)
	}
}

// pinned reports whether only packets from the tunnel's own port pass for
// sure. The peer's own address is given the benefit of the doubt, for there it
// takes a firewall to make a difference; translators are known for it.
func (c *candidate) pinned() bool {
	if c.to.Port() == 0 {
		return false
	}
	return c.any == dataplane.No || c.any == dataplane.Unknown && c.rank != registered
}
