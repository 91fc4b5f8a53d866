package bfd

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// wire is two machines and a network between them in virtual time.
type wire struct {
	now      time.Time
	machines [2]*Machine
	transit  transit
	lose     func(from int, p *Packet) bool
	delay    func() time.Duration
	sent     [2][]Packet
	at       [2][]time.Time // of sent
	states   [2][]State
	last     [2]time.Time // arrival of the packet sent before
	n        int
}

type arrival struct {
	at time.Time
	n  int // packets of one side arrive in the order they were sent: nothing in them would tell
	to int
	p  Packet
}

type transit []arrival

func (t transit) Len() int { return len(t) }
func (t transit) Less(i, j int) bool {
	return t[i].at.Before(t[j].at) || t[i].at.Equal(t[j].at) && t[i].n < t[j].n
}
func (t transit) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *transit) Push(x any)   { *t = append(*t, x.(arrival)) }
func (t *transit) Pop() any {
	a := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return a
}

func newWire(a, b Timing, jitter func() float64) *wire {
	w := &wire{now: start, delay: func() time.Duration { return time.Millisecond }, lose: func(int, *Packet) bool { return false }}
	w.machines = [2]*Machine{NewMachine(start, 11, a, jitter), NewMachine(start, 22, b, jitter)}
	return w
}

func (w *wire) send(from int, p Packet) {
	w.sent[from] = append(w.sent[from], p)
	w.at[from] = append(w.at[from], w.now)
	if !w.lose(from, &p) {
		at := w.now.Add(w.delay())
		if at.Before(w.last[from]) {
			at = w.last[from]
		}
		w.last[from] = at
		w.n++
		heap.Push(&w.transit, arrival{at, w.n, 1 - from, p})
	}
}

func (w *wire) note(i int, was State) {
	if s := w.machines[i].State(); s != was {
		w.states[i] = append(w.states[i], s)
	}
}

// run lets d pass.
func (w *wire) run(d time.Duration) {
	end := w.now.Add(d)
	for {
		next, what := end, -1
		for i, m := range w.machines {
			if at := m.Next(); !at.IsZero() && at.Before(next) {
				next, what = at, i
			}
		}
		if len(w.transit) > 0 && w.transit[0].at.Before(next) {
			next, what = w.transit[0].at, 2
		}
		if what < 0 {
			w.now = end
			return
		}
		if next.After(w.now) {
			w.now = next
		}
		if what == 2 {
			a := heap.Pop(&w.transit).(arrival)
			was := w.machines[a.to].State()
			if answer, ok := w.machines[a.to].Receive(w.now, &a.p); ok {
				w.send(a.to, answer)
			}
			w.note(a.to, was)
			continue
		}
		was := w.machines[what].State()
		if p, ok := w.machines[what].Tick(w.now); ok {
			w.send(what, p)
		}
		w.note(what, was)
	}
}

func (w *wire) up(t interface{ Fatalf(string, ...any) }) {
	w.run(5 * time.Second)
	for i, m := range w.machines {
		if m.State() != Up || m.polling {
			t.Fatalf("machine %d is %v (polling: %v) after 5 s", i, m.State(), m.polling)
		}
	}
}

func timing(tx, rx time.Duration, n uint8) Timing { return Timing{tx, rx, n} }

func half() float64 { return 0.5 }

const ms = time.Millisecond

func TestComesUp(t *testing.T) {
	t.Parallel()
	w := newWire(timing(50*ms, 50*ms, 3), timing(20*ms, 100*ms, 5), half)
	w.up(t)
	// The second has to see the first one's packet before it may say Init.
	if diff := cmp.Diff([2][]State{{Init, Up}, {Init, Up}}, w.states); diff != "" {
		t.Error(diff)
	}
	// What both agree on: the slower of what one wants to send and the other to receive.
	for i, want := range []Status{
		{State: Up, Independent: true, RemoteState: Up, Interval: 100 * ms, Detection: 5 * 50 * ms},
		{State: Up, Independent: true, RemoteState: Up, Interval: 50 * ms, Detection: 3 * 100 * ms},
	} {
		got := w.machines[i].Status()
		want.Since, want.Sent, want.Received = got.Since, got.Sent, got.Received
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Errorf("machine %d (-want +got):\n%s", i, diff)
		}
	}
}

func TestSlowUntilUp(t *testing.T) {
	t.Parallel()
	w := newWire(timing(10*ms, 10*ms, 3), timing(10*ms, 10*ms, 3), half)
	w.lose = func(int, *Packet) bool { return true }
	w.run(10 * time.Second)
	if n := len(w.sent[0]); n < 10 || n > 14 {
		t.Errorf("%d packets in 10 s to a peer that does not answer; want one a second, less jitter", n)
	}
	for _, p := range w.sent[0] {
		if p.MinTx < slow {
			t.Fatalf("a session that is down says that it sends every %v", p.MinTx)
		}
	}
}

// TestDetects cuts one or both directions: each side that hears nothing goes down after its detection time, and says so.
func TestDetects(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lose  func(from int, p *Packet) bool
		diags [2]Diagnostic
	}{
		{"both", func(int, *Packet) bool { return true }, [2]Diagnostic{TimeExpired, TimeExpired}},
		{"one way", func(from int, _ *Packet) bool { return from == 0 }, [2]Diagnostic{NeighborDown, TimeExpired}},
	} {
		w := newWire(timing(50*ms, 50*ms, 3), timing(50*ms, 50*ms, 3), half)
		w.up(t)
		w.lose = tc.lose
		cut := w.now
		w.run(151 * ms) // one on the way counts from when it arrives
		for i, m := range w.machines {
			st := m.Status()
			if m.State() == Up || st.Diagnostic != tc.diags[i] || !st.Failed || st.Flaps != 1 {
				t.Errorf("%s: machine %d is %+v", tc.name, i, st)
			}
			if d := st.Since.Sub(cut); d > 151*ms {
				t.Errorf("%s: machine %d found it out after %v", tc.name, i, d)
			}
		}
		w.lose = func(int, *Packet) bool { return false }
		w.up(t)
		if w.machines[0].Status().Failed {
			t.Errorf("%s: failed, though it is up again", tc.name)
		}
	}
}

// TestLate: who looks late waits as much longer, once, and no longer than the detection time; what came meanwhile counts.
func TestLate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		late, more time.Duration
	}{
		{0, 0},
		{ms, ms},
		{100 * ms, 100 * ms},
		{time.Hour, 150 * ms},
	} {
		w := newWire(timing(50*ms, 50*ms, 3), timing(50*ms, 50*ms, 3), half)
		w.up(t)
		m := w.machines[0]
		ticked := m.deadline.Add(tc.late)
		m.next = ticked // nothing else was due before
		m.Tick(ticked)
		if up := m.State() == Up; up != (tc.late > 0) {
			t.Errorf("%v late: %v", tc.late, m.State())
		}
		if tc.late == 0 {
			continue
		}
		if got := m.Status().Late; got != tc.late {
			t.Errorf("%v late: reported %v", tc.late, got)
		}
		heard := *m
		if m.Tick(ticked.Add(tc.more - 1)); m.State() != Up {
			t.Errorf("%v late: %v before %v more", tc.late, m.State(), tc.more)
		}
		// Late again, it has waited enough.
		if m.Tick(ticked.Add(tc.more + 10*ms)); m.State() != Down {
			t.Errorf("%v late: %v after %v more", tc.late, m.State(), tc.more)
		}
		p := w.machines[1].packet()
		heard.Receive(ticked.Add(tc.more-1), &p)
		if heard.Tick(ticked.Add(tc.more + 10*ms)); heard.State() != Up {
			t.Errorf("%v late: %v though the peer was heard", tc.late, heard.State())
		}
	}
}

// TestAdministrative takes one side down: the other one does not take it for a failure.
func TestAdministrative(t *testing.T) {
	t.Parallel()
	w := newWire(timing(50*ms, 50*ms, 3), timing(50*ms, 50*ms, 3), half)
	w.up(t)
	if !w.machines[1].Status().Independent {
		t.Error("a failure would count for nothing while BGP restarts")
	}
	w.machines[0].Stop(w.now)
	w.run(10 * ms)
	got := w.machines[1].Status()
	if got.State != Down || got.RemoteState != AdminDown || got.Diagnostic != NeighborDown || got.Failed || got.Independent {
		t.Errorf("the other side is %+v; want down, not failed", got)
	}
	w.run(time.Minute)
	if s := w.machines[0].State(); s != AdminDown {
		t.Errorf("who was stopped is %v", s)
	}
	if s := w.machines[1].Status(); s.State != Down || s.Failed {
		t.Errorf("a minute later the other side is %+v", s)
	}
}

// TestTimingChanges changes both ways while the session is up: it stays up, and both sides end with the new values.
func TestTimingChanges(t *testing.T) {
	t.Parallel()
	w := newWire(timing(50*ms, 50*ms, 3), timing(50*ms, 50*ms, 3), half)
	w.up(t)
	for _, tt := range []Timing{timing(500*ms, 500*ms, 3), timing(20*ms, 300*ms, 1), timing(20*ms, 20*ms, 3)} {
		w.machines[0].SetTiming(w.now, tt)
		w.run(3 * time.Second)
		if w.machines[0].polling {
			t.Errorf("%v: not acknowledged", tt)
		}
		if got, want := w.machines[0].interval(), max(tt.MinTx, 50*ms); got != want {
			t.Errorf("%v: sends every %v; want %v", tt, got, want)
		}
	}
	if diff := cmp.Diff([2][]State{{Init, Up}, {Init, Up}}, w.states); diff != "" {
		t.Errorf("the session was not up all the time:\n%s", diff)
	}
}

// TestWantsNone: a peer with a receive interval of zero gets no periodic packets, and one that has demand mode none while
// both are up (RFC 5880 sections 6.8.1 and 6.6).
func TestWantsNone(t *testing.T) {
	t.Parallel()
	m := NewMachine(start, 1, timing(50*ms, 50*ms, 3), half)
	p := Packet{State: Down, Multiplier: 3, My: 2, MinTx: slow, MinRx: 50 * ms}
	m.Receive(start, &p)
	p.State, p.Your = Init, 1
	m.Receive(start, &p)
	p.State, p.Final = Up, true
	m.Receive(start, &p)
	if _, ok := m.Tick(start.Add(time.Second / 2)); !ok {
		t.Fatal("no packet, though the peer wants some")
	}
	for _, p := range []Packet{
		{State: Up, Multiplier: 3, My: 2, Your: 1, MinTx: time.Second, MinRx: 0},
		{State: Up, Multiplier: 3, My: 2, Your: 1, MinTx: time.Second, MinRx: 50 * ms, Demand: true},
	} {
		m.Receive(start, &p)
		if p, ok := m.Tick(start.Add(2 * time.Second)); ok {
			t.Errorf("sent %+v", p)
		}
		// A poll is answered all the same.
		p.Poll = true
		if a, ok := m.Receive(start, &p); !ok || !a.Final {
			t.Errorf("a poll got %+v, %v", a, ok)
		}
	}
}

// TestJitter: packets are 75 to 100 % of the interval apart, with a multiplier of one 75 to 90 %.
func TestJitter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint8Range(1, 4).Draw(t, "multiplier")
		w := newWire(timing(100*ms, 100*ms, n), timing(100*ms, 100*ms, 3), rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "jitter"), 0)).Float64)
		w.up(t)
		w.at[0] = nil
		w.run(2 * time.Second)
		longest := 100 * ms
		if n == 1 {
			longest = 90 * ms
		}
		for i, at := range w.at[0][1:] {
			if d := at.Sub(w.at[0][i]); d < 75*ms || d > longest+time.Microsecond {
				t.Fatalf("%v between two packets", d)
			}
		}
	})
}

// TestMachine lets two machines live through losses, delays, changes and stops: no session goes down unless nothing came
// for the detection time or a side was stopped, and when all is well again both are up.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) Timing {
			d := rapid.IntRange(10, 300)
			return timing(time.Duration(d.Draw(t, name+" tx"))*ms, time.Duration(d.Draw(t, name+" rx"))*ms, rapid.Uint8Range(3, 5).Draw(t, name+" n"))
		}
		w := newWire(draw("a"), draw("b"), half)
		chance := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "delays"), 0))
		w.delay = func() time.Duration { return time.Duration(chance.IntN(5)) * ms }
		w.up(t)
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			i := rapid.IntRange(0, 1).Draw(t, "side")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0: // single losses, which the multiplier is for
				before := w.machines[i].flaps
				lost := false
				w.lose = func(from int, p *Packet) bool {
					// Polls and answers are what changes travel by; they are repeated.
					if from == i || p.Final {
						return false
					}
					lost = !lost
					return lost
				}
				w.run(time.Second)
				if w.machines[i].flaps != before {
					t.Fatalf("every other packet was lost, and the session went down: %+v", w.machines[i].Status())
				}
			case 1:
				before := w.machines[0].flaps + w.machines[1].flaps
				for range rapid.IntRange(0, 3).Draw(t, "changes before") { // also while a poll is under way
					w.machines[i].SetTiming(w.now, draw("passing"))
					w.run(time.Duration(rapid.IntRange(0, 40).Draw(t, "meanwhile")) * ms)
				}
				w.machines[i].SetTiming(w.now, draw("new"))
				w.run(3 * time.Second)
				if now := w.machines[0].flaps + w.machines[1].flaps; now != before {
					t.Fatalf("a change of timing took the session down: %+v, %+v", w.machines[0].Status(), w.machines[1].Status())
				}
			case 2:
				w.lose = func(int, *Packet) bool { return true }
				w.run(3 * time.Second)
				for i, m := range w.machines {
					if s := m.Status(); s.State == Up || !s.Failed {
						t.Fatalf("machine %d is %+v without packets", i, s)
					}
				}
			case 3: // one side starts anew
				w.machines[i] = NewMachine(w.now, uint32(rapid.IntRange(100, 1<<30).Draw(t, "discriminator")), w.machines[i].timing, half)
				w.transit = nil
				// The other side notices by its packets or by their absence.
				w.run(3 * time.Second)
			}
			w.lose = func(int, *Packet) bool { return false }
			w.up(t)
		}
	})
}

func TestPacket(t *testing.T) {
	t.Parallel()
	good := Packet{
		Diagnostic: TimeExpired, State: Up, Poll: true, Independent: true, Demand: true, Multiplier: 3,
		My: 1, Your: 2, MinTx: 50 * ms, MinRx: 60 * ms,
	}
	wire := good.Append(nil)
	// RFC 5880 section 4.1, by hand.
	if diff := cmp.Diff([]byte{
		0x21, 0xea, 3, 24, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0xc3, 0x50, 0, 0, 0xea, 0x60, 0, 0, 0, 0,
	}, wire); diff != "" {
		t.Error(diff)
	}
	got, err := Parse(append(wire, 0xff)) // padded, as a short Ethernet frame is
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(good, got); diff != "" {
		t.Error(diff)
	}
	for _, tc := range []struct {
		name   string
		change func(b []byte) []byte
		says   string
	}{
		{"short", func(b []byte) []byte { return b[:23] }, "23 bytes: shorter than a control packet"},
		{"version", func(b []byte) []byte { b[0] = 0x40; return b }, "version 2: only 1 is known"},
		{"length short", func(b []byte) []byte { b[3] = 23; return b }, "length field 23 in a packet of 24 bytes"},
		{"length long", func(b []byte) []byte { b[3] = 25; return b }, "length field 25 in a packet of 24 bytes"},
		{"authenticated", func(b []byte) []byte { b[1] |= bitAuth; return b }, "authenticated: no authentication is in use"},
		{"multipoint", func(b []byte) []byte { b[1] |= bitMultipoint; return b }, "the bit Multipoint is set"},
		{"multiplier", func(b []byte) []byte { b[2] = 0; return b }, "detect multiplier 0"},
		{"no discriminator", func(b []byte) []byte { b[7] = 0; return b }, "its discriminator is 0"},
		{"not ours", func(b []byte) []byte { b[11] = 0; return b }, "state Up without our discriminator"},
	} {
		_, err := Parse(tc.change(good.Append(nil)))
		if fmt.Sprint(err) != tc.says {
			t.Errorf("%s: %v; want %s", tc.name, err, tc.says)
		}
	}
}

// FuzzParse: what is read is written the same way.
func FuzzParse(f *testing.F) {
	p := Packet{State: Down, Multiplier: 3, My: 1, MinTx: slow, MinRx: slow}
	f.Add(p.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(p.Append(nil))
		if err != nil || again != p {
			t.Fatalf("%+v became %+v, %v", p, again, err)
		}
	})
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		t    Timing
		says string
	}{
		{timing(50*ms, 50*ms, 3), "<nil>"},
		{timing(time.Millisecond, 50*ms, 3), "transmit interval 1ms: use a duration from 10ms to 1m0s"},
		{timing(50*ms, time.Hour, 3), "receive interval 1h0m0s: use a duration from 10ms to 1m0s"},
		{timing(50*ms, 50*ms, 0), "multiplier 0: use a number from 1 to 255, such as 3"},
	} {
		if err := tc.t.Check(); fmt.Sprint(err) != tc.says {
			t.Errorf("%v: %v; want %s", tc.t, err, tc.says)
		}
	}
}
