package bgp

import (
	"time"
)

// loop handles what the backend reports.
func (s *Speaker) loop() {
	clock := time.NewTimer(time.Hour)
	defer clock.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-s.q.wake:
		case <-clock.C:
		}
		clock.Reset(s.handle(s.q.take(), time.Now()))
	}
}

// handle applies events and returns when it wants to be called again without
// one.
func (s *Speaker) handle(events []event, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	counted := s.count()
	for _, e := range events {
		if e.from == s.engine {
			s.event(e, counted)
		}
	}
	return s.checkSync(now)
}

func (s *Speaker) event(e event, counted func() drops) {
	switch e.kind {
	case eventChosen:
		for _, c := range e.chosen {
			s.rib.set(c.prefix, c.hops)
		}
		return
	case eventSwept:
		s.rib.recover(e.peer)
	case eventLost:
		s.rib.lose(e.peer)
	}
	ss, ok := s.sessions[e.peer]
	if !ok || e.time.Before(ss.began) {
		return // what was still to be said of a session that is no more, or was configured anew
	}
	up := ss.up
	ss.apply(e, counted)
	if up != ss.up {
		s.logState(ss, counted)
	}
}

func (s *Speaker) logState(ss *session, counted func() drops) {
	state, info := ss.info(s.listenErr, counted)
	s.log.Info("bgp session changed", "peer", ss.peer.Name, "address", ss.peer.Addr, "state", state, "info", info)
	if s.opts.OnState != nil {
		s.opts.OnState(ss.peer, state, info)
	}
}

// checkSync gives Synced when nothing more is to be waited for.
func (s *Speaker) checkSync(now time.Time) time.Duration {
	const rest = time.Hour
	if s.engine == nil || s.deadline.IsZero() {
		return rest
	}
	wait := time.Duration(0)
	for _, ss := range s.sessions {
		wait = max(wait, ss.wait(now))
	}
	for _, p := range s.cfg.Peers {
		if _, there := s.sessions[p.id()]; p.awaited() || p.runs() && !there { // it is being configured anew, or could not be
			wait = rest // what it reports is expected too
		}
	}
	wait = min(wait, s.deadline.Sub(now))
	if wait > 0 {
		return wait
	}
	s.deadline = time.Time{}
	s.rib.sync()
	s.log.Info("bgp routes in sync", "peers", len(s.sessions))
	return rest
}
