package bgp

import (
	"context"
	"maps"
	"net/netip"
	"time"
)

const (
	// compareEvery is the time between two comparisons of what was told with
	// the table. The kernel's writer compares the rest of the way.
	compareEvery = 10 * time.Minute
	// compareShare bounds the part of the time that comparing may take.
	compareShare = 100
	// underWay is the time in which what the backend has changed surely is an event.
	underWay = time.Second
)

// comparison is when the next one is due, and whether one is being made.
type comparison struct {
	due     time.Time
	running bool
	judged  bool                      // otherwise than when it was told: differences are to be expected
	touched map[netip.Prefix]struct{} // by events since the present one began; nil: there is none
}

// checkCompare starts a comparison when one is due and nothing is under way. The
// caller holds s.mu.
func (s *Speaker) checkCompare(now time.Time) time.Duration {
	c := &s.compared
	if c.due.IsZero() {
		c.due = now.Add(compareEvery)
	}
	if wait := c.due.Sub(now); wait > 0 || c.running {
		return max(wait, time.Minute)
	}
	if s.engine == nil || !s.deadline.IsZero() {
		return compareEvery // the end of that is an event
	}
	next, judged := now.Add(compareEvery), c.judged
	c.running, c.due, c.judged = true, next, false
	s.wg.Go(func() {
		start := time.Now()
		switch n := s.compare(); {
		case n > 0 && judged:
			s.log.Info("bgp routes judged again, for this host's addresses or filters are others", "prefixes", n)
		case n > 0:
			s.log.Error("bgp table differed from what was told of it, and was told again", "prefixes", n)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		c.running = false
		if c.due.Equal(next) {
			c.due = time.Now().Add(max(compareEvery, compareShare*time.Since(start)))
		} else {
			s.q.poke() // it is due already
		}
	})
	return compareEvery
}

// judge has what was told compared at once when this host has other addresses,
// which are no next hops of what others announce, or when filters let paths in by
// other names. The caller holds s.mu.
func (s *Speaker) judge(old, c *Config, now time.Time) {
	if old.NextHop != c.NextHop || old.NextHop6 != c.NextHop6 || !old.sameNames(c) {
		s.compared.due, s.compared.judged = now, true
	}
}

// compare tells the reader again of prefixes of which it knows something else
// than GoBGP's table says, and returns how many. Those that change meanwhile are
// left to the next time.
func (s *Speaker) compare() int {
	touched := map[netip.Prefix]struct{}{}
	s.mu.Lock()
	e := s.engine
	s.compared.touched = touched
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.compared.touched = nil
	}()
	if e == nil {
		return 0
	}
	known := s.rib.snapshot()
	wrong := map[netip.Prefix][]Hop{}
	err := e.chosen(context.Background(), func(prefix netip.Prefix, hops []Hop) {
		for i := range hops {
			hops[i].Stale = false
		}
		if !known[prefix].is(hops) {
			wrong[prefix] = hops
		}
		delete(known, prefix)
	})
	if err != nil {
		return 0 // the engine has ended
	}
	for p, set := range known {
		if !set.is(nil) {
			wrong[p] = nil
		}
	}
	if len(wrong) == 0 {
		return 0
	}
	select {
	case <-time.After(underWay):
	case <-s.done:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engine != e {
		return 0
	}
	for p := range touched {
		delete(wrong, p)
	}
	for p, hops := range wrong {
		s.rib.correct(p, hops)
	}
	return len(wrong)
}

// snapshot is what the reader was told, or is to be.
func (r *rib) snapshot() map[netip.Prefix]*PathSet {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.known)
}

// correct gives p these paths of peers, whatever it had.
func (r *rib) correct(p netip.Prefix, hops []Hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replace(p, hops)
}

// is reports whether these are the set's paths from peers. What a peer is called
// does not count: it may have been called otherwise when it was told.
func (s *PathSet) is(hops []Hop) bool {
	if s == nil {
		return len(hops) == 0
	}
	n := 0
	for _, have := range s.hops {
		if !have.PeerAddr.IsValid() {
			continue // nobody announced it
		}
		n++
		found := false
		for _, h := range hops {
			h.Peer = have.Peer
			found = found || have == h
		}
		if !found {
			return false
		}
	}
	return n == len(hops)
}
