package bfd

import (
	"container/heap"
	"context"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/routerd/routerd/control/async"
)

// Session is a session that is wanted.
type Session struct {
	Key
	Timing
}

// Engine runs sessions on UDP. One goroutine, that of [Engine.Run], owns them all.
type Engine struct {
	notify  func(Status)
	calls   chan func(now time.Time)
	packets chan received
	stopped chan struct{}

	sessions map[Key]*session
	byLocal  map[uint32]*session // by our discriminator
	due      queue
	inbox    inbox
	reopen   time.Time // when sockets of the inbox are tried again; zero: all are open
}

type session struct {
	key     Key
	machine *Machine
	out     *sender // nil while there is no socket
	open    async.Backoff
	retry   time.Time // when the socket is opened again; zero: it is open
	fault   string
	at      time.Time // of the next event
	index   int       // in the queue
}

// NewEngine returns an engine without sessions. It calls notify, on Run's goroutine, with each session whose state has
// changed.
func NewEngine(notify func(Status)) *Engine {
	return &Engine{
		notify: notify, calls: make(chan func(time.Time)), packets: make(chan received, 256), stopped: make(chan struct{}),
		sessions: map[Key]*session{}, byLocal: map[uint32]*session{}, inbox: newInbox(),
	}
}

// Run serves the sessions until ctx ends. Then it tells the peers that they are down administratively, so that no peer
// takes a restart for a failure (RFC 5882 section 3.2), and closes the sockets.
func (e *Engine) Run(ctx context.Context) {
	defer close(e.stopped)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(time.Until(e.next()))
		select {
		case <-ctx.Done():
			e.close()
			return
		case do := <-e.calls:
			do(time.Now())
		case p := <-e.packets:
			e.receive(time.Now(), &p)
		case <-timer.C:
			e.tick(time.Now())
		}
	}
}

// next returns when something is due.
func (e *Engine) next() time.Time {
	at := e.reopen
	if len(e.due) > 0 && (at.IsZero() || e.due[0].at.Before(at)) {
		at = e.due[0].at
	}
	if at.IsZero() {
		at = time.Now().Add(time.Hour)
	}
	return at
}

// Set makes the sessions those of want. A session that is already there keeps its state, also if its timing changes;
// one that is not wanted any more is taken down administratively. It returns when that is done, or Run has ended.
func (e *Engine) Set(want []Session) {
	e.call(func(now time.Time) { e.set(now, want) })
}

// Status returns the sessions, in no order.
func (e *Engine) Status() (all []Status) {
	e.call(func(time.Time) {
		for _, s := range e.sessions {
			all = append(all, e.status(s))
		}
	})
	return all
}

func (e *Engine) call(do func(now time.Time)) {
	done := make(chan struct{})
	select {
	case e.calls <- func(now time.Time) { do(now); close(done) }:
		<-done
	case <-e.stopped:
	}
}

func (e *Engine) set(now time.Time, want []Session) {
	wanted := make(map[Key]bool, len(want))
	for _, w := range want {
		wanted[w.Key] = true
	}
	for k, s := range e.sessions {
		if !wanted[k] {
			e.remove(now, s)
		}
	}
	for _, w := range want {
		s := e.sessions[w.Key]
		if s == nil {
			s = &session{key: w.Key, open: async.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}, retry: now}
			s.machine = NewMachine(now, e.discriminator(), w.Timing, rand.Float64)
			e.sessions[w.Key] = s
			e.byLocal[s.machine.local] = s
			heap.Push(&e.due, s)
		} else {
			s.machine.SetTiming(now, w.Timing)
		}
		e.step(now, s)
	}
	e.listen(now)
}

// listen opens what sessions need to receive; what another program has is tried again.
func (e *Engine) listen(now time.Time) {
	e.reopen = time.Time{}
	if !e.inbox.serve(e.sessions, e.packets) {
		e.reopen = now.Add(reopen)
	}
}

// reopen is the pause between attempts to open a port that another program has.
const reopen = 5 * time.Second

func (e *Engine) discriminator() uint32 {
	for {
		if d := rand.Uint32(); d != 0 && e.byLocal[d] == nil { //nolint:gosec // it is no secret: it is in every packet
			return d
		}
	}
}

func (e *Engine) remove(now time.Time, s *session) {
	s.machine.Stop(now)
	if p, ok := s.machine.Tick(now); ok {
		s.send(&p)
	}
	s.closeSocket()
	heap.Remove(&e.due, s.index)
	delete(e.sessions, s.key)
	delete(e.byLocal, s.machine.local)
}

func (e *Engine) close() {
	now := time.Now()
	for _, s := range e.sessions {
		e.remove(now, s)
	}
	e.inbox.close()
}

func (e *Engine) receive(now time.Time, r *received) {
	p, err := Parse(r.data[:r.n])
	if err != nil {
		return
	}
	s := e.byLocal[p.Your]
	if p.Your == 0 {
		s = e.sessions[Key{Local: r.to, Remote: r.from, Multihop: r.multihop}]
	}
	// A discriminator alone is no proof: whoever sees one packet knows it.
	if s == nil || s.key != (Key{Local: r.to, Remote: r.from, Multihop: r.multihop}) {
		return
	}
	e.change(s, func() {
		if answer, ok := s.machine.Receive(now, &p); ok {
			s.send(&answer)
		}
	})
	e.step(now, s)
}

func (e *Engine) tick(now time.Time) {
	if !e.reopen.IsZero() && !e.reopen.After(now) {
		e.listen(now)
	}
	for len(e.due) > 0 && !e.due[0].at.After(now) {
		e.step(now, e.due[0])
	}
}

// step does what is due of s and sorts it in again.
func (e *Engine) step(now time.Time, s *session) {
	e.change(s, func() {
		if !s.retry.IsZero() && !now.Before(s.retry) {
			s.openSocket(now)
		}
		if p, ok := s.machine.Tick(now); ok {
			s.send(&p)
		}
	})
	s.at = s.machine.Next()
	if !s.retry.IsZero() && (s.at.IsZero() || s.retry.Before(s.at)) {
		s.at = s.retry
	}
	if s.at.IsZero() {
		s.at = now.Add(time.Hour)
	}
	heap.Fix(&e.due, s.index)
}

// change reports s if do changes its state.
func (e *Engine) change(s *session, do func()) {
	was := s.machine.State()
	do()
	if s.machine.State() != was {
		e.notify(e.status(s))
	}
}

func (e *Engine) status(s *session) Status {
	st := s.machine.Status()
	st.Key, st.Fault = s.key, s.fault
	if err := e.inbox.faults[placeOf(s.key)]; err != nil {
		st.Fault = err.Error()
	}
	return st
}

func (s *session) openSocket(now time.Time) {
	out, err := newSender(s.key)
	if err != nil {
		s.fault = err.Error()
		s.retry = now.Add(s.open.Next())
		return
	}
	s.open.Reset()
	s.out, s.retry, s.fault = out, time.Time{}, ""
}

func (s *session) closeSocket() {
	if s.out != nil {
		s.out.close()
	}
	s.out = nil
}

// send drops what cannot be sent: the next packet is due soon. The fault is shown.
func (s *session) send(p *Packet) {
	if s.out == nil {
		return
	}
	s.fault = ""
	if err := s.out.send(p.Append(nil)); err != nil {
		s.fault = err.Error()
	}
}

// queue is a heap of sessions by when they are due.
type queue []*session

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].at.Before(q[j].at) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *queue) Push(x any) {
	s := x.(*session)
	s.index = len(*q)
	*q = append(*q, s)
}

func (q *queue) Pop() any {
	n := len(*q) - 1
	s := (*q)[n]
	*q = (*q)[:n]
	return s
}

// received is a packet as it came.
type received struct {
	data     [64]byte
	n        int
	from, to netip.Addr
	multihop bool
}
