package probe

import (
	"testing"
	"time"
)

// TestClock: what an answer said of a clock counts for a while, and not if this host's own was set meanwhile.
func TestClock(t *testing.T) {
	t.Parallel()
	const s = time.Second
	heard := time.Unix(1000, 0)
	for name, tt := range map[string]struct {
		clock         clock
		elapsed, wall time.Duration // by the monotonic and by the wall clock since the answer
		least, most   time.Duration
		ok            bool
	}{
		"no answer":              {clock{}, 0, 0, 0, 0, false},
		"alike":                  {clock{heard.Add(-s), heard, s}, 0, 0, -s, 0, true},
		"later":                  {clock{heard.Add(-s), heard, s}, 15 * s, 15 * s, -s, 0, true},
		"ahead":                  {clock{heard.Add(20 * s), heard, s}, 15 * s, 15 * s, 20 * s, 21 * s, true},
		"behind":                 {clock{heard.Add(-20 * s), heard, s}, 15 * s, 15 * s, -20 * s, -19 * s, true},
		"long ago":               {clock{heard, heard, s}, 61 * s, 61 * s, 0, 0, false},
		"slewed":                 {clock{heard, heard, 0}, 15 * s, 15*s + s/2, -s / 2, -s / 2, true},
		"set since, or it slept": {clock{heard, heard, s}, 15 * s, 35 * s, 0, 0, false},
		"set back since":         {clock{heard, heard, s}, 15 * s, -5 * s, 0, 0, false},
	} {
		least, most, ok := tt.clock.aheadAfter(tt.elapsed, heard.Add(tt.wall))
		if least != tt.least || most != tt.most || ok != tt.ok {
			t.Errorf("%s: %v to %v, %t; want %v to %v, %t", name, least, most, ok, tt.least, tt.most, tt.ok)
		}
	}
}

// TestClockOfPeer: the answers of the underlay's probes say by how much a peer's clock differs.
func TestClockOfPeer(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	n := 0
	for _, h := range s.hosts {
		for _, p := range h.eng.peers {
			least, most, ok := p.clock.ahead(s.now)
			if p.up && (!ok || least > 0 || most < 0 || most-least > time.Second) {
				t.Errorf("%s of %s: %v to %v ahead, %t", h.name, p.key.node, least, most, ok)
			}
			if p.up {
				n++
			}
		}
	}
	if n == 0 {
		t.Error("no peer answers")
	}
}
