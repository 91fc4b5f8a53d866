package bgp

import (
	"maps"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
)

const (
	// compareEvery is the time between two comparisons of what was told with
	// GoBGP's table. The kernel's writer compares the rest of the way.
	compareEvery = 10 * time.Minute
	// compareShare bounds the part of the time that comparing may take.
	compareShare = 100
)

// comparison is when the next one is due, and whether one is being made.
type comparison struct {
	due     time.Time
	running bool
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
	c.due = now.Add(compareEvery)
	if s.engine == nil || !s.deadline.IsZero() {
		return compareEvery
	}
	c.running = true
	s.wg.Go(func() {
		start := time.Now()
		if n := s.compare(); n > 0 {
			s.log.Error("bgp table differed from what was told of it, and was told again", "prefixes", n)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		c.running = false
		c.due = time.Now().Add(max(compareEvery, compareShare*time.Since(start)))
	})
	return compareEvery
}

// compare tells the reader again of prefixes of which it knows something else
// than GoBGP's table says, and returns how many. While the table changes there
// is nothing to compare: the next time will do.
func (s *Speaker) compare() int {
	s.mu.Lock()
	e, changes, conv := s.engine, s.changes, s.newConverter()
	s.mu.Unlock()
	if e == nil {
		return 0
	}
	known := s.rib.snapshot()
	wrong := map[netip.Prefix][]Hop{}
	err := e.table(nil, func(paths []*apiutil.Path) {
		var prefix netip.Prefix
		var hops []Hop
		for i, p := range paths {
			if path, ok := conv.path(p); ok && (i == 0 || p.Best) {
				path.Stale = false
				prefix, hops = path.Prefix, append(hops, path.Hop)
			}
		}
		if len(hops) == 0 {
			return // our own
		}
		if !known[prefix].is(hops) {
			wrong[prefix] = hops
		}
		delete(known, prefix)
	})
	if err != nil {
		return 0 // the engine has ended
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.engine != e || s.changes != changes || s.q.waiting() {
		return 0
	}
	for p, set := range known {
		if !set.is(nil) {
			wrong[p] = nil
		}
	}
	for p, hops := range wrong {
		s.rib.correct(p, hops)
	}
	return len(wrong)
}

// snapshot is what the reader was told, or is to be.
func (r *rib) snapshot() map[netip.Prefix]*hopSet {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.known)
}

// correct gives p these paths of peers, whatever it had.
func (r *rib) correct(p netip.Prefix, hops []Hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s *hopSet
	if old := r.known[p]; old != nil {
		for _, h := range old.hops {
			if !h.PeerAddr.IsValid() { // configured
				s = r.sets.with(s, h)
			}
		}
	}
	for _, h := range hops {
		s = r.sets.with(s, h)
	}
	r.change(p, s)
}

// is reports whether these are the set's paths from peers. What a peer is called
// does not count: it may have been called otherwise when it was told.
func (s *hopSet) is(hops []Hop) bool {
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
