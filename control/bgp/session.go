package bgp

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/store"
)

// States of a session in status.
const (
	StateUp    = "up"    // Established
	StateStart = "start" // trying
	StateDown  = "down"  // not run; the reason is in Info

	StateListening = "listening" // no session, but a range that neighbours connect from
)

// PeerStatus is one session as `node status` shows it.
type PeerStatus struct {
	Name string // the node, or the BGPPeer resource
	Type PeerType
	Addr netip.Addr // invalid when the resource does not say; with a zone over link-local addresses

	ID netip.Addr // what [Query] and [Route] know it by

	Interface string // as in [Peer]
	Found     bool   // as in [Peer]

	// Range is as in [Peer]: without Addr the range itself, of which Neighbours have a session and Limit may.
	Range             netip.Prefix
	Neighbours, Limit int

	Port  uint16
	ASN   uint32
	State string    // StateUp, StateStart or StateDown
	Since time.Time // of State
	Info  string    // "Established", or why not

	// Due is until when the timers of both sides let a session take that is not up yet; zero: it is up, it was, or something
	// says that it cannot be.
	Due time.Time

	// Counted says that the numbers of prefixes, families and messages are known;
	// without it they are zero.
	Counted    bool
	Received   int // prefixes in the peer's last word
	Accepted   int // of these, those that import lets in
	Advertised int // prefixes that are advertised to it

	MaxPrefixes uint32 // as in [Peer]: of each family that is received

	BFD string // state of the BFD session that watches the peer; empty: none does

	Counters

	runs   bool
	bfd    bool   // it is to be watched by BFD
	unread string // as in [Peer]
}

// session is what the speaker knows of one peer. The speaker's lock guards it.
type session struct {
	peer  Peer
	asn   uint32    // this node's on the session
	began time.Time // what is reported of a time before is of an earlier one with the peer
	up    bool
	since time.Time     // of up, or of the start
	eor   bool          // End-of-RIB came since the backend started, of all families
	due   []wire.Family // whose End-of-RIB is to come
	canGR bool

	until   time.Time // Due in [PeerStatus]
	resumed bool      // the peer may not know that an earlier session with this host is over

	last  string // why the last attempt failed
	ended string // why the last established session ended, until the next one

	objection string    // why one side refused the other's OPEN
	objected  time.Time // when; zero: none did since the session was up

	tally counters

	drops drops // the kernel's counters when the session was not up last

	limited time.Time // since when it is cut off for too many prefixes; zero: it is not
}

func newSession(p Peer, asn uint32, now time.Time, d drops) *session {
	return &session{peer: p, asn: p.localASN(asn), began: now, since: now, drops: d}
}

// allow gives a new session the time that the timers of both sides imply. A peer that has not noticed the end of the session that
// there was before this daemon refuses another one for up to its hold time (RFC 4271 sections 6.5 and 6.8).
func (s *session) allow(resumed bool, now time.Time) {
	s.resumed, s.until = resumed, now.Add(passiveWait)
	if resumed && s.peer.HoldTime > passiveWait {
		s.until = now.Add(s.peer.HoldTime)
	}
}

// overdue forgets the time of a new session whose attempt has failed for a reason that time does not mend.
func (s *session) overdue(r fsm.Reason) {
	n, _ := r.Notification.HardReset()
	held := r.Cause == fsm.Lost || r.Cause == fsm.Received && n.Code == fsm.CodeCease && (n.Subcode == fsm.CeaseRejected || n.Subcode == fsm.CeaseCollision)
	if !s.resumed || !held {
		s.until = time.Time{}
	}
}

// suspicion says that the passwords or the distance are suspected: since the
// session began to be tried, the kernel has dropped segments for them. Its
// counters are those of the whole host, so another session may be the cause.
func (s *session) suspicion(now drops) string {
	d := now.since(s.drops)
	return cmp.Or(d.suspicion(s.peer), d.farther(s.peer.TTLSecurity))
}

// apply notes what happened on the session, with the kernel's counters then.
func (s *session) apply(e event, now func() drops) {
	const kept = "; the peer's routes are kept while it restarts"
	switch e.kind {
	case eventResumed:
		s.limited = time.Time{}
	case eventUp:
		s.up, s.since, s.canGR, s.until = true, e.time, e.canGR, time.Time{}
		s.due = slices.Clone(e.families)
		s.tally.rose()
		s.last, s.ended, s.objection, s.objected, s.limited = "", "", "", time.Time{}, time.Time{}
	case eventDown:
		s.up, s.since, s.drops = false, e.time, now()
		s.last, s.ended = "", s.endText(e.reason)
		if e.kept {
			s.ended += kept
		}
		s.tally.fell(resetOf(e.reason))
		s.limit(e)
	case eventFail:
		s.fail(e)
	case eventExpired:
		const text = "the peer did not come back within its restart time"
		if s.ended == "" {
			s.last = text
		} else {
			s.ended = strings.TrimSuffix(s.ended, kept) + "; " + text
		}
	case eventEOR:
		s.endOfRIB(e.families)
	}
}

// limit notes that the peer was cut off because it announced too much.
func (s *session) limit(e event) {
	n, _ := e.reason.Notification.HardReset()
	if e.reason.Cause == fsm.Sent && n.Code == fsm.CodeCease && n.Subcode == fsm.CeaseMaxPrefixes {
		s.limited = e.time
	}
}

// fail notes why an attempt failed.
func (s *session) fail(e event) {
	s.overdue(e.reason)
	text := s.endText(e.reason)
	switch n, _ := e.reason.Notification.HardReset(); {
	case e.reason.Cause == fsm.Lost:
		s.closed(e, text)
		return
	case (e.reason.Cause == fsm.Sent || e.reason.Cause == fsm.Received) && n.Code == fsm.CodeOpen:
		s.objection, s.objected = text, e.time
	}
	s.last = text
	s.limit(e)
}

// afterObjection is how long a peer may close every connection after it has
// objected, or we have: BIRD's longest wait after errors, unless configured.
const afterObjection = 5 * time.Minute

// closed notes that a connection was closed before a session was up. What one
// side has objected to says more.
func (s *session) closed(e event, says string) {
	if s.last = says; !s.objected.IsZero() && e.time.Sub(s.objected) < afterObjection {
		s.last = s.objection
	}
}

// endText puts the end of a connection in the operator's words.
func (s *session) endText(r fsm.Reason) string {
	n, _ := r.Notification.HardReset()
	a := s.peer.Addr
	badAS := n.Code == fsm.CodeOpen && n.Subcode == fsm.OpenPeerAS
	switch r.Cause {
	case fsm.NotConnected:
		return dialReason(r.Err, s.peer)
	case fsm.HoldTimer:
		return "hold timer expired: nothing was received from the peer"
	case fsm.SendHoldTimer:
		return "send hold timer expired: the peer read nothing (RFC 9687)"
	case fsm.PeerRestarted:
		return "the peer restarted: it opened a new connection"
	case fsm.Lost:
		if r.State == fsm.OpenSent {
			return fmt.Sprintf("%s closed the connection before it opened a session: is this node's address known to it as a peer?", a)
		}
		return "the connection was lost"
	case fsm.Sent:
		text := "notification sent: " + meaningOf(r.Notification)
		switch {
		case badAS && r.PeerAS != 0:
			return fmt.Sprintf("wrong AS: %s has AS %d, but AS %d is configured for it", a, r.PeerAS, s.peer.ASN)
		case badAS:
			return fmt.Sprintf("wrong AS: %s does not have AS %d, which is configured for it (%s)", a, s.peer.ASN, text)
		}
		return text
	case fsm.Received:
		text := "notification received: " + meaningOf(r.Notification)
		if badAS {
			return fmt.Sprintf("wrong AS: %s expects another one of this node than %d (%s)", a, s.asn, text)
		}
		return text
	}
	if r.Err != nil {
		return r.Err.Error()
	}
	return ""
}

// endOfRIB notes that a peer has advertised all of a family.
func (s *session) endOfRIB(families []wire.Family) {
	s.due = slices.DeleteFunc(s.due, func(f wire.Family) bool { return slices.Contains(families, f) })
	s.eor = s.eor || len(s.due) == 0
}

// info says in one line how the session is, or why it is not up, by the kernel's counters.
func (s *session) info(listening error, now func() drops) (state, info string) {
	switch {
	case !s.peer.wanted():
		return StateDown, s.peer.Problem
	case s.peer.Waiting != "":
		return StateStart, s.peer.Waiting
	case s.peer.listens() && listening != nil:
		return StateStart, "waiting for the peer to connect, but " + listening.Error()
	case s.peer.listens():
		return StateListening, "listening"
	case s.up:
		return StateUp, "Established"
	case !s.limited.IsZero():
		return StateDown, fmt.Sprintf("the peer announced more than %d prefixes: have it announce fewer, or raise %s's annotation %s; tried again after %s", s.peer.MaxPrefixes, s.peer.settings(), store.AnnotationMaxPrefixes, limitPause)
	}
	var parts []string
	switch {
	case s.last != "":
		parts = append(parts, s.last)
	case s.peer.Passive && listening != nil:
		parts = append(parts, "waiting for the peer to connect, but "+listening.Error())
	case s.peer.Passive:
		parts = append(parts, "passive: waiting for the peer to connect")
	default:
		parts = append(parts, "connecting")
	}
	if hint := s.suspicion(now()); hint != "" {
		parts = append(parts, hint)
	}
	if s.ended != "" {
		parts = append(parts, "the last session ended: "+s.ended)
	}
	return StateStart, strings.Join(parts, "; ")
}

// settings names the resource that has the session's.
func (p Peer) settings() string {
	if p.betweenNodes() {
		return "the default BGPConfiguration"
	}
	return "the BGPPeer"
}

// meaningOf names what a notification was sent for, and what it says to people (RFC
// 9003).
func meaningOf(n fsm.Notification) string {
	inner, _ := n.HardReset()
	text := meaning(inner.Code, inner.Subcode)
	if says := n.Communication(); says != "" {
		text += fmt.Sprintf(" (%q)", says)
	}
	return text
}

// meaning names a notification's code and subcode (RFC 4271 section 4.5, RFC
// 4486, RFC 6608, RFC 9384).
func meaning(code, subcode uint8) string {
	names := map[uint8]struct {
		code string
		sub  []string
	}{
		1: {"message header error", []string{"", "connection not synchronized", "bad message length", "bad message type"}},
		2: {"OPEN message error", []string{"", "unsupported version number", "bad peer AS", "bad BGP identifier", "unsupported optional parameter", "", "unacceptable hold time", "unsupported capability"}},
		3: {"UPDATE message error", []string{"", "malformed attribute list", "unrecognised well-known attribute", "missing well-known attribute", "attribute flags error", "attribute length error", "invalid ORIGIN", "", "invalid NEXT_HOP", "optional attribute error", "invalid network field", "malformed AS_PATH"}},
		4: {"hold timer expired", nil},
		5: {"state machine error", []string{"", "unexpected message in OpenSent", "unexpected message in OpenConfirm", "unexpected message in Established"}},
		6: {"cease", []string{"", "maximum number of prefixes reached", "administrative shutdown", "peer de-configured", "administrative reset", "connection rejected", "other configuration change", "connection collision resolution", "out of resources", "hard reset", "BFD down"}},
		7: {"ROUTE-REFRESH message error", []string{"", "invalid message length"}},
	}
	n, ok := names[code]
	switch {
	case !ok:
		return fmt.Sprintf("code %d, subcode %d", code, subcode)
	case int(subcode) < len(n.sub) && n.sub[subcode] != "":
		return n.code + ", " + n.sub[subcode]
	case subcode == 0:
		return n.code
	}
	return fmt.Sprintf("%s, subcode %d", n.code, subcode)
}

// dialReason explains the error of a connection attempt.
func dialReason(err error, p Peer) string {
	text := err.Error()
	to := netip.AddrPortFrom(p.Addr, p.Port)
	switch {
	case strings.Contains(text, "connection refused") && p.Interface != "":
		return fmt.Sprintf("connection refused by %s: nothing listens there, or it is filtered (a routerd node listens for peers on links if it has such a BGPPeer itself and bindMode is not NodeIP)", to)
	case strings.Contains(text, "connection refused"):
		return fmt.Sprintf("connection refused by %s: nothing listens there, or it is filtered", to)
	case strings.Contains(text, "no route to host"), strings.Contains(text, "network is unreachable"):
		return fmt.Sprintf("no route to %s", p.Addr)
	case errors.Is(err, os.ErrDeadlineExceeded), strings.Contains(text, "i/o timeout"), strings.Contains(text, "timed out"):
		return fmt.Sprintf("no answer from %s: it is down, or filtered on the way", to)
	case strings.Contains(text, "cannot assign requested address"):
		return fmt.Sprintf("this host does not have the address %s to connect from", p.Source)
	}
	return "connect: " + text
}

// quiet is how long a session is up before a peer that cannot send End-of-RIB
// counts as having advertised everything.
const quiet = 5 * time.Second

// wait returns how long to wait for this peer's routes; 0: no more.
func (s *session) wait(now time.Time) time.Duration {
	switch {
	case !s.peer.runs(), s.eor, !s.limited.IsZero():
		return 0
	case s.up && !s.canGR:
		return max(0, s.since.Add(quiet).Sub(now))
	}
	return time.Hour
}
