package bgp

import (
	"maps"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Reset says in a word why an established session ended, for counting.
type Reset string

// The reasons. A session that is taken away or changed by its configuration is
// counted from zero.
const (
	ResetHoldTimer Reset = "hold-timer"            // nothing was heard from the peer
	ResetLost      Reset = "connection-lost"       // the transport ended
	ResetByPeer    Reset = "notification-received" // the peer ended it
	ResetByUs      Reset = "notification-sent"     // the peer did what ends a session
	ResetLimit     Reset = "prefix-limit"          // the peer announced too much
	ResetMalformed Reset = "malformed-message"
	ResetOther     Reset = "other"
)

// Counters is what has happened on a session since this host runs it with its
// present settings.
type Counters struct {
	FSMState    int // RFC 4271 section 8.2.2 as bgpPeerState counts it (RFC 4273): 1 Idle … 6 Established
	Established int // how often the session came up
	Resets      map[Reset]int
	LastReset   Reset // empty: none yet

	Families []FamilyCounts // of a session that is up
	In, Out  Messages
}

// FamilyCounts is prefixes of one address family.
type FamilyCounts struct {
	Family                         string // "ipv4" or "ipv6"
	Received, Accepted, Advertised int
}

// Messages counts BGP messages by type (RFC 4271 section 4.1, RFC 2918).
type Messages struct{ Open, Update, Notification, Keepalive, Refresh uint64 }

// counters is the speaker's part of [Counters].
type counters struct {
	established int
	resets      map[Reset]int
	last        Reset
}

func (c *counters) rose() { c.established++ }

// fell counts the end of a session.
func (c *counters) fell(r Reset) {
	if c.resets == nil {
		c.resets = map[Reset]int{}
	}
	c.resets[r]++
	c.last = r
}

// resetOf says what counts of why a session ended.
func resetOf(r fsm.Reason) Reset {
	switch r.Cause {
	case fsm.HoldTimer:
		return ResetHoldTimer
	case fsm.Lost, fsm.PeerRestarted, fsm.SendHoldTimer:
		return ResetLost
	case fsm.Received:
		return ResetByPeer
	case fsm.Sent:
		return resetBySending(r.Notification)
	}
	return ResetOther
}

// resetBySending reads a notification of ours (RFC 4271 section 4.5, RFC 4486).
func resetBySending(n fsm.Notification) Reset {
	switch n, _ = n.HardReset(); {
	case n.Code == fsm.CodeHoldTimer:
		return ResetHoldTimer
	case n.Code == fsm.CodeCease && n.Subcode == fsm.CeaseMaxPrefixes:
		return ResetLimit
	case n.Code == wire.CodeHeader, n.Code == wire.CodeUpdate:
		return ResetMalformed
	}
	return ResetByUs
}

// counters returns what the speaker itself has counted.
func (s *session) counters() Counters {
	return Counters{FSMState: 1, Established: s.tally.established, Resets: maps.Clone(s.tally.resets), LastReset: s.tally.last}
}

// count adds what the backend has counted.
func (p *PeerStatus) count(c peerCounts) {
	p.Counted, p.In, p.Out = true, c.in, c.out
	if p.State != StateUp {
		return
	}
	p.Families = c.families
	for _, f := range c.families {
		p.Received, p.Accepted, p.Advertised = p.Received+f.Received, p.Accepted+f.Accepted, p.Advertised+f.Advertised
	}
}

// familyName is a family in the words of configuration files.
func familyName(f wire.Family) string {
	if f == wire.IPv4 {
		return "ipv4"
	}
	return "ipv6"
}
