package scenarios

import (
	"context"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// pingRate is how many requests each flow sends in a second: as many as tell
// of the shortest gap, and no more than an emulated CPU can carry.
func pingRate() int {
	if emulated() {
		return 50
	}
	return 500
}

func addr(t *testing.T, l *lab.Lab, where string) netip.Addr {
	t.Helper()
	a, err := l.Addr(where)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func openStore(t *testing.T, l *lab.Lab) store.Store {
	t.Helper()
	s, err := l.Store(t.Context(), l.Hosts()[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// startFlows starts a stream of pings for each pair FROM, TO and returns once
// each has answers. stop ends them and fails the test for each packet lost.
func startFlows(t *testing.T, l *lab.Lab, pairs ...[2]string) (flows []*traffic.Flow, stop func()) {
	t.Helper()
	flows, stop = flowsAt(t, l, pingRate(), pairs...)
	waitFlows(t, flows, 200*time.Millisecond)
	return flows, stop
}

// flowsAt is startFlows with another rate, and waits for nothing.
func flowsAt(t *testing.T, l *lab.Lab, rate int, pairs ...[2]string) (flows []*traffic.Flow, stop func()) {
	t.Helper()
	for _, p := range pairs {
		f, err := l.Flow(t.Context(), p[0], p[1], rate, traffic.Options{})
		if err != nil {
			t.Fatal(err)
		}
		flows = append(flows, f)
	}
	return flows, stopFlows(t, flows)
}

// stopFlows returns what ends flows, with the test at the latest; none may have lost a packet.
func stopFlows(t *testing.T, flows []*traffic.Flow) (stop func()) {
	t.Helper()
	stop = sync.OnceFunc(func() {
		for _, f := range flows {
			r := f.Stop()
			t.Log(r)
			if r.Lost() != 0 || r.Duplicates != 0 || r.Complaints != 0 {
				t.Errorf("packets were lost: %s", r)
			}
		}
	})
	t.Cleanup(stop)
	return stop
}

// waitFlows waits until each flow has seen as many answers more as it should in
// this time.
func waitFlows(t *testing.T, flows []*traffic.Flow, d time.Duration) {
	t.Helper()
	ctx := within(t, time.Minute+4*d)
	n := int(d.Seconds() * float64(pingRate()))
	targets := make([]int, len(flows))
	for i, f := range flows {
		targets[i] = f.Report().Received + n
	}
	for i, f := range flows {
		if err := f.WaitReceived(ctx, targets[i]); err != nil {
			t.Error(err)
		}
	}
}

// pairsOf are the pairs that the faults on a host must not disturb: through the
// host, to it from near and far, and past it.
func pairsOf(host string) [][2]string {
	switch host {
	case "node1":
		return [][2]string{{"node1/pod1", "node3/pod1"}, {"node2/pod1", "node1/pod2"}, {"node1/pod1", "node1/pod2"}, {"node3/pod2", "node2/pod2"}}
	default:
		return [][2]string{{"node3/pod1", "node1/pod1"}, {"node2/pod1", "node3/pod2"}, {"node1/pod2", "node3/pod1"}}
	}
}

// monitor records what happens to a host's routes and next hops.
type monitor struct {
	lab    *lab.Lab
	host   string
	cancel context.CancelFunc
	done   chan error

	mu  sync.Mutex
	out strings.Builder
}

func (m *monitor) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.out.Write(b)
}

func (m *monitor) text() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.out.String()
}

// watchRoutes starts "ip monitor" on a host and returns once it is seen to
// report.
func watchRoutes(t *testing.T, l *lab.Lab, host string) *monitor {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	m := &monitor{lab: l, host: host, cancel: cancel, done: make(chan error, 1)}
	go func() {
		// What it says of itself is no change: it cannot name the other end of a
		// device whose namespace is just going.
		_, err := l.Run(ctx, host, lab.Streams{Out: m, Err: io.Discard}, "ip", "-4", "monitor", "route", "nexthop")
		m.done <- err
	}()
	m.mark(t)
	return m
}

// The marker is a stranger's route, of a range for documentation (RFC 5737).
const marker = "203.0.113.77"

// mark makes a change that the monitor must report, and waits until it has:
// everything before it has been reported by then.
func (m *monitor) mark(t *testing.T) {
	t.Helper()
	before := strings.Count(m.text(), marker)
	poll(t, "ip monitor on "+m.host, func() string {
		output(t, m.lab, m.host, "ip", "route", "replace", "blackhole", marker, "proto", "static")
		output(t, m.lab, m.host, "ip", "route", "del", "blackhole", marker, "proto", "static")
		if strings.Count(m.text(), marker) == before {
			return "reports nothing: " + m.text()
		}
		return ""
	})
}

// stop returns what was reported beside the markers.
func (m *monitor) stop(t *testing.T) []string {
	t.Helper()
	m.mark(t)
	m.cancel()
	<-m.done // its end by our wish is not an error
	var lines []string
	for line := range strings.SplitSeq(strings.TrimSpace(m.text()), "\n") {
		if line != "" && !strings.Contains(line, marker) {
			lines = append(lines, line)
		}
	}
	return lines
}

// testKillUnderTraffic kills daemons with -9 and starts them again while pods
// ping: nothing is lost, and no route or next hop of the host is touched.
func testKillUnderTraffic(t *testing.T, l *lab.Lab, m mode) {
	for _, host := range []string{"node1", "node3"} {
		t.Run(host, func(t *testing.T) {
			disturb(t, l, m, host, func() error { return l.Kill(await.Context(t), host, unix.SIGKILL) })
		})
	}
}

// testStopUnderTraffic is the same with a daemon that may say goodbye.
func testStopUnderTraffic(t *testing.T, l *lab.Lab, m mode) {
	disturb(t, l, m, "node3", func() error { return l.Kill(await.Context(t), "node3", unix.SIGTERM) })
}

func disturb(t *testing.T, l *lab.Lab, m mode, host string, end func() error) {
	t.Helper()
	flows, stop := startFlows(t, l, pairsOf(host)...)
	before := output(t, l, host, "ip", "route")
	var monitors []*monitor
	for _, h := range l.Hosts() {
		monitors = append(monitors, watchRoutes(t, l, h))
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	waitFlows(t, flows, time.Second) // a second without the daemon
	if err := l.Restart(await.Context(t), host); err != nil {
		t.Fatal(err)
	}
	testSessions(t, l, m)              // everything that it waits for has come
	waitFlows(t, flows, 2*time.Second) // and was acted on
	for _, w := range monitors {
		if lines := w.stop(t); len(lines) > 0 {
			t.Errorf("routes or next hops of %s were touched while %s's daemon was away:\n%s", w.host, host, strings.Join(lines, "\n"))
		}
	}
	stop()
	if after := output(t, l, host, "ip", "route"); after != before {
		t.Errorf("routes of %s changed\nbefore:\n%s\nafter:\n%s", host, before, after)
	}
}
