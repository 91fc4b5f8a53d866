package bgp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/osrg/gobgp/v4/api"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
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
	cause       Reset // of an end that is to come
}

func (c *counters) rose() {
	c.established++
	c.cause = ""
}

// fell counts the end of a session; what was known before of its cause counts
// more than what is known at the end.
func (c *counters) fell(r Reset) {
	if c.cause != "" {
		r = c.cause
	}
	if c.resets == nil {
		c.resets = map[Reset]int{}
	}
	c.resets[r]++
	c.last, c.cause = r, ""
}

// resetOf reads GoBGP's word for the end of a session.
func resetOf(reason string) Reset {
	switch {
	case reason == "hold-timer-expired":
		return ResetHoldTimer
	case reason == "read-failed", reason == "write-failed", reason == "graceful-restart":
		return ResetLost
	case reason == "invalid-msg":
		return ResetMalformed
	case strings.HasPrefix(reason, "notification-received"):
		return ResetByPeer
	case strings.HasPrefix(reason, "notification-sent"):
		return ResetByUs
	}
	return ResetOther
}

// resetBySending reads a notification of ours (RFC 4271 section 4.5, RFC 4486).
func resetBySending(code, subcode uint8) Reset {
	switch {
	case code == packet.BGP_ERROR_HOLD_TIMER_EXPIRED:
		return ResetHoldTimer
	case code == packet.BGP_ERROR_CEASE && subcode == packet.BGP_ERROR_SUB_MAXIMUM_NUMBER_OF_PREFIXES_REACHED:
		return ResetLimit
	case code == packet.BGP_ERROR_MESSAGE_HEADER_ERROR, code == packet.BGP_ERROR_UPDATE_MESSAGE_ERROR:
		return ResetMalformed
	}
	return ResetByUs
}

// counters returns what the speaker itself has counted.
func (s *session) counters() Counters {
	c := Counters{FSMState: 1, Established: s.tally.established, Resets: maps.Clone(s.tally.resets), LastReset: s.tally.last}
	if s.peer.runs() && !s.removed {
		c.FSMState = int(s.state) + 1
	}
	return c
}

// count adds what GoBGP has counted.
func (p *PeerStatus) count(h heard, t tally) {
	p.Counted, p.In, p.Out = true, h.in, h.out
	if p.State != StateUp {
		return
	}
	for _, f := range families() {
		received, ok := h.received[f]
		if !ok {
			continue // the session does not carry it
		}
		c := FamilyCounts{Family: familyName(f), Received: received, Accepted: t.accepted[peerFamily{p.Addr, f}], Advertised: t.told[p.updateGroup].advertisedTo(f, h.router)}
		p.Families = append(p.Families, c)
		p.Received, p.Accepted, p.Advertised = p.Received+c.Received, p.Accepted+c.Accepted, p.Advertised+c.Advertised
	}
}

// heard is what GoBGP has counted of one peer.
type heard struct {
	router   netip.Addr // its router id; invalid: it has not said
	received map[packet.Family]int
	in, out  Messages
}

// heard asks GoBGP for its counts.
func (e *engine) heard(ctx context.Context) (map[netip.Addr]heard, error) {
	all := map[netip.Addr]heard{}
	err := e.srv.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
		addr, err := netip.ParseAddr(p.GetState().GetNeighborAddress())
		if err != nil {
			return
		}
		h := heard{received: map[packet.Family]int{}}
		h.router, _ = netip.ParseAddr(p.GetState().GetRouterId())
		for _, f := range p.GetAfiSafis() {
			family := f.GetConfig().GetFamily()
			h.received[packet.NewFamily(uint16(family.GetAfi()), uint8(family.GetSafi()))] += int(f.GetState().GetReceived())
		}
		h.in, h.out = messages(p.GetState().GetMessages().GetReceived()), messages(p.GetState().GetMessages().GetSent())
		all[addr] = h
	})
	if err != nil {
		return nil, fmt.Errorf("list peers: %w", err)
	}
	return all, nil
}

func messages(m *api.Message) Messages {
	return Messages{
		Open: m.GetOpen(), Update: m.GetUpdate(), Notification: m.GetNotification(), Keepalive: m.GetKeepalive(), Refresh: m.GetRefresh(),
	}
}

// familyName is a family in the words of configuration files.
func familyName(f packet.Family) string {
	if f == packet.RF_IPv4_UC {
		return "ipv4"
	}
	return "ipv6"
}
