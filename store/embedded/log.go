package embedded

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapLogger returns a logger for etcd that writes what is worth reading to
// log. dead is called with the message when etcd gives up, instead of the end
// of the process that etcd means by that.
func zapLogger(log *slog.Logger, dead func(msg string)) *zap.Logger {
	end := lastWords(dead)
	return zap.New(&slogCore{log: log}, zap.WithFatalHook(end), zap.WithPanicHook(end))
}

// lastWords ends the goroutine in which etcd found that it cannot go on.
type lastWords func(msg string)

// OnWrite implements [zapcore.CheckWriteHook].
func (dead lastWords) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	var msg strings.Builder
	msg.WriteString(e.Message)
	for _, key := range []string{"error", "path", "dir", "current-server-version", "determined-cluster-version"} {
		if v, ok := enc.Fields[key]; ok {
			msg.WriteString(", " + key + " " + slog.AnyValue(v).String())
		}
	}
	dead(msg.String())
	runtime.Goexit()
}

// slogCore is a zapcore.Core that writes to a slog.Logger.
type slogCore struct {
	log    *slog.Logger
	fields []zapcore.Field
}

// Enabled implements [zapcore.Core]. What etcd reports of its normal work is not
// for our logs.
func (c *slogCore) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

// With implements [zapcore.Core].
func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{c.log, append(slices.Clip(c.fields), fields...)}
}

// Check implements [zapcore.Core].
func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements [zapcore.Core].
func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range append(slices.Clip(c.fields), fields...) {
		f.AddTo(enc)
	}
	attrs := make([]slog.Attr, 0, len(enc.Fields)+1)
	attrs = append(attrs, slog.String("message", e.Message))
	for name, v := range enc.Fields {
		attrs = append(attrs, slog.Any(name, v))
	}
	slices.SortFunc(attrs[1:], func(a, b slog.Attr) int {
		if a.Key < b.Key {
			return -1
		}
		return 1
	})
	c.log.LogAttrs(context.Background(), levelOf(e), "etcd", attrs...)
	return nil
}

// Sync implements [zapcore.Core].
func (c *slogCore) Sync() error { return nil }

// levelOf translates a level. Some of etcd's warnings are about choices that
// are ours and right for one member on a private socket.
func levelOf(e zapcore.Entry) slog.Level {
	switch {
	case slices.Contains([]string{
		"scheme is http or unix while key and cert files are present; ignoring key and cert files",
		"scheme is http or unix while --client-cert-auth is enabled; ignoring client cert auth for this URL",
		"simple token is not cryptographically signed",
		// The error that makes it do so comes out of Server.Err, except at the
		// end, when it is only that the listener is closed.
		"closing client listener",
		"setting up serving from embedded etcd failed.",
		// New data has no term before the first entry is applied; etcd looks
		// again every few seconds.
		"Failed to detect schema version",
		"failed to update storage version",
	}, e.Message):
		return slog.LevelDebug
	case strings.HasSuffix(e.Message, "since there are still pending configuration changes to apply"):
		// The only member of a new cluster, on a slow start: it stands for
		// election again when it has applied that it is a member.
		return slog.LevelDebug
	case e.Level >= zapcore.ErrorLevel:
		return slog.LevelError
	default:
		return slog.LevelWarn
	}
}
