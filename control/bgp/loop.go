package bgp

import (
	"context"
	"math/rand/v2"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/async"
)

// loop handles what GoBGP reports.
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
	for _, e := range events {
		if e.from == s.engine {
			s.event(e)
		}
	}
	return min(s.checkSync(now), s.tryLimited(now), s.checkCompare(now))
}

func (s *Speaker) event(e event) {
	if e.kind == eventPaths {
		s.changes++
		for _, p := range e.paths {
			prefix, h, ok := s.conv.path(p)
			if ok {
				s.rib.add(prefix, h)
			} else if prefix.IsValid() {
				s.rib.remove(prefix, p.PeerAddress)
			}
			if s.compared.touched != nil {
				s.compared.touched[prefix] = struct{}{}
			}
		}
		return
	}
	if e.kind == eventState && (e.state == packet.BGP_FSM_IDLE || e.state == packet.BGP_FSM_ESTABLISHED) {
		s.rib.recover(e.peer) // the withdrawals came before
	}
	ss, ok := s.sessions[e.peer]
	if !ok || ss.removed && e.kind == eventState {
		return // what GoBGP still had to say of a session that is no more
	}
	unexplained := false
	switch e.kind {
	case eventEOR:
		ss.endOfRIB(e.families)
	case eventState:
		wasUp, was := ss.up, ss.state
		unexplained = ss.setState(e)
		if wasUp != ss.up {
			s.logState(ss)
		}
		s.mindCollision(ss, was)
	case eventLog:
		if e.text == logPeerDown {
			if ss.leaves(e) {
				s.rib.lose(e.peer)
			}
			return
		}
		unexplained = ss.setLog(e)
		if e.text == logLimit {
			s.settle(ss)
		}
	}
	if unexplained {
		s.diagnose(ss)
	}
}

func (s *Speaker) logState(ss *session) {
	state, info := ss.info(s.listenErr)
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
		if p.wanted() && p.Waiting != "" {
			wait = rest // what its neighbour has to tell is expected too
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

// again is how long a diagnosis holds before a new failure asks for another.
const again = time.Minute

// diagnose finds out in the background what a peer objects to, unless that is
// being done or was done lately.
func (s *Speaker) diagnose(ss *session) {
	if ss.up || ss.diagnosing != nil || !ss.diagnosed.IsZero() && time.Since(ss.diagnosed) < again {
		return
	}
	e, p := s.engine, ss.peer
	c := Config{ASN: e.asn, RouterID: e.routerID}
	ctx, cancel := context.WithCancel(e.ctx)
	ss.diagnosing = cancel
	e.wg.Go(func() {
		defer cancel()
		found := reasonOf(ctx, &c, p, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return ss.state == packet.BGP_FSM_OPENSENT || ss.state == packet.BGP_FSM_OPENCONFIRM
		})
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() != nil {
			return // up, gone, or changed meanwhile
		}
		ss.diagnosing, ss.diagnosed, ss.found = nil, time.Now(), found
		if found != "" {
			s.log.Warn("bgp session refused", "peer", p.Name, "address", p.Addr, "reason", found)
		}
	})
}

// reasonOf probes a peer until it answers. After a failed session many speakers
// take no connection for a while, and then the first: GoBGP tries once a second,
// so for some seconds the probes come closer to each other than that. None is
// sent while a session is coming up, with which it would collide.
func reasonOf(ctx context.Context, c *Config, p Peer, comingUp func() bool) string {
	const hurry, all = 10 * time.Second, 70
	start := time.Now()
	for try := range all {
		wait := min(time.Duration(try+1)*time.Second, 5*time.Second)
		if time.Since(start) < hurry {
			wait = 200*time.Millisecond + rand.N(100*time.Millisecond)
		}
		if async.Sleep(ctx, wait) != nil {
			return ""
		}
		if comingUp() {
			continue
		}
		v, err := probe(ctx, c, p)
		if err != nil || v.asn == 0 && !v.refused {
			continue
		}
		// A peer that has another connection with us by chance has none later.
		if !v.collided() || time.Since(start) > hurry {
			return v.explain(c, p)
		}
	}
	return ""
}
