package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// gobgpPeer is what is known of a peer of GoBGP's, whose events and log are put
// together to what happened. The lock of [gobgp] guards it.
type gobgpPeer struct {
	Peer
	state packet.FSMState
	up    bool
	keeps bool // it said that it forwards while it restarts (RFC 4724, section 3)

	said    fsm.Reason // the notification in the log since the session was up; Cause 0: none
	attempt int        // counts the times that the session came near to being up, or fell back from there

	// A peer that announced too many prefixes is cut off.
	limited bool
	removed bool // GoBGP does not know it

	diagnosing context.CancelFunc // stops a diagnosis; nil: none runs
	diagnosed  time.Time          // when the last one ended
}

func (p *gobgpPeer) stopDiagnosis() {
	if p.diagnosing != nil {
		p.diagnosing()
		p.diagnosing = nil
	}
}

// emit tells the speaker something, unless the server is being stopped.
func (e *gobgp) emit(ev event) {
	if e.closed.Load() {
		return
	}
	ev.from, ev.time = e, time.Now()
	e.out.put(ev)
}

// learned tells of changes of paths.
func (e *gobgp) learned(paths []*apiutil.Path) {
	e.mu.Lock()
	e.changes++
	changes := make([]pathChange, 0, len(paths))
	for _, p := range paths {
		prefix, h, ok := e.conv.path(p)
		if ok || prefix.IsValid() {
			changes = append(changes, pathChange{prefix, p.PeerAddress, h, ok})
		}
	}
	e.mu.Unlock()
	e.emit(event{kind: eventPaths, paths: changes})
}

// changed handles GoBGP's event of a peer's state.
func (e *gobgp) changed(s apiutil.PeerState) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.SessionState == packet.BGP_FSM_IDLE || s.SessionState == packet.BGP_FSM_ESTABLISHED {
		e.emit(event{kind: eventSwept, peer: s.NeighborAddress}) // the withdrawals came before
	}
	p, ok := e.peers[s.NeighborAddress]
	if !ok || p.limited {
		return // what GoBGP still had to say of a session that is no more
	}
	was := p.state
	events, unexplained := p.change(s)
	for _, ev := range events {
		ev.peer = p.Addr
		e.emit(ev)
	}
	e.mindCollision(p, was)
	if unexplained {
		e.diagnose(p)
	}
}

// change applies GoBGP's word of a state, and reports whether something went wrong
// that only a look at the peer's own messages can explain.
func (p *gobgpPeer) change(s apiutil.PeerState) (events []event, unexplained bool) {
	was, reason := p.state, s.DisconnectMessage
	p.state = s.SessionState
	switch {
	case s.SessionState == packet.BGP_FSM_ESTABLISHED:
		up := event{kind: eventUp}
		var theirs []wire.Family
		for _, c := range s.RemoteCap {
			up.canGR = up.canGR || c.Code() == packet.BGP_CAP_GRACEFUL_RESTART
			switch c := c.(type) {
			case *packet.CapGracefulRestart:
				p.keeps = len(c.Tuples) > 0
			case *packet.CapMultiProtocol:
				theirs = append(theirs, fromPacket(c.CapValue))
			}
		}
		up.families = p.agreed(theirs)
		p.up, p.said = true, fsm.Reason{}
		p.stopDiagnosis()
		return []event{up}, false
	case p.up:
		p.up = false
		down := event{kind: eventDown, reason: p.said, kept: reason == "graceful-restart"}
		if down.reason.Cause == 0 {
			down.reason = reasonOf(reason)
		}
		p.said = fsm.Reason{}
		return []event{down}, false
	case reason == "restart-timer-expired":
		return []event{{kind: eventExpired}}, false
	case s.SessionState == packet.BGP_FSM_IDLE && was > packet.BGP_FSM_ACTIVE:
		if reason == "invalid-msg" || reason == "bad-peer-as" {
			return nil, true // GoBGP does not tell what the peer objected to
		}
		fail := event{kind: eventFail, reason: reasonOf(reason)}
		fail.reason.State = fsm.OpenConfirm
		return []event{fail}, false
	}
	return nil, false
}

// reasonOf reads GoBGP's word for the end of a session.
func reasonOf(text string) fsm.Reason {
	switch text {
	case "hold-timer-expired":
		return fsm.Reason{Cause: fsm.HoldTimer}
	case "read-failed", "write-failed", "graceful-restart":
		return fsm.Reason{Cause: fsm.Lost}
	case "invalid-msg":
		return fsm.Reason{Cause: fsm.Sent, Notification: fsm.Notification{Code: wire.CodeUpdate}}
	case "deconfigured", "dying", "":
		return fsm.Reason{Cause: fsm.Stopped}
	}
	for dir, cause := range map[string]fsm.Cause{"sent": fsm.Sent, "received": fsm.Received} {
		rest, ok := strings.CutPrefix(text, "notification-"+dir+" ")
		if !ok {
			continue
		}
		r := fsm.Reason{Cause: cause}
		_, err1 := fmt.Sscanf(rest, "code %d(", &r.Notification.Code)
		_, err2 := fmt.Sscanf(rest[max(0, strings.Index(rest, "subcode")):], "subcode %d(", &r.Notification.Subcode)
		if err1 == nil && err2 == nil {
			return r
		}
	}
	return fsm.Reason{Err: errors.New(text)}
}

// logLine is what GoBGP logged of a peer, see [tap].
type logLine struct {
	peer          netip.Addr
	text, detail  string
	code, subcode uint8
}

// logged handles what GoBGP tells in its log only.
func (e *gobgp) logged(l logLine) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, ok := e.peers[l.peer]
	if !ok || p.limited {
		return
	}
	ev, unexplained := p.log(l)
	if ev.kind != eventPaths {
		ev.peer = p.Addr
		e.emit(ev)
	}
	if l.text == logLimit {
		p.limited = true
		e.emit(event{kind: eventLost, peer: p.Addr})
		e.settle(p, 0)
	}
	if unexplained {
		e.diagnose(p)
	}
}

// log returns the event that a line of the log is, if it is one, and reports as
// change does.
func (p *gobgpPeer) log(l logLine) (ev event, unexplained bool) {
	n := fsm.Notification{Code: l.code, Subcode: l.subcode}
	switch l.text {
	case logPeerDown:
		if l.detail != "graceful-restart" || !p.keeps {
			return event{kind: eventLost}, false
		}
	case logDialFailed:
		return event{kind: eventFail, reason: fsm.Reason{Cause: fsm.NotConnected, Err: errors.New(l.detail)}}, false
	case logIOError:
		return event{kind: eventFail, reason: fsm.Reason{Cause: fsm.Lost, State: fsm.OpenSent}}, false
	case logLimit:
		r := fsm.Reason{Cause: fsm.Sent, Notification: fsm.Cease(fsm.CeaseMaxPrefixes, "")}
		if !p.up {
			return event{kind: eventFail, reason: r}, false
		}
		p.up = false
		return event{kind: eventDown, reason: r}, false
	case logSent, logReceived:
		r := fsm.Reason{Cause: fsm.Received, Notification: n}
		if l.text == logSent {
			r.Cause = fsm.Sent
			unexplained = n.Code == fsm.CodeOpen || n.Code == fsm.CodeFSM
			if n.Code == fsm.CodeHoldTimer {
				r.Cause = fsm.HoldTimer
			}
		}
		if p.up {
			p.said = r
			return event{}, false
		}
		return event{kind: eventFail, reason: r}, unexplained
	}
	return event{}, false
}
