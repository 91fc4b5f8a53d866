package events_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/slogtest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/control/events"
)

func newLog(level slog.Level) (*events.Log, *bytes.Buffer) {
	var b bytes.Buffer
	return events.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}), level), &b
}

func all(l *events.Log) []events.Event {
	list, _ := l.Since(0)
	return list
}

// TestHandler: what is written is what the handler alone would have written.
func TestHandler(t *testing.T) {
	t.Parallel()
	var l *events.Log
	slogtest.Run(t, func(*testing.T) slog.Handler {
		l = events.New(slog.DiscardHandler, slog.LevelDebug)
		return l.Logger().Handler()
	}, func(t *testing.T) map[string]any {
		list := all(l)
		if len(list) != 1 {
			t.Fatalf("%d events; want 1", len(list))
		}
		m := map[string]any{slog.MessageKey: list[0].Message, slog.LevelKey: list[0].Level}
		if !list[0].Time.IsZero() {
			m[slog.TimeKey] = list[0].Time
		}
		for _, a := range list[0].Attrs {
			in := m
			names := strings.Split(a.Key, ".")
			for _, n := range names[:len(names)-1] {
				if in[n] == nil {
					in[n] = map[string]any{}
				}
				in = in[n].(map[string]any)
			}
			in[names[len(names)-1]] = a.Value
		}
		return m
	})
}

func TestEvents(t *testing.T) {
	t.Parallel()
	l, _ := newLog(slog.LevelWarn)
	log := l.Logger()
	bgp := log.With(events.PartKey, "bgp", "peer", "10.0.0.1")
	bgp.Info("session is up", "as", 64512)
	bgp.Debug("not kept")
	log.WithGroup("store").Error("away", "error", errors.New("refused"))
	want := []events.Event{
		{Seq: 1, Part: "bgp", Message: "session is up", Attrs: []events.Attr{{Key: "peer", Value: "10.0.0.1"}, {Key: "as", Value: "64512"}}},
		{Seq: 2, Level: slog.LevelError, Message: "away", Attrs: []events.Attr{{Key: "store.error", Value: "refused"}}},
	}
	if diff := cmp.Diff(want, all(l), cmpopts.IgnoreFields(events.Event{}, "Time")); diff != "" {
		t.Error(diff)
	}
	list, _ := l.Since(1)
	if len(list) != 1 || list[0].Seq != 2 {
		t.Errorf("since 1: %+v", list)
	}
	if list, _ := l.Since(1000); len(list) != 0 {
		t.Errorf("since the future: %+v", list)
	}
}

// TestLevels: a part's level holds at once, also for loggers that were made before, and for nobody else.
func TestLevels(t *testing.T) {
	t.Parallel()
	l, out := newLog(slog.LevelInfo)
	log := l.Logger()
	bgp, ipam := log.With(events.PartKey, "bgp"), log.With(events.PartKey, "ipam")
	say := func() string {
		out.Reset()
		for _, to := range []*slog.Logger{log, bgp, ipam} {
			to.Debug("d")
			to.Info("i")
		}
		var lines []string
		for line := range strings.Lines(out.String()) {
			part := "daemon"
			if _, after, ok := strings.Cut(line, events.PartKey+"="); ok {
				part = strings.TrimSpace(after)
			}
			_, msg, _ := strings.Cut(line, "msg=")
			lines = append(lines, part+":"+msg[:1])
		}
		return strings.Join(lines, " ")
	}
	for _, tt := range []struct {
		part  string
		level slog.Level
		want  string
	}{
		{"bgp", slog.LevelDebug, "daemon:i bgp:d bgp:i ipam:i"},
		{"ipam", slog.LevelError, "daemon:i bgp:d bgp:i"},
		{"", slog.LevelDebug, "daemon:d daemon:i bgp:d bgp:i ipam:d ipam:i"},
		{"", slog.LevelWarn, ""},
	} {
		l.SetLevel(tt.part, tt.level)
		if got := say(); got != tt.want {
			t.Errorf("%q at %v: %s; want %s", tt.part, tt.level, got, tt.want)
		}
	}
	l.SetLevel("bgp", slog.LevelDebug)
	lvl, parts := l.Levels()
	if diff := cmp.Diff(map[string]slog.Level{"bgp": slog.LevelDebug, "ipam": slog.LevelWarn}, parts); diff != "" || lvl != slog.LevelWarn {
		t.Errorf("levels: all %v, parts:\n%s", lvl, diff)
	}
	if diff := cmp.Diff([]string{"bgp", "ipam"}, l.Parts()); diff != "" {
		t.Error(diff)
	}
}

// TestBound: the newest records stay, in order, and who follows sees each of them once.
func TestBound(t *testing.T) {
	t.Parallel()
	l, _ := newLog(slog.LevelError)
	const n = 5000
	for i := range n {
		l.Logger().Info(fmt.Sprint(i + 1))
	}
	list := all(l)
	if len(list) < 1000 || len(list) >= n {
		t.Fatalf("%d events are kept", len(list))
	}
	for i, e := range list {
		if want := uint64(n - len(list) + i + 1); e.Seq != want || e.Message != fmt.Sprint(want) {
			t.Fatalf("event %d is %d %q; want %d", i, e.Seq, e.Message, want)
		}
	}
}

// TestFollow has many write while one follows.
func TestFollow(t *testing.T) {
	t.Parallel()
	l, _ := newLog(slog.LevelError)
	const writers, each = 8, 100
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				l.Logger().Info("x")
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var last uint64
	for last < writers*each {
		list, more := l.Since(last)
		for _, e := range list {
			if e.Seq != last+1 {
				t.Fatalf("event %d after %d", e.Seq, last)
			}
			last = e.Seq
		}
		if len(list) > 0 {
			continue
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("%d events came; want %d", last, writers*each)
		}
	}
	wg.Wait()
}
