package bgp

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/store"
)

// TestInfo tells a session's story event by event and reads its status.
func TestInfo(t *testing.T) {
	t.Parallel()
	p := Peer{Addr: netip.MustParseAddr("10.1.0.1"), Port: 179, ASN: 64999, Source: netip.MustParseAddr("10.1.0.11")}
	passive := p
	passive.Passive = true
	problem := p
	problem.Problem = "spec.password is not supported by this version"
	fail := func(r fsm.Reason) event { return event{kind: eventFail, reason: r} }
	dial := func(text string) event { return fail(fsm.Reason{Cause: fsm.NotConnected, Err: errors.New(text)}) }
	note := func(cause fsm.Cause, code, sub uint8) fsm.Reason {
		return fsm.Reason{Cause: cause, Notification: fsm.Notification{Code: code, Subcode: sub}}
	}
	lost := func(s fsm.State) fsm.Reason { return fsm.Reason{Cause: fsm.Lost, State: s} }
	down := func(r fsm.Reason, kept bool) event { return event{kind: eventDown, reason: r, kept: kept} }
	at := func(after time.Duration, e event) event {
		e.time = time.Unix(0, 0).Add(after)
		return e
	}
	up := event{kind: eventUp}
	for _, tt := range []struct {
		name   string
		peer   Peer
		listen error
		events []event
		want   string
	}{
		{"new", p, nil, nil, "start: connecting"},
		{"new passive", passive, nil, nil, "start: passive: waiting for the peer to connect"},
		{"passive without listener", passive, errors.New("port 179 is taken"), nil, "start: waiting for the peer to connect, but port 179 is taken"},
		{"problem", problem, nil, nil, "down: spec.password is not supported by this version"},
		{"up", p, nil, []event{dial("connect: connection refused"), up}, "up: Established"},
		{"refused", p, nil, []event{dial("dial tcp: connect: connection refused")}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered"},
		{"no route", p, nil, []event{dial("connect: no route to host")}, "start: no route to 10.1.0.1"},
		{"unreachable", p, nil, []event{dial("connect: network is unreachable")}, "start: no route to 10.1.0.1"},
		{"timeout", p, nil, []event{dial("dial tcp: i/o timeout")}, "start: no answer from 10.1.0.1:179: it is down, or filtered on the way"},
		{"no source", p, nil, []event{dial("bind: cannot assign requested address")}, "start: this host does not have the address 10.1.0.11 to connect from"},
		{"other", p, nil, []event{dial("too many open files")}, "start: connect: too many open files"},
		{"closed before OPEN", p, nil, []event{fail(lost(fsm.OpenSent))}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"closed after OPEN", p, nil, []event{fail(lost(fsm.OpenConfirm))}, "start: the connection was lost"},
		{"another AS", p, nil, []event{fail(fsm.Reason{Cause: fsm.Sent, PeerAS: 7, Notification: fsm.Notification{Code: 2, Subcode: 2}})}, "start: wrong AS: 10.1.0.1 has AS 7, but AS 64999 is configured for it"},
		{"expects another AS", p, nil, []event{fail(note(fsm.Received, 2, 2))}, "start: wrong AS: 10.1.0.1 expects another one of this node than 64512 (notification received: OPEN message error, bad peer AS)"},
		{"closed after our objection", p, nil, []event{at(0, fail(note(fsm.Sent, 2, 2))), at(time.Minute, fail(lost(fsm.OpenSent)))}, "start: wrong AS: 10.1.0.1 does not have AS 64999, which is configured for it (notification sent: OPEN message error, bad peer AS)"},
		{"closed after the peer's objection", p, nil, []event{at(0, fail(note(fsm.Received, 2, 7))), at(time.Minute, fail(lost(fsm.OpenConfirm)))}, "start: notification received: OPEN message error, unsupported capability"},
		{"refused after an objection", p, nil, []event{at(0, fail(note(fsm.Sent, 2, 2))), at(time.Minute, dial("connection refused"))}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered"},
		{"closed and refused after an objection", p, nil, []event{at(0, fail(note(fsm.Sent, 2, 2))), at(time.Minute, dial("connection refused")), at(2*time.Minute, fail(lost(fsm.OpenSent)))}, "start: wrong AS: 10.1.0.1 does not have AS 64999, which is configured for it (notification sent: OPEN message error, bad peer AS)"},
		{"closed long after an objection", p, nil, []event{at(0, fail(note(fsm.Sent, 2, 2))), at(time.Hour, fail(lost(fsm.OpenSent)))}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"closed after our hold timer", p, nil, []event{at(0, fail(note(fsm.HoldTimer, 4, 0))), at(time.Second, fail(lost(fsm.OpenSent)))}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"hold timer", p, nil, []event{up, down(note(fsm.HoldTimer, 4, 0), true)}, "start: connecting; the last session ended: hold timer expired: nothing was received from the peer; the peer's routes are kept while it restarts"},
		{"hold timer without grace", p, nil, []event{up, down(note(fsm.HoldTimer, 4, 0), false)}, "start: connecting; the last session ended: hold timer expired: nothing was received from the peer"},
		{"lost", p, nil, []event{up, down(lost(fsm.Established), false), dial("connection refused")}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered; the last session ended: the connection was lost"},
		{"notification", p, nil, []event{up, down(note(fsm.Received, 6, 2), false)}, "start: connecting; the last session ended: notification received: cease, administrative shutdown"},
		{"hard reset with a word", p, nil, []event{up, down(fsm.Reason{Cause: fsm.Received, Notification: fsm.Notification{Code: 6, Subcode: 9, Data: append([]byte{6, 2, 4}, "bye!"...)}}, false)}, `start: connecting; the last session ended: notification received: cease, administrative shutdown ("bye!")`},
		{"the peer read nothing", p, nil, []event{up, down(fsm.Reason{Cause: fsm.SendHoldTimer}, false)}, "start: connecting; the last session ended: send hold timer expired: the peer read nothing (RFC 9687)"},
		{"the peer restarted", p, nil, []event{up, down(fsm.Reason{Cause: fsm.PeerRestarted}, true)}, "start: connecting; the last session ended: the peer restarted: it opened a new connection; the peer's routes are kept while it restarts"},
		{"odd notification", p, nil, []event{up, down(note(fsm.Sent, 9, 7), false)}, "start: connecting; the last session ended: notification sent: code 9, subcode 7"},
		{"restart time over", p, nil, []event{{kind: eventExpired}}, "start: the peer did not come back within its restart time"},
		{"restart time over after a session", p, nil, []event{up, down(lost(fsm.Established), true), {kind: eventExpired}}, "start: connecting; the last session ended: the connection was lost; the peer did not come back within its restart time"},
		{"too many prefixes", p, nil, []event{up, at(0, down(note(fsm.Sent, 6, 1), false))}, "down: the peer announced more than 0 prefixes: have it announce fewer, or raise the BGPPeer's annotation " + store.AnnotationMaxPrefixes + "; tried again after 5m0s"},
		{"tried again", p, nil, []event{up, at(0, down(note(fsm.Sent, 6, 1), false)), {kind: eventResumed}}, "start: connecting; the last session ended: notification sent: cease, maximum number of prefixes reached"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newSession(tt.peer, 64512, time.Time{}, drops{})
			for _, e := range tt.events {
				s.apply(e, noDrops)
			}
			state, info := s.info(tt.listen, noDrops)
			if diff := cmp.Diff(tt.want, state+": "+info); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestDue: a new session has until some time to come up. What happened may say that time does not mend it.
func TestDue(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	fail := func(r fsm.Reason) event { return event{kind: eventFail, reason: r} }
	cease := func(sub uint8) event {
		return fail(fsm.Reason{Cause: fsm.Received, Notification: fsm.Notification{Code: fsm.CodeCease, Subcode: sub}})
	}
	lost := fail(fsm.Reason{Cause: fsm.Lost, State: fsm.OpenSent})
	refused := fail(fsm.Reason{Cause: fsm.NotConnected, Err: errors.New("connection refused")})
	never := time.Duration(-1)
	for _, tt := range []struct {
		name    string
		hold    time.Duration
		resumed bool
		events  []event
		want    time.Duration // after its start
	}{
		{"new", 90 * time.Second, false, nil, passiveWait},
		{"after a start of the daemon", 90 * time.Second, true, nil, 90 * time.Second},
		{"with a short hold time", 3 * time.Second, true, nil, passiveWait},
		{"the peer closes while it holds the old session", 90 * time.Second, true, []event{lost, cease(fsm.CeaseRejected), cease(fsm.CeaseCollision)}, 90 * time.Second},
		{"the peer closes, and there was no old session", 90 * time.Second, false, []event{lost}, never},
		{"the peer rejects it for another reason", 90 * time.Second, true, []event{cease(fsm.CeaseShutdown)}, never},
		{"refused", 90 * time.Second, true, []event{refused}, never},
		{"wrong AS", 90 * time.Second, true, []event{fail(fsm.Reason{Cause: fsm.Sent, Notification: fsm.Notification{Code: fsm.CodeOpen, Subcode: fsm.OpenPeerAS}})}, never},
		{"it was up", 90 * time.Second, true, []event{{kind: eventUp}, {kind: eventDown, reason: fsm.Reason{Cause: fsm.Lost}}}, never},
	} {
		s := newSession(Peer{Addr: netip.MustParseAddr("10.1.0.1"), HoldTime: tt.hold}, 64512, start, drops{})
		s.allow(tt.resumed, start)
		for _, e := range tt.events {
			s.apply(e, noDrops)
		}
		want := start.Add(tt.want)
		if tt.want == never {
			want = time.Time{}
		}
		if !s.until.Equal(want) {
			t.Errorf("%s: due %v, want %v", tt.name, s.until, want)
		}
	}
}

// TestResets counts the ends of a session by reason.
func TestResets(t *testing.T) {
	t.Parallel()
	s := newSession(Peer{Addr: netip.MustParseAddr("10.1.0.1")}, 64512, time.Time{}, drops{})
	note := func(cause fsm.Cause, code, sub uint8) fsm.Reason {
		return fsm.Reason{Cause: cause, Notification: fsm.Notification{Code: code, Subcode: sub}}
	}
	for _, tt := range []struct {
		reason fsm.Reason
		want   Reset
	}{
		{note(fsm.HoldTimer, 4, 0), ResetHoldTimer},
		{fsm.Reason{Cause: fsm.Lost}, ResetLost},
		{fsm.Reason{Cause: fsm.PeerRestarted}, ResetLost},
		{note(fsm.Received, 6, 2), ResetByPeer},
		{note(fsm.Sent, 4, 0), ResetHoldTimer},
		{note(fsm.Sent, 6, 1), ResetLimit},
		{fsm.Reason{Cause: fsm.Sent, Notification: fsm.Notification{Code: 6, Subcode: 9, Data: []byte{6, 1}}}, ResetLimit},
		{note(fsm.Sent, 3, 1), ResetMalformed},
		{note(fsm.Sent, 1, 2), ResetMalformed},
		{note(fsm.Sent, 6, 4), ResetByUs},
		{fsm.Reason{Err: errors.New("something new")}, ResetOther},
	} {
		before := s.counters()
		for _, e := range []event{{kind: eventUp}, {kind: eventDown, reason: tt.reason}} {
			s.apply(e, noDrops)
		}
		c := s.counters()
		if c.LastReset != tt.want || c.Resets[tt.want] != before.Resets[tt.want]+1 || c.Established != before.Established+1 || c.FSMState != 1 {
			t.Errorf("%+v: %+v, want one more of %s than in %+v", tt.reason, c, tt.want, before)
		}
	}
}

func TestSessionWait(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		name string
		s    session
		want time.Duration
	}{
		{"trying", session{}, time.Hour},
		{"cannot run", session{peer: Peer{Problem: "no"}}, 0},
		{"End-of-RIB came", session{up: true, canGR: true, eor: true}, 0},
		{"will send one", session{up: true, canGR: true, since: now.Add(-time.Minute)}, time.Hour},
		{"cannot send one, just up", session{up: true, since: now.Add(-time.Second)}, 4 * time.Second},
		{"cannot send one, long up", session{up: true, since: now.Add(-time.Minute)}, 0},
		{"End-of-RIB came, then it went", session{eor: true}, 0},
	} {
		tt.s.peer.Addr = netip.MustParseAddr("192.0.2.1")
		if got := tt.s.wait(now); got != tt.want {
			t.Errorf("%s: wait %s, want %s", tt.name, got, tt.want)
		}
	}
}

// TestMeaning reads what a peer's NOTIFICATION says.
func TestMeaning(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		code, subcode uint8
		want          string
	}{
		{1, 0, "message header error"},
		{1, 1, "message header error, connection not synchronized"},
		{1, 2, "message header error, bad message length"},
		{1, 3, "message header error, bad message type"},
		{2, 0, "OPEN message error"},
		{2, 1, "OPEN message error, unsupported version number"},
		{2, 2, "OPEN message error, bad peer AS"},
		{2, 3, "OPEN message error, bad BGP identifier"},
		{2, 4, "OPEN message error, unsupported optional parameter"},
		{2, 6, "OPEN message error, unacceptable hold time"},
		{2, 7, "OPEN message error, unsupported capability"},
		{3, 0, "UPDATE message error"},
		{3, 1, "UPDATE message error, malformed attribute list"},
		{3, 2, "UPDATE message error, unrecognised well-known attribute"},
		{3, 3, "UPDATE message error, missing well-known attribute"},
		{3, 4, "UPDATE message error, attribute flags error"},
		{3, 5, "UPDATE message error, attribute length error"},
		{3, 6, "UPDATE message error, invalid ORIGIN"},
		{3, 8, "UPDATE message error, invalid NEXT_HOP"},
		{3, 9, "UPDATE message error, optional attribute error"},
		{3, 10, "UPDATE message error, invalid network field"},
		{3, 11, "UPDATE message error, malformed AS_PATH"},
		{4, 0, "hold timer expired"},
		{5, 0, "state machine error"},
		{5, 1, "state machine error, unexpected message in OpenSent"},
		{5, 2, "state machine error, unexpected message in OpenConfirm"},
		{5, 3, "state machine error, unexpected message in Established"},
		{6, 0, "cease"},
		{6, 1, "cease, maximum number of prefixes reached"},
		{6, 2, "cease, administrative shutdown"},
		{6, 3, "cease, peer de-configured"},
		{6, 4, "cease, administrative reset"},
		{6, 5, "cease, connection rejected"},
		{6, 6, "cease, other configuration change"},
		{6, 7, "cease, connection collision resolution"},
		{6, 8, "cease, out of resources"},
		{6, 9, "cease, hard reset"},
		{6, 10, "cease, BFD down"},
		{7, 0, "ROUTE-REFRESH message error"},
		{7, 1, "ROUTE-REFRESH message error, invalid message length"},
		{2, 5, "OPEN message error, subcode 5"},
		{6, 99, "cease, subcode 99"},
		{200, 1, "code 200, subcode 1"},
	} {
		if got := meaning(tt.code, tt.subcode); got != tt.want {
			t.Errorf("meaning(%d, %d) = %q, want %q", tt.code, tt.subcode, got, tt.want)
		}
	}
}
