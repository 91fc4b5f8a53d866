package bgp

import "maps"

// past is what a session over link-local addresses has counted that ended with
// its link or its neighbour, for the one that follows.
type past struct {
	peer  Peer
	tally counters
}

// sameButLink reports whether two peers differ only in what the link decides: a
// change from one to the other is no change of the configuration.
func (p Peer) sameButLink(q Peer) bool {
	p.Addr, p.Source, p.Waiting = q.Addr, q.Source, q.Waiting
	return p.Interface != "" && p.sameSession(q)
}

// bury keeps what an ended session has counted if c has its peer as before but
// for the link, and tells of its end. The caller holds s.mu.
func (s *Speaker) bury(ss *session, c *Config) {
	for _, p := range c.Peers {
		if p.Name != ss.peer.Name || !p.sameButLink(ss.peer) {
			continue
		}
		was := ss.up
		if was {
			ss.up = false
			ss.tally.fell(ResetLost)
		}
		s.past[p.Name] = past{p, ss.tally.clone()}
		if was {
			told := *ss
			told.peer = p // which says what the link lacks
			s.logState(&told)
		}
		return
	}
}

// forget drops what was kept of peers that are gone or changed. The caller holds
// s.mu.
func (s *Speaker) forget(c *Config) {
	if len(s.past) == 0 {
		return
	}
	now := map[string]Peer{}
	for _, p := range c.Peers {
		if p.Interface != "" {
			now[p.Name] = p
		}
	}
	maps.DeleteFunc(s.past, func(name string, was past) bool {
		p, ok := now[name]
		return !ok || !p.sameButLink(was.peer)
	})
}

// tallyOf returns what a peer's last session has counted. The caller holds s.mu.
func (s *Speaker) tallyOf(p Peer) counters {
	if p.Interface == "" {
		return counters{}
	}
	return s.past[p.Name].tally.clone()
}

func (c counters) clone() counters {
	c.resets = maps.Clone(c.resets)
	return c
}
