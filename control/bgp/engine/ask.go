package engine

import (
	"context"
	"fmt"
	"iter"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// acceptPause is how long nothing is accepted after that has failed.
const acceptPause = 100 * time.Millisecond

var errClosed = net.ErrClosed

// remote is who a connection came from, with the zone of a link-local address.
func remote(c *net.TCPConn) netip.Addr {
	return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
}

// Changed holds a token when [Engine.Take] has something. It is for one reader.
func (e *Engine) Changed() <-chan struct{} { return e.changed }

// Take hands on what has happened since the last call: events, and up to n prefixes
// whose chosen paths are others, each once, as it is now: its paths of equal cost,
// the best one first; none if there are none any more. A path that becomes stale is no
// change. It reports whether there is more. Both functions are called with the engine's
// lock.
func (e *Engine) Take(n int, event func(Event), change func(prefix wire.Prefix, chosen iter.Seq[*Path])) (more bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if more = e.core.events.take(n, event, func(p wire.Prefix, chosen func(func(*Path) bool)) { change(p, chosen) }); more {
		signal(e.changed)
	}
	return more
}

// Announce makes the paths that begin here those of a list.
func (e *Engine) Announce(own []Origin) { e.locked(func(c *core) { c.announce(own) }) }

// Update makes some of the paths that begin here others, and ends some, at the cost of these.
func (e *Engine) Update(own []Origin, gone []netip.Prefix) {
	e.locked(func(c *core) { c.update(own, gone) })
}

// Incomplete says that peers or paths are yet to come, until complete is called: by what there is meanwhile a restart of this
// side ([Options.Restarting]) is not over before its Deferral.
func (e *Engine) Incomplete() (complete func()) {
	e.locked(func(c *core) { c.incomplete(1) })
	return sync.OnceFunc(func() { e.locked(func(c *core) { c.incomplete(-1) }) })
}

// SetPolicy has another policy judge what comes from now on. What is there is judged by
// it after [Engine.Rejudge].
func (e *Engine) SetPolicy(p Policy) { e.locked(func(c *core) { c.setPolicy(p) }) }

// Rejudge has what is there judged again, in the background, in the order of calls.
func (e *Engine) Rejudge(s Scope) { e.locked(func(c *core) { c.rejudge(s) }) }

// Reset ends the session with a peer, and connects again.
func (e *Engine) Reset(peer netip.Addr, n fsm.Notification) error {
	e.mu.Lock()
	s := e.sessions[peer]
	e.mu.Unlock()
	if s == nil {
		return fmt.Errorf("reset the session with %s: no such peer", peer)
	}
	s.conn.Reset(n)
	return nil
}

// Unreachable ends the session with a peer that is not reached any more, for BFD says so, and removes at once what the peer
// announced, also if the session has ended before and its paths are kept: graceful restart is for a peer
// that goes on forwarding (RFC 5882 section 4.3). The session is tried again.
func (e *Engine) Unreachable(peer netip.Addr) error {
	if err := e.Reset(peer, fsm.Cease(fsm.CeaseBFDDown, "")); err != nil {
		return err
	}
	e.locked(func(c *core) {
		if p := c.peers[peer]; p != nil {
			c.kept.unreachable(p)
			c.settle()
		}
	})
	return nil
}

// Query calls yield with the paths that are asked for until it returns false. It is
// called with the engine's lock, which is let go of now and then.
func (e *Engine) Query(ctx context.Context, q Query, yield func(*Path) bool) error {
	next := e.core.query(q, yield)
	for done := false; !done; {
		if err := ctx.Err(); err != nil {
			return err
		}
		e.mu.Lock()
		done = next()
		e.mu.Unlock()
		if q.Pause != nil {
			if err := q.Pause(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Peers returns how all peers are, in the order of their addresses.
func (e *Engine) Peers() []Status {
	var out []Status
	var sessions []*session
	e.locked(func(c *core) {
		for _, p := range c.ordered() {
			if s := e.sessions[p.config.Addr]; s != nil {
				out, sessions = append(out, c.table.status(p)), append(sessions, s)
			}
		}
	})
	for i, s := range sessions {
		s.complete(&out[i])
	}
	return out
}

// Peer returns how a peer is; false: there is no such.
func (e *Engine) Peer(addr netip.Addr) (Status, bool) {
	var s *session
	var out Status
	e.locked(func(c *core) {
		if s = e.sessions[addr]; s != nil {
			out = c.table.status(s.peer)
		}
	})
	if s == nil {
		return Status{}, false
	}
	s.complete(&out)
	return out, true
}

// complete adds what the connections know.
func (s *session) complete(o *Status) {
	o.State = s.conn.State()
	o.Keys = s.conn.KeyUse()
	in, out := s.conn.Messages()
	for _, m := range []struct {
		to   *Messages
		from []uint64
	}{{&o.In, in[:]}, {&o.Out, out[:]}} {
		n := func(t wire.Type) uint64 { return m.from[t-1] }
		*m.to = Messages{n(wire.Open), n(wire.UpdateMessage), n(wire.Notification), n(wire.Keepalive), n(wire.RouteRefresh)}
	}
}
