package fsm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// State is that of a connection, or of the peer: the furthest of its connections.
type State uint8

// The states (RFC 4271 section 8.2.2).
const (
	Idle State = iota // stopped
	Connect
	Active // waiting for the peer, or until it is time to connect again
	OpenSent
	OpenConfirm
	Established
)

func (s State) String() string {
	return [...]string{"Idle", "Connect", "Active", "OpenSent", "OpenConfirm", "Established"}[s]
}

// Times that no setting has.
const (
	// dialTime is how long a connection may take to come about.
	dialTime = 30 * time.Second
	// openTime is how long an OPEN is waited for (RFC 4271 section 8.2.2).
	openTime = 4 * time.Minute
	// unreadTime is what a peer whose bytes wait to be read has beyond its hold time:
	// then it is this side that is late.
	unreadTime = 10 * time.Second
	// leastSendHold is the send hold time of sessions with short hold times (RFC 9687
	// section 3).
	leastSendHold = 8 * time.Minute
	// collisionTime is how long a connection on which the peer's OPEN came waits for the
	// OPEN on the other, and answerTime how long for the peer's side to answer at all,
	// from when this side began to connect.
	collisionTime = 5 * time.Second
	answerTime    = time.Second
	// settledTime is how long after a session came up connections from the peer are
	// closed: they belong to the same attempt, and an OPEN sent on one could have the
	// peer close the session, which may not be up on its side yet.
	settledTime = 5 * time.Second
)

// Config is how sessions with a peer are opened.
type Config struct {
	Local        Open          // what OPEN says; see also [Machine.SetRestarting]
	PeerAS       uint32        // that the peer has to have
	Keepalive    time.Duration // 0: a third of the hold time
	ConnectRetry time.Duration // between attempts
	Passive      bool          // the peer connects
	// Wait is after how long without a session a passive side connects all the same: the
	// peer may wait for it likewise. 0: never.
	Wait time.Duration
	// Jitter returns a number in [0, 1), by which up to a quarter of a time is left out
	// (RFC 4271 section 10). nil: nothing is.
	Jitter func() float64
}

// ID stands for a connection of a machine. 0 is none, and no id is used again.
type ID uint32

// Kind is what an [Action] asks for.
type Kind uint8

// The kinds.
const (
	Dial  Kind = iota + 1 // connect to the peer as Conn, and report Connected or NotConnected
	Send                  // write Message
	Close                 // close Conn once what was sent is written, or give up dialling
	Abort                 // close Conn at once: the peer reads nothing
	Up                    // Conn has become a session, Session
	Down                  // Session has ended, for Reason; Close or Abort comes before it
	Fail                  // an attempt has ended, for Reason
)

// Action is what the caller of a machine has to do, in the order of the list.
type Action struct {
	Kind    Kind
	Conn    ID
	Message []byte
	Session *Session
	Reason  Reason
}

// conn is one connection.
type conn struct {
	id       ID
	incoming bool
	state    State
	session  *Session // from OpenConfirm on
	peerAS   uint32   // that its OPEN says; 0: none came
	sent     []byte   // the OPEN
	since    time.Time

	// Until the other connection's OPEN has come, or that connection has gone, this one
	// is no session: withheld is the KEEPALIVE to the peer, confirmed that the peer's came.
	withheld, confirmed bool
	waited              bool // for the other connection, long enough

	hold, keepalive, sendHold, collision time.Time // zero: not set
}

// Machine is the state machine of a peer.
type Machine struct {
	config  Config
	running bool
	last    ID
	conns   []*conn // at most one that is not incoming, and two that are: Established, and a new one
	retry   time.Time
	actions []Action
}

// New returns a machine that is stopped.
func New(c Config) *Machine { return &Machine{config: c} }

// State is that of the connection that has come furthest.
func (m *Machine) State() State {
	if !m.running {
		return Idle
	}
	s := Active
	if len(m.conns) > 0 && m.conns[0].state == Connect {
		s = Connect
	}
	for _, c := range m.conns {
		if c.state > Active {
			s = max(s, c.state)
		}
	}
	return s
}

// SetRestarting sets R for OPENs from now on (RFC 4724 section 3): whether this side
// has restarted, and its routes are not yet complete.
func (m *Machine) SetRestarting(on bool) { m.config.Local.Restarting = on }

// SetForwarding sets for OPENs from now on whether routes were kept when the session
// before ended (RFC 4724 section 3, RFC 9494 section 3): not by a host that has just
// come up.
func (m *Machine) SetForwarding(on bool) {
	for i := range m.config.Local.Family {
		f := &m.config.Local.Family[i]
		f.Forwarding, f.LongLivedForwarding = on && f.Restart, on && f.StaleTime > 0
	}
}

// Start begins to connect.
func (m *Machine) Start(now time.Time) []Action {
	if !m.running {
		m.running = true
		if m.config.Passive {
			m.again(now)
		} else {
			m.dial(now)
		}
	}
	return m.done()
}

// Stop ends all connections with n, as a hard reset where routes are to go with the
// session and the peer would keep them. nil: without a word, so that the peer keeps
// the routes while this side restarts.
func (m *Machine) Stop(n *Notification) []Action {
	m.running, m.retry = false, time.Time{}
	for _, c := range slices.Clone(m.conns) {
		if n == nil {
			m.end(c, Close, Reason{Cause: Stopped})
			continue
		}
		m.notify(c, *n, Reason{Cause: Sent})
	}
	return m.done()
}

// Reset ends all connections with n, and begins anew.
func (m *Machine) Reset(now time.Time, n Notification) []Action {
	for _, c := range slices.Clone(m.conns) {
		m.notify(c, n, Reason{Cause: Sent})
	}
	m.again(now)
	return m.done()
}

// Accepted reports a connection that the peer opened, and returns its id, or 0 if it
// has to be closed. A newer one replaces one on which no OPEN has come: the peer may
// have forgotten that.
func (m *Machine) Accepted(now time.Time) (ID, []Action) {
	if !m.running {
		return 0, nil
	}
	for _, c := range slices.Clone(m.conns) {
		switch {
		case c.state == Established && now.Before(c.since.Add(settledTime)):
			return 0, nil
		case !c.incoming || c.state == Established:
		case c.state == OpenConfirm:
			return 0, nil
		default:
			m.drop(c)
		}
	}
	c := m.add(true)
	m.open(now, c)
	return c.id, m.done()
}

// Connected reports that Dial succeeded.
func (m *Machine) Connected(now time.Time, id ID) []Action {
	if c := m.find(id); c != nil && c.state == Connect {
		m.open(now, c)
		for _, o := range m.conns {
			if !o.collision.IsZero() {
				o.collision = now.Add(collisionTime)
			}
		}
	}
	return m.done()
}

// NotConnected reports that Dial failed.
func (m *Machine) NotConnected(now time.Time, id ID, err error) []Action {
	if c := m.find(id); c != nil && c.state == Connect {
		m.lose(now, c, Reason{Cause: NotConnected, Err: err})
	}
	return m.done()
}

// Closed reports that a connection was closed by the peer, or broke.
func (m *Machine) Closed(now time.Time, id ID, err error) []Action {
	if c := m.find(id); c != nil {
		m.lose(now, c, Reason{Cause: Lost, Err: err})
	}
	return m.done()
}

// Fault reports a message that ends the session by what is wrong with it.
func (m *Machine) Fault(now time.Time, id ID, e *wire.Error) []Action {
	if c := m.find(id); c != nil {
		m.refuse(now, c, e)
	}
	return m.done()
}

// Wrote reports that the peer's side took what was written to a connection.
func (m *Machine) Wrote(now time.Time, id ID) {
	if c := m.find(id); c != nil && c.state == Established && c.session.HoldTime > 0 {
		c.sendHold = now.Add(max(leastSendHold, 2*c.session.HoldTime))
	}
}

// Message reports what came from the peer. UPDATE and ROUTE-REFRESH are the caller's
// to handle if the connection is Established then ([Machine.Session]).
func (m *Machine) Message(now time.Time, id ID, t wire.Type, body []byte) []Action {
	c := m.find(id)
	if c == nil {
		return nil
	}
	switch {
	case t == wire.Notification:
		r := Reason{Cause: Received, Notification: ParseNotification(body)}
		m.lose(now, c, r)
	case t == wire.Open && c.state == OpenSent:
		m.opened(now, c, body)
	case t == wire.Keepalive && c.state == OpenConfirm:
		m.heard(now, c)
		m.confirm(now, c)
	case t != wire.Open && c.confirmed: // to the peer the session is up
		m.proceed(now, c)
	case t != wire.Open && c.state == Established:
		m.heard(now, c)
	default:
		m.refuse(now, c, &wire.Error{
			Code: CodeFSM, Subcode: map[State]uint8{OpenSent: 1, OpenConfirm: 2, Established: 3}[c.state], // RFC 6608
			Data: []byte{byte(t)}, Reason: fmt.Sprintf("message of type %d in %s", t, c.state),
		})
	}
	return m.done()
}

// Session returns what was agreed on a connection that is Established, or nil.
func (m *Machine) Session(id ID) *Session {
	if c := m.find(id); c != nil && c.state == Established {
		return c.session
	}
	return nil
}

// Next is when [Machine.Tick] has to be called; zero: no timer runs.
func (m *Machine) Next() (at time.Time) {
	earliest := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	earliest(m.retry)
	for _, c := range m.conns {
		for _, t := range []time.Time{c.hold, c.keepalive, c.sendHold, c.collision} {
			earliest(t)
		}
	}
	return at
}

// Tick lets timers expire. unread says whether bytes of a connection wait to be read.
func (m *Machine) Tick(now time.Time, unread func(ID) bool) []Action {
	for _, c := range slices.Clone(m.conns) {
		if m.find(c.id) == nil {
			continue // a connection before it won the collision
		}
		switch {
		case due(&c.sendHold, now):
			m.end(c, Abort, Reason{Cause: SendHoldTimer})
			m.again(now)
		case due(&c.hold, now):
			switch {
			case c.state == Connect:
				m.lose(now, c, Reason{Cause: NotConnected, Err: os.ErrDeadlineExceeded})
			case unread(c.id):
				c.hold = now.Add(unreadTime)
			default:
				m.notify(c, Notification{Code: CodeHoldTimer}, Reason{Cause: HoldTimer})
				m.again(now)
			}
		case due(&c.collision, now):
			m.giveUp(c)
			m.proceed(now, c)
		}
		if due(&c.keepalive, now) && m.find(c.id) != nil {
			m.sendKeepalive(now, c)
		}
	}
	if due(&m.retry, now) {
		m.dial(now)
	}
	return m.done()
}

// due reports whether a timer has expired, which it then no longer runs.
func due(t *time.Time, now time.Time) bool {
	if t.IsZero() || now.Before(*t) {
		return false
	}
	*t = time.Time{}
	return true
}

func (m *Machine) done() []Action {
	a := m.actions
	m.actions = nil
	return a
}

func (m *Machine) do(a Action) { m.actions = append(m.actions, a) }

func (m *Machine) find(id ID) *conn {
	for _, c := range m.conns {
		if c.id == id {
			return c
		}
	}
	return nil
}

func (m *Machine) add(incoming bool) *conn {
	m.last++
	c := &conn{id: m.last, incoming: incoming}
	m.conns = append(m.conns, c)
	return c
}

// dial connects, unless a session is up or about to be, or this is done already.
func (m *Machine) dial(now time.Time) {
	if m.config.Passive && m.config.Wait == 0 {
		return
	}
	for _, c := range m.conns {
		switch {
		case c.state == Established, c.state == Connect, c.state == OpenSent && !c.incoming:
			return
		case c.state == OpenConfirm:
			m.again(now)
			return
		}
	}
	c := m.add(false)
	c.state, c.since, c.hold = Connect, now, now.Add(dialTime)
	m.do(Action{Kind: Dial, Conn: c.id})
}

// again has the next attempt wait.
func (m *Machine) again(now time.Time) {
	pause := m.config.ConnectRetry
	if m.config.Passive {
		pause = m.config.Wait
	}
	if m.running && m.retry.IsZero() && (pause > 0 || !m.config.Passive) {
		m.retry = now.Add(m.jittered(pause))
	}
}

func (m *Machine) jittered(d time.Duration) time.Duration {
	if m.config.Jitter == nil {
		return d
	}
	return d - time.Duration(m.config.Jitter()*float64(d)/4)
}

// open sends OPEN.
func (m *Machine) open(now time.Time, c *conn) {
	msg, err := m.config.Local.Append(nil)
	if err != nil {
		m.lose(now, c, Reason{Cause: NotConnected, Err: err})
		return
	}
	c.state, c.since, c.hold, c.sent = OpenSent, now, now.Add(openTime), msg
	m.do(Action{Kind: Send, Conn: c.id, Message: msg})
}

// opened applies the peer's OPEN.
func (m *Machine) opened(now time.Time, c *conn, body []byte) {
	peer, err := ParseOpen(body)
	if err == nil {
		c.peerAS = peer.AS
		c.session, err = negotiate(&m.config.Local, peer, m.config.PeerAS, m.config.Keepalive)
	}
	if err != nil {
		e := &wire.Error{Code: CodeOpen, Reason: err.Error()}
		errors.As(err, &e)
		m.refuse(now, c, e)
		return
	}
	if !m.wins(c) {
		m.drop(c)
		m.settle(now)
		return
	}
	c.session.SentOpen, c.session.ReceivedOpen = c.sent, wire.AppendMessage(nil, wire.Open, body)
	c.state, c.hold = OpenConfirm, now.Add(openTime)
	m.heard(now, c)
	until := m.contested(now, c)
	if now.Before(until) {
		// With the KEEPALIVE the peer would have its session. It could close the other
		// connection while the OPEN on that has this side close this one, and a connection
		// of this side that it reads after the KEEPALIVE is to it a restart (RFC 4724
		// section 5). Of a session that ends so, in a restart, it keeps no routes.
		c.withheld, c.collision = true, until
	} else {
		if !until.IsZero() {
			m.giveUp(c)
		}
		m.sendKeepalive(now, c)
	}
	m.settle(now)
}

// contested returns until when a connection on which the peer's OPEN has come waits for
// another one; zero: for none.
func (m *Machine) contested(now time.Time, c *conn) time.Time {
	for _, o := range m.conns {
		switch {
		case c.waited || o.incoming == c.incoming:
		case o.state == Connect:
			return o.since.Add(answerTime)
		case o.state == OpenSent && (c.incoming || m.prefersIncoming(c)):
			return now.Add(collisionTime)
		}
	}
	return time.Time{}
}

// giveUp has a connection wait for no other one, and no other one come about.
func (m *Machine) giveUp(c *conn) {
	c.waited = true
	for _, o := range slices.Clone(m.conns) {
		if o.state == Connect {
			m.drop(o)
		}
	}
}

// wins resolves a collision (RFC 4271 section 6.8): it closes the connections that
// lose to c, or reports that c does.
func (m *Machine) wins(c *conn) bool {
	for _, o := range slices.Clone(m.conns) {
		switch {
		case o == c:
		case o.state == Established:
			if !o.session.GracefulRestart {
				return false
			}
			m.end(o, Close, Reason{Cause: PeerRestarted})
		case o.state == OpenConfirm && c.incoming == m.prefersIncoming(c):
			m.drop(o)
		case o.state == OpenConfirm:
			return false
		}
	}
	return true
}

// prefersIncoming reports which of two connections stays: that of the side with the
// higher BGP identifier, or else AS (RFC 6286 section 2.3).
func (m *Machine) prefersIncoming(c *conn) bool {
	local, peer := &m.config.Local, &c.session.Peer
	if local.ID != peer.ID {
		return local.ID < peer.ID
	}
	return local.AS < peer.AS
}

// confirm brings the session up, unless the peer may be closing this very connection
// because it has the OPENs of both: then both sides would close one.
func (m *Machine) confirm(now time.Time, c *conn) {
	c.confirmed = true
	if until := m.contested(now, c); until.IsZero() {
		m.proceed(now, c)
	} else if c.collision.IsZero() {
		c.collision = until
	}
}

// settle lets connections go on that waited for one that is gone.
func (m *Machine) settle(now time.Time) {
	for _, c := range slices.Clone(m.conns) {
		if (c.withheld || c.confirmed) && m.find(c.id) != nil && m.contested(now, c).IsZero() {
			m.proceed(now, c)
		}
	}
}

// proceed has a connection wait for no other any more.
func (m *Machine) proceed(now time.Time, c *conn) {
	c.collision = time.Time{}
	if c.withheld {
		c.withheld = false
		m.sendKeepalive(now, c)
	}
	if c.confirmed {
		m.establish(now, c)
	}
}

func (m *Machine) establish(now time.Time, c *conn) {
	for _, o := range slices.Clone(m.conns) {
		if o != c {
			m.drop(o)
		}
	}
	c.state, c.since, c.confirmed, c.collision = Established, now, false, time.Time{}
	c.hold, m.retry = time.Time{}, time.Time{}
	m.heard(now, c)
	m.Wrote(now, c.id)
	m.do(Action{Kind: Up, Conn: c.id, Session: c.session})
}

// heard restarts the hold timer.
func (m *Machine) heard(now time.Time, c *conn) {
	if c.session.HoldTime > 0 {
		c.hold = now.Add(c.session.HoldTime)
	}
}

func (m *Machine) sendKeepalive(now time.Time, c *conn) {
	m.do(Action{Kind: Send, Conn: c.id, Message: wire.AppendMessage(nil, wire.Keepalive, nil)})
	if c.session.HoldTime > 0 {
		c.keepalive = now.Add(m.jittered(c.session.Keepalive))
	}
}

// refuse ends a connection for what is wrong with a message.
func (m *Machine) refuse(now time.Time, c *conn, e *wire.Error) {
	m.notify(c, fault(e), Reason{Cause: Sent, Err: e})
	m.again(now)
	m.settle(now)
}

// lose ends a connection that needs no NOTIFICATION.
func (m *Machine) lose(now time.Time, c *conn, r Reason) {
	m.end(c, Close, r)
	m.again(now)
	m.settle(now)
}

// drop ends a connection that lost a collision, which is no failure.
func (m *Machine) drop(c *conn) {
	if c.state > Active {
		m.do(Action{Kind: Send, Conn: c.id, Message: Cease(CeaseCollision, "").Append(nil)})
	}
	m.do(Action{Kind: Close, Conn: c.id})
	m.remove(c)
}

// notify ends a connection with a NOTIFICATION.
func (m *Machine) notify(c *conn, n Notification, r Reason) {
	if c.state == Established && c.session.Notification && n.final() {
		n = n.harden()
	}
	r.Notification = n
	if c.state > Active {
		m.do(Action{Kind: Send, Conn: c.id, Message: n.Append(nil)})
	}
	m.end(c, Close, r)
}

func (m *Machine) end(c *conn, how Kind, r Reason) {
	r.State, r.PeerAS = c.state, c.peerAS
	m.remove(c)
	m.do(Action{Kind: how, Conn: c.id})
	if c.state == Established {
		m.do(Action{Kind: Down, Conn: c.id, Session: c.session, Reason: r})
	} else {
		m.do(Action{Kind: Fail, Conn: c.id, Reason: r})
	}
}

func (m *Machine) remove(c *conn) {
	m.conns = slices.DeleteFunc(m.conns, func(o *conn) bool { return o == c })
}
