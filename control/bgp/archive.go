package bgp

import "maps"

// archivedCounters is what a session over link-local addresses had counted when
// it ended with its link or its neighbour, for the one that follows.
type archivedCounters struct {
	peer  Peer
	tally counters
}

// sameButLink reports whether two peers differ only in what the link decides: a
// change from one to the other is no change of the configuration.
func (p Peer) sameButLink(q Peer) bool {
	p.Addr, p.Source, p.Waiting = q.Addr, q.Source, q.Waiting
	return p.Interface != "" && p.sameSession(q)
}

// archive keeps what an ended session has counted if c has its peer as before but
// for the link, and reports its end. The caller holds s.mu.
func (s *Speaker) archive(ss *session, c *Config) {
	if ss.peer.Interface == "" {
		return
	}
	for _, p := range c.Peers {
		if p.Name != ss.peer.Name || !p.sameButLink(ss.peer) {
			continue
		}
		was := ss.up
		if was {
			ss.up = false
			ss.tally.fell(ResetLost)
		}
		s.archived[p.Name] = archivedCounters{p, ss.tally.clone()}
		if was {
			ended := *ss
			ended.peer = p // which says what the link lacks
			s.logState(&ended, s.count())
		}
		return
	}
}

// forget drops what was kept of peers that are gone or changed. The caller holds
// s.mu.
func (s *Speaker) forget(c *Config) {
	if len(s.archived) == 0 {
		return
	}
	now := map[string]Peer{}
	for _, p := range c.Peers {
		if p.Interface != "" {
			now[p.Name] = p
		}
	}
	maps.DeleteFunc(s.archived, func(name string, was archivedCounters) bool {
		p, ok := now[name]
		return !ok || !p.sameButLink(was.peer)
	})
}

// tallyOf returns what a peer's last session has counted. The caller holds s.mu.
func (s *Speaker) tallyOf(p Peer) counters {
	if p.Interface == "" {
		return counters{}
	}
	return s.archived[p.Name].tally.clone()
}

func (c counters) clone() counters {
	c.resets = maps.Clone(c.resets)
	return c
}
