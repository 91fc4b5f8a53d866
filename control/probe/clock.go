package probe

import "time"

// clock is what an answer says of the answering host's wall clock.
type clock struct {
	said   time.Time
	heard  time.Time     // when the answer came; zero: none has
	within time.Duration // how long it took: said is from that time
}

// How old an answer may be for what it says of a clock, and how far this host's own clock may have been set since.
const (
	clockFor    = time.Minute
	clockSteady = time.Second
)

// ahead returns between what the clock is ahead of this host's. ok is false if no answer came of late, or this
// host's clock was set, or the host slept, since the last one: the next answer tells.
func (c clock) ahead(now time.Time) (atLeast, atMost time.Duration, ok bool) {
	return c.aheadAfter(now.Sub(c.heard), now.Round(0))
}

// aheadAfter is ahead when some time has gone by, and the wall clock shows wall.
func (c clock) aheadAfter(elapsed time.Duration, wall time.Time) (atLeast, atMost time.Duration, ok bool) {
	set := wall.Sub(c.heard.Round(0)) - elapsed
	if c.heard.IsZero() || elapsed > clockFor || set.Abs() > clockSteady {
		return 0, 0, false
	}
	atLeast = c.said.Add(elapsed).Sub(wall)
	return atLeast, atLeast + c.within, true
}
