package engine

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// hand is a core with peers whose sessions are up, the first one outside of the AS.
func hand(n int) (c *core, peers []*peer, now time.Time) {
	now = time.Unix(1e9, 0)
	c = newCore(Options{AS: 65000, RouterID: netip.MustParseAddr("10.0.0.99")}, now)
	for i := range n {
		p := Peer{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), AS: 65000, ClusterID: netip.MustParseAddr("10.0.0.99")}
		if i == 0 {
			p.AS = 65001
		}
		s := &fsm.Session{AS4: true, Refresh: true, EnhancedRefresh: true, GracefulRestart: true, LongestSent: wire.MaxLen}
		s.Peer = fsm.Open{AS: p.AS, ID: uint32(i + 1)}
		s.Peer.GracefulRestart, s.Peer.RestartTime = true, time.Minute
		for f := range s.Wire.Family {
			p.Families[f].Enabled, s.Wire.Family[f].Enabled = true, true
			s.Peer.Family[f] = fsm.FamilyCapabilities{Enabled: true, Restart: true, Forwarding: true}
		}
		q := c.addPeer(p)
		q.local = netip.MustParseAddr("10.0.0.1")
		c.up(q, s, func() {})
		peers = append(peers, q)
	}
	for c.work() {
	}
	return c, peers, now
}

func discard(c *core) {
	for c.events.take(4096, func(Event) {}, func(wire.Prefix, func(func(*Path) bool)) {}) {
	}
}

// TestAllocations: an UPDATE of 700 prefixes costs few allocations on its way through
// the table to the peers and to the caller, though all of it changes.
func TestAllocations(t *testing.T) { // not parallel: it counts
	c, peers, _ := hand(10)
	var messages [2][]byte
	for i := range messages {
		var p wire.Packer
		if err := p.Announce(wire.IPv4, []byte{192, 0, 2, byte(1 + i)}, []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 5, 4, 0, 0, 0, 100}); err != nil {
			t.Fatal(err)
		}
		for k := range 700 {
			p.Add(wire.Prefix{Hi: uint64(k) << 40, Bits: 24})
		}
		messages[i] = slices.Clone(p.Bytes()[wire.HeaderLen:])
	}
	i := 0
	run := func() {
		i++
		if fault := c.receive(peers[1], peers[1].session, wire.UpdateMessage, messages[i%2]); fault != nil {
			t.Fatal(fault)
		}
		for _, p := range peers {
			for len(p.member.Next(batchSize)) > 0 {
			}
		}
		discard(c)
	}
	run()
	run()
	allocs := testing.AllocsPerRun(100, run)
	t.Logf("%.0f allocations for an UPDATE of 700 prefixes to 9 peers and the caller", allocs)
	if allocs > 150 {
		t.Errorf("%.0f allocations for an UPDATE", allocs)
	}
}

// feed has a core receive UPDATEs of a peer, and calls after behind each.
func feed(t *testing.T, c *core, from *peer, messages []byte, after func()) {
	t.Helper()
	for len(messages) > 0 {
		_, body, size, err := wire.Frame(messages, wire.MaxLen)
		if err != nil {
			t.Fatal(err)
		}
		messages = messages[size:]
		if fault := c.receive(from, from.session, wire.UpdateMessage, body); fault != nil {
			t.Fatal(fault)
		}
		after()
	}
}

// TestOriginsMemory: what this side originates, such as the addresses of ten thousand Services, takes little
// beside the table.
func TestOriginsMemory(t *testing.T) { // not parallel: it measures the heap
	const n, most = 10_000, 200
	c, _, _ := hand(0)
	before := heapNow()
	list := make([]Origin, n)
	for i := range list {
		list[i] = Origin{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}), 32), LocalPref: 100, Communities: []uint32{65535 << 16}}
	}
	c.announce(list)
	for c.work() {
	}
	discard(c)
	per := float64(heapNow()-before) / n
	t.Logf("%.0f bytes a prefix that is originated", per)
	if per > most {
		t.Errorf("%.0f bytes a prefix that is originated, want at most %d", per, most)
	}
	runtime.KeepAlive(c)
}

// TestMemory: what a prefix costs in the whole engine, of one peer, and reflected.
func TestMemory(t *testing.T) { // not parallel: it measures the heap
	const n = 200_000
	before := heapNow()
	c, peers, _ := hand(10)
	feed(t, c, peers[1], announcements(1, n), func() {
		for _, p := range peers {
			for len(p.member.Next(batchSize)) > 0 {
			}
		}
		discard(c)
	})
	per := float64(heapNow()-before) / n
	t.Logf("%.0f bytes a prefix in the table and two update groups", per)
	if per > 140 {
		t.Errorf("%.0f bytes a prefix", per)
	}
	runtime.KeepAlive(c)
}

// TestFill: an update group is filled in steps of a bounded number of prefixes. Meanwhile other
// peers are sent what changes, and a peer of the new group nothing; then it is sent all, once,
// as it is by then, and End-of-RIB behind it.
func TestFill(t *testing.T) {
	t.Parallel()
	const n = 5 * step
	c, peers, _ := hand(3)
	received := func(p *peer) (announced map[wire.Prefix]int, withdrawn int, ended bool) {
		announced = map[wire.Prefix]int{}
		d := wire.Decoder{Session: p.session.Wire}
		for out := p.member.Next(batchSize); len(out) > 0; out = p.member.Next(batchSize) {
			for _, b := range out {
				for len(b) > 0 {
					_, body, size, err := wire.Frame(b, wire.MaxLen)
					var u wire.Update
					if err = cmp.Or(err, d.Decode(body, &u)); err != nil {
						t.Fatal(err)
					}
					b = b[size:]
					if _, ok := u.EndOfRIB(); ok {
						ended = true
						continue
					}
					if p.config.AS == 65009 && ended {
						t.Fatal("an UPDATE comes after End-of-RIB")
					}
					for _, list := range []wire.NLRI{u.Announced, u.Reach} {
						for prefix, ok := list.Next(); ok; prefix, ok = list.Next() {
							announced[prefix]++
						}
					}
					for _, ok := u.Withdrawn.Next(); ok; _, ok = u.Withdrawn.Next() {
						withdrawn++
					}
				}
			}
		}
		return announced, withdrawn, ended
	}
	feed(t, c, peers[1], announcements(1, n), func() {})
	received(peers[2])
	// Another AS has a group of its own.
	config := peers[0].config
	config.Addr, config.AS = netip.MustParseAddr("10.1.9.9"), 65009
	s := *peers[0].session
	s.Peer.AS, s.Peer.ID = 65009, 99
	late := c.addPeer(config)
	late.local = netip.MustParseAddr("10.0.0.1")
	woken := false
	c.up(late, &s, func() { woken = true })
	steps := 0
	for more := true; more; steps++ {
		if woken = false; steps < n/step {
			if got, _, ended := received(late); len(got) > 0 || ended {
				t.Fatalf("after %d steps the new peer is sent %d prefixes", steps, len(got))
			}
			var p wire.Packer
			if err := p.Announce(wire.IPv4, []byte{192, 0, 2, byte(steps)}, []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 5, 4, 0, 0, 0, 100}); err != nil {
				t.Fatal(err)
			}
			p.Add(wire.Prefix{Hi: 1<<63 | uint64(steps)<<40, Bits: 24})
			feed(t, c, peers[1], p.Bytes(), func() {})
			if got, _, _ := received(peers[2]); len(got) != 1 {
				t.Fatalf("after %d steps another peer is sent %d prefixes of one that is new", steps, len(got))
			}
		}
		if had := late.updates.Advertised(late.number, wire.IPv4); steps == 0 && had != 1 {
			t.Fatalf("%d prefixes in a group that was just made, apart from what is new", had)
		}
		before := late.updates.Advertised(late.number, wire.IPv4)
		more = c.work()
		if after := late.updates.Advertised(late.number, wire.IPv4); after-before > step {
			t.Fatalf("%d prefixes in one step", after-before)
		}
	}
	if steps < n/step || !woken {
		t.Errorf("%d steps for %d prefixes; woken: %t", steps, n, woken)
	}
	got, withdrawn, ended := received(late)
	if len(got) != n+n/step || withdrawn > 0 || !ended {
		t.Errorf("%d prefixes are announced and %d withdrawn, End-of-RIB: %t; want %d", len(got), withdrawn, ended, n+n/step)
	}
	for prefix, times := range got {
		if times > 1 {
			t.Fatalf("%v comes %d times", prefix.Netip(), times)
		}
	}
}

func heapNow() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestRemovedAfterItsEnd: whenever a peer whose session has ended is removed, that what it had
// announced is gone is reported once, after the changes: a next hop that was lost with the
// session is usable again then, and the peer may be configured anew by that time.
func TestRemovedAfterItsEnd(t *testing.T) {
	t.Parallel()
	for steps := range 4 { // of the work between the end and the removal
		c, peers, _ := hand(3)
		feed(t, c, peers[1], announcements(1, 3), func() {})
		discard(c)
		end := fsm.Cease(fsm.CeaseDeconfigured, "")
		c.down(peers[1], peers[1].session, fsm.Reason{Cause: fsm.Received, Notification: end})
		for range steps {
			c.work()
		}
		c.removePeer(peers[1])
		for c.work() {
		}
		var events []string
		changes, atEnd := 0, 0
		event := func(e Event) {
			events = append(events, fmt.Sprint(e.Kind, " ", e.Peer))
			atEnd = changes
		}
		for c.events.take(4096, event, func(wire.Prefix, func(func(*Path) bool)) { changes++ }) {
		}
		want := []string{fmt.Sprint(Down, " 10.1.0.1"), fmt.Sprint(Withdrawn, " 10.1.0.1")}
		if !slices.Equal(events, want) || changes != 3 || atEnd != 3 {
			t.Errorf("removed after %d steps: %q, want %q; the last after %d of %d changes, want 3", steps, events, want, atEnd, changes)
		}
	}
}

// TestEndOfRIBOfItsSession: that a peer has announced all it has is not reported of another session than it was said in, however
// late what is before it is read.
func TestEndOfRIBOfItsSession(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} { // by what is still to be done, or to be read
		c, peers, _ := hand(2)
		p := peers[1]
		session := *p.session
		feed(t, c, p, announcements(1, 3), func() {})
		var pack wire.Packer
		pack.EndOfRIB(wire.IPv4)
		feed(t, c, p, pack.Bytes(), func() {})
		for late && c.work() {
		}
		c.down(p, p.session, fsm.Reason{Cause: fsm.Lost})
		c.up(p, &session, func() {})
		for c.work() {
		}
		up := false
		for c.events.take(1, func(e Event) {
			if up = up || e.Kind == Up && e.Session == &session; up && e.Kind == EndOfRIB {
				t.Errorf("read late: %t: End-of-RIB is reported of the second session, which has not sent it", late)
			}
		}, func(wire.Prefix, func(func(*Path) bool)) {}) {
		}
		if !up {
			t.Error("the second session is not reported")
		}
	}
}

// TestOwnClusters: with clients of two clusters a path that has been in either is a loop, whoever sends it; with none,
// one that has been in the cluster that has the router id.
func TestOwnClusters(t *testing.T) {
	t.Parallel()
	for range 10 { // it was a map's order that decided
		c, peers, _ := hand(4)
		clusters := func(list ...string) {
			for i, id := range list {
				config := peers[i].config
				config.ClusterID, _ = netip.ParseAddr(id)
				c.changePeer(peers[i], config)
			}
		}
		accepted := func(want ...bool) {
			t.Helper()
			for i, id := range []byte{5, 6, 99} {
				var p wire.Packer
				list := []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0x40, 5, 4, 0, 0, 0, 100, 0x80, 9, 4, 0, 0, 0, 77, 0x80, 10, 8, 10, 0, 0, id, 0, 0, 0, 9}
				if err := p.Announce(wire.IPv4, []byte{192, 0, 2, 1}, list); err != nil {
					t.Fatal(err)
				}
				p.Add(wire.FromNetip(netip.MustParsePrefix("10.7.0.0/24")))
				feed(t, c, peers[3], p.Bytes(), func() {})
				if got := c.table.rib.Refused(peers[3].number, wire.IPv4) == 0; got != want[i] {
					t.Errorf("a path that was in cluster 10.0.0.%d is accepted: %t", id, got)
				}
			}
		}
		clusters("", "10.0.0.5", "10.0.0.6", "")
		accepted(false, false, true)
		clusters("", "", "", "")
		accepted(true, true, false)
	}
}

// FuzzReceive hands messages of any content to a core: a fault has a code for its
// NOTIFICATION, and what is advertised then can be read.
func FuzzReceive(f *testing.F) {
	var p wire.Packer
	if err := p.Announce(wire.IPv6, make([]byte, 32), []byte{0x40, 1, 1, 0, 0x40, 2, 0, 0xc0, 8, 4, 0xff, 0xff, 0, 6}); err != nil {
		f.Fatal(err)
	}
	p.Add(wire.Prefix{Hi: 0x20010db8 << 32, Bits: 64, Family: wire.IPv6})
	f.Add(p.Bytes()[wire.HeaderLen:], false)
	f.Add(announcements(1, 3)[wire.HeaderLen:], false)
	p.Reset()
	p.EndOfRIB(wire.IPv4)
	f.Add(p.Bytes()[wire.HeaderLen:], false)
	for subtype := range byte(4) {
		f.Add([]byte{0, 1, subtype, 1}, true)
	}
	f.Fuzz(func(t *testing.T, body []byte, refresh bool) {
		if len(body) < 4 || len(body) > wire.MaxLen-wire.HeaderLen {
			return // no frame has it
		}
		c, peers, now := hand(3)
		typ := wire.UpdateMessage
		if refresh {
			typ = wire.RouteRefresh
		}
		for i := range 2 {
			if fault := c.receive(peers[i], peers[i].session, typ, body); fault != nil && fault.Code == 0 {
				t.Errorf("fault without a code: %v", fault)
			}
		}
		for c.work() {
		}
		for _, p := range peers {
			d := wire.Decoder{Session: p.session.Wire}
			for out := p.member.Next(batchSize); len(out) > 0; out = p.member.Next(batchSize) {
				for _, b := range out {
					for len(b) > 0 {
						typ, body, n, err := wire.Frame(b, wire.MaxLen)
						if err != nil || n == 0 {
							t.Fatalf("%v in %x", err, b)
						}
						var u wire.Update
						if typ == wire.UpdateMessage {
							if err := d.Decode(body, &u); err != nil {
								t.Fatalf("%v in %x", err, body)
							}
						}
						b = b[n:]
					}
				}
			}
		}
		discard(c)
		c.down(peers[0], peers[0].session, fsm.Reason{Cause: fsm.Lost})
		c.table.at(now.Add(time.Hour))
		c.tick()
		for _, p := range peers {
			c.removePeer(p)
		}
		for c.work() {
		}
		discard(c)
		if n := c.table.sets.Len(); n != 0 {
			t.Errorf("%d sets are left", n)
		}
	})
}

// slow is a policy that takes long.
type slow struct{ openPolicy }

func (slow) Import(Peer) Judge {
	return func(*Path) Verdict {
		for end := time.Now().Add(500 * time.Microsecond); time.Now().Before(end); {
			runtime.Gosched()
		}
		return Verdict{Accept: true}
	}
}

// TestSlow: no session is lost while the table is busy for longer than the hold time.
func TestSlow(t *testing.T) {
	t.Parallel()
	a := newNode(t, "127.0.72.1", 65000, func(o *Options) { o.Policy = slow{} })
	var peers []Peer
	for i := range 2 {
		b := newNode(t, fmt.Sprintf("127.0.72.%d", 2+i), 65001, nil)
		hold := func(p *Peer) { p.HoldTime = 3 * time.Second }
		set(t, b, b.peerOf(a, hold))
		peers = append(peers, a.peerOf(b, hold))
		var own []Origin
		for k := range 5000 {
			own = append(own, b.origin(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), byte(k >> 8), byte(k)}), 32).String(), nil))
		}
		b.Announce(own)
	}
	set(t, a, peers...)
	a.is(t, "all routes", func() bool { return len(a.routes) == 10000 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if slices.ContainsFunc(a.events, func(e string) bool { return strings.Contains(e, "down") }) {
		t.Errorf("%q", a.events)
	}
}

// TestSaboteurs: peers that open half a session, send a byte at a time, or read nothing hold
// up neither the others nor the end of the engine, and leave no descriptor.
func TestSaboteurs(t *testing.T) { // not parallel: it counts descriptors
	before, running := descriptors(t), goleak.IgnoreCurrent()
	t.Run("engine", func(t *testing.T) {
		a, b := newNode(t, "127.0.73.1", 65000, nil), newNode(t, "127.0.73.2", 65000, nil)
		client := func(p *Peer) { p.ClusterID = a.options.RouterID }
		peers := []Peer{a.peerOf(b, client)}
		for i := range 4 {
			p := peers[0]
			p.Addr, p.Passive, p.HoldTime = netip.AddrFrom4([4]byte{127, 0, 73, byte(10 + i)}), true, 4*time.Minute // they send no KEEPALIVE
			peers = append(peers, p)
		}
		set(t, a, peers...)
		set(t, b, b.peerOf(a, nil))
		dial := func(i int) net.Conn {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(peers[i].Addr, 0))}
			c, err := d.DialContext(t.Context(), "tcp", a.at.String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return c
		}
		for range 50 { // half-open: each replaces the one before
			dial(1)
		}
		reads, err := speak(t.Context(), peers[2].Addr, a.at, 65000)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { reads.conn.Close() })
		bytewise := dial(3)
		o := fsm.Open{AS: 65000, ID: 77, HoldTime: 4 * time.Minute}
		o.Family[wire.IPv4].Enabled = true
		msg, err := o.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range slices.Concat(wire.AppendMessage(msg, wire.Keepalive, nil), announcements(3, 2)) {
			if _, err := bytewise.Write([]byte{x}); err != nil {
				t.Fatal(err)
			}
		}
		trickles := dial(4) // the least window, read byte by byte
		if err := trickles.(*net.TCPConn).SetReadBuffer(1); err != nil {
			t.Fatal(err)
		}
		o.ID++
		if msg, err = o.Append(nil); err != nil {
			t.Fatal(err)
		}
		if _, err := trickles.Write(wire.AppendMessage(msg, wire.Keepalive, nil)); err != nil {
			t.Fatal(err)
		}
		read := make(chan int)
		go func() {
			n := 0
			for one := make([]byte, 1); ; n++ {
				if _, err := trickles.Read(one); err != nil {
					read <- n
					return
				}
			}
		}()
		t.Cleanup(func() {
			trickles.Close()
			if n := <-read; n < 1000 {
				t.Errorf("who reads byte by byte got %d", n)
			}
		})
		var own []Origin
		for k := range 3000 {
			own = append(own, b.origin(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(k >> 8), byte(k)}), 32).String(), nil))
		}
		for round := range 20 { // more than the buffers of who reads nothing hold
			for i := range own {
				own[i].Communities = []uint32{uint32(round)}
			}
			b.Announce(own)
			want := fmt.Sprintf("127.0.73.2 via 192.0.73.2 [] 200 0:%d", round)
			a.is(t, want, func() bool { return len(a.routes) == 3002 && a.routes[own[2999].Prefix] == want })
		}
	})
	await.Until(t, "descriptors", func() error {
		if n := descriptors(t); n > before+2 { // the runtime's poller, and this directory
			return fmt.Errorf("%d descriptors, %d before", n, before)
		}
		return nil
	})
	if err := goleak.Find(running); err != nil {
		t.Error(err)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
}
