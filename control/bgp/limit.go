package bgp

import (
	"context"
	"net/netip"
	"time"
)

// limitPause is for how long a peer that announced too much is left alone.
const limitPause = 5 * time.Minute

// tryLimited tries the peers again that were cut off long enough ago, and
// returns when to look again.
func (s *Speaker) tryLimited(now time.Time) time.Duration {
	wait := time.Hour
	for _, ss := range s.sessions {
		if ss.limited.IsZero() || s.engine == nil || ss.settling {
			continue
		}
		left := ss.limited.Add(limitPause).Sub(now)
		if left <= 0 {
			s.settle(ss)
			left = limitPause
		}
		wait = min(wait, left)
	}
	return wait
}

// settle takes a peer that announced too much out of GoBGP, or puts it back
// when its time has come, in the background. GoBGP itself would keep what the
// peer sent for the restart time.
func (s *Speaker) settle(ss *session) {
	if ss.settling {
		return
	}
	ss.settling = true
	e, addr := s.engine, ss.peer.Addr
	e.wg.Go(func() {
		if !s.lockApply(e.ctx) {
			return // the engine ends
		}
		defer s.apply.Unlock()
		s.mu.Lock()
		now, ok := s.sessions[addr]
		cfg := s.cfg
		s.mu.Unlock()
		if !ok || now != ss {
			return // changed meanwhile
		}
		var err error
		back := ss.removed
		if back {
			err = e.addPeer(e.ctx, &cfg, ss.peer, false)
		} else {
			err = e.deletePeer(e.ctx, ss.peer)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		ss.settling = false
		if err != nil {
			s.log.Warn("bgp peer beyond its prefix limit", "address", addr, "error", err)
			return
		}
		if ss.removed = !back; back {
			ss.limited = time.Time{}
		} else {
			if ss.up {
				ss.tally.fell(ResetLimit)
			}
			ss.up, ss.since = false, time.Now()
		}
		s.q.poke()
	})
}

// lockApply takes the lock unless ctx ends first: who holds it may be waiting
// for the caller to end.
func (s *Speaker) lockApply(ctx context.Context) bool {
	for !s.apply.TryLock() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
	if ctx.Err() != nil {
		s.apply.Unlock()
		return false
	}
	return true
}

// drop takes a session that is not wanted any more out of GoBGP.
func (s *Speaker) drop(ctx context.Context, e *engine, addr netip.Addr) error {
	s.mu.Lock()
	removed, p := s.sessions[addr].removed, s.sessions[addr].peer
	s.mu.Unlock()
	if removed {
		return nil
	}
	return e.deletePeer(ctx, p)
}
