package inject

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// world is a host with a clock and processes of its own.
type world struct {
	now     time.Duration
	procs   map[int]uint64
	changes int
	file    string
	boot    string
}

func (w *world) open(t *testing.T) *Table {
	t.Helper()
	out, err := open(Options{MaxRoutes: 3, File: w.file, Changed: func() { w.changes++ }}, w.boot, func() time.Duration { return w.now }, func(pid int) uint64 { return w.procs[pid] })
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return &world{now: time.Hour, procs: map[int]uint64{7: 100}, file: filepath.Join(t.TempDir(), "injected"), boot: "a"}
}

func routes(list ...string) (out []Route) {
	for _, s := range list {
		out = append(out, Route{Prefix: netip.MustParsePrefix(s)})
	}
	return out
}

// has is what a table holds, in a line.
func has(t *Table) string {
	var out []string
	for _, e := range t.List() {
		s := e.Owner + ":" + e.Prefix.String()
		if e.Stream {
			s += "+stream"
		}
		if e.PID != 0 {
			s += fmt.Sprintf("+pid%d", e.PID)
		}
		if e.TTL != 0 {
			s += "+" + e.TTL.String()
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func want(t *testing.T, table *Table, s string) {
	t.Helper()
	if got := has(table); got != s {
		t.Fatalf("got %q, want %q", got, s)
	}
}

func put(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestTTL: a route goes when its time is over, unless its owner says it again.
func TestTTL(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	table := w.open(t)
	put(t, table.Put("lb", Lease{TTL: 10 * time.Second}, routes("203.0.113.1/32", "203.0.113.2/32"), false))
	w.now += 6 * time.Second
	put(t, table.Put("lb", Lease{TTL: 10 * time.Second}, routes("203.0.113.1/32"), false))
	if w.changes != 1 {
		t.Errorf("%d changes: what is said again is none", w.changes)
	}
	if next := table.Expire(); next != 4*time.Second {
		t.Errorf("to be called again after %s, want 4s", next)
	}
	w.now += 4 * time.Second
	table.Expire()
	want(t, table, "lb:203.0.113.1/32+6s")
	put(t, table.Put("lb", Lease{TTL: time.Second}, routes("203.0.113.3/32"), true))
	want(t, table, "lb:203.0.113.3/32+1s")
}

// TestProcess: a route goes with the process that its owner names, also when another one has its number since.
func TestProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	table := w.open(t)
	put(t, table.Put("vpn", Lease{PID: 7}, routes("203.0.113.0/24"), false))
	if next := table.Expire(); next != watchEvery {
		t.Errorf("looked at again after %s", next)
	}
	want(t, table, "vpn:203.0.113.0/24+pid7")
	w.procs[7] = 200
	table.Expire()
	want(t, table, "")
	if err := table.Put("vpn", Lease{PID: 8}, routes("203.0.113.0/24"), false); !errors.Is(err, ErrInvalid) {
		t.Errorf("a process that is none: %v", err)
	}
	if startOf(os.Getpid()) == 0 || startOf(1<<22+1) != 0 {
		t.Error("/proc is misread")
	}
}

// TestStream: routes go with their owner's stream, after the grace period; a new stream of the owner takes them over.
func TestStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	table := w.open(t)
	open := func(grace time.Duration) *Stream {
		s, err := table.Open("lb", grace)
		put(t, err)
		return s
	}
	first := open(0)
	put(t, first.Put(routes("203.0.113.1/32", "203.0.113.2/32"), false))
	second := open(time.Minute)
	if err := first.Put(routes("203.0.113.3/32"), false); !errors.Is(err, ErrInvalid) {
		t.Errorf("the stream whose place was taken: %v", err)
	}
	first.Close()
	want(t, table, "lb:203.0.113.1/32+stream lb:203.0.113.2/32+stream")
	if n, err := second.Withdraw([]netip.Prefix{netip.MustParsePrefix("203.0.113.2/32")}); n != 1 || err != nil {
		t.Errorf("withdrew %d, %v", n, err)
	}
	second.Close()
	want(t, table, "lb:203.0.113.1/32+1m0s")
	third := open(0)
	put(t, third.Put(routes("203.0.113.1/32"), false))
	want(t, table, "lb:203.0.113.1/32+stream")
	third.Close()
	want(t, table, "")
}

// TestRestart: what stays over a restart of the daemon, and for how long; nothing does over one of the host.
func TestRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	table := w.open(t)
	s, err := table.Open("stream", 0)
	put(t, err)
	put(t, s.Put(routes("203.0.113.1/32", "203.0.113.2/32"), false))
	put(t, table.Put("time", Lease{TTL: time.Minute}, routes("203.0.113.3/32"), false))
	put(t, table.Put("process", Lease{PID: 7}, routes("203.0.113.4/32"), false))
	table.Freeze()
	s.Close() // as the daemon's end has it

	w.now += 10 * time.Second
	table = w.open(t)
	want(t, table, "stream:203.0.113.1/32+30s stream:203.0.113.2/32+30s time:203.0.113.3/32+50s process:203.0.113.4/32+pid7")
	s, err = table.Open("stream", 0)
	put(t, err)
	put(t, s.Put(routes("203.0.113.2/32"), false))
	w.now += 31 * time.Second // what it has not said again goes
	table.Expire()
	want(t, table, "stream:203.0.113.2/32+stream time:203.0.113.3/32+19s process:203.0.113.4/32+pid7")

	w.boot = "b"
	want(t, w.open(t), "")
}

// TestRefused: limits, and what belongs to others. Nothing of a request that is refused is done.
func TestRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	table := w.open(t)
	put(t, table.Put("a", Lease{TTL: time.Minute}, routes("203.0.113.1/32", "203.0.113.2/32"), false))
	before := has(table)
	for _, c := range []struct {
		name, owner string
		lease       Lease
		routes      []Route
		all         bool
		err         error
		says        string
	}{
		{"another's", "b", Lease{TTL: time.Minute}, routes("203.0.113.9/32", "203.0.113.1/32"), false, ErrTaken, "owner a has it"},
		{"too many", "a", Lease{TTL: time.Minute}, routes("203.0.113.3/32", "203.0.113.4/32"), false, ErrLimit, "would have 4 routes; bgp.inject.maxRoutes is 3"},
		{"too many at once", "a", Lease{TTL: time.Minute}, routes("10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32", "10.0.0.4/32"), true, ErrLimit, "4 routes"},
		{"for ever", "a", Lease{}, routes("203.0.113.3/32"), false, ErrInvalid, "say how long"},
		{"too long", "a", Lease{TTL: 25 * time.Hour}, routes("203.0.113.3/32"), false, ErrInvalid, "want 1s to 24h"},
		{"nobody's", "", Lease{TTL: time.Minute}, routes("203.0.113.3/32"), false, ErrInvalid, "owner"},
		{"bits", "a", Lease{TTL: time.Minute}, []Route{{Prefix: netip.MustParsePrefix("203.0.113.3/24")}}, false, ErrInvalid, "203.0.113.3/24"},
	} {
		if err := table.Put(c.owner, c.lease, c.routes, c.all); !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", c.name, err, c.says)
		}
		want(t, table, before)
	}
	put(t, table.Put("a", Lease{TTL: time.Minute}, routes("203.0.113.3/32"), false)) // the limit is what it is
	for i := range maxOwners - 1 {
		put(t, table.Put(fmt.Sprint("o", i), Lease{TTL: time.Minute}, routes(fmt.Sprintf("10.0.%d.0/24", i)), false))
	}
	if err := table.Put("more", Lease{TTL: time.Minute}, routes("10.9.0.0/24"), false); !errors.Is(err, ErrLimit) {
		t.Errorf("one owner too many: %v", err)
	}
	if n, err := table.Withdraw("a", nil); n != 3 || err != nil {
		t.Errorf("withdrew %d, %v", n, err)
	}
}

// TestFile: a directory that cannot be written, and a file that is none, are errors, and change nothing.
func TestFile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.file = filepath.Join(t.TempDir(), "none", "injected")
	table := w.open(t)
	if err := table.Put("a", Lease{TTL: time.Minute}, routes("203.0.113.1/32"), false); err == nil {
		t.Error("said that it was kept")
	}
	want(t, table, "")
	w.file = filepath.Join(t.TempDir(), "injected")
	put(t, os.WriteFile(w.file, []byte("{"), 0o600))
	if _, err := New(Options{File: w.file}); err == nil {
		t.Error("read what is none")
	}
}
