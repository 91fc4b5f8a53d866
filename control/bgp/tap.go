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
	logPeerUp     = "Peer Up"
	logPeerDown   = "Peer Down" // before the paths are withdrawn, the state's event after
)

// tap is a slog.Handler that passes GoBGP's log on and reads in it why a
// session does not come up: GoBGP logs the error of a connection attempt and
// the code of a notification, but its events do not carry them.
type tap struct {
	next slog.Handler
	peer netip.Addr   // from the logger's own attributes
	up   *atomic.Bool // the peer's session; nil: not a peer's logger
	emit func(logLine)
	done *atomic.Bool // GoBGP is being stopped: what it says then is no news
}

// Enabled is true for what is needed: why a session does not come up is logged
// at debug level. Once it is up GoBGP logs each message and many a path there.
func (t tap) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || t.up == nil || !t.up.Load() || t.next.Enabled(ctx, l)
}

func (t tap) Handle(ctx context.Context, r slog.Record) error {
	if t.done.Load() {
		return nil
	}
	if t.up != nil && (r.Message == logPeerUp || r.Message == logPeerDown) {
		t.up.Store(r.Message == logPeerUp)
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
	e := logLine{peer: t.peer, text: r.Message}
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
				t.peer, t.up = addr, new(atomic.Bool)
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
