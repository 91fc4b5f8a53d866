package bgp

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
)

// Messages that GoBGP logs and tells nowhere else. A test holds each against
// the version in use.
const (
	logDialFailed = "failed to connect"
	logSent       = "sent notification"
	logReceived   = "received notification"
	logIOError    = "outgoing connection IO error"
	logLimit      = "prefix limit reached"
	logPeerDown   = "Peer Down" // before the paths are withdrawn, the state's event after
)

// tap is a slog.Handler that passes GoBGP's log on and reads in it why a
// session does not come up: GoBGP logs the error of a connection attempt and
// the code of a notification, but its events do not carry them.
type tap struct {
	next slog.Handler
	peer netip.Addr // from the logger's own attributes
	emit func(event)
	done *atomic.Bool // GoBGP is being stopped: what it says then is no news
}

// Enabled is always true: what is needed is logged at debug level.
func (t tap) Enabled(context.Context, slog.Level) bool { return true }

func (t tap) Handle(ctx context.Context, r slog.Record) error {
	if t.done.Load() {
		return nil
	}
	switch r.Message {
	case logDialFailed, logSent, logReceived, logIOError, logLimit, logPeerDown:
		t.read(r)
	}
	r.Level = lower(r.Level)
	if !t.next.Enabled(ctx, r.Level) {
		return nil
	}
	return t.next.Handle(ctx, r)
}

// lower maps GoBGP's levels to ours: what it calls information are details of
// single messages and sessions.
func lower(l slog.Level) slog.Level {
	if l == slog.LevelInfo {
		return slog.LevelDebug
	}
	return l
}

func (t tap) read(r slog.Record) {
	e := event{kind: eventLog, peer: t.peer, text: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "Error", "reason", "Reason":
			e.detail = a.Value.String()
		case "Code":
			e.code = uint8(a.Value.Int64())
		case "Subcode":
			e.subcode = uint8(a.Value.Int64())
		}
		return true
	})
	t.emit(e)
}

func (t tap) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		if a.Key == "Key" {
			if addr, err := netip.ParseAddr(a.Value.String()); err == nil {
				t.peer = addr
			}
		}
	}
	t.next = t.next.WithAttrs(attrs)
	return t
}

func (t tap) WithGroup(name string) slog.Handler {
	t.next = t.next.WithGroup(name)
	return t
}
