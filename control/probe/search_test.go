package probe

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

// run makes a search end on a path that takes packets up to limit, and returns
// the number of rounds. lose says which packets are lost besides.
func (s *search) run(t *rapid.T, now *time.Time, limit int, lose func() bool) (rounds int) {
	for s.active {
		for !s.settled(*now) {
			for _, size := range s.due(*now) {
				if size > s.full {
					t.Fatalf("asked for %d bytes, and the uplink takes %d", size, s.full)
				}
				if size <= limit && !lose() {
					s.got(size)
				}
			}
			if !now.Before(s.next) {
				s.sent(*now)
			}
			*now = now.Add(probeTimeout)
		}
		s.advance(*now, floor(dataplane.IPv4), time.Minute)
		if rounds++; rounds > 20 {
			t.Fatalf("no end: %+v", s)
		}
	}
	return rounds
}

// The search finds the exact size of any path, and follows one that changes.
func TestSearch(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(0, 0)
		full := rapid.IntRange(576, 9216).Draw(t, "uplink")
		var s search
		s.start(now, netip.MustParseAddrPort("192.0.2.1:4789"), full)
		never := func() bool { return false }
		for range rapid.IntRange(1, 4).Draw(t, "changes") {
			limit := rapid.IntRange(576, 9500).Draw(t, "path")
			want := limit
			if limit >= full {
				want = 0
			}
			// A larger path is noticed at the tenth check at the latest.
			for range raiseEvery + 1 {
				if !s.active {
					s.check(now)
				}
				s.run(t, &now, limit, never)
			}
			if s.result != want {
				t.Fatalf("path of %d bytes behind an uplink of %d: %d, want %d", limit, full, s.result, want)
			}
		}
	})
}

// A lost packet now and then does not make the path small, and the common
// paths are found within a few rounds.
func TestSearchRounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(0, 0)
		full := rapid.SampledFrom([]int{1500, 9000}).Draw(t, "uplink")
		limit := rapid.SampledFrom([]int{1280, 1400, 1450, 1476, 1480, 1492, 1500, 9000}).Draw(t, "path")
		var s search
		s.start(now, netip.MustParseAddrPort("192.0.2.1:4789"), full)
		sent := 0
		rounds := s.run(t, &now, limit, func() bool { sent++; return sent%3 == 1 })
		want := limit
		if limit >= full {
			want = 0
		}
		if s.result != want || rounds > 5 {
			t.Fatalf("path of %d behind %d: %d after %d rounds", limit, full, s.result, rounds)
		}
	})
}
