package scenarios

import (
	"os"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
)

// loadRate is how many packets each flow sends in a second. An emulated CPU
// carries fewer: there an idle lab must be seen to lose none.
func loadRate() int {
	if os.Getenv("ROUTERD_STAGE") == "vm" {
		return 100
	}
	return 1000
}

// loadPairs are pods of one rack and of two.
func loadPairs() [][2]string {
	return [][2]string{{"node1/pod1", "node2/pod1"}, {"node1/pod2", "node3/pod1"}, {"node2/pod2", "node3/pod2"}}
}

// load is traffic that a change must not disturb.
type load struct {
	packets *traffic.Load
	large   *traffic.Load // nil: none
	streams []*traffic.Stream
}

// startLoad starts numbered packets and a TCP stream for each pair. They end
// with the test.
func startLoad(t *testing.T, l *lab.Lab, pairs ...[2]string) *load {
	t.Helper()
	var out load
	for _, p := range pairs {
		s, err := l.StartStream(within(t, 20*time.Second), p[0], p[1])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Stop() })
		out.streams = append(out.streams, s)
	}
	out.packets = startPackets(t, l, traffic.LoadOptions{Rate: loadRate()}, pairs...)
	return &out
}

func startPackets(t *testing.T, l *lab.Lab, o traffic.LoadOptions, pairs ...[2]string) *traffic.Load {
	t.Helper()
	p, err := l.StartLoad(o, pairs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop() })
	return p
}

// expectNoLoss fails the test for each packet that was lost since the last call,
// or since the start, and for each TCP connection that ended or stood still.
func expectNoLoss(t *testing.T, what string, l *load) {
	t.Helper()
	for _, p := range []*traffic.Load{l.packets, l.large} {
		if p == nil {
			continue
		}
		r := p.Interval()
		t.Logf("%s: %s", what, r.Sum())
		for _, f := range r.Bad() {
			t.Errorf("%s: %s", what, f)
		}
	}
	for _, s := range l.streams {
		r := s.Report()
		t.Logf("%s: %s", what, r)
		// A pause in which nothing had to be sent again was the machine's.
		if r.Err != nil || r.LongestGap > time.Second && r.Resent > 0 {
			t.Errorf("%s: %s", what, r)
		}
	}
}
