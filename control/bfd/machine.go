package bfd

import "time"

// slow is the least interval between packets while a session is not up (RFC 5880 section 6.8.3).
const slow = time.Second

// Machine is one session's state (RFC 5880 section 6.8). It does no I/O and reads no clock: the caller reports the time
// and what arrived, and sends what it is given. It is not safe for concurrent use.
type Machine struct {
	timing Timing
	jitter func() float64 // from 0 to 1

	local      uint32 // discriminator
	state      State
	diagnostic Diagnostic
	since      time.Time
	next       time.Time // of our packets

	// The peer, as its last packet has it.
	remote       uint32 // discriminator; 0: unknown
	remoteState  State
	remoteDiag   Diagnostic
	remoteDemand bool
	remoteMinRx  time.Duration // 0: it wants no packets
	remoteMinTx  time.Duration
	remoteMult   uint8
	independent  bool
	deadline     time.Time // of the next packet; zero: none came for so long
	extended     bool      // the deadline was, since the last packet

	failed  bool   // it left the state Up, and not because a side wanted it
	polling bool   // our packets have the bit Poll until one with Final comes
	before  Timing // what the peer knows of us while polling

	late                  time.Duration // see Status.Late
	flaps, sent, received uint64
}

// NewMachine returns a session that is down and due to send. The discriminator must be unique on this host and not
// zero; jitter returns a number from 0 to 1.
func NewMachine(now time.Time, discriminator uint32, t Timing, jitter func() float64) *Machine {
	return &Machine{timing: t, before: t, jitter: jitter, local: discriminator, state: Down, since: now, remoteMinRx: 1, next: now}
}

// State returns the state of the session.
func (m *Machine) State() State { return m.state }

// desired is the transmit interval that packets name: at least a second while the session is not up.
func (m *Machine) desired(t Timing) time.Duration {
	if m.state != Up {
		return max(t.MinTx, slow)
	}
	return t.MinTx
}

// interval is the time between two packets, before jitter. While the peer has not acknowledged a longer one, the
// shorter one stays (RFC 5880 section 6.8.3).
func (m *Machine) interval() time.Duration {
	d := m.desired(m.timing)
	if m.polling && m.state == Up {
		d = min(d, m.desired(m.before))
	}
	return max(d, m.remoteMinRx)
}

// detection is how long nothing may be received: the peer's multiplier times the interval that both agree on.
func (m *Machine) detection() time.Duration {
	rx := m.timing.MinRx
	if m.polling {
		rx = max(rx, m.before.MinRx)
	}
	return time.Duration(m.remoteMult) * max(rx, m.remoteMinTx)
}

// silent says that no periodic packets are due: the peer wants none, or has demand mode (sections 6.8.1 and 6.6).
func (m *Machine) silent() bool {
	if m.polling {
		return false
	}
	return m.remoteMinRx == 0 || m.remoteDemand && m.state == Up && m.remoteState == Up
}

// SetTiming changes what this side asks for. A session that is up stays up: the peer is polled.
func (m *Machine) SetTiming(now time.Time, t Timing) {
	if t == m.timing {
		return
	}
	if m.state == Up && !m.polling {
		m.polling, m.before = true, m.timing
	}
	m.timing = t
	m.next = now
}

// Stop takes the session down administratively. The packet that says so is due at once.
func (m *Machine) Stop(now time.Time) {
	m.set(now, AdminDown, AdministrativeDown)
	m.next = now
}

// Receive takes a packet of this session into account. It returns the answer that is due at once, if any.
func (m *Machine) Receive(now time.Time, p *Packet) (answer Packet, ok bool) {
	m.received++
	m.remote = p.My
	m.remoteState, m.remoteDiag = p.State, p.Diagnostic
	m.remoteDemand, m.independent = p.Demand, p.Independent
	old := m.interval()
	m.remoteMinRx, m.remoteMinTx, m.remoteMult = p.MinRx, p.MinTx, p.Multiplier
	if m.polling && p.Final {
		m.polling, m.before = false, m.timing
	}
	if m.state == AdminDown {
		return Packet{}, false
	}
	m.deadline, m.extended = now.Add(m.detection()), false
	switch {
	case p.State == AdminDown:
		if m.state != Down {
			m.set(now, Down, NeighborDown)
		}
	case m.state == Down && p.State == Down:
		m.set(now, Init, m.diagnostic)
	case m.state == Down && p.State == Init, m.state == Init && p.State >= Init:
		m.set(now, Up, NoDiagnostic)
		// The interval is shorter from now on, which a poll makes known.
		m.polling, m.before = true, m.timing
	case m.state == Up && p.State == Down:
		m.set(now, Down, NeighborDown)
	}
	// What the peer asks for holds at once (section 6.8.7).
	if i := m.interval(); i < old && m.next.After(now.Add(i)) {
		m.next = now.Add(m.jittered(i))
	}
	if !p.Poll {
		return Packet{}, false
	}
	answer = m.packet()
	answer.Poll, answer.Final = false, true
	m.sent++
	return answer, true
}

// Next returns when Tick is to be called.
func (m *Machine) Next() time.Time {
	at := m.next
	if m.silent() {
		at = time.Time{}
	}
	if !m.deadline.IsZero() && (at.IsZero() || m.deadline.Before(at)) {
		at = m.deadline
	}
	return at
}

// Tick does what is due. It returns the packet to send, if one is. A caller that is late has not read packets meanwhile
// either, and on a host that stalls the peer may not have sent any: it has until as long after now to be heard.
func (m *Machine) Tick(now time.Time) (p Packet, ok bool) {
	if at := m.Next(); !at.IsZero() {
		m.late = max(m.late, now.Sub(at))
	}
	if late := now.Sub(m.deadline); !m.deadline.IsZero() && late > 0 && !m.extended {
		m.deadline, m.extended = now.Add(min(late, m.detection())), true
	}
	if !m.deadline.IsZero() && !now.Before(m.deadline) {
		m.deadline, m.remote, m.remoteDemand, m.remoteMinRx = time.Time{}, 0, false, 1
		if m.state == Init || m.state == Up {
			m.set(now, Down, TimeExpired)
		}
	}
	if now.Before(m.next) || m.silent() {
		return Packet{}, false
	}
	m.next = now.Add(m.jittered(m.interval()))
	m.sent++
	return m.packet(), true
}

// jittered shortens an interval by up to a quarter; with a multiplier of one at least by a tenth (section 6.8.7).
func (m *Machine) jittered(d time.Duration) time.Duration {
	cut := 0.25 * m.jitter()
	if m.timing.Multiplier == 1 {
		cut = 0.10 + 0.15*m.jitter()
	}
	return d - time.Duration(cut*float64(d))
}

// packet is what is sent. The C bit says that the peer is to take a failure for one of the host, also while BGP
// restarts; at the end, which the daemon's brings about, it is clear (RFC 5882 section 4.3).
func (m *Machine) packet() Packet {
	return Packet{
		Diagnostic: m.diagnostic, State: m.state, Independent: m.state != AdminDown, Poll: m.polling, Multiplier: m.timing.Multiplier,
		My: m.local, Your: m.remote, MinTx: m.desired(m.timing), MinRx: m.timing.MinRx,
	}
}

func (m *Machine) set(now time.Time, s State, d Diagnostic) {
	switch {
	case s == Up:
		m.failed, m.late = false, 0
	case m.state == Up:
		m.flaps++
		m.failed = d == TimeExpired || d == NeighborDown && m.remoteState == Down
	}
	if s != m.state {
		m.since = now
		m.next = now // the peer hears of it at once
	}
	m.state, m.diagnostic = s, d
	if s != Up {
		m.polling, m.before = false, m.timing
	}
}

// Status returns what is known of the session, without its key.
func (m *Machine) Status() Status {
	s := Status{
		State: m.state, RemoteState: m.remoteState, Diagnostic: m.diagnostic, RemoteDiagnostic: m.remoteDiag,
		Failed: m.failed, Independent: m.independent, Interval: m.interval(), Since: m.since, Late: m.late, Flaps: m.flaps, Sent: m.sent, Received: m.received,
	}
	if !m.deadline.IsZero() {
		s.Detection = m.detection()
	}
	return s
}
