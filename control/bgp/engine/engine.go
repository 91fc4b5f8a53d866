package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Engine is a running speaker. Its methods may be called by any goroutine, but not by
// those that it calls.
type Engine struct {
	options Options
	ctx     context.Context // ends with the engine
	cancel  context.CancelFunc
	changed chan struct{}
	kick    chan struct{}
	wg      sync.WaitGroup

	setup     sync.Mutex // held while peers and listeners are changed
	stopped   bool
	listeners map[netip.AddrPort]*conn.Listener
	ranges    map[netip.Prefix]conn.Auth // what is signed
	refusals  refusals

	mu       sync.Mutex
	core     *core
	sessions map[netip.Addr]*session
	callers  map[netip.Addr]*caller

	inbox struct { // what sessions report, which must not wait for the table
		sync.Mutex
		list []func(*core)
	}
}

// session is a peer and its connections.
type session struct {
	engine *Engine
	peer   *peer
	conn   *conn.Peer
	resume *time.Timer // after a limit; nil: it is not left alone
}

// ErrStopped is returned by an engine that was stopped.
var ErrStopped = errors.New("BGP engine stopped")

// New returns an engine without peers, paths or listeners. [Engine.Stop] ends it.
func New(o Options) (*Engine, error) {
	if o.AS == 0 || !o.RouterID.Is4() || o.RouterID.IsUnspecified() {
		return nil, fmt.Errorf("AS %d and router id %s: both are needed, the router id as an IPv4 address", o.AS, o.RouterID)
	}
	e := &Engine{
		options: o, changed: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		listeners: map[netip.AddrPort]*conn.Listener{}, core: newCore(o, time.Now()), sessions: map[netip.Addr]*session{}, callers: map[netip.Addr]*caller{},
		refusals: refusals{log: o.Log},
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.core.agenda.poke = func() { signal(e.kick) }
	e.wg.Go(e.run)
	return e, nil
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// locked calls do with the lock, after what sessions have reported, and lets the reader
// know of what is new.
func (e *Engine) locked(do func(c *core)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.core.table.at(time.Now())
	e.inbox.Lock()
	reports := e.inbox.list
	e.inbox.list = nil
	e.inbox.Unlock()
	for _, report := range reports {
		report(e.core)
	}
	do(e.core)
	if e.core.events.unread() {
		signal(e.changed)
	}
}

// report has something done that a session reports, before anything else that concerns
// the table. It never waits: while a session did, it would send no KEEPALIVE.
func (e *Engine) report(do func(*core)) {
	e.inbox.Lock()
	defer e.inbox.Unlock()
	e.inbox.list = append(e.inbox.list, do)
	signal(e.kick)
}

// run does what takes long in steps, and lets times run out.
func (e *Engine) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for e.ctx.Err() == nil {
		more, next, orders := false, time.Time{}, []order(nil)
		e.locked(func(c *core) {
			if at := c.next(); !at.IsZero() && !c.table.now.Before(at) {
				c.tick()
			}
			more = c.work()
			orders, c.agenda.orders = c.agenda.orders, nil
			next = c.next()
		})
		for _, o := range orders {
			e.carryOut(o)
		}
		if more {
			runtime.Gosched()
			continue
		}
		wait := time.Hour
		if !next.IsZero() {
			wait = time.Until(next)
		}
		timer.Reset(max(wait, 0))
		select {
		case <-e.ctx.Done():
		case <-e.kick:
		case <-timer.C:
		}
	}
}

// carryOut does what the core asks for.
func (e *Engine) carryOut(o order) {
	e.mu.Lock()
	var list []*session
	for _, s := range e.sessions {
		if o.peer == nil || s.peer == o.peer {
			list = append(list, s)
		}
	}
	e.mu.Unlock()
	for _, s := range list {
		switch o.kind {
		case orderPause:
			s.pause()
		case orderForwarding:
			s.conn.SetForwarding(true)
		case orderRestarted:
			s.conn.SetRestarting(false)
		}
	}
}

// pause leaves a peer alone for a while.
func (s *session) pause() {
	e := s.engine
	e.mu.Lock()
	again := !s.peer.removed && s.resume == nil
	if again {
		s.resume = time.AfterFunc(e.options.LimitPause, s.start)
	}
	e.mu.Unlock()
	if again {
		s.conn.Stop(nil)
	}
}

// start tries a peer again.
func (s *session) start() {
	s.engine.locked(func(c *core) {
		if s.resume = nil; !s.peer.removed {
			s.peer.limited = false
			c.events.add(s.peer, Event{Kind: Resumed})
		}
	})
	s.conn.Start() // of no consequence for one that is closed
}

// Listen has the engine listen at these addresses and no others. Those at which it
// listens already are left alone. What cannot be had is left out, and is in the error.
func (e *Engine) Listen(ctx context.Context, at []netip.AddrPort) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	want := map[netip.AddrPort]bool{}
	for _, a := range at {
		want[a] = true
	}
	for a, l := range e.listeners {
		if !want[a] {
			delete(e.listeners, a)
			l.Close()
		}
	}
	var errs []error
	for _, a := range at {
		if e.listeners[a] != nil {
			continue
		}
		l, err := conn.Listen(ctx, a)
		if err != nil {
			errs = append(errs, fmt.Errorf("listen at %s: %w", a, err))
			continue
		}
		e.listeners[a] = l
		for _, p := range e.Configured() {
			if p.signsAlone() && p.Addr.Is4() == a.Addr().Is4() && !e.haveKeys(p.Addr, p.Auth.Keys) {
				errs = append(errs, l.Sign(alone(p.Addr), p.Auth))
			}
		}
		own := e.ownKeys()
		for r, auth := range e.ranges {
			if r.Addr().Is4() == a.Addr().Is4() && !own[r] {
				errs = append(errs, l.Sign(r, auth))
			}
		}
		e.wg.Go(func() { e.accept(l) })
	}
	return errors.Join(errs...)
}

// accept hands connections to the peers of their addresses.
func (e *Engine) accept(l *conn.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			if e.ctx.Err() != nil || errors.Is(err, errClosed) {
				return
			}
			select { // of descriptors there may be more again soon
			case <-e.ctx.Done():
				return
			case <-time.After(acceptPause):
			}
			continue
		}
		from := remote(c)
		e.mu.Lock()
		s, held := e.sessions[from], (*caller)(nil)
		switch {
		case e.several(from):
			s = nil // it is not known whose it is
		case s == nil && e.options.Call != nil && !e.core.halted:
			held = e.hold(from, c)
		}
		e.mu.Unlock()
		if held != nil && (e.options.Call(from) || !e.drop(from, held)) {
			continue
		}
		if s == nil {
			c.Close()
			e.refusals.note(from, nil, time.Now())
			continue
		}
		if err := s.conn.Accept(c); err != nil {
			e.refusals.note(from, err, time.Now())
		}
	}
}

// Configured returns the peers as they are configured.
func (e *Engine) Configured() (out []Peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.sessions {
		out = append(out, s.peer.config)
	}
	return out
}

// SetPeers has the engine have sessions with these peers and no others. Of a peer that
// it has, a change of the password, of keys that [conn.Keys.Follow], Others, limits, AllowOwnAS, ClusterID or ExportKey leaves the
// session as it is; any other makes a new one.
func (e *Engine) SetPeers(peers []Peer) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	want := make(map[netip.Addr]Peer, len(peers))
	for _, p := range peers {
		want[p.Addr] = p
	}
	defer e.Incomplete()()
	var errs []error
	for _, old := range e.Configured() {
		if _, ok := want[old.Addr]; !ok {
			errs = append(errs, e.deconfigure(old, fsm.CeaseDeconfigured))
		}
	}
	for _, p := range peers {
		errs = append(errs, e.set(p))
	}
	return errors.Join(errs...)
}

// SetPeer is [Engine.SetPeers] for one peer beside those that there are: what it costs does not follow their number.
// The error is [ErrStopped], or what the kernel refused of the keys that sign its segments (RFC 2385, RFC 5925); the
// peer is there then all the same.
func (e *Engine) SetPeer(p Peer) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	defer e.Incomplete()()
	return e.set(p)
}

// RemovePeer ends the session with a peer, if there is one, by a Cease (RFC 4486, Peer De-configured). The errors are
// those of [Engine.SetPeer]; the peer is gone then all the same.
func (e *Engine) RemovePeer(addr netip.Addr) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	if e.stopped {
		return ErrStopped
	}
	old, ok := e.configured(addr)
	if !ok {
		return nil
	}
	return e.deconfigure(old, fsm.CeaseDeconfigured)
}

// configured returns a peer as it is configured.
func (e *Engine) configured(addr netip.Addr) (p Peer, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, ok := e.sessions[addr]
	if ok {
		p = s.peer.config
	}
	return p, ok
}

// set makes a peer be as it is to be. e.setup is held.
func (e *Engine) set(p Peer) error {
	old, ok := e.configured(p.Addr)
	if ok && p == old {
		return nil
	}
	if ok && p.sameSession(old) {
		return e.change(old, p)
	}
	var errs []error
	if ok {
		errs = append(errs, e.deconfigure(old, fsm.CeaseConfigChange))
	}
	errs = append(errs, e.sign(p, p.Auth))
	e.add(p)
	return errors.Join(errs...)
}

// deconfigure removes a peer, with its signature from the listeners. e.setup is held.
func (e *Engine) deconfigure(p Peer, subcode uint8) error {
	e.remove(p, subcode)
	return e.sign(p, conn.Auth{})
}

// sameSession reports whether two settings need the same session.
func (p Peer) sameSession(q Peer) bool {
	if p.Auth.Keys.Follow(q.Auth.Keys) {
		p.Auth = q.Auth
	}
	p.Others, p.AllowOwnAS, p.ClusterID, p.ExportKey = q.Others, q.AllowOwnAS, q.ClusterID, q.ExportKey
	for f := range p.Families {
		p.Families[f].Limit = q.Families[f].Limit
	}
	return p == q
}

// change gives a peer settings that need no new session.
func (e *Engine) change(old, p Peer) error {
	var s *session
	e.locked(func(c *core) {
		s = e.sessions[p.Addr]
		c.changePeer(s.peer, p)
	})
	if old.Auth == p.Auth && old.Others == p.Others {
		return nil
	}
	return errors.Join(e.sign(old, p.Auth), s.conn.Sign(p.Auth, p.Others))
}

func (e *Engine) add(p Peer) {
	s := &session{engine: e}
	var held *caller
	// At once: what the core orders for all peers, that a restart is over above all, is for this one too.
	e.locked(func(c *core) {
		s.peer = c.addPeer(p)
		config := c.openOf(&p)
		config.Jitter = rand.Float64
		s.conn = conn.NewPeer(conn.Options{
			Peer: netip.AddrPortFrom(Remote(p.Addr), p.Port), Source: p.Source, Device: p.Device, Auth: p.Auth, Others: p.Others, Hops: p.Hops,
		}, config, s)
		e.sessions[p.Addr] = s
		held = e.callers[p.Addr]
		delete(e.callers, p.Addr)
	})
	s.conn.Start()
	if held == nil {
		return
	}
	held.timeout.Stop()
	if err := s.conn.Accept(held.conn); err != nil {
		e.refusals.note(p.Addr, err, time.Now())
	}
}

// openOf is how sessions with a peer are opened. That routes were kept over a restart of this side holds after it too: a
// peer may be configured, or be found on its link, later than the others.
func (c *core) openOf(p *Peer) fsm.Config {
	o := fsm.Open{AS: c.options.localAS(p), ID: c.inbound.id, HoldTime: p.HoldTime}
	o.AS4, o.Refresh, o.EnhancedRefresh, o.ExtendedMessages, o.ExtendedNextHop = true, true, true, true, p.ExtendedNextHop
	o.GracefulRestart, o.Notification, o.RestartTime = p.RestartTime > 0, p.RestartTime > 0, p.RestartTime
	o.Restarting = c.starting.on && o.GracefulRestart
	kept := c.options.Restarting
	for f := range o.Family {
		of, my := &p.Families[f], &o.Family[f]
		my.Enabled, my.Restart, my.Forwarding = of.Enabled, of.Enabled && o.GracefulRestart, of.Enabled && o.GracefulRestart && kept
		if of.Enabled && o.GracefulRestart {
			my.StaleTime, my.LongLivedForwarding = of.StaleTime, of.StaleTime > 0 && kept
		}
	}
	return fsm.Config{Local: o, PeerAS: p.AS, Keepalive: p.Keepalive, ConnectRetry: p.ConnectRetry, Passive: p.Passive, Wait: p.Wait}
}

// remove ends the session with a peer, and has nothing more to do with it.
func (e *Engine) remove(p Peer, subcode uint8) {
	var s *session
	e.locked(func(c *core) {
		s = e.sessions[p.Addr]
		delete(e.sessions, p.Addr)
		c.removePeer(s.peer)
		if s.resume != nil {
			s.resume.Stop()
		}
	})
	n := fsm.Cease(subcode, "")
	s.conn.Stop(&n)
	e.wg.Go(s.conn.Close)
}

// Stop ends all sessions with n, or without a word, so that peers keep the routes of
// this side while it restarts (RFC 4724), and waits for everything.
func (e *Engine) Stop(ctx context.Context, n *fsm.Notification) error {
	e.setup.Lock()
	defer e.setup.Unlock()
	e.stopped = true
	e.cancel()
	for a, l := range e.listeners {
		delete(e.listeners, a)
		l.Close()
	}
	e.mu.Lock()
	e.core.halted = true // a session that ends has the others lose nothing
	var list []*session
	for _, s := range e.sessions {
		list = append(list, s)
		s.peer.removed = true // nothing is reported of it any more
		if s.resume != nil {
			s.resume.Stop()
		}
	}
	clear(e.sessions)
	for _, held := range e.callers {
		held.timeout.Stop()
		held.conn.Close()
	}
	clear(e.callers)
	e.mu.Unlock()
	for _, s := range list {
		s.conn.Stop(n)
		e.wg.Go(s.conn.Close)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.wg.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop the BGP engine: %w", ctx.Err())
	}
}

// Up is [conn.Handler]'s.
func (s *session) Up(session *fsm.Session, l *conn.Link) {
	local := l.Local()
	localPort, remotePort := l.Ports()
	s.engine.report(func(c *core) {
		s.peer.local, s.peer.localPort, s.peer.remotePort = local, localPort, remotePort
		c.up(s.peer, session, l.Wake)
	})
}

// Updates is [conn.Handler]'s.
func (s *session) Updates(session *fsm.Session) (out [][]byte) {
	s.engine.mu.Lock()
	defer s.engine.mu.Unlock()
	if s.peer.session == session && s.peer.member != nil && !s.engine.core.halted {
		out = s.peer.member.Next(batchSize)
	}
	return out
}

// batchSize is how many bytes are written at once.
const batchSize = 64 << 10

// Receive is [conn.Handler]'s.
func (s *session) Receive(session *fsm.Session, t wire.Type, body []byte) (fault *wire.Error) {
	s.engine.locked(func(c *core) { fault = c.receive(s.peer, session, t, body) })
	return fault
}

// Down is [conn.Handler]'s.
func (s *session) Down(session *fsm.Session, r fsm.Reason) {
	s.engine.report(func(c *core) { c.down(s.peer, session, r) })
}

// Fail is [conn.Handler]'s.
func (s *session) Fail(r fsm.Reason) {
	s.engine.report(func(c *core) {
		if !s.peer.removed {
			c.events.add(s.peer, Event{Kind: Failed, Reason: r})
		}
	})
}
