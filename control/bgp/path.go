package bgp

import (
	"fmt"
	"net/netip"
	"strings"
)

// Hop is one way to a prefix: the attributes of one BGP path (RFC 4271 section
// 5).
type Hop struct {
	NextHop   netip.Addr // as the peer sent it; not resolved
	Peer      string     // name of the peer that sent it: the node or the BGPPeer resource
	PeerAddr  netip.Addr // invalid: no peer sent it; it is the configured way to Peer (reachableBy)
	IBGP      bool
	ASPath    string // "64999 65001 {65010}"; empty for a path that begins in the own AS
	LocalPref uint32 // 0: the path has none
	MED       uint32

	// Named is the length of the cidr of the rule by which the peer's BGPFilter let
	// the path in; 0: no rule with one did.
	Named int

	// LongLived says that the path is kept though its origin has not come back
	// within its restart time (RFC 9494): any other is better.
	LongLived bool

	// Stale says that the peer is restarting and the path is kept meanwhile
	// (RFC 4724 section 4.2). [Speaker.Routes] knows; a path that goes stale, or
	// comes again as it was, is no change of the best path and is not reported.
	Stale bool
}

// Path is what BGP knows of a prefix. Do not change it.
type Path struct {
	Prefix netip.Prefix
	*PathSet
}

func (p Path) String() string {
	var b strings.Builder
	if !p.PeerAddr.IsValid() {
		return fmt.Sprintf("%s via %s to reach %s", p.Prefix, p.NextHop, p.Peer)
	}
	fmt.Fprintf(&b, "%s via %s from %s", p.Prefix, p.NextHop, p.PeerAddr)
	if p.IBGP {
		b.WriteString(" ibgp")
	} else {
		b.WriteString(" ebgp")
	}
	if p.ASPath != "" {
		fmt.Fprintf(&b, " as-path %s", p.ASPath)
	}
	if p.LocalPref != 0 {
		fmt.Fprintf(&b, " local-pref %d", p.LocalPref)
	}
	if p.Stale {
		b.WriteString(" stale")
	}
	return b.String()
}

// Changes is a step of the learned best paths. The parts apply in the order
// Reset, Down, Put, Del, Up, Synced. A prefix is at most once in one Changes.
type Changes struct {
	// Reset is set on the first Changes of a [Speaker]: whatever is known from
	// an earlier one is void. When the Speaker itself has to start its engine anew
	// there is no Reset: what was reported stays valid, and what does not come
	// again is deleted at Synced, so that nothing is withdrawn in between.
	Reset bool

	// Put holds prefixes whose best path is new or has changed.
	Put []Path

	// Down names next hops that only peers gave whose session has just ended
	// and who are not expected back (RFC 4724): nothing is to be sent to them
	// any more. The withdrawals of the prefixes behind them follow. Up names
	// those of which that is over.
	Down, Up []netip.Addr

	// Del holds prefixes that no peer announces any more. It may name prefixes
	// that were never Put.
	Del []netip.Prefix

	// Synced says that everything has been reported that can be expected to come,
	// once after each start of the engine: every peer has sent its End-of-RIB marker (RFC
	// 4724 section 2), or has been up for five seconds without being able to
	// send one, or the time limit has passed (the longest restart time of the
	// peers, see [SpeakerOptions]). So a dead peer delays it but never prevents
	// it, and without peers it comes at once.
	Synced bool
}

// Empty reports whether there is nothing in c.
func (c Changes) Empty() bool {
	return !c.Reset && !c.Synced && len(c.Put)+len(c.Del)+len(c.Down)+len(c.Up) == 0
}
