package bgp

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// TestInfo tells a session's story event by event and reads its status.
func TestInfo(t *testing.T) {
	t.Parallel()
	p := Peer{Addr: netip.MustParseAddr("10.1.0.1"), Port: 179, ASN: 64999, Source: netip.MustParseAddr("10.1.0.11")}
	passive := p
	passive.Passive = true
	problem := p
	problem.Problem = "spec.password is not supported by this version"
	state := func(s packet.FSMState, reason string) event { return event{kind: eventState, state: s, reason: reason} }
	logged := func(text, detail string, code, sub uint8) event {
		return event{kind: eventLog, text: text, detail: detail, code: code, subcode: sub}
	}
	at := func(after time.Duration, e event) event {
		e.time = time.Unix(0, 0).Add(after)
		return e
	}
	up := state(packet.BGP_FSM_ESTABLISHED, "")
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
		{"up", p, nil, []event{logged(logDialFailed, "connect: connection refused", 0, 0), up}, "up: Established"},
		{"refused", p, nil, []event{logged(logDialFailed, "dial tcp: connect: connection refused", 0, 0)}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered"},
		{"no route", p, nil, []event{logged(logDialFailed, "connect: no route to host", 0, 0)}, "start: no route to 10.1.0.1"},
		{"unreachable", p, nil, []event{logged(logDialFailed, "connect: network is unreachable", 0, 0)}, "start: no route to 10.1.0.1"},
		{"timeout", p, nil, []event{logged(logDialFailed, "dial tcp: i/o timeout", 0, 0)}, "start: no answer from 10.1.0.1:179: it is down, or filtered on the way"},
		{"no source", p, nil, []event{logged(logDialFailed, "bind: cannot assign requested address", 0, 0)}, "start: this host does not have the address 10.1.0.11 to connect from"},
		{"other", p, nil, []event{logged(logDialFailed, "too many open files", 0, 0)}, "start: connect: too many open files"},
		{"closed before OPEN", p, nil, []event{logged(logIOError, "read-failed", 0, 0)}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"closed after our objection", p, nil, []event{at(0, logged(logSent, "", 2, 2)), at(time.Minute, logged(logIOError, "read-failed", 0, 0))}, "start: wrong AS: 10.1.0.1 does not have AS 64999, which is configured for it (notification sent: OPEN message error, bad peer AS)"},
		{"closed after the peer's objection", p, nil, []event{at(0, logged(logReceived, "", 2, 7)), at(time.Minute, state(packet.BGP_FSM_OPENSENT, "")), at(time.Minute, state(packet.BGP_FSM_IDLE, "read-failed"))}, "start: notification received: OPEN message error, unsupported capability"},
		{"refused after an objection", p, nil, []event{at(0, logged(logSent, "", 2, 2)), at(time.Minute, logged(logDialFailed, "connection refused", 0, 0))}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered"},
		{"closed and refused after an objection", p, nil, []event{at(0, logged(logSent, "", 2, 2)), at(time.Minute, logged(logDialFailed, "connection refused", 0, 0)), at(2*time.Minute, logged(logIOError, "read-failed", 0, 0))}, "start: wrong AS: 10.1.0.1 does not have AS 64999, which is configured for it (notification sent: OPEN message error, bad peer AS)"},
		{"closed long after an objection", p, nil, []event{at(0, logged(logSent, "", 2, 2)), at(time.Hour, logged(logIOError, "read-failed", 0, 0))}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"closed after our hold timer", p, nil, []event{at(0, logged(logSent, "", 4, 0)), at(time.Second, logged(logIOError, "read-failed", 0, 0))}, "start: 10.1.0.1 closed the connection before it opened a session: is this node's address known to it as a peer?"},
		{"hold timer", p, nil, []event{up, logged(logSent, "", 4, 0), state(packet.BGP_FSM_IDLE, "graceful-restart")}, "start: connecting; the last session ended: hold timer expired: nothing was heard from the peer; the peer's routes are kept while it restarts"},
		{"hold timer without grace", p, nil, []event{up, state(packet.BGP_FSM_IDLE, "hold-timer-expired")}, "start: connecting; the last session ended: hold timer expired: nothing was heard from the peer"},
		{"lost", p, nil, []event{up, state(packet.BGP_FSM_IDLE, "read-failed"), logged(logDialFailed, "connection refused", 0, 0)}, "start: connection refused by 10.1.0.1:179: nothing listens there, or it is filtered; the last session ended: the connection was lost"},
		{"notification", p, nil, []event{up, logged(logReceived, "", 6, 2), state(packet.BGP_FSM_IDLE, "notification-received code 6(cease) subcode 2(administrative shutdown)")}, "start: connecting; the last session ended: notification received: cease, administrative shutdown"},
		{"odd notification", p, nil, []event{up, state(packet.BGP_FSM_IDLE, "notification-sent code 9(undefined) subcode 7(undefined)")}, "start: connecting; the last session ended: notification sent: code 9, subcode 7"},
		{"restart time over", p, nil, []event{state(packet.BGP_FSM_OPENSENT, ""), state(packet.BGP_FSM_IDLE, "restart-timer-expired")}, "start: the peer did not come back within its restart time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newSession(tt.peer, time.Time{})
			for _, e := range tt.events {
				if e.kind == eventState {
					s.setState(e)
				} else {
					s.setLog(e)
				}
			}
			state, info := s.info(tt.listen)
			if diff := cmp.Diff(tt.want, state+": "+info); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestResets counts the ends of a session by reason.
func TestResets(t *testing.T) {
	t.Parallel()
	s := newSession(Peer{Addr: netip.MustParseAddr("10.1.0.1")}, time.Time{})
	up := event{kind: eventState, state: packet.BGP_FSM_ESTABLISHED}
	down := func(reason string) event {
		return event{kind: eventState, state: packet.BGP_FSM_IDLE, reason: reason}
	}
	for _, tt := range []struct {
		events []event
		want   Reset
	}{
		{[]event{up, down("hold-timer-expired")}, ResetHoldTimer},
		{[]event{up, {kind: eventLog, text: logSent, code: 4}, down("graceful-restart")}, ResetHoldTimer},
		{[]event{up, down("graceful-restart")}, ResetLost},
		{[]event{up, down("read-failed")}, ResetLost},
		{[]event{up, {kind: eventLog, text: logReceived, code: 6, subcode: 2}, down("notification-received code 6(cease) subcode 2(x)")}, ResetByPeer},
		{[]event{up, {kind: eventLog, text: logSent, code: 6, subcode: 1}, down("graceful-restart")}, ResetLimit},
		{[]event{up, {kind: eventLog, text: logSent, code: 3, subcode: 1}, down("notification-sent code 3(x) subcode 1(y)")}, ResetMalformed},
		{[]event{up, {kind: eventLog, text: logSent, code: 6, subcode: 4}, down("notification-sent code 6(x) subcode 4(y)")}, ResetByUs},
		{[]event{{kind: eventLog, text: logReceived, code: 2, subcode: 2}, up, down("invalid-msg")}, ResetMalformed},
		{[]event{up, down("something new")}, ResetOther},
	} {
		before := s.counters()
		for _, e := range tt.events {
			if e.kind == eventState {
				s.setState(e)
			} else {
				s.setLog(e)
			}
		}
		c := s.counters()
		if c.LastReset != tt.want || c.Resets[tt.want] != before.Resets[tt.want]+1 || c.Established != before.Established+1 || c.FSMState != 1 {
			t.Errorf("%+v: %+v, want one more of %s than in %+v", tt.events, c, tt.want, before)
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
	c := &Config{ASN: 64512, RouterID: netip.MustParseAddr("10.1.0.11")}
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
		said := bytes.NewReader(message(packet.BGP_MSG_NOTIFICATION, []byte{tt.code, tt.subcode}))
		v, err := ask(&wire{Reader: *said}, c, Peer{ASN: 64999})
		if err != nil || !v.refused {
			t.Errorf("code %d, subcode %d: %+v, %v", tt.code, tt.subcode, v, err)
		}
		if got := meaning(v.code, v.subcode); got != tt.want {
			t.Errorf("meaning(%d, %d) = %q, want %q", tt.code, tt.subcode, got, tt.want)
		}
	}
}

// wire answers what is written with what was recorded.
type wire struct {
	bytes.Reader
	sent bytes.Buffer
}

func (w *wire) Write(b []byte) (int, error) { return w.sent.Write(b) }

// TestAsk reads a peer's answers to an OPEN.
func TestAsk(t *testing.T) {
	t.Parallel()
	c := &Config{ASN: 4200000001, RouterID: netip.MustParseAddr("10.1.0.11")}
	p := Peer{Addr: netip.MustParseAddr("10.1.0.1"), ASN: 64999, HoldTime: defaultHoldTime}
	var right, wrong, big bytes.Buffer
	for _, o := range []struct {
		to  *bytes.Buffer
		asn uint32
	}{{&right, 64999}, {&wrong, 64998}, {&big, 4200000002}} {
		if err := sendOpen(o.to, &Config{ASN: o.asn, RouterID: p.Addr}, p); err != nil {
			t.Fatal(err)
		}
	}
	cease, badAS := message(3, []byte{6, 5}), message(3, []byte{2, 2})
	for _, tt := range []struct {
		name     string
		in       []byte
		want     string
		err      bool
		opens    bool // ours is sent
		accepted bool
	}{
		{name: "silence", err: true},
		{name: "garbage", in: []byte("SSH-2.0-OpenSSH_9.2p1 Debian-2"), err: true},
		{name: "wrong AS", in: wrong.Bytes(), want: "wrong AS: 10.1.0.1 has AS 64998, but AS 64999 is configured for it"},
		{name: "wrong AS of four octets", in: big.Bytes(), want: "wrong AS: 10.1.0.1 has AS 4200000002, but AS 64999 is configured for it"},
		{name: "expects another", in: append(bytes.Clone(right.Bytes()), badAS...), opens: true, want: "wrong AS: 10.1.0.1 expects another one of this node than 4200000001 (notification received: OPEN message error, bad peer AS)"},
		{name: "refused at once", in: cease, want: "notification received: cease, connection rejected"},
		{name: "accepted", in: append(bytes.Clone(right.Bytes()), message(4, nil)...), opens: true, accepted: true},
		{name: "hung up after OPEN", in: right.Bytes(), opens: true},
	} {
		w := &wire{Reader: *bytes.NewReader(tt.in)}
		v, err := ask(w, c, p)
		if (err != nil) != tt.err {
			t.Errorf("%s: error %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, v.explain(c, p)); diff != "" || v.accepted != tt.accepted {
			t.Errorf("%s: verdict %+v (-want +got):\n%s", tt.name, v, diff)
		}
		if (w.sent.Len() > 0) != tt.opens {
			t.Errorf("%s: sent %d bytes", tt.name, w.sent.Len())
		}
	}
}

// TestTap reads what GoBGP only logs, and passes its log on one level lower.
func TestTap(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	var got []event
	var done atomic.Bool
	log := slog.New(tap{
		next: slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo}),
		emit: func(e event) { got = append(got, e) }, done: &done,
	})
	peer := log.With("Topic", "Peer", "Key", "10.1.0.1")
	peer.Debug(logDialFailed, "Error", "connection refused")
	peer.Info(logSent, "Code", 2, "Subcode", 2)
	enabled := func() bool { return peer.Handler().Enabled(context.Background(), slog.LevelDebug) }
	if !enabled() {
		t.Error("debug is off before the session is up: the error of a connection attempt would not be seen")
	}
	peer.Info(logPeerUp)
	if enabled() {
		t.Error("debug is on while the session is up: each message would be put into words")
	}
	peer.Warn("odd message")
	peer.Info(logPeerDown, "Reason", "hold-timer-expired")
	if !enabled() {
		t.Error("debug is off after the session's end")
	}
	log.WithGroup("g").Error("broken")
	done.Store(true)
	log.Error("failed to stop")
	a := netip.MustParseAddr("10.1.0.1")
	want := []event{
		{kind: eventLog, peer: a, text: logDialFailed, detail: "connection refused"},
		{kind: eventLog, peer: a, text: logSent, code: 2, subcode: 2},
		{kind: eventLog, peer: a, text: logPeerDown, detail: "hold-timer-expired"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(event{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	for s, want := range map[string]bool{"odd message": true, "broken": true, "Peer Up": false, "failed to stop": false, "connection refused": false} {
		if strings.Contains(out.String(), s) != want {
			t.Errorf("log has %q: %t, want %t\n%s", s, !want, want, &out)
		}
	}
	if !log.Handler().Enabled(context.Background(), slog.LevelDebug) {
		t.Error("debug is off: the error of a connection attempt would not be seen")
	}
}
