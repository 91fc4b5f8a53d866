package labcmd

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/routerd/routerd/integration/lab"
)

// table is rows under headings, in columns as wide as they need to be.
type table struct{ rows [][]string }

func newTable(headings ...string) *table { return &table{rows: [][]string{headings}} }

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// print writes the table, each line after indent, without spaces at the end.
func (t *table) print(w io.Writer, indent string) error {
	widths := make([]int, len(t.rows[0]))
	for _, r := range t.rows {
		for i, c := range r {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	for _, r := range t.rows {
		var b strings.Builder
		b.WriteString(indent)
		for i, c := range r {
			b.WriteString(c)
			b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c)+2))
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(b.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}

func joinAddrs(addrs []netip.Addr) string {
	var s []string
	for _, a := range addrs {
		s = append(s, a.String())
	}
	return strings.Join(s, ",")
}

func (c *commands) printStatus(ctx context.Context, l *lab.Lab) error {
	hosts, err := l.Status(ctx)
	if err != nil {
		return err
	}
	t := newTable("HOST", "RACK", "ADDRESS", "PID", "READY", "POD", "POD ADDRESS", "NAMESPACE")
	for _, h := range hosts {
		ready := "yes"
		if !h.Ready {
			ready = "no: " + h.Reason
		}
		t.add(h.Name, h.Rack, joinAddrs(h.Addrs), fmt.Sprint(h.PID), ready, "", "", l.Space(h.Name))
		for _, p := range h.Pods {
			t.add("", "", "", "", "", p.Name, joinAddrs(p.Addrs), l.Space(p.String()))
		}
	}
	return t.print(c.stdout, "")
}

// heartbeat is after how long a step that is not done says so again.
const heartbeat = 5 * time.Second

// progress tells what goes on: a line when a step begins, and another now and
// then while it lasts.
type progress struct {
	w    io.Writer
	wg   sync.WaitGroup
	stop chan struct{}

	mu    sync.Mutex
	start time.Time
	what  string
	since time.Time
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, stop: make(chan struct{}), start: time.Now()}
	p.wg.Go(p.beat)
	return p
}

func (p *progress) beat() {
	t := time.NewTicker(heartbeat)
	defer t.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-t.C:
			p.mu.Lock()
			if p.what != "" && time.Since(p.since) >= heartbeat {
				p.line("still " + p.what)
			}
			p.mu.Unlock()
		}
	}
}

// line writes one line; the caller holds mu.
func (p *progress) line(s string) {
	fmt.Fprintf(p.w, "%6.1fs  %s\n", time.Since(p.start).Seconds(), s)
}

// step says what is done from now on.
func (p *progress) step(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what, p.since = what, time.Now()
	p.line(what)
}

// done ends the telling. It may be called once.
func (p *progress) done() {
	close(p.stop)
	p.wg.Wait()
}
