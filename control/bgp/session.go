package bgp

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/store"
)

// States of a session in status.
const (
	StateUp    = "up"    // Established
	StateStart = "start" // trying
	StateDown  = "down"  // not run; the reason is in Info
)

// PeerStatus is one session as `node status` shows it.
type PeerStatus struct {
	Name string // the node, or the BGPPeer resource
	Type PeerType
	Addr netip.Addr // invalid when the resource does not tell; with a zone over link-local addresses

	Interface string // as in [Peer]
	Found     bool   // as in [Peer]
	Port      uint16
	ASN       uint32
	State     string    // StateUp, StateStart or StateDown
	Since     time.Time // of State
	Info      string    // "Established", or why not

	// Counted says that the numbers of prefixes, families and messages are known;
	// without it they are zero.
	Counted    bool
	Received   int // prefixes in the peer's last word
	Accepted   int // of these, those that import lets in
	Advertised int // prefixes that it was told

	MaxPrefixes uint32 // as in [Peer]: of each family that is received

	Counters

	updateGroup Peer // that it is in
}

// session is what the speaker knows of one peer. The speaker's lock guards it.
type session struct {
	peer  Peer
	state packet.FSMState
	up    bool
	since time.Time       // of up, or of the start
	eor   bool            // End-of-RIB came since the engine started, of all families
	due   []packet.Family // whose End-of-RIB is to come
	canGR bool
	keeps bool // it said that it forwards while it restarts (RFC 4724, section 3)

	last  string // why the last attempt failed, or the last session ended
	ended string // why the last established session ended, until the next one
	found string // what the diagnosis found; beats last

	objection string    // why one side refused the other's OPEN
	objected  time.Time // when; zero: none did since the session was up

	attempt int // counts the times that the session came near to being up, or fell back from there

	tally counters

	drops drops // the kernel's counters when the session was not up last

	// A peer that announced too many prefixes is cut off.
	limited  time.Time // since when; zero: it is not
	removed  bool      // GoBGP does not know it
	settling bool      // removed is being changed

	diagnosing context.CancelFunc // stops a diagnosis; nil: none runs
	diagnosed  time.Time          // when the last one ended
}

func newSession(p Peer, now time.Time) *session {
	return &session{peer: p, since: now, drops: readDrops(procNetstat)}
}

// suspicion says that the passwords or the distance are suspected: since the
// session began to be tried, the kernel has dropped segments for them. Its
// counters are those of the whole host, so another session may be the cause.
func (s *session) suspicion() string {
	d := readDrops(procNetstat).since(s.drops)
	return cmp.Or(d.suspicion(s.peer.Password != Password{}), d.farther(s.peer.TTLSecurity))
}

// state applies a change of state and reports whether something went wrong
// that only a look at the peer's own messages can explain.
func (s *session) setState(e event) (unexplained bool) {
	was := s.state
	s.state = e.state
	switch {
	case e.state == packet.BGP_FSM_ESTABLISHED:
		s.up, s.since, s.canGR, s.keeps = true, e.time, e.canGR, e.keeps
		s.due = s.peer.agreed(e.families)
		s.tally.rose()
		s.last, s.ended, s.found, s.objection, s.objected = "", "", "", "", time.Time{} // limited stays: GoBGP's log of the limit comes before its event
		s.stopDiagnosis()
	case s.up:
		s.up, s.since, s.drops = false, e.time, readDrops(procNetstat)
		s.last = ""
		s.ended = ending(s.ended, e.reason)
		s.tally.fell(resetOf(e.reason))
	case e.reason == "restart-timer-expired" && s.ended != "":
		s.ended = strings.TrimSuffix(s.ended, kept("")) + "; " + downReason(e.reason)
	case e.state == packet.BGP_FSM_IDLE && was > packet.BGP_FSM_ACTIVE:
		// GoBGP does not tell what the peer objected to.
		if e.reason == "invalid-msg" || e.reason == "bad-peer-as" {
			return true
		}
		if says := downReason(e.reason); e.reason == "read-failed" || e.reason == "write-failed" {
			s.closed(e, says)
		} else {
			s.last = says
		}
	}
	return false
}

// afterObjection is how long a peer may close every connection after it has
// objected, or we have: BIRD's longest wait after errors, unless configured.
const afterObjection = 5 * time.Minute

// closed notes that a connection was closed before a session was up. What one
// side has objected to tells more.
func (s *session) closed(e event, says string) {
	if s.last = says; !s.objected.IsZero() && e.time.Sub(s.objected) < afterObjection {
		s.last = s.objection
	}
}

// endOfRIB notes that a peer has advertised all of a family.
func (s *session) endOfRIB(families []packet.Family) {
	s.due = slices.DeleteFunc(s.due, func(f packet.Family) bool { return slices.Contains(families, f) })
	s.eor = s.eor || len(s.due) == 0
}

// agreed returns the families that both sides carry. Who announces none means
// IPv4 (RFC 4760 section 8).
func (p Peer) agreed(theirs []packet.Family) []packet.Family {
	if len(theirs) == 0 {
		theirs = []packet.Family{packet.RF_IPv4_UC}
	}
	return slices.DeleteFunc(p.carries(), func(f packet.Family) bool { return !slices.Contains(theirs, f) })
}

// leaves reports whether the end of a session that GoBGP logged takes the
// peer's paths with it.
func (s *session) leaves(e event) bool { return e.detail != "graceful-restart" || !s.keeps }

func (s *session) stopDiagnosis() {
	if s.diagnosing != nil {
		s.diagnosing()
		s.diagnosing = nil
	}
}

// setLog handles what GoBGP only logs, and reports as setState does.
func (s *session) setLog(e event) (unexplained bool) {
	switch e.text {
	case logDialFailed:
		s.last = dialReason(e.detail, s.peer)
	case logIOError:
		s.closed(e, fmt.Sprintf("%s closed the connection before it opened a session: is this node's address known to it as a peer?", s.peer.Addr))
	case logSent:
		s.last = "notification sent: " + meaning(e.code, e.subcode)
		if s.up {
			s.ended, s.tally.cause = s.last, resetBySending(e.code, e.subcode)
			return false
		}
		if e.code == packet.BGP_ERROR_OPEN_MESSAGE_ERROR {
			if e.subcode == packet.BGP_ERROR_SUB_BAD_PEER_AS {
				s.last = fmt.Sprintf("wrong AS: %s does not have AS %d, which is configured for it (%s)", s.peer.Addr, s.peer.ASN, s.last)
			}
			s.objection, s.objected = s.last, e.time
		}
		return e.code == packet.BGP_ERROR_OPEN_MESSAGE_ERROR || e.code == packet.BGP_ERROR_FSM_ERROR
	case logLimit:
		s.limited = e.time
	case logReceived:
		s.last = "notification received: " + meaning(e.code, e.subcode)
		if s.up {
			s.ended, s.tally.cause = s.last, ResetByPeer
			return false
		}
		if e.code == packet.BGP_ERROR_OPEN_MESSAGE_ERROR {
			s.objection, s.objected = s.last, e.time
		}
	}
	return false
}

// info says in one line how the session is, or why it is not up.
func (s *session) info(listening error) (state, info string) {
	switch {
	case !s.peer.wanted():
		return StateDown, s.peer.Problem
	case s.peer.Waiting != "":
		return StateStart, s.peer.Waiting
	case s.up:
		return StateUp, "Established"
	case !s.limited.IsZero():
		return StateDown, fmt.Sprintf("the peer announced more than %d prefixes: have it announce less, or raise the BGPPeer's annotation %s; tried again after %s", s.peer.MaxPrefixes, store.AnnotationMaxPrefixes, limitPause)
	}
	var parts []string
	switch {
	case s.found != "":
		parts = append(parts, s.found)
	case s.last != "":
		parts = append(parts, s.last)
	case s.peer.Passive && listening != nil:
		parts = append(parts, "waiting for the peer to connect, but "+listening.Error())
	case s.peer.Passive:
		parts = append(parts, "passive: waiting for the peer to connect")
	default:
		parts = append(parts, "connecting")
	}
	if hint := s.suspicion(); hint != "" {
		parts = append(parts, hint)
	}
	if s.ended != "" {
		parts = append(parts, "the last session ended: "+s.ended)
	}
	return StateStart, strings.Join(parts, "; ")
}

// downReason puts GoBGP's word for the end of a session in the operator's.
func downReason(reason string) string {
	switch reason {
	case "hold-timer-expired":
		return "hold timer expired: nothing was heard from the peer"
	case "read-failed", "write-failed":
		return "the connection was lost"
	case "graceful-restart":
		return kept(downReason("read-failed"))
	case "restart-timer-expired":
		return "the peer did not come back within its restart time"
	case "deconfigured", "dying", "":
		return ""
	}
	for _, dir := range []string{"sent", "received"} {
		rest, ok := strings.CutPrefix(reason, "notification-"+dir+" ")
		if !ok {
			continue
		}
		var code, subcode uint8
		_, err1 := fmt.Sscanf(rest, "code %d(", &code)
		_, err2 := fmt.Sscanf(rest[max(0, strings.Index(rest, "subcode")):], "subcode %d(", &subcode)
		if err1 == nil && err2 == nil {
			rest = meaning(code, subcode)
		}
		return "notification " + dir + ": " + rest
	}
	return reason
}

// ending joins the notification that ended a session, if there was one, with
// GoBGP's reason.
func ending(notification, reason string) string {
	if notification == "" || reason != "graceful-restart" {
		return downReason(reason)
	}
	if notification == "notification sent: "+meaning(packet.BGP_ERROR_HOLD_TIMER_EXPIRED, 0) {
		notification = downReason("hold-timer-expired")
	}
	return kept(notification)
}

// kept adds to the end of a session that it is expected to come again.
func kept(end string) string { return end + "; the peer's routes are kept while it restarts" }

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
func dialReason(text string, p Peer) string {
	to := netip.AddrPortFrom(p.Addr, p.Port)
	switch {
	case strings.Contains(text, "connection refused") && p.Interface != "":
		return fmt.Sprintf("connection refused by %s: nothing listens there, or it is filtered (a routerd node listens for peers on links if it has such a BGPPeer itself and bindMode is not NodeIP)", to)
	case strings.Contains(text, "connection refused"):
		return fmt.Sprintf("connection refused by %s: nothing listens there, or it is filtered", to)
	case strings.Contains(text, "no route to host"), strings.Contains(text, "network is unreachable"):
		return fmt.Sprintf("no route to %s", p.Addr)
	case strings.Contains(text, "i/o timeout"), strings.Contains(text, "timed out"):
		return fmt.Sprintf("no answer from %s: it is down, or filtered on the way", to)
	case strings.Contains(text, "cannot assign requested address"):
		return fmt.Sprintf("this host does not have the address %s to connect from", p.Source)
	}
	return "connect: " + text
}

// quiet is how long a session is up before a peer that cannot send End-of-RIB
// counts as having told everything.
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
