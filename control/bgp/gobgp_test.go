package bgp

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
)

// TestGoBGPsWords reads why a session ended from GoBGP's states and its log.
func TestGoBGPsWords(t *testing.T) {
	t.Parallel()
	up := apiutil.PeerState{SessionState: packet.BGP_FSM_ESTABLISHED}
	idle := func(reason string) apiutil.PeerState {
		return apiutil.PeerState{SessionState: packet.BGP_FSM_IDLE, DisconnectMessage: reason}
	}
	note := func(cause fsm.Cause, code, sub uint8) fsm.Reason {
		return fsm.Reason{Cause: cause, Notification: fsm.Notification{Code: code, Subcode: sub}}
	}
	for _, tt := range []struct {
		name  string
		words []any // logLine or apiutil.PeerState
		want  fsm.Reason
		kept  bool
	}{
		{"hold timer", []any{up, idle("hold-timer-expired")}, fsm.Reason{Cause: fsm.HoldTimer}, false},
		{"hold timer with grace", []any{up, logLine{text: logSent, code: 4}, idle("graceful-restart")}, note(fsm.HoldTimer, 4, 0), true},
		{"lost", []any{up, idle("read-failed")}, fsm.Reason{Cause: fsm.Lost}, false},
		{"lost with grace", []any{up, idle("graceful-restart")}, fsm.Reason{Cause: fsm.Lost}, true},
		{"notification received", []any{up, logLine{text: logReceived, code: 6, subcode: 2}, idle("notification-received code 6(cease) subcode 2(x)")}, note(fsm.Received, 6, 2), false},
		{"not logged", []any{up, idle("notification-sent code 9(undefined) subcode 7(undefined)")}, note(fsm.Sent, 9, 7), false},
		{"limit", []any{up, logLine{text: logLimit}}, note(fsm.Sent, 6, 1), false},
		{"malformed", []any{up, idle("invalid-msg")}, note(fsm.Sent, 3, 0), false},
		{"of an attempt before", []any{logLine{text: logReceived, code: 2, subcode: 2}, up, idle("read-failed")}, fsm.Reason{Cause: fsm.Lost}, false},
	} {
		p := &gobgpPeer{}
		var last event
		for _, w := range tt.words {
			switch w := w.(type) {
			case logLine:
				last, _ = p.log(w)
			case apiutil.PeerState:
				events, _ := p.change(w)
				last = events[len(events)-1]
			}
		}
		if diff := cmp.Diff(event{kind: eventDown, reason: tt.want, kept: tt.kept}, last, cmp.AllowUnexported(event{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// recording answers what is written with what was recorded.
type recording struct {
	bytes.Reader
	sent bytes.Buffer
}

func (w *recording) Write(b []byte) (int, error) { return w.sent.Write(b) }

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
		w := &recording{Reader: *bytes.NewReader(tt.in)}
		v, err := ask(w, c, p)
		if (err != nil) != tt.err {
			t.Errorf("%s: error %v", tt.name, err)
		}
		s := newSession(p, c.ASN, time.Time{})
		if r := v.explain(p); r.Cause != 0 {
			s.apply(event{kind: eventFail, reason: r, sure: true})
		}
		if diff := cmp.Diff(tt.want, s.found); diff != "" || v.accepted != tt.accepted {
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
	var got []logLine
	var done atomic.Bool
	log := slog.New(tap{
		next: slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo}),
		emit: func(e logLine) { got = append(got, e) }, done: &done,
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
	want := []logLine{
		{peer: a, text: logDialFailed, detail: "connection refused"},
		{peer: a, text: logSent, code: 2, subcode: 2},
		{peer: a, text: logPeerDown, detail: "hold-timer-expired"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(logLine{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
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
