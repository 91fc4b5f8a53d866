// Package health holds what the daemon says of itself: three separate answers,
// and numbers.
//
// Live says that the loops turn; when it is false, restarting the daemon helps.
// Ready says that this host's own dataplane is programmed; when it is false,
// workloads should not be sent here. The peers are each session's own affair:
// a dead peer never makes a healthy host unready.
package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Check is one answer.
type Check struct {
	Name   string    `json:"name"`
	OK     bool      `json:"ok"`
	Reason string    `json:"reason,omitempty"` // why not
	Since  time.Time `json:"since"`            // of the present answer
}

// Log remembers when answers changed. It is safe for concurrent use.
type Log struct {
	now     func() time.Time
	changed func(Check)
	mu      sync.Mutex
	m       map[string]Check
}

// NewLog returns an empty log. now gives the time of changes; changed is told of answers that are another one than
// before, and of first ones that are no.
func NewLog(now func() time.Time, changed func(Check)) *Log {
	return &Log{now: now, changed: changed, m: map[string]Check{}}
}

// Note records the present answer to the question name: yes if err is nil. A
// new reason for the same "no" does not change since when it holds.
func (l *Log) Note(name string, err error) Check {
	c, changed := l.note(name, err)
	if changed {
		l.changed(c)
	}
	return c
}

func (l *Log) note(name string, err error) (c Check, changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, known := l.m[name]
	if ok := err == nil; !known || c.OK != ok {
		changed = known || !ok
		c = Check{Name: name, OK: ok, Since: l.now()}
	}
	c.Reason = ""
	if err != nil {
		c.Reason = err.Error()
	}
	l.m[name] = c
	return c, changed
}

// Turning returns an error when a loop has not turned for longer than limit.
func Turning(name string, last, now time.Time, limit time.Duration) error {
	if age := now.Sub(last); age > limit {
		return fmt.Errorf("the loop of %s has not turned for %s", name, age.Round(time.Second))
	}
	return nil
}

// Join makes one check of several: it holds when all of them do. Since is that
// of the youngest fault, or of the youngest check when all hold.
func Join(name string, checks []Check) Check {
	out := Check{Name: name, OK: true}
	var reasons []string
	for _, c := range checks {
		if !c.OK {
			reasons = append(reasons, c.Name+": "+c.Reason)
			if out.OK {
				out.OK, out.Since = false, time.Time{}
			}
		}
		if c.OK == out.OK && c.Since.After(out.Since) {
			out.Since = c.Since
		}
	}
	out.Reason = strings.Join(reasons, "; ")
	return out
}

// Report is all that the daemon says of itself.
type Report struct {
	Live       Check   `json:"live"`
	Ready      Check   `json:"ready"`
	Peers      []Check `json:"peers"`
	Conditions []Check `json:"conditions"`
}

// Handler serves /liveness and /readiness (Felix's paths), /peers, /health and
// /metrics. live answers alone for /liveness and must not block: a report asks
// the loops, and the question is whether they still answer.
func Handler(live func() Check, report func(context.Context) Report, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	one := func(ask func(context.Context) Check) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			c := ask(r.Context())
			code := http.StatusOK
			if !c.OK {
				code = http.StatusServiceUnavailable
			}
			write(w, code, c)
		}
	}
	mux.HandleFunc("GET /liveness", one(func(context.Context) Check { return live() }))
	mux.HandleFunc("GET /readiness", one(func(ctx context.Context) Check { return report(ctx).Ready }))
	mux.HandleFunc("GET /peers", func(w http.ResponseWriter, r *http.Request) { write(w, http.StatusOK, report(r.Context()).Peers) })
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) { write(w, http.StatusOK, report(r.Context())) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	return mux
}

func write(w http.ResponseWriter, code int, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if _, err := w.Write(append(b, '\n')); err != nil {
		return // the client is gone; nobody is left to tell
	}
}

// Serve serves h on an address until ctx ends.
func Serve(ctx context.Context, addr string, h http.Handler, log *slog.Logger) error {
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("health.listen: %w", err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(lis) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve health on %s: %w", addr, err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	err = srv.Shutdown(stop)
	if errors.Is(err, context.DeadlineExceeded) {
		err = srv.Close()
	}
	// Serve has nothing to tell: it was ended from here.
	if serr := <-done; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

// Failed returns the checks that do not hold.
func Failed(checks []Check) []Check {
	return slices.DeleteFunc(slices.Clone(checks), func(c Check) bool { return c.OK })
}
