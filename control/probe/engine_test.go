package probe

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

// clouds is a plain rack and two clouds behind 1:1 translators.
func clouds(t testing.TB) *sim {
	s := newSim(t)
	s.realms["a"], s.realms["b"] = &realm{name: "a"}, &realm{name: "b"}
	s.host("rack1", "", "203.0.113.1", "")
	s.host("rack2", "", "203.0.113.2", "")
	s.host("a1", "a", "10.1.0.1", "198.51.100.1")
	s.host("a2", "a", "10.1.0.2", "198.51.100.2")
	s.host("b1", "b", "10.2.0.1", "198.51.100.11")
	s.tell()
	return s
}

// Within a network private addresses are used, between networks public ones,
// all at once, and nobody had to say which are public.
func TestOneToOne(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	want := []string{
		"a1 → a2: ", "a1 → b1: 198.51.100.11", "a1 → rack1: ", "a1 → rack2: ",
		"a2 → a1: ", "a2 → b1: 198.51.100.11", "a2 → rack1: ", "a2 → rack2: ",
		"b1 → a1: 198.51.100.1", "b1 → a2: 198.51.100.2", "b1 → rack1: ", "b1 → rack2: ",
		"rack1 → a1: 198.51.100.1", "rack1 → a2: 198.51.100.2", "rack1 → b1: 198.51.100.11", "rack1 → rack2: ",
		"rack2 → a1: 198.51.100.1", "rack2 → a2: 198.51.100.2", "rack2 → b1: 198.51.100.11", "rack2 → rack1: ",
	}
	if diff := cmp.Diff(want, s.table()); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	// An unchanged world: nothing moves, and the probes are few.
	before := s.sent
	for range 40 {
		s.run(time.Minute)
		if diff := cmp.Diff(want, s.table()); diff != "" {
			t.Fatalf("paths moved (-before +after):\n%s", diff)
		}
	}
	perPeer := float64(s.sent-before) / (40 * 60) / 20
	if t.Logf("%.2f packets a second sent for each peer, answers included", perPeer); perPeer > 0.5 {
		t.Error("too many")
	}
}

func TestPublicAddressChanges(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	s.hosts[2].public = netip.MustParseAddr("198.51.100.99")
	s.run(35 * time.Second)
	for _, from := range []string{"rack1", "rack2", "b1"} {
		s.want(from, "a1", "198.51.100.99")
	}
	s.want("a2", "a1", "")
	if got := s.hosts[2].published; got != s.hosts[2].public {
		t.Errorf("a1 publishes %s, want %s", got, s.hosts[2].public)
	}
}

// A host that moves out from behind its translator stops publishing.
func TestTranslatorGoes(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	s.hosts[4].realm, s.hosts[4].public = s.realms[""], netip.Addr{}
	s.run(2 * time.Minute)
	s.want("rack1", "b1", "")
	s.want("a1", "b1", "")
	if got := s.hosts[4].published; got.IsValid() {
		t.Errorf("b1 still publishes %s", got)
	}
}

func TestPortTranslation(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]realm{
		"symmetric":             {},
		"port preserved":        {preserve: true},
		"everybody let in":      {anyone: true},
		"preserved, all let in": {anyone: true, preserve: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSim(t)
			r.name, r.pat, r.public = "p", true, netip.MustParseAddr("198.51.100.1")
			s.realms["p"] = &r
			s.host("rack1", "", "203.0.113.1", "")
			s.host("rack2", "", "203.0.113.2", "")
			s.host("p1", "p", "10.1.0.1", "")
			s.host("p2", "p", "10.1.0.2", "")
			s.tell()
			s.run(20 * time.Second)
			check := func() {
				t.Helper()
				s.want("p1", "rack1", "")
				s.want("p1", "p2", "")
				for _, from := range []string{"rack1", "rack2"} {
					for _, to := range []string{"p1", "p2"} {
						h := s.hosts[2]
						if to == "p2" {
							h = s.hosts[3]
						}
						far := netip.AddrPortFrom(s.at(s.realms[""], netip.MustParseAddr(map[string]string{"rack1": "203.0.113.1", "rack2": "203.0.113.2"}[from])).addr, simPort)
						out := r.outward(h, netip.AddrPortFrom(h.addr, simPort), far)
						want := out.Addr().String()
						if out.Port() != simPort {
							want = out.String()
						}
						if !r.anyone {
							want += ", pinned"
						}
						s.want(from, to, want)
					}
				}
			}
			check()
			// The translator forgets everything.
			r.mappings = nil
			r.nextPort += 100
			s.run(25 * time.Second)
			check()
		})
	}
}

// Calico's own nodes never answer: they are sent to as ever, and are not
// bothered much.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	s := newSim(t)
	s.host("ours", "", "203.0.113.1", "")
	s.host("theirs", "", "203.0.113.2", "").silent = true
	s.tell()
	s.run(time.Minute)
	s.want("ours", "theirs", "")
	before := s.sent
	s.run(time.Hour)
	if n := s.sent - before; n > 70 {
		t.Errorf("%d probes in an hour", n)
	}
}

// A peer that goes away stays where it was known to be, and is found again at
// once when it comes back.
func TestPeerAway(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	before := s.table()
	s.hosts[2].down = true
	s.run(10 * time.Minute)
	if diff := cmp.Diff(before, s.table()); diff != "" {
		t.Errorf("paths while a1 is down (-before +after):\n%s", diff)
	}
	s.hosts[2].down = false
	s.hosts[2].start(s)
	s.tell()
	s.run(3 * time.Second)
	if c := s.hosts[0].eng.peers[peerKey{"a1", dataplane.IPv4}].chosen; !c.up {
		t.Error("rack1 has not noticed that a1 is back")
	}
}

// Loss moves nothing: one packet in twenty, both ways.
func TestLossMovesNothing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		s := clouds(t)
		s.rng = rand.New(rand.NewPCG(seed, 1))
		s.run(10 * time.Second)
		before := s.table()
		s.lose = func(_, _ *simHost, _ int) bool { return s.rng.IntN(20) == 0 }
		for range 10 {
			s.run(time.Minute)
			if diff := cmp.Diff(before, s.table()); diff != "" {
				t.Fatalf("seed %d: paths moved (-before +after):\n%s", seed, diff)
			}
		}
	}
}

// The private address comes to work where it did not (a VPN), and stops again.
func TestPrivateAddressPreferred(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	s.want("rack1", "b1", "198.51.100.11")
	vpn := s.realms["b"]
	rack := s.hosts[0]
	rack.realm = vpn // rack1 is now in b's network too
	s.run(3 * time.Minute)
	s.want("rack1", "b1", "")
	rack.realm = s.realms[""]
	s.run(30 * time.Second)
	s.want("rack1", "b1", "198.51.100.11")
}

// Behind a firewall that lets in only whom its host has sent to, VXLAN's own
// port passes, for both sides probe from it.
func TestStatefulFirewall(t *testing.T) {
	t.Parallel()
	s := newSim(t)
	s.host("open", "", "203.0.113.1", "")
	s.host("closed", "", "203.0.113.2", "").closed = true
	s.tell()
	s.run(30 * time.Second)
	s.want("open", "closed", ", pinned")
	s.want("closed", "open", "")
}

func TestUnderlayMTU(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	limit := 1400
	s.lose = func(a, b *simHost, size int) bool { return a.realm != b.realm && size > limit }
	s.run(30 * time.Second)
	s.want("rack1", "a1", "198.51.100.1, mtu 1400")
	s.want("a1", "rack1", ", mtu 1400")
	s.want("rack1", "rack2", "")
	s.want("a1", "a2", "")
	limit = 1392
	s.run(2 * time.Minute)
	s.want("rack1", "a1", "198.51.100.1, mtu 1392")
	limit = 1500
	s.run(15 * time.Minute)
	s.want("rack1", "a1", "198.51.100.1")
}

// A restarted daemon begins with what it knew: at no moment do tunnels send
// elsewhere.
func TestUnderlayRestart(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.realms["p"] = &realm{name: "p", pat: true, public: netip.MustParseAddr("198.51.100.77")}
	s.host("p1", "p", "10.9.0.1", "")
	s.lose = func(a, b *simHost, size int) bool { return a.realm != b.realm && size > 1450 }
	s.tell()
	s.run(time.Minute)
	before := s.table()
	for _, h := range s.hosts {
		saved := h.eng.known()
		h.start(s)
		h.eng.seed(s.now, saved)
		// The targets come one after the other.
		h.eng.setTargets(s.now, nil)
		for k, v := range saved {
			if got := h.eng.reach(dataplane.IPv4)[k.node]; got != v.Reach {
				t.Errorf("%s forgot %s: %+v, want %+v", h.name, k.node, got, v.Reach)
			}
		}
		if len(saved) != len(h.eng.known()) {
			t.Errorf("%s keeps %d peers, want %d", h.name, len(h.eng.known()), len(saved))
		}
		s.tell()
		for range 100 {
			if diff := cmp.Diff(before, s.table()); diff != "" {
				t.Fatalf("paths moved after the restart of %s (-before +after):\n%s", h.name, diff)
			}
			s.run(500 * time.Millisecond)
		}
	}
}

// reach returns what is known of all peers of a family.
func (e *engine) reach(f dataplane.Family) map[string]dataplane.Reach {
	out := map[string]dataplane.Reach{}
	for k := range e.gone {
		if k.fam == f {
			out[k.node] = e.reachOf(k)
		}
	}
	for k := range e.peers {
		if k.fam == f {
			out[k.node] = e.reachOf(k)
		}
	}
	return out
}

// reachCore notes what is published of the underlay.
type reachCore struct {
	Core
	got []map[string]dataplane.Reach
}

func (c *reachCore) Reach(_ context.Context, _ dataplane.Family, peers map[string]dataplane.Reach) error {
	c.got = append(c.got, peers)
	return nil
}

// TestOnlyChangesArePublished: what one peer does costs nothing by the number of the
// others.
func TestOnlyChangesArePublished(t *testing.T) {
	t.Parallel()
	core := &reachCore{}
	now := time.Now()
	l := New(Config{Node: "self", Core: core, Log: slog.New(slog.DiscardHandler), Underlay: UnderlayConfig{Enabled: true, Interval: time.Minute}}).newLoop(now)
	var targets []dataplane.ProbeTarget
	for i := range 100 {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
		targets = append(targets, dataplane.ProbeTarget{Node: a.String(), Registered: a, ProbePath: &dataplane.ProbePath{Family: dataplane.IPv4, Uplink: "eth0", Local: netip.MustParsePrefix("10.255.0.1/8")}})
	}
	expect := func(when string, want ...map[string]dataplane.Reach) {
		t.Helper()
		l.unsaved = false
		if err := l.deliver(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, core.got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
		if l.unsaved != (len(want) > 0) {
			t.Errorf("%s: to be saved: %t", when, l.unsaved)
		}
		core.got = nil
	}
	l.eng.setTargets(now, targets)
	expect("peers of whom nothing is known")
	l.eng.setNear(peerKey{"10.0.0.7", dataplane.IPv4}, dataplane.Yes)
	expect("one answers as a neighbour", map[string]dataplane.Reach{"10.0.0.7": {Near: dataplane.Yes}})
	l.eng.setTargets(now, nil)
	expect("all go")
	l.eng.tick(now.Add(remember))
	expect("they are forgotten", map[string]dataplane.Reach{"10.0.0.7": {}})
}

// A Node that is removed and comes back is known at once; one that stays away
// is forgotten.
func TestPeerRemoved(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	e := s.hosts[0].eng
	before := e.reach(dataplane.IPv4)
	delete(before, "rack2") // at its own address: the same as not measured
	e.setTargets(s.now, nil)
	e.tick(s.now)
	if diff := cmp.Diff(before, e.reach(dataplane.IPv4), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("forgotten at once (-before +after):\n%s", diff)
	}
	s.tell()
	s.want("rack1", "a1", "198.51.100.1")
	e.setTargets(s.now, nil)
	e.tick(s.now.Add(remember))
	if got := e.reach(dataplane.IPv4); len(got) != 0 {
		t.Errorf("still known: %v", got)
	}
}

// What somebody recorded and sends again leads nowhere.
func TestReplay(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	e := s.hosts[0].eng
	l := localEnd{s.hosts[0].addr, dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, Port: simPort}}
	evil := netip.MustParseAddrPort("192.0.2.66:4789")
	recorded := message{kind: kindRequest, from: "a1", to: "rack1", nonce: 7, time: s.now.UnixNano()}
	s.run(20 * time.Second)
	e.arrived(s.now, l, evil, recorded)
	if e.replayed != 1 {
		t.Errorf("%d requests counted as replayed, want 1", e.replayed)
	}
	// One that is fresh is answered, and asked back, but not believed.
	e.arrived(s.now, l, evil, message{kind: kindRequest, from: "a1", to: "rack1", nonce: 8, time: s.now.UnixNano()})
	s.run(5 * time.Minute)
	s.want("rack1", "a1", "198.51.100.1")
	// Neither is an answer that nobody asked for.
	e.arrived(s.now, l, evil, message{kind: kindAnswer, from: "a1", to: "rack1", nonce: 9, seen: evil})
	e.arrived(s.now, l, evil, message{kind: kindRequest, from: "nobody", to: "rack1", nonce: 9, time: s.now.UnixNano()})
	e.arrived(s.now, l, evil, message{kind: kindRequest, from: "a1", to: "rack2", nonce: 9, time: s.now.UnixNano()})
	if e.unasked != 1 || e.unknown != 2 {
		t.Errorf("%d unasked, %d unknown; want 1 and 2", e.unasked, e.unknown)
	}
}

// A flood of valid requests is answered up to the limit, and memory does not
// grow with it.
func TestFlood(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	e := s.hosts[0].eng
	l := localEnd{s.hosts[0].addr, dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, Port: simPort}}
	for i := range 20000 {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), 1)
		e.arrived(s.now, l, from, message{kind: kindRequest, from: "a1", to: "rack1", nonce: uint64(i), time: s.now.UnixNano()})
	}
	out, _ := e.tick(s.now)
	if len(out) > replyRate+10 {
		t.Errorf("%d packets sent, want at most %d", len(out), replyRate)
	}
	if n := len(e.peers[peerKey{"a1", dataplane.IPv4}].cands); n > 2+maxLearned {
		t.Errorf("%d addresses of a1 are kept", n)
	}
	s.run(time.Minute)
	s.want("rack1", "a1", "198.51.100.1")
}

// A large cluster starts within the limit of packets.
func TestManyPeers(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	e := newEngine("self", 15*time.Second, now)
	e.setUplink(now, "eth0", 1500)
	const n = 5000
	var ts []dataplane.ProbeTarget
	path := simPath()
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		ts = append(ts, dataplane.ProbeTarget{Node: a.String(), Registered: a, ProbePath: path})
	}
	e.setTargets(now, ts)
	asked := map[string]bool{}
	for sec := range 60 {
		sent := 0
		end := now.Add(time.Second)
		for now.Before(end) {
			out, next := e.tick(now)
			sent += len(out)
			for _, p := range out {
				asked[p.msg.to] = true
			}
			if next.After(end) || next.IsZero() {
				next = end
			}
			now = next
		}
		if sent > 2*sendRate {
			t.Fatalf("%d packets in second %d", sent, sec)
		}
	}
	if len(asked) != n {
		t.Errorf("%d of %d peers were asked in a minute", len(asked), n)
	}
}

// TestMutePeers: peers that have no prober cost next to nothing at rest, and one that
// gets a prober is asked as soon as it speaks.
func TestMutePeers(t *testing.T) {
	t.Parallel()
	const n = 5000
	now := time.Now()
	e := newEngine("self", 25*time.Second, now)
	e.mute = func(string) bool { return true }
	targets := make([]dataplane.ProbeTarget, 0, n)
	path := simPath()
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		targets = append(targets, dataplane.ProbeTarget{Node: a.String(), Registered: a, ProbePath: path})
	}
	e.setTargets(now, targets)
	run := func(d time.Duration) (sent int) {
		for end := now.Add(d); now.Before(end); {
			out, next := e.tick(now)
			sent += len(out)
			if next.After(end) || next.IsZero() {
				next = end
			}
			now = next
		}
		return sent
	}
	if run(time.Minute) < n {
		t.Error("some peers were not asked at all")
	}
	run(time.Hour)
	if sent := run(time.Hour); sent > 5*n {
		t.Errorf("%d packets in an hour to %d peers that cannot answer", sent, n)
	}
	first := targets[0]
	e.arrived(now, localOf(&first), netip.AddrPortFrom(first.Registered, simPort), message{
		kind: kindRequest, from: first.Node, to: "self", nonce: 1, time: now.UnixNano(),
	})
	out, _ := e.tick(now)
	if !slices.ContainsFunc(out, func(p packet) bool { return p.msg.kind == kindRequest && p.msg.to == first.Node }) {
		t.Error("a peer that speaks was not asked")
	}
}

// Path independence: whatever happens on the way, when the network has been
// quiet for a while every host knows what one knows that has just started.
func TestPathIndependence(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := clouds(t)
		s.run(time.Duration(rapid.IntRange(0, 5000).Draw(rt, "start")) * time.Millisecond)
		for range rapid.IntRange(0, 6).Draw(rt, "events") {
			h := s.hosts[rapid.IntRange(0, len(s.hosts)-1).Draw(rt, "host")]
			switch rapid.SampledFrom([]string{"restart", "down", "up", "address", "underlay", "loss", "no loss", "port", "driver"}).Draw(rt, "event") {
			case "restart":
				saved := h.eng.known()
				h.start(s)
				h.eng.seed(s.now, saved)
				s.tell()
			case "down":
				h.down = true
			case "up":
				h.down = false
			case "address":
				if h.public.IsValid() {
					b := h.public.As4()
					b[3] += 30
					h.public = netip.AddrFrom4(b)
				}
			case "underlay":
				h.eng.again(s.now)
				h.next = s.now
			case "loss":
				s.lose = func(_, _ *simHost, _ int) bool { return s.rng.IntN(3) == 0 }
			case "no loss":
				s.lose = nil
			case "port":
				h.encap = simEncap(simPort + 1)
				s.tell()
			case "driver":
				h.encap = simEncap(0)
				s.tell()
			}
			s.run(time.Duration(rapid.IntRange(0, 60000).Draw(rt, "pause")) * time.Millisecond)
		}
		s.lose = nil
		for _, h := range s.hosts {
			h.down, h.encap = false, simEncap(simPort)
		}
		s.tell()
		s.run(15 * time.Minute)
		got := s.table()
		for _, h := range s.hosts {
			h.published = netip.Addr{}
			h.start(s)
		}
		s.tell()
		s.run(time.Minute)
		if diff := cmp.Diff(s.table(), got); diff != "" {
			rt.Fatalf("paths (-fresh +after the events):\n%s", diff)
		}
	})
}

// steady runs for a while, in which no path may move and no neighbour be
// forgotten, not for a moment.
func (s *sim) steady(when string, d time.Duration, want []string) {
	s.t.Helper()
	for end := s.now.Add(d); s.now.Before(end); s.run(20 * time.Millisecond) {
		if diff := cmp.Diff(want, s.table()); diff != "" {
			s.t.Fatalf("paths moved %s (-before +after):\n%s", when, diff)
		}
		for _, h := range s.hosts {
			for node, r := range h.eng.reach(dataplane.IPv4) {
				if r.Near != dataplane.No {
					s.t.Fatalf("%s: %s does not know any more that %s is not near", when, h.name, node)
				}
			}
		}
	}
}

// TestEncapChanges: the encapsulation in use before carries packets still when another
// one is probed first, here on one host after the other. Nothing moves, no
// address is withdrawn, and what is a neighbour stays one.
func TestEncapChanges(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		from, to uint16
	}{
		{"another port", simPort, simPort + 1},
		{"VXLAN to IPIP", simPort, 0},
		{"IPIP to VXLAN", 0, simPort},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := clouds(t)
			for _, h := range s.hosts {
				h.encap = simEncap(tt.from)
			}
			s.tell()
			s.run(30 * time.Second)
			for _, h := range s.hosts {
				for k := range h.eng.peers {
					h.eng.setNear(k, dataplane.No)
				}
			}
			before := s.table()
			for _, h := range s.hosts {
				h.encap = simEncap(tt.to)
				s.tell()
				s.steady("after the change of "+h.name, time.Second, before)
			}
			s.steady("when all had changed", time.Minute, before)
			for _, h := range s.hosts[2:] {
				if h.published != h.public {
					t.Errorf("%s publishes %s, want %s", h.name, h.published, h.public)
				}
			}
		})
	}
}

// TestPinnedEncapChanges: where only VXLAN's own port passes, it is the one of
// the encapsulation in use; and behind a translator of ports the mapping stays until the
// new one has its own.
func TestPinnedEncapChanges(t *testing.T) {
	t.Parallel()
	s := newSim(t)
	s.realms["p"] = &realm{name: "p", pat: true, public: netip.MustParseAddr("198.51.100.1")}
	s.host("open", "", "203.0.113.1", "")
	s.host("closed", "", "203.0.113.2", "").closed = true
	s.host("p1", "p", "10.1.0.1", "")
	s.tell()
	s.run(30 * time.Second)
	e := s.hosts[0].eng
	mapped := s.path("open", "p1")
	for _, h := range s.hosts {
		h.encap = simEncap(simPort + 1)
	}
	s.tell()
	s.want("open", "closed", ", pinned")
	s.want("open", "p1", mapped)
	if !slices.Contains(e.pins(), netip.AddrPortFrom(s.hosts[1].addr, simPort+1)) {
		t.Errorf("pins %v lack the new port", e.pins())
	}
	s.run(3 * time.Second)
	if now := s.path("open", "p1"); now == mapped || !strings.HasPrefix(now, "198.51.100.1:") {
		t.Errorf("open → p1: %s, before %s: want another mapping", now, mapped)
	}
}

func TestNear(t *testing.T) {
	t.Parallel()
	s := clouds(t)
	s.run(10 * time.Second)
	e := s.hosts[0].eng
	near := func(node string) dataplane.Answer { return e.reach(dataplane.IPv4)[node].Near }
	e.setNear(peerKey{"rack2", dataplane.IPv4}, dataplane.Yes)
	e.setNear(peerKey{"a1", dataplane.IPv4}, dataplane.No)
	if near("rack2") != dataplane.Yes || near("a1") != dataplane.No || near("a2") != dataplane.Unknown {
		t.Errorf("near: rack2 %s, a1 %s, a2 %s", near("rack2"), near("a1"), near("a2"))
	}
	// A neighbour that is down is still a neighbour.
	s.hosts[1].down = true
	s.run(time.Minute)
	e.setNear(peerKey{"rack2", dataplane.IPv4}, dataplane.No)
	s.run(time.Minute)
	if near("rack2") != dataplane.Yes {
		t.Errorf("rack2 is down, and near says %s", near("rack2"))
	}
	s.hosts[1].down = false
	s.run(2 * time.Minute)
	if near("rack2") != dataplane.No {
		t.Errorf("rack2 answers, but not as a neighbour, and near says %s", near("rack2"))
	}
}

// A daemon that is away for some seconds, again and again, says nothing about ports:
// nobody sends from VXLAN's own port for that, and nobody stops who has to.
func TestRestartsPinNothing(t *testing.T) {
	t.Parallel()
	s := newSim(t)
	a, b := s.host("a", "", "198.51.100.1", ""), s.host("b", "", "198.51.100.2", "")
	open, closed := s.host("open", "", "198.51.100.3", ""), s.host("closed", "", "198.51.100.4", "")
	closed.closed = true
	s.tell()
	s.run(2 * time.Minute)
	s.want("a", "b", "")
	s.want("open", "closed", ", pinned")
	for range 1000 {
		h := []*simHost{a, b, open}[s.rng.IntN(3)]
		s.run(time.Duration(s.rng.Int64N(int64(20 * time.Second))))
		h.down = true
		s.run(time.Duration(s.rng.Int64N(int64(12 * time.Second))))
		h.down = false
		for range 10 {
			s.run(200 * time.Millisecond)
			if got := s.path("a", "b"); got != "" {
				t.Fatalf("a → b: %q after %s was away", got, h.name)
			}
			if got := s.path("open", "closed"); got != ", pinned" {
				t.Fatalf("open → closed: %q after %s was away", got, h.name)
			}
		}
	}
}
