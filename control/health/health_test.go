package health_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/control/health"
)

func TestLogRemembersChanges(t *testing.T) {
	now := time.Unix(100, 0)
	var told []string
	l := health.NewLog(func() time.Time { return now }, func(c health.Check) { told = append(told, fmt.Sprint(c.Name, c.OK, c.Reason)) })
	l.Note("y", nil)
	l.Note("x", errors.New("first"))
	now = now.Add(time.Minute)
	got := l.Note("x", errors.New("second"))
	if diff := cmp.Diff(health.Check{Name: "x", Reason: "second", Since: time.Unix(100, 0)}, got); diff != "" {
		t.Errorf("a new reason (-want +got):\n%s", diff)
	}
	got = l.Note("x", nil)
	if diff := cmp.Diff(health.Check{Name: "x", OK: true, Since: now}, got); diff != "" {
		t.Errorf("recovery (-want +got):\n%s", diff)
	}
	l.Note("y", errors.New("gone"))
	if diff := cmp.Diff([]string{"xfalsefirst", "xtrue", "yfalsegone"}, told); diff != "" {
		t.Errorf("told of changes (-want +got):\n%s", diff)
	}
}

func TestTurning(t *testing.T) {
	now := time.Unix(100, 0)
	if err := health.Turning("core", now.Add(-2*time.Second), now, 5*time.Second); err != nil {
		t.Errorf("a loop that turned 2s ago: %v", err)
	}
	if err := health.Turning("core", now.Add(-20*time.Second), now, 5*time.Second); err == nil || !strings.Contains(err.Error(), "core has not turned for 20s") {
		t.Errorf("a loop that hangs: %v", err)
	}
}

func TestJoin(t *testing.T) {
	good := health.Check{Name: "a", OK: true, Since: time.Unix(50, 0)}
	bad := health.Check{Name: "b", Reason: "no", Since: time.Unix(10, 0)}
	if diff := cmp.Diff(health.Check{Name: "ready", OK: true, Since: time.Unix(50, 0)}, health.Join("ready", []health.Check{good})); diff != "" {
		t.Errorf("all hold (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(health.Check{Name: "ready", Reason: "b: no", Since: time.Unix(10, 0)}, health.Join("ready", []health.Check{good, bad})); diff != "" {
		t.Errorf("one does not (-want +got):\n%s", diff)
	}
}

// TestDeadPeerIsNotUnready holds the separation of the answers at the HTTP
// door. Liveness is answered without a report, which a hung loop would hold up.
func TestDeadPeerIsNotUnready(t *testing.T) {
	reg := prometheus.NewRegistry()
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "routerd_test"})
	reg.MustRegister(g)
	live := func() health.Check {
		return health.Check{Name: "live", Reason: "the loop of core has not turned for 20s"}
	}
	srv := httptest.NewServer(health.Handler(live, func(context.Context) health.Report {
		return health.Report{
			Live:  health.Check{Name: "live", OK: true},
			Ready: health.Check{Name: "ready", OK: true},
			Peers: []health.Check{{Name: "10.0.0.1", Reason: "connection refused"}},
		}
	}, reg))
	defer srv.Close()
	for path, want := range map[string]struct {
		code int
		text string
	}{
		"/liveness":  {503, "has not turned"},
		"/readiness": {200, `"ok": true`},
		"/peers":     {200, "connection refused"},
		"/health":    {200, "connection refused"},
		"/metrics":   {200, "routerd_test 0"},
		"/else":      {404, ""},
	} {
		expect(t, srv.URL+path, want.code, want.text)
	}
}

func TestProfiles(t *testing.T) {
	rest := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.Error(w, r.URL.Path, http.StatusTeapot) })
	srv := httptest.NewServer(health.WithProfiles(rest))
	defer srv.Close()
	for path, want := range map[string]struct {
		code int
		text string
	}{
		"/debug/pprof/goroutine?debug=1": {200, "TestProfiles"},
		"/debug/pprof/":                  {200, "heap"},
		"/debug/pprof/cmdline":           {404, ""}, // where a secret might stand
		"/readiness":                     {418, "/readiness"},
	} {
		expect(t, srv.URL+path, want.code, want.text)
	}
}

// expect asks for a page, and for its code and a part of its text.
func expect(t *testing.T, url string, code int, text string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != code || !strings.Contains(string(body), text) {
		t.Errorf("GET %s: %d %s; want %d and %q", url, resp.StatusCode, body, code, text)
	}
}

func TestServePortTaken(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	err = health.Serve(t.Context(), lis.Addr().String(), http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "health.listen") || !strings.Contains(err.Error(), "in use") {
		t.Errorf("port taken: %v", err)
	}
}

func TestServeStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- health.Serve(ctx, "127.0.0.1:0", http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	}()
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) && !strings.Contains(err.Error(), "canceled") {
		t.Errorf("Serve = %v", err)
	}
}
