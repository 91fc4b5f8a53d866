package bgp

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
)

// TestEventsOfTheSessionBefore: what was still to be said of a session when its peer was
// configured anew is not taken for the new one's, in the log, the status and the counters.
func TestEventsOfTheSessionBefore(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.NewTextHandler(&log, nil))})
	peer := Peer{Name: "tor", Addr: netip.MustParseAddr("10.1.0.1"), Port: 179, ASN: 64999}
	anew := time.Now()
	ss := newSession(peer, 64512, anew, drops{})
	s.sessions[peer.id()] = ss
	tell := func(after time.Duration, k eventKind, n fsm.Notification) {
		s.event(event{kind: k, peer: peer.id(), time: anew.Add(after), reason: fsm.Reason{Cause: fsm.Received, Notification: n}}, noDrops)
	}
	deconfigured, shutdown := fsm.Cease(fsm.CeaseDeconfigured, ""), fsm.Cease(fsm.CeaseShutdown, "")

	tell(-3*time.Millisecond, eventUp, fsm.Notification{})
	tell(-2*time.Millisecond, eventDown, deconfigured)
	tell(-time.Millisecond, eventFail, deconfigured)
	if _, info := ss.info(nil, noDrops); info != "connecting" || log.Len() > 0 || ss.tally.established != 0 || ss.tally.resets != nil {
		t.Errorf("of the session before: %q, %+v, log %q", info, ss.tally, &log)
	}

	tell(0, eventUp, fsm.Notification{})
	tell(time.Millisecond, eventDown, shutdown)
	_, info := ss.info(nil, noDrops)
	if want := "connecting; the last session ended: notification received: cease, administrative shutdown"; info != want {
		t.Errorf("of the session: %q, want %q", info, want)
	}
	if n := strings.Count(log.String(), "bgp session changed"); n != 2 || ss.tally.established != 1 || ss.tally.resets[ResetByPeer] != 1 {
		t.Errorf("%d changes in the log, want 2; %+v", n, ss.tally)
	}
}
