package probe

import (
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// search finds the largest packet that gets to an address, or through a tunnel.
// It asks for several sizes at once, for each answer that does not come costs a
// timeout.
type search struct {
	to   netip.AddrPort // what the result is of
	full int            // the device's MTU
	// result is the largest packet in bytes; 0: the device's, or not known yet.
	result int

	active   bool
	raising  bool // looking for more than the result
	lo, hi   int  // lo gets there, hi does not
	sizes    []int
	answered map[int]bool
	tries    int
	began    time.Time // the round
	sure     bool      // that the path takes less than before was asked twice
	next     time.Time // of the next try, or of the next check
	checks   int       // since the last attempt at a larger size
}

// Of one size so many probes are sent before it counts as too large, so that a
// single loss does not make a path small.
const sizeTries = 3

// plateaus are sizes at which paths commonly end: IPv6's minimum, tunnels in
// tunnels, PPPoE, Ethernet, jumbo frames; after RFC 1191, section 7.1, with
// those of today.
func plateaus() []int {
	return []int{1280, 1340, 1380, 1400, 1410, 1420, 1430, 1440, 1450, 1458, 1460, 1470, 1472, 1476, 1480, 1492, 1500, 4352, 8000, 8192, 8500, 8900, 8951, 9000}
}

// floor is what every path takes: RFC 8200, section 5, and RFC 791, section
// 3.2, which says 68 but gives 576 to every host.
func floor(f dataplane.Family) int {
	if f == dataplane.IPv4 {
		return 576
	}
	return 1280
}

// start begins a check at once: of the uplink's whole MTU.
func (s *search) start(now time.Time, to netip.AddrPort, full int) {
	*s = search{to: to, full: full, result: s.result, active: true, raising: true, lo: 0, hi: full + 1, next: now}
	if s.result >= full {
		s.result = 0
	}
	s.ask(full)
}

// check begins the slow check: that what is in use still gets there, and at
// times that no more does.
func (s *search) check(now time.Time) {
	s.active, s.lo, s.hi, s.next, s.tries = true, 0, s.full+1, now, 0
	s.checks++
	s.raising = s.result == 0 || s.checks%raiseEvery == 0
	switch {
	case s.result == 0:
		s.ask(s.full)
	case s.raising:
		s.ask(s.result, s.result+1, s.full)
	default:
		s.ask(s.result)
	}
}

func (s *search) ask(sizes ...int) {
	slices.Sort(sizes)
	s.sizes, s.answered, s.tries = slices.Compact(sizes), map[int]bool{}, 0
}

// due returns the sizes to be sent now. Those below one that was answered need
// no answer. The caller says by [search.sent] that it sent them.
func (s *search) due(now time.Time) []int {
	if !s.active || now.Before(s.next) || s.tries >= sizeTries {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.sizes), func(n int) bool { return n <= s.largest() })
}

func (s *search) sent(now time.Time) {
	if s.tries == 0 {
		s.began = now
	}
	s.tries++
	s.next = now.Add(probeTimeout)
}

func (s *search) largest() int {
	n := 0
	for size := range s.answered {
		n = max(n, size)
	}
	return n
}

// got notes that a packet of a size got there.
func (s *search) got(size int) {
	if s.active && slices.Contains(s.sizes, size) {
		s.answered[size] = true
	}
}

// settled reports whether the round is over: every size answered, or tried
// often enough and waited for.
func (s *search) settled(now time.Time) bool {
	if !s.active {
		return false
	}
	if s.largest() == s.sizes[len(s.sizes)-1] {
		return true
	}
	return s.tries >= sizeTries && !now.Before(s.next)
}

// advance draws the conclusion of a round that is settled: the result, or the
// next round. Packets of floor bytes get there in any case; pause is the time
// until the next check.
func (s *search) advance(now time.Time, floor int, pause time.Duration) {
	if n := s.largest(); n > s.lo {
		s.lo = n
	}
	for _, size := range s.sizes {
		if size > s.lo {
			s.hi = min(s.hi, size)
		}
	}
	switch {
	case s.lo >= s.full:
		s.finish(now, 0, pause)
		return
	case !s.raising && s.lo == s.result && s.lo > 0:
		s.finish(now, s.result, pause)
		return
	}
	// The small probes are answered, or nothing would be measured.
	s.lo = max(s.lo, min(floor, s.hi-1))
	if s.hi-s.lo <= 1 {
		s.conclude(now, pause)
		return
	}
	s.ask(between(s.lo, s.hi)...)
	s.next = now
}

// conclude ends a search that found the path smaller than the device. That it
// is smaller than it was is asked twice: probes get lost on a path that loses
// packets, and then more than one in a row.
func (s *search) conclude(now time.Time, pause time.Duration) {
	was := s.result
	if was == 0 {
		was = s.full
	}
	switch {
	case s.lo >= was || s.sure && s.hi <= was:
		s.finish(now, s.lo, pause)
	case s.sure:
		// It does get there: look again from the beginning.
		s.lo, s.hi, s.sure, s.next = 0, s.full+1, false, now
		s.ask(was)
	default:
		s.sure, s.hi, s.next = true, s.full+1, now
		s.ask(s.lo+1, was)
	}
}

func (s *search) finish(now time.Time, result int, pause time.Duration) {
	s.active, s.sure, s.result, s.next = false, false, result, now.Add(pause)
}

// stop gives a search up, because the peer does not answer at all.
func (s *search) stop(now time.Time, pause time.Duration) {
	s.active, s.next = false, now.Add(pause)
}

// between returns sizes larger than lo and smaller than hi: those at which
// paths commonly end, else the next one and some at equal distances.
func between(lo, hi int) []int {
	const most = 8
	var out []int
	if hi-lo > 4*most {
		for _, p := range plateaus() {
			if p > lo && p < hi {
				out = append(out, p)
			}
		}
	}
	if len(out) > 0 {
		return out
	}
	out = []int{lo + 1}
	step := max(1, (hi-lo)/(most+1))
	for n := lo + max(2, step); n < hi; n += step {
		out = append(out, n)
	}
	return out
}
