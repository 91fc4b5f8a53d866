package fsm

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// network is two machines, and connections between them, in virtual time.
type network struct {
	t      rapid.TB
	now    time.Time
	sides  [2]*side
	events []event
	seq    int
	delay  func() time.Duration // of a segment
	broken bool                 // connections do not come about, and nothing is delivered on them
	late   int                  // connections that came to a side whose session was up
}

type event struct {
	at  time.Time
	seq int
	do  func()
}

// side is one machine with its caller's records.
type side struct {
	*Machine
	n     *network
	index int
	ends  map[ID]*end
	up    ID
	ups   int
	said  []Reason // of Fail and Down
}

// end is one side's end of a connection.
type end struct {
	owner  *side
	id     ID
	other  *end
	open   bool
	latest time.Time // of what was sent: segments stay in order
}

func config(index int, passive bool) Config {
	o := Open{AS: 65000, ID: uint32(10 + index), HoldTime: 9 * time.Second}
	o.AS4, o.Refresh, o.GracefulRestart, o.Notification, o.RestartTime = true, true, true, true, 120*time.Second
	o.Family[wire.IPv4] = FamilyCapabilities{Enabled: true, Restart: true, Forwarding: true}
	return Config{Local: o, PeerAS: 65000, ConnectRetry: 5 * time.Second, Passive: passive}
}

func newNetwork(t rapid.TB, a, b Config, delay func() time.Duration) *network {
	n := &network{t: t, now: time.Unix(1e9, 0), delay: delay}
	for i, c := range []Config{a, b} {
		n.sides[i] = &side{Machine: New(c), n: n, index: i, ends: map[ID]*end{}}
	}
	return n
}

func (n *network) after(d time.Duration, do func()) time.Time {
	n.seq++
	at := n.now.Add(d)
	n.events = append(n.events, event{at, n.seq, do})
	return at
}

// run lets time pass, and checks after every step what always holds.
func (n *network) run(d time.Duration) {
	until := n.now.Add(d)
	for steps := 0; ; steps++ {
		if steps > 100_000 {
			n.t.Fatal("it never rests")
		}
		next := until
		var ticking *side
		for _, s := range n.sides {
			if at := s.Next(); !at.IsZero() && !at.After(next) {
				next, ticking = at, s
			}
		}
		i := -1
		for k, e := range n.events {
			if !e.at.After(next) && (i < 0 || e.at.Before(n.events[i].at) || e.at.Equal(n.events[i].at) && e.seq < n.events[i].seq) {
				i = k
			}
		}
		switch {
		case i >= 0:
			e := n.events[i]
			n.events = slices.Delete(n.events, i, i+1)
			n.now = e.at
			e.do()
		case ticking != nil:
			n.now = next
			ticking.apply(ticking.Tick(n.now, func(ID) bool { return false }))
		default:
			n.now = until
			return
		}
		for _, s := range n.sides {
			s.check()
		}
	}
}

// deliver does something at the other end, later, in order.
func (e *end) deliver(do func(o *end)) {
	n := e.owner.n
	wait := n.delay()
	if at := n.now.Add(wait); at.Before(e.latest) {
		wait = e.latest.Sub(n.now)
	}
	e.latest = n.after(wait, func() {
		if o := e.other; o != nil && o.open && !n.broken {
			do(o)
		}
	})
}

func (s *side) apply(actions []Action) {
	n := s.n
	for _, a := range actions {
		e := s.ends[a.Conn]
		switch a.Kind {
		case Dial:
			e = &end{owner: s, id: a.Conn, open: true}
			s.ends[a.Conn] = e
			n.after(n.delay(), func() {
				other := n.sides[1-s.index]
				if n.broken {
					return
				}
				if other.up != 0 {
					n.late++
				}
				id, accepted := other.Accepted(n.now)
				if id == 0 {
					n.after(n.delay(), func() { s.apply(s.NotConnected(n.now, e.id, errors.New("refused"))) })
					return
				}
				e.other = &end{owner: other, id: id, other: e, open: true}
				other.ends[id] = e.other
				e.other.deliver(func(o *end) { s.apply(s.Connected(n.now, o.id)) })
				other.apply(accepted)
				if !e.open {
					n.after(n.delay(), func() { other.apply(other.Closed(n.now, id, nil)) })
				}
			})
		case Send:
			if e == nil || !e.open {
				n.t.Fatalf("side %d writes to connection %d, which is closed", s.index, a.Conn)
			}
			s.Wrote(n.now, a.Conn)
			e.deliver(func(o *end) {
				typ, body, size, err := wire.Frame(a.Message, wire.MaxLen)
				if err != nil || size != len(a.Message) {
					n.t.Fatalf("bad message: %v", err)
				}
				o.owner.apply(o.owner.Message(n.now, o.id, typ, body))
			})
		case Close, Abort:
			if e == nil || !e.open {
				n.t.Fatalf("side %d closes connection %d again", s.index, a.Conn)
			}
			e.open = false
			e.deliver(func(o *end) { o.owner.apply(o.owner.Closed(n.now, o.id, nil)) })
		case Up:
			if s.up != 0 || a.Session == nil || s.Session(a.Conn) != a.Session {
				n.t.Fatalf("side %d has a session on %d beside that on %d", s.index, a.Conn, s.up)
			}
			s.up = a.Conn
			s.ups++
		case Down:
			if s.up != a.Conn {
				n.t.Fatalf("side %d lost the session on %d, but has it on %d", s.index, a.Conn, s.up)
			}
			s.up = 0
			s.said = append(s.said, a.Reason)
		case Fail:
			s.said = append(s.said, a.Reason)
		}
	}
}

// check is what holds between any two events.
func (s *side) check() {
	open := 0
	for _, e := range s.ends {
		if e.open {
			open++
		}
	}
	if open != len(s.conns) {
		s.n.t.Fatalf("side %d has %d connections open, and knows %d", s.index, open, len(s.conns))
	}
	outgoing, incoming := 0, 0
	for _, c := range s.conns {
		if c.incoming {
			incoming++
		} else {
			outgoing++
		}
		if c.hold.IsZero() && (c.state != Established || c.session.HoldTime > 0) {
			s.n.t.Fatalf("side %d: %s without a timer", s.index, c.state)
		}
	}
	if outgoing > 1 || incoming > 2 {
		s.n.t.Fatalf("side %d has %d connections of its own, and %d of the peer's", s.index, outgoing, incoming)
	}
	if s.running && (!s.config.Passive || s.config.Wait > 0) && len(s.conns) == 0 && s.retry.IsZero() {
		s.n.t.Fatalf("side %d will never connect again", s.index)
	}
	if (s.up != 0) != (s.State() == Established) {
		s.n.t.Fatalf("side %d is %s, and has its session on %d", s.index, s.State(), s.up)
	}
	if !s.running && (s.State() != Idle || len(s.conns) > 0 || !s.Next().IsZero()) {
		s.n.t.Fatalf("side %d is stopped, and has %d connections, next %v", s.index, len(s.conns), s.Next())
	}
}

// both reports whether one connection is the session of both sides.
func (n *network) both() bool {
	a, b := n.sides[0], n.sides[1]
	return a.up != 0 && b.up != 0 && a.ends[a.up].other == b.ends[b.up] && len(a.conns) == 1 && len(b.conns) == 1
}

func anyDelay(t *rapid.T) func() time.Duration {
	return func() time.Duration {
		return time.Duration(rapid.IntRange(1, 100).Draw(t, "ms")) * time.Millisecond
	}
}

// TestCollision: whoever connects when, with whatever delays, the first attempt comes
// to one session, on which both sides agree, and neither fails.
func TestCollision(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := newNetwork(t, config(0, false), config(1, rapid.IntRange(0, 4).Draw(t, "passive") == 0), anyDelay(t))
		first := rapid.IntRange(0, 1).Draw(t, "first")
		n.sides[first].apply(n.sides[first].Start(n.now))
		n.run(time.Duration(rapid.IntRange(0, 400).Draw(t, "later")) * time.Millisecond)
		n.sides[1-first].apply(n.sides[1-first].Start(n.now))
		n.run(15 * time.Second)
		if !n.both() {
			t.Fatalf("%s and %s: %v, %v", n.sides[0].State(), n.sides[1].State(), n.sides[0].said, n.sides[1].said)
		}
		for _, s := range n.sides {
			if s.ups != 1 {
				t.Errorf("side %d: %d sessions: %v", s.index, s.ups, s.said)
			}
		}
		if n.late != 0 {
			t.Error("a connection came to a side whose session was up: a peer may take that for a restart")
		}
		n.run(time.Hour)
		if n.sides[0].ups != 1 || n.sides[1].ups != 1 {
			t.Errorf("the session did not last: %v, %v", n.sides[0].said, n.sides[1].said)
		}
	})
}

// TestContested: a connection that would go if the peer's OPEN came on the other one is
// confirmed only when that one has gone. A peer that is faster has a session with the
// KEEPALIVE, and closes the other connection: then both would be gone, and in a restart
// the routes that it keeps with them.
func TestContested(t *testing.T) {
	t.Parallel()
	keepalive := wire.AppendMessage(nil, wire.Keepalive, nil)
	for _, outgoingWins := range []bool{true, false} {
		us, them := 1, 0 // the higher identifier's own connection stays
		if !outgoingWins {
			us, them = 0, 1
		}
		theirs := config(them, false).Local
		peer, err := theirs.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name string
			do   func(m *Machine, now time.Time, winner, loser ID) []Action
			want string
		}{
			{"the winner opens", func(m *Machine, now time.Time, winner, _ ID) []Action {
				return append(m.Message(now, winner, wire.Open, peer[wire.HeaderLen:]), m.Message(now, winner, wire.Keepalive, nil)...)
			}, "loser: Cease, closed; winner: KEEPALIVE, up"},
			{"the winner goes", func(m *Machine, now time.Time, winner, loser ID) []Action {
				return append(m.Closed(now, winner, nil), m.Message(now, loser, wire.Keepalive, nil)...)
			}, "winner: closed, failed; loser: KEEPALIVE, up"},
			{"the winner goes, the loser is confirmed", func(m *Machine, now time.Time, winner, loser ID) []Action {
				return append(m.Message(now, loser, wire.Keepalive, nil), m.Closed(now, winner, nil)...)
			}, "winner: closed, failed; loser: KEEPALIVE, up"},
			{"nothing comes", func(m *Machine, now time.Time, _, loser ID) []Action {
				actions := m.Tick(now.Add(collisionTime), func(ID) bool { return false })
				return append(actions, m.Message(now.Add(collisionTime), loser, wire.Keepalive, nil)...)
			}, "loser: KEEPALIVE; winner: Cease, closed; loser: up"},
			{"nothing comes, the loser is confirmed", func(m *Machine, now time.Time, _, loser ID) []Action {
				actions := m.Message(now, loser, wire.Keepalive, nil)
				return append(actions, m.Tick(now.Add(collisionTime), func(ID) bool { return false })...)
			}, "loser: KEEPALIVE; winner: Cease, closed; loser: up"},
		} {
			now := time.Unix(1e9, 0)
			m := New(config(us, false))
			outgoing := m.Start(now)[0].Conn
			m.Connected(now, outgoing)
			incoming, _ := m.Accepted(now)
			winner, loser := incoming, outgoing
			if outgoingWins {
				winner, loser = outgoing, incoming
			}
			if actions := m.Message(now, loser, wire.Open, peer[wire.HeaderLen:]); len(actions) != 0 {
				t.Errorf("%s, outgoing wins %t: at the loser's OPEN %v", c.name, outgoingWins, actions)
			}
			var got []string
			for _, a := range c.do(m, now, winner, loser) {
				conn := map[ID]string{winner: "winner", loser: "loser"}[a.Conn]
				did := map[Kind]string{Close: "closed", Up: "up", Fail: "failed"}[a.Kind]
				switch {
				case a.Kind == Send && bytes.Equal(a.Message, keepalive):
					did = "KEEPALIVE"
				case a.Kind == Send:
					did = "Cease"
				}
				if n := len(got); n > 0 && strings.HasPrefix(got[n-1], conn+":") {
					got[n-1] += ", " + did
				} else {
					got = append(got, conn+": "+did)
				}
			}
			if got := strings.Join(got, "; "); got != c.want {
				t.Errorf("%s, outgoing wins %t: %s, want %s", c.name, outgoingWins, got, c.want)
			}
		}
	}
}

// TestLateConnection: while a connection of this side comes about, one of the peer's is
// not confirmed: the peer may read of the former last, and take it for a restart.
func TestLateConnection(t *testing.T) {
	t.Parallel()
	start := time.Unix(1e9, 0)
	never := func(ID) bool { return false }
	theirs := config(0, false).Local
	peer, err := theirs.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	open := peer[wire.HeaderLen:]
	for _, c := range []struct {
		name     string
		later    time.Duration // the peer's OPEN comes than this side began to connect
		opened   string        // at the peer's OPEN
		do       func(m *Machine, now time.Time, outgoing ID) []Action
		confirms string // at what is done then
		up       string // at the peer's KEEPALIVE
	}{
		{"it comes about", 0, "", func(m *Machine, now time.Time, outgoing ID) []Action {
			return append(m.Connected(now, outgoing), m.Message(now, outgoing, wire.Open, open)...)
		}, "OPEN; Cease; Close; KEEPALIVE", ""}, // this side has the higher identifier: its own stays
		{"it fails", 0, "", func(m *Machine, now time.Time, outgoing ID) []Action {
			return m.NotConnected(now, outgoing, nil)
		}, "Close; Fail; KEEPALIVE", "Up"},
		{"nothing answers", 0, "", func(m *Machine, now time.Time, _ ID) []Action {
			return append(m.Tick(now.Add(answerTime-1), never), m.Tick(now.Add(answerTime), never)...)
		}, "Close; KEEPALIVE", "Up"},
		{"nothing answered", answerTime, "Close; KEEPALIVE", func(m *Machine, now time.Time, outgoing ID) []Action {
			return m.Connected(now, outgoing)
		}, "", "Up"},
		{"it comes about, and no OPEN comes", 0, "", func(m *Machine, now time.Time, outgoing ID) []Action {
			actions := m.Connected(now.Add(answerTime-1), outgoing)
			actions = append(actions, m.Tick(now.Add(answerTime+collisionTime-2), never)...)
			return append(actions, m.Tick(now.Add(answerTime+collisionTime-1), never)...)
		}, "OPEN; KEEPALIVE", "Cease; Close; Up"},
	} {
		m := New(config(1, false))
		outgoing := m.Start(start)[0].Conn
		now := start.Add(c.later)
		incoming, _ := m.Accepted(now)
		for _, step := range []struct {
			actions []Action
			want    string
		}{
			{m.Message(now, incoming, wire.Open, open), c.opened},
			{c.do(m, now, outgoing), c.confirms},
			{m.Message(now, incoming, wire.Keepalive, nil), c.up},
		} {
			if got := did(step.actions); got != step.want {
				t.Errorf("%s: %s, want %s", c.name, got, step.want)
			}
		}
	}
}

// did names actions, and the messages among them.
func did(actions []Action) string {
	var names []string
	for _, a := range actions {
		name := map[Kind]string{Dial: "Dial", Close: "Close", Abort: "Abort", Up: "Up", Down: "Down", Fail: "Fail"}[a.Kind]
		if a.Kind == Send {
			name = map[wire.Type]string{wire.Open: "OPEN", wire.Keepalive: "KEEPALIVE", wire.Notification: "Cease"}[wire.Type(a.Message[wire.HeaderLen-1])]
		}
		names = append(names, name)
	}
	return strings.Join(names, "; ")
}

// TestBothWait: two sides that each wait for the other come to a session where one of
// them has a time to wait, and each time anew; the side that is to open it has it first.
func TestBothWait(t *testing.T) {
	t.Parallel()
	waiting := config(1, true)
	waiting.Wait = 10 * time.Second
	delay := func() time.Duration { return time.Millisecond }
	start := func(a, b Config) *network {
		n := newNetwork(t, a, b, delay)
		for _, s := range n.sides {
			s.apply(s.Start(n.now))
		}
		return n
	}
	n := start(config(0, true), config(1, true))
	if n.run(time.Hour); n.both() {
		t.Error("a session though both are passive for good")
	}
	n = start(config(0, true), waiting)
	n.run(9 * time.Second)
	if n.both() {
		t.Error("a session before the time")
	}
	n.run(2 * time.Second)
	if !n.both() {
		t.Fatal("no session though one side is to connect after 10s")
	}
	n.sides[0].apply(n.sides[0].Reset(n.now, Cease(CeaseReset, "")))
	n.run(11 * time.Second)
	if !n.both() || n.sides[0].ups != 2 {
		t.Errorf("%d sessions, want a second one", n.sides[0].ups)
	}
	n = start(config(0, false), waiting)
	n.run(time.Minute)
	if !n.both() || n.sides[0].ups != 1 || n.sides[1].ends[1] == nil || len(n.sides[1].ends) != 1 {
		t.Errorf("the peer has opened the session, and this side %d connections", len(n.sides[1].ends))
	}
}

// TestMachine: whatever happens to two speakers and the network between them, each is
// in a state that a timer ends, keeps no connection that it does not know, and once
// nothing more happens they have one session.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		other := config(1, rapid.Bool().Draw(t, "passive"))
		other.Wait = time.Duration(rapid.IntRange(0, 1).Draw(t, "wait")) * 10 * time.Second
		n := newNetwork(t, config(0, false), other, anyDelay(t))
		anySide := func() *side { return n.sides[rapid.IntRange(0, 1).Draw(t, "side")] }
		steps := rapid.IntRange(1, 30).Draw(t, "steps")
		for range steps {
			s := anySide()
			switch rapid.IntRange(0, 7).Draw(t, "what") {
			case 0:
				s.apply(s.Start(n.now))
			case 1:
				c := Cease(rapid.SampledFrom([]uint8{CeaseMaxPrefixes, CeaseShutdown, CeaseDeconfigured, CeaseReset}).Draw(t, "why"), "text")
				s.apply(s.Stop(&c))
			case 2:
				s.apply(s.Stop(nil))
			case 3:
				s.apply(s.Reset(n.now, Cease(CeaseBFDDown, "")))
			case 4:
				n.broken = !n.broken
			case 5: // the host loses its power
				for id, e := range s.ends {
					s.ends[id] = &end{owner: s, id: id, open: false}
					e.open = false
				}
				if s.up != 0 {
					s.up = 0
				}
				s.Machine = New(s.config)
				s.last = ID(len(s.ends)) + 1000*ID(s.ups+1)
				s.ends = map[ID]*end{}
			case 6: // an odd message
				for id, e := range s.ends {
					if e.open && s.find(id).state > Active {
						typ := rapid.SampledFrom([]wire.Type{wire.Open, wire.UpdateMessage, wire.Keepalive, wire.Notification, wire.RouteRefresh}).Draw(t, "type")
						s.apply(s.Message(n.now, id, typ, append(openBody(), 0)))
						break
					}
				}
			case 7:
				s.apply(s.Fault(n.now, s.up, &wire.Error{Code: wire.CodeUpdate, Subcode: 1, Reason: "test"}))
			}
			n.run(time.Duration(rapid.IntRange(0, 20_000).Draw(t, "pause")) * time.Millisecond)
		}
		n.broken = false
		for _, s := range n.sides {
			s.apply(s.Start(n.now))
		}
		n.run(10 * time.Minute)
		if !n.both() {
			t.Fatalf("%s and %s: %v, %v", n.sides[0].State(), n.sides[1].State(), n.sides[0].said, n.sides[1].said)
		}
	})
}

// established is two sides with a session, 1 ms apart.
func established(t *testing.T) *network {
	t.Helper()
	n := newNetwork(t, config(0, false), config(1, true), func() time.Duration { return time.Millisecond })
	for _, s := range n.sides {
		s.apply(s.Start(n.now))
	}
	n.run(time.Second)
	if !n.both() {
		t.Fatalf("no session: %v, %v", n.sides[0].said, n.sides[1].said)
	}
	return n
}

// TestEnd: each way for a session to end gives both sides its reason, and tells
// whether the peer's routes are kept.
func TestEnd(t *testing.T) {
	t.Parallel()
	shutdown := Cease(CeaseShutdown, "maintenance")
	for _, c := range []struct {
		name   string
		do     func(n *network, s *side)
		reason [2]string
		keep   [2]bool
	}{
		{"shutdown", func(_ *network, s *side) { s.apply(s.Stop(&shutdown)) }, [2]string{
			`sent NOTIFICATION 6/2, hard reset: "maintenance"`, `received NOTIFICATION 6/2, hard reset: "maintenance"`,
		}, [2]bool{}},
		{"restart", func(_ *network, s *side) { s.apply(s.Stop(nil)) }, [2]string{"stopped", "connection lost"}, [2]bool{false, true}},
		{"reset", func(n *network, s *side) { s.apply(s.Reset(n.now, Cease(CeaseReset, "new keys"))) }, [2]string{
			`sent NOTIFICATION 6/4: "new keys"`, `received NOTIFICATION 6/4: "new keys"`,
		}, [2]bool{true, true}},
		{"hold timer", func(n *network, s *side) { n.broken = true }, [2]string{"hold timer expired", "hold timer expired"}, [2]bool{true, true}},
		{"fault", func(n *network, s *side) {
			s.apply(s.Fault(n.now, s.up, &wire.Error{Code: 3, Subcode: 1, Reason: "bad"}))
		}, [2]string{"sent NOTIFICATION 3/1: bad (NOTIFICATION 3/1)", "received NOTIFICATION 3/1"}, [2]bool{true, true}},
		{"OPEN again", func(n *network, s *side) { s.apply(s.Message(n.now, s.up, wire.Open, openBody())) }, [2]string{
			"sent NOTIFICATION 5/3: message of type 1 in Established (NOTIFICATION 5/3)", "received NOTIFICATION 5/3",
		}, [2]bool{true, true}},
	} {
		n := established(t)
		sessions := [2]*Session{n.sides[0].Session(n.sides[0].up), n.sides[1].Session(n.sides[1].up)}
		c.do(n, n.sides[0])
		n.run(12 * time.Second)
		for i, s := range n.sides {
			if len(s.said) == 0 || s.said[0].String() != c.reason[i] || s.said[0].Retains(sessions[i]) != c.keep[i] {
				t.Errorf("%s: side %d: %v", c.name, i, s.said)
			}
		}
	}
}

// TestRestart: a peer that comes again while its old session still stands here takes
// that over if both have graceful restart, with its routes kept; a connection that is
// late for the attempt does not.
func TestRestart(t *testing.T) {
	t.Parallel()
	for _, graceful := range []bool{false, true} {
		n := newNetwork(t, config(0, false), config(1, true), func() time.Duration { return time.Millisecond })
		for _, s := range n.sides {
			s.config.Local.GracefulRestart = graceful
			s.apply(s.Start(n.now))
		}
		n.run(time.Second)
		s := n.sides[1]
		if id, _ := s.Accepted(n.now); id != 0 || !n.both() {
			t.Fatalf("a connection that was late is number %d", id)
		}
		n.run(settledTime)
		old := s.up
		id, actions := s.Accepted(n.now)
		if id == 0 || len(actions) != 1 || actions[0].Kind != Send {
			t.Fatalf("connection %d: %v", id, actions)
		}
		msg, err := n.sides[0].config.Local.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		actions = s.Message(n.now, id, wire.Open, msg[wire.HeaderLen:])
		lost := slices.ContainsFunc(actions, func(a Action) bool {
			return a.Kind == Down && a.Conn == old && a.Reason.Cause == PeerRestarted && a.Reason.Retains(a.Session)
		})
		if lost != graceful || (s.Session(old) == nil) != graceful {
			t.Errorf("graceful restart %t: %v", graceful, actions)
		}
	}
}

// TestHoldTimer: what waits to be read keeps the session; then this side is late.
func TestHoldTimer(t *testing.T) {
	t.Parallel()
	n := established(t)
	s := n.sides[0]
	for range 5 {
		n.now = n.now.Add(10 * time.Second)
		for _, a := range s.Tick(n.now, func(ID) bool { return true }) {
			if a.Kind != Send {
				t.Fatalf("%v", a)
			}
		}
	}
	n.now = n.now.Add(10 * time.Second)
	actions := s.Tick(n.now, func(ID) bool { return false })
	want := Notification{Code: CodeHoldTimer}.Append(nil)
	if len(actions) < 3 || !bytes.Equal(actions[0].Message, want) || actions[2].Reason.Cause != HoldTimer {
		t.Errorf("%v", actions)
	}
}

// TestSendHoldTimer: a peer that sends but reads nothing loses the session after the
// time of RFC 9687, and not before.
func TestSendHoldTimer(t *testing.T) {
	t.Parallel()
	n := established(t)
	s := n.sides[0]
	s.Wrote(n.now, s.up)
	for start := n.now; ; n.now = n.now.Add(time.Second) {
		s.Message(n.now, s.up, wire.Keepalive, nil)
		for _, a := range s.Tick(n.now, func(ID) bool { return false }) {
			if a.Kind != Abort {
				continue
			}
			if past := n.now.Sub(start); past != leastSendHold {
				t.Errorf("after %v", past)
			}
			return
		}
		if n.now.Sub(start) > 2*leastSendHold {
			t.Fatal("never")
		}
	}
}

// TestReplaced: a connection on which the peer has said nothing gives way to a newer
// one, and no number of them is held.
func TestReplaced(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	m := New(config(0, true))
	if id, _ := m.Accepted(now); id != 0 {
		t.Fatal("accepted while stopped")
	}
	m.Start(now)
	closed := 0
	for i := range 1000 {
		id, actions := m.Accepted(now)
		if id != ID(i+1) {
			t.Fatalf("connection %d is %d", i+1, id)
		}
		for _, a := range actions {
			if a.Kind == Close {
				closed++
			}
		}
	}
	if closed != 999 || len(m.conns) != 1 || m.State() != OpenSent {
		t.Errorf("%d closed, %d open, %s", closed, len(m.conns), m.State())
	}
}

// TestJitter: times are shortened by up to a quarter (RFC 4271 section 10).
func TestJitter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		jitter float64
		want   time.Duration
	}{{0, 5 * time.Second}, {0.5, 4375 * time.Millisecond}} {
		conf := config(0, false)
		conf.Jitter = func() float64 { return c.jitter }
		m := New(conf)
		now := time.Unix(1e9, 0)
		id := m.Start(now)[0].Conn
		m.NotConnected(now, id, errors.New("refused"))
		if got := m.Next().Sub(now); got != c.want {
			t.Errorf("jitter %v: %v", c.jitter, got)
		}
	}
}

// FuzzMachine: no order of events makes it panic, leaves a state without a timer, or
// closes a connection twice.
func FuzzMachine(f *testing.F) {
	f.Add([]byte{0, 1, 4, 1, 4, 2})
	f.Add([]byte{0, 2, 5, 5, 9, 3, 3, 3})
	f.Fuzz(func(t *testing.T, script []byte) {
		now := time.Unix(1e9, 0)
		m := New(config(0, false))
		peer := config(1, false).Local
		msg, err := peer.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		open := map[ID]bool{}
		apply := func(actions []Action) {
			for _, a := range actions {
				switch a.Kind {
				case Dial:
					open[a.Conn] = true
				case Close, Abort:
					if !open[a.Conn] {
						t.Fatalf("connection %d is closed twice", a.Conn)
					}
					delete(open, a.Conn)
				}
			}
		}
		for _, b := range script {
			id := ID(b >> 4)
			switch b & 15 {
			case 0:
				apply(m.Start(now))
			case 1:
				id, actions := m.Accepted(now)
				if id != 0 {
					open[id] = true
				}
				apply(actions)
			case 2:
				apply(m.Connected(now, id))
			case 3:
				apply(m.NotConnected(now, id, nil))
			case 4:
				if open[id] {
					apply(m.Message(now, id, wire.Open, msg[wire.HeaderLen:]))
				}
			case 5:
				apply(m.Message(now, id, wire.Keepalive, nil))
			case 6:
				apply(m.Message(now, id, wire.UpdateMessage, nil))
			case 7:
				apply(m.Message(now, id, wire.Notification, []byte{6, 9}))
			case 8:
				apply(m.Closed(now, id, nil))
			case 9, 10, 11:
				now = now.Add(time.Duration(b) * 50 * time.Millisecond)
				apply(m.Tick(now, func(ID) bool { return b&16 != 0 }))
			case 12:
				apply(m.Stop(nil))
			case 13:
				n := Cease(CeaseShutdown, "")
				apply(m.Stop(&n))
			case 14:
				apply(m.Reset(now, Cease(CeaseReset, "")))
			case 15:
				m.Wrote(now, id)
			}
			if len(open) != len(m.conns) {
				t.Fatalf("%d open, %d known", len(open), len(m.conns))
			}
			if m.running && m.Next().IsZero() {
				t.Fatal("no timer: " + fmt.Sprint(m.State()))
			}
		}
	})
}
