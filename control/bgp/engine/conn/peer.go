package conn

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Handler is who is concerned by a peer's sessions. Up, Down and Fail are called in
// order, one at a time, must not call the [Peer], and must not wait: no KEEPALIVE is sent
// meanwhile.
type Handler interface {
	// Up says that a session is established, on a link.
	Up(s *fsm.Session, l *Link)
	// Updates is asked for messages to write, on a goroutine of the session: after
	// [Link.Wake], and again as long as it returns some. They are not changed. KEEPALIVEs
	// are written between what two calls return, so one should return no more than a
	// peer reads in its hold time.
	Updates(s *fsm.Session) [][]byte
	// Receive is handed UPDATE and ROUTE-REFRESH of a session, in order, on its reader's
	// goroutine. While it does not return nothing is read, and the hold timer does not
	// expire. body is valid until it returns. An error ends the session. A call may still
	// run, or begin, when Down has ended the session: it is late then.
	Receive(s *fsm.Session, t wire.Type, body []byte) *wire.Error
	// Down says that a session has ended.
	Down(s *fsm.Session, r fsm.Reason)
	// Fail says that an attempt has ended.
	Fail(r fsm.Reason)
}

// Peer has the connections with one peer. Its methods may be called by any goroutine.
type Peer struct {
	longest int // message that may come
	in, out [types]atomic.Uint64
	handler Handler
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu      sync.Mutex
	options Options
	tries   int  // attempts to connect in a row that failed, which says what is signed with next
	follows bool // the goroutine of follow runs
	closed  bool
	machine *fsm.Machine
	links   map[fsm.ID]*Link
	timer   *time.Timer // calls tick
	due     time.Time   // when it does; zero: not
}

// types is how many types of messages there are.
const types = int(wire.RouteRefresh)

// NewPeer returns a peer that is stopped. [Peer.Close] ends its goroutines.
func NewPeer(o Options, c fsm.Config, h Handler) *Peer {
	p := &Peer{options: o, longest: wire.MaxLen, handler: h, machine: fsm.New(c), links: map[fsm.ID]*Link{}}
	if c.Local.ExtendedMessages {
		p.longest = wire.MaxExtended
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.timer = time.AfterFunc(time.Hour, p.tick)
	p.timer.Stop()
	p.mayFollow()
	return p
}

// Start begins to connect.
func (p *Peer) Start() { p.step(func(now time.Time) []fsm.Action { return p.machine.Start(now) }) }

// Stop ends sessions; see [fsm.Machine.Stop].
func (p *Peer) Stop(n *fsm.Notification) {
	p.step(func(time.Time) []fsm.Action { return p.machine.Stop(n) })
}

// Reset ends sessions and connects again; see [fsm.Machine.Reset].
func (p *Peer) Reset(n fsm.Notification) {
	p.step(func(now time.Time) []fsm.Action { return p.machine.Reset(now, n) })
}

// SetRestarting is [fsm.Machine.SetRestarting].
func (p *Peer) SetRestarting(on bool) {
	p.step(func(time.Time) []fsm.Action { p.machine.SetRestarting(on); return nil })
}

// SetForwarding is [fsm.Machine.SetForwarding].
func (p *Peer) SetForwarding(on bool) {
	p.step(func(time.Time) []fsm.Action { p.machine.SetForwarding(on); return nil })
}

// State is the peer's.
func (p *Peer) State() fsm.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.machine.State()
}

// KeyUse says which keys the connection of the session uses.
func (p *Peer) KeyUse() KeyUse {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, l := range p.links {
		if p.machine.Session(id) != nil {
			return l.keyUse()
		}
	}
	return KeyUse{}
}

// Messages returns how many messages of each type, from [wire.Open] on, came and were
// written since the peer began.
func (p *Peer) Messages() (in, out [types]uint64) {
	for i := range in {
		in[i], out[i] = p.in[i].Load(), p.out[i].Load()
	}
	return in, out
}

// count counts messages, of which each buffer has one or more.
func (p *Peer) count(by *[types]atomic.Uint64, batch [][]byte) {
	for _, b := range batch {
		for len(b) >= wire.HeaderLen {
			by[b[wire.HeaderLen-1]-1].Add(1)
			b = b[binary.BigEndian.Uint16(b[wire.HeaderLen-3:]):]
		}
	}
}

// next are the options of the next attempt to connect, and how it signs.
func (p *Peer) next() (o Options, tries int, a Auth) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.options, p.tries, p.options.auth(p.tries)
}

// settings are the options as they are now.
func (p *Peer) settings() Options {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.options
}

// Sign changes how connections that stand and those to come are signed; from a password to keys or back only
// those to come are. Established sessions go on: what is lost while the two sides have different passwords is sent again. The
// side that opened a connection follows the other one: others are those that it tries in
// turn when it hears nothing.
func (p *Peer) Sign(a Auth, others Passwords) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.options.Auth, p.options.Others, p.tries = a, others, 0
	var errs []error
	for id, l := range p.links {
		errs = append(errs, l.sign(&p.options))
		if a.Keys.N > 0 && p.machine.Session(id) != nil {
			l.send(wire.AppendMessage(nil, wire.Keepalive, nil)) // so that the peer hears at once what it is asked for
		}
	}
	p.mayFollow()
	return errors.Join(errs...)
}

// mayFollow has the passwords of connections followed while there are several. The
// lock is held.
func (p *Peer) mayFollow() {
	if p.options.Others.N > 0 && !p.follows && !p.closed {
		p.follows = true
		p.wg.Go(p.follow)
	}
}

// unheardEvery is how often it is looked whether a peer acknowledges what it is sent,
// while it may have another password.
const unheardEvery = time.Second

// follow has connections that this side opened try the peer's other passwords.
func (p *Peer) follow() {
	tick := time.NewTicker(unheardEvery)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
		}
		p.mu.Lock()
		if p.options.Others.N == 0 {
			p.follows = false
			p.mu.Unlock()
			return
		}
		for _, l := range p.links {
			l.tryOther(&p.options)
		}
		p.mu.Unlock()
	}
}

// dialled notes how an attempt to connect ended that was the n-th in a row, and signed so.
func (p *Peer) dialled(n int, a Auth, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && p.tries == n && p.options.auth(n) == a {
		p.tries++
	}
}

// Close closes what is left of connections, after [Peer.Stop] for a while for what
// was sent, and waits for all goroutines. The handler is not called any more, but for
// a Receive that runs, which it waits for.
func (p *Peer) Close() {
	p.Stop(nil)
	p.mu.Lock()
	p.closed = true
	p.timer.Stop()
	p.mu.Unlock()
	p.cancel()
	p.wg.Wait()
}

// Accept hands over a connection that the peer opened.
func (p *Peer) Accept(c *net.TCPConn) error {
	// Before it may be refused: a peer with RFC 5082 would not see that it is closed.
	raw, err := c.SyscallConn()
	if err == nil {
		o := p.settings()
		err = control(raw, func(fd int) error { return errors.Join(o.setTTL(fd), o.checkKeys(fd)) })
	}
	if err != nil {
		c.Close()
		return err
	}
	accepted := false
	p.step(func(now time.Time) []fsm.Action {
		id, actions := p.machine.Accepted(now)
		if accepted = id != 0; accepted {
			l := newLink(p, id)
			p.links[id] = l
			l.start(c)
			l.keys.keys = slices.Clone(p.options.Auth.Keys.all()) // as the listener has them
			if p.options.Auth != (Auth{}) {                       // the listener may have got it after the connection was opened
				err = l.sign(&p.options)
			}
		}
		return actions
	})
	if !accepted {
		c.Close()
	}
	return err
}

// step has the machine do a step, and does what it returns.
func (p *Peer) step(do func(now time.Time) []fsm.Action) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	for _, a := range do(time.Now()) {
		p.do(a)
	}
	next := p.machine.Next()
	if next.Equal(p.due) {
		return
	}
	if p.due = next; next.IsZero() {
		p.timer.Stop()
	} else {
		p.timer.Reset(time.Until(next))
	}
}

// tick lets the machine's timers expire. No goroutine waits for them: with a thousand peers that do
// not answer it would be a thousand stacks.
func (p *Peer) tick() {
	p.step(func(now time.Time) []fsm.Action {
		p.due = time.Time{}
		return p.machine.Tick(now, p.unread)
	})
}

func (p *Peer) do(a fsm.Action) {
	l := p.links[a.Conn]
	switch a.Kind {
	case fsm.Dial:
		l = newLink(p, a.Conn)
		p.links[a.Conn] = l
		p.wg.Go(l.dial)
	case fsm.Send:
		l.send(a.Message)
	case fsm.Close, fsm.Abort:
		delete(p.links, a.Conn)
		l.finish(a.Kind == fsm.Abort)
	case fsm.Up:
		l.mu.Lock()
		l.session = a.Session
		l.mu.Unlock()
		p.handler.Up(a.Session, l)
	case fsm.Down:
		p.handler.Down(a.Session, a.Reason)
	case fsm.Fail:
		p.handler.Fail(a.Reason)
	}
}

// unread reports whether a connection's bytes wait to be read. It is called with the
// lock held, by the machine.
func (p *Peer) unread(id fsm.ID) bool {
	l := p.links[id]
	return l != nil && l.unread()
}
