package traffic

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
)

// counter reads a counter of a namespace from /proc/net/netstat.
func counter(t *testing.T, space, name string) int {
	t.Helper()
	var b []byte
	err := ns.Do(space, func() (err error) {
		b, err = os.ReadFile("/proc/thread-self/net/netstat")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(b), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		for j, n := range names {
			var v int
			if n == name {
				if _, err := fmt.Sscan(values[j], &v); err != nil {
					t.Fatal(err)
				}
				return v
			}
		}
	}
	t.Fatalf("no counter %s in %s", name, space)
	return 0
}

// The load sees nothing where nothing is lost, and where a route is away for a
// moment exactly what the router counts, in that direction alone, and when.
func TestLoad(t *testing.T) {
	t.Parallel()
	a, r, b := wire(t, "load")
	here, there := Place{"a", a, addr(10, 0, 1, 2)}, Place{"b", b, addr(10, 0, 2, 2)}
	l, err := StartLoad(LoadOptions{Rate: 1000, OneProcessor: true}, [2]Place{here, there})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	var quiet LoadReport
	await.Until(t, "packets", func() error {
		quiet = append(quiet, l.Interval()...)
		if n := quiet.Sum().Sent; n < 2000 {
			return fmt.Errorf("only %d sent", n)
		}
		return nil
	})
	if bad := quiet.Bad(); len(bad) != 0 {
		t.Errorf("nothing was wrong, and the report says: %v", bad)
	}
	l.Interval()
	before, from := counter(t, r, "InNoRoutes"), time.Now()
	run(t, "ip -n "+r+" route del 10.0.2.0/24")
	await.Until(t, "packets without a route", func() error {
		if n := counter(t, r, "InNoRoutes") - before; n < 50 {
			return fmt.Errorf("only %d", n)
		}
		return nil
	})
	run(t, "ip -n "+r+" route add 10.0.2.0/24 dev right src 10.0.2.1")
	until := time.Now()
	var after LoadReport
	await.Until(t, "a quiet interval", func() error {
		next := l.Interval()
		after = append(after, next...)
		if bad := next.Bad(); len(bad) > 0 || next.Sum().Sent == 0 {
			return fmt.Errorf("%v", next)
		}
		return nil
	})
	want, lost := counter(t, r, "InNoRoutes")-before, 0
	for _, f := range after {
		lost += f.Lost()
		for _, loss := range f.Losses {
			if loss.From.Before(from) || loss.Until.After(until) {
				t.Errorf("loss outside of the fault, which was from %s to %s: %s", from.Format(logTime), until.Format(logTime), f)
			}
		}
		if f.From == "b" && f.Lost() > 0 {
			t.Errorf("the other direction lost packets: %s", f)
		}
	}
	if lost != want || want < 50 {
		t.Errorf("%d packets lost, and the router dropped %d: %v", lost, want, after)
	}
	if bad := l.Stop().Bad(); len(bad) != 0 {
		t.Errorf("after the fault: %v", bad)
	}
}

// However quickly reports follow each other, each is about something; only the
// rest that the end leaves may be about nothing.
func TestLoadIntervals(t *testing.T) {
	t.Parallel()
	a, _, b := wire(t, "quick")
	l, err := StartLoad(LoadOptions{Rate: 20}, [2]Place{{"a", a, addr(10, 0, 1, 2)}, {"b", b, addr(10, 0, 2, 2)}})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if r := l.Interval(); len(r) != 2 || len(r.Silent()) > 0 || len(r.Bad()) > 0 {
			t.Errorf("%v, want some packets of both flows, and none lost", r)
		}
	}
	if r := l.Stop(); len(r.Bad()) > 0 {
		t.Errorf("the rest: %v", r)
	}
}

// TestLoadEstablished: with Established there is one connection between two places, which the router
// between takes for established, and in which each direction is told from the other. Without
// it there are two that nobody answers.
func TestLoadEstablished(t *testing.T) {
	t.Parallel()
	for name, established := range map[string]bool{"one": true, "two": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, r, b := wire(t, name)
			run(t, "ip netns exec "+r+` nft 'table ip watch { chain c { type filter hook forward priority 0
				ct state established ip saddr 10.0.1.2 counter comment "there"
				ct state established ip saddr 10.0.2.2 counter comment "back"
			}; }'`)
			l, err := StartLoad(LoadOptions{Rate: 100, Established: established}, [2]Place{{"a", a, addr(10, 0, 1, 2)}, {"b", b, addr(10, 0, 2, 2)}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Stop() })
			for range 3 {
				report := l.Interval()
				if len(report) != 2 || len(report.Silent()) > 0 || len(report.Bad()) > 0 {
					t.Errorf("%v, want some packets of both flows, and none lost", report)
				}
			}
			counted, err := exec.Command("ip", "netns", "exec", r, "nft", "list", "table", "ip", "watch").CombinedOutput()
			if none := strings.Count(string(counted), "counter packets 0 "); err != nil || (none == 0) != established || (none == 2) == established {
				t.Errorf("%v\n%s", err, counted)
			}
		})
	}
}

// A load that ended has no descriptors: their numbers are other files' by then.
func TestLoadStopsTwice(t *testing.T) {
	t.Parallel()
	a, _, b := wire(t, "twice")
	start := func() *Load {
		t.Helper()
		l, err := StartLoad(LoadOptions{Rate: 100}, [2]Place{{"a", a, addr(10, 0, 1, 2)}, {"b", b, addr(10, 0, 2, 2)}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Stop() })
		return l
	}
	ended := start()
	ended.Stop()
	other := start()
	for i, r := range []LoadReport{ended.Stop(), ended.Interval(), ended.Stop()} {
		if n := r.Sum().Sent; n > 0 {
			t.Errorf("report %d of a load that ended has %d packets", i, n)
		}
	}
	other.Interval()
	if r := other.Interval(); len(r.Bad()) > 0 || len(r.Silent()) > 0 || r[0].LastError != "" {
		t.Errorf("the load beside it: %v", r)
	}
}

func TestLoadReport(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name        string
		flow        FlowReport
		bad, silent bool
	}{
		{"all arrived", FlowReport{Sent: 3, Received: 3}, false, false},
		{"out of order", FlowReport{Sent: 3, Received: 3, Reordered: 1}, false, false},
		{"one lost", FlowReport{Sent: 3, Received: 2}, true, false},
		{"all lost", FlowReport{Sent: 3}, true, false},
		{"one twice", FlowReport{Sent: 3, Received: 3, Duplicates: 1}, true, false},
		{"nothing sent", FlowReport{}, false, true},
		{"nothing sent, one of before twice", FlowReport{Duplicates: 1}, true, true},
	} {
		r := LoadReport{tt.flow, {Sent: 1, Received: 1}}
		want := func(is bool) []FlowReport {
			if is {
				return []FlowReport{tt.flow}
			}
			return []FlowReport{}
		}
		if diff := cmp.Diff(want(tt.bad), r.Bad()); diff != "" {
			t.Errorf("%s: Bad (-want +got):\n%s", tt.name, diff)
		}
		if diff := cmp.Diff(want(tt.silent), r.Silent()); diff != "" {
			t.Errorf("%s: Silent (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	a, _, b := wire(t, "lref")
	here, there := Place{"a", a, addr(10, 0, 1, 2)}, Place{"b", b, addr(10, 0, 2, 2)}
	for _, tt := range []struct {
		o    LoadOptions
		to   Place
		says string
	}{
		{LoadOptions{}, there, "rate 0"},
		{LoadOptions{Rate: 10, Size: 43}, there, "44 to 65535"},
		{LoadOptions{Rate: 10}, Place{"nowhere", a + "x", addr(10, 0, 1, 2)}, a + "x"},
		{LoadOptions{Rate: 10}, Place{"elsewhere", b, addr(10, 0, 9, 9)}, "bind UDP socket to 10.0.9.9"},
	} {
		l, err := StartLoad(tt.o, [2]Place{here, tt.to})
		if err == nil {
			l.Stop()
		}
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%+v to %s: %v, want an error that says %q", tt.o, tt.to.Name, err, tt.says)
		}
	}
}

// What arrives twice, late or out of order is told apart from what is lost.
func TestFlowNotes(t *testing.T) {
	t.Parallel()
	f := &flow{from: Place{Name: "a"}, to: Place{Name: "b"}, secret: 7, out: -1, in: -1, packet: make([]byte, headerLen)}
	at := time.Unix(100, 0)
	sent := func(n int) {
		for range n {
			at = at.Add(time.Millisecond)
			f.sentAt, f.arrived = append(f.sentAt, at), append(f.arrived, false)
		}
	}
	arrive := func(seqs ...byte) {
		for _, s := range seqs {
			f.note([]byte{0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, s})
		}
	}
	sent(10)
	arrive(0, 1, 3, 2, 2, 7, 200)
	f.note([]byte{0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 9}) // another flow's
	f.note([]byte{7})
	got := f.report(10)
	ms := func(n int) time.Time { return time.Unix(100, 0).Add(time.Duration(n) * time.Millisecond) }
	want := FlowReport{From: "a", To: "b", Sent: 10, Received: 5, Duplicates: 1, Reordered: 1, Losses: []Loss{
		{From: ms(5), Until: ms(7), Packets: 3, last: 6}, {From: ms(9), Until: ms(10), Packets: 2, last: 9},
	}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(Loss{})); diff != "" {
		t.Errorf("first report (-want +got):\n%s", diff)
	}
	sent(2)
	arrive(9, 10, 11)
	if diff := cmp.Diff(FlowReport{From: "a", To: "b", Sent: 2, Received: 2, Late: 1}, f.report(12)); diff != "" {
		t.Errorf("second report (-want +got):\n%s", diff)
	}
}

// A stream runs without a gap, shows one where packets are dropped, and the
// reset that ends it.
func TestStream(t *testing.T) {
	t.Parallel()
	a, r, b := wire(t, "strm")
	s, err := StartStream(await.Context(t), StreamOptions{OneProcessor: true}, Place{"a", a, addr(10, 0, 1, 2)}, Place{"b", b, addr(10, 0, 2, 2)})
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	t.Cleanup(func() {
		if !stopped {
			s.Stop()
		}
	})
	more := func(n int) {
		t.Helper()
		until := s.Report().Bytes + n*recordLen
		await.Until(t, "records", func() error {
			if got := s.Report(); got.Bytes < until {
				return errors.New(got.String())
			}
			return nil
		})
	}
	// Where the other end's processor is away for some milliseconds the kernel sends the
	// last segment again though nothing was lost (RFC 8985 section 7).
	await.Until(t, "a hundred records of which nothing is sent again", func() error {
		before := s.Report().Resent
		more(100)
		if got := s.Report(); got.Err != nil || got.Resent != before {
			return fmt.Errorf("nothing was wrong: %s", got)
		}
		return nil
	})
	for range 3 { // as in TestLoadIntervals
		if got := s.Interval(); got.Err != nil || got.Bytes == 0 {
			t.Errorf("%s, want some bytes", got)
		}
	}
	before := s.Report().Resent
	run(t, "ip -n "+r+" route add blackhole 10.0.2.2")
	await.Until(t, "gap", func() error {
		if got := s.Report(); got.LongestGap < 500*time.Millisecond {
			return errors.New(got.String())
		}
		return nil
	})
	run(t, "ip -n "+r+" route del blackhole 10.0.2.2")
	more(20)
	if s.Report().Resent <= before {
		t.Error("segments were dropped and none was sent again")
	}
	run(t, `ip netns exec `+r+` nft 'add table ip t; add chain ip t f { type filter hook forward priority 0; }; add rule ip t f meta l4proto tcp reject with tcp reset'`)
	await.Until(t, "reset", func() error {
		if err := s.Report().Err; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	})
	stopped = true
	if got := s.Stop().String(); !strings.Contains(got, "ended: ") {
		t.Errorf("report %s does not say that the stream ended", got)
	}
}

func TestPauseBeyond(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.UnixMilli(1_000_000 + int64(ms)) }
	gap := func(from, to int) StreamReport {
		return StreamReport{LongestGap: at(to).Sub(at(from)), GapEnd: at(to)}
	}
	for _, tt := range []struct {
		name        string
		own, beside StreamReport
		want        time.Duration
	}{
		{"the same time", gap(100, 1300), gap(100, 1300), 0},
		{"longer at both ends", gap(100, 1300), gap(200, 1000), 400},
		{"within the other's", gap(300, 400), gap(100, 1300), 0},
		{"later", gap(2000, 3200), gap(100, 1300), 1200},
		{"begun while the other stood still", gap(1000, 2200), gap(100, 1300), 900},
		{"the other never stood still", gap(100, 1300), StreamReport{}, 1200},
		{"nothing came back at all", StreamReport{}, gap(100, 1300), 0},
	} {
		if got := tt.own.PauseBeyond(tt.beside); got != tt.want*time.Millisecond {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want*time.Millisecond)
		}
	}
}

// A transfer finds its way over a narrow link, and one that cannot end ends
// with its context and says how far it came.
func TestSend(t *testing.T) {
	t.Parallel()
	a, r, b := wire(t, "send")
	here, there := Place{"a", a, addr(10, 0, 1, 2)}, Place{"b", b, addr(10, 0, 2, 2)}
	got, err := Send(await.Context(t), here, there, 4<<20)
	if err != nil || got.Bytes != 4<<20 || got.MSS != 1000-20-20-12 {
		t.Errorf("transfer %s, %v; want it whole with segments for 1000 bytes", got, err)
	}
	if out, err := exec.Command("ip", "-n", r, "route", "add", "blackhole", "10.0.2.2").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := Send(ctx, here, there, 1<<20); err == nil {
		t.Error("a transfer into a black hole ended well")
	}
}
