package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

const vx = " vxlan/4096/4789 "

func TestVerdicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.broken["checksum"], n.broken["tcp"], n.broken["udp"] = NoChecksum, NoTCPSegments, NoUDPSegments
		n.mtu["small"], n.silent["mute"], n.refused["calico"], n.lossy["lossy"] = 1400, true, true, true
		p, stop := start(t, n, "")
		defer stop()
		// A device for each, so that one cure does not help another.
		w := world("good", "checksum", "tcp", "udp", "small", "mute", "calico", "lossy")
		for i := range w.tunnels {
			w.tunnels[i].Tunnel.Link = "vx-" + w.tunnels[i].Node
		}
		p.show(t, w)
		pass(5 * time.Second)
		expect(t, n, "calico"+vx+"unknown", "checksum"+vx+"yes", "good"+vx+"yes", "lossy"+vx+"yes", "mute"+vx+"no",
			"small"+vx+"yes mtu 1400", "tcp"+vx+"yes", "udp"+vx+"yes")
		for link, want := range map[string]Setting{
			"vx-good": 0, "vx-checksum": NoChecksum.effective(), "vx-tcp": NoTCPSegments, "vx-udp": NoUDPSegments,
			// What does not help is taken back.
			"vx-lossy": 0, "vx-mute": 0, "vx-calico": 0, "vx-small": 0,
		} {
			if got := n.device(link); got != want {
				t.Errorf("%s: %v, want %v", link, got, want)
			}
		}
	})
}

// One cure may bring the next fault to light, and a device has what all its
// peers need together.
func TestUnionOfNeeds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.broken["b"], n.broken["c"] = NoTCPSegments, NoUDPSegments
		p, stop := start(t, n, "")
		defer stop()
		p.show(t, world("a", "b", "c"))
		pass(10 * time.Second)
		expect(t, n, "a"+vx+"yes", "b"+vx+"yes", "c"+vx+"yes")
		if got := n.device(device); got != NoTCPSegments|NoUDPSegments {
			t.Errorf("device: %v", got)
		}
		// The peer that needed it goes: so does the cure, and the rest is looked
		// at again.
		before := n.count("a")
		p.show(t, world("a", "c"))
		pass(10 * time.Second)
		if got := n.device(device); got != NoUDPSegments {
			t.Errorf("device after b went: %v", got)
		}
		if n.count("a") == before {
			t.Error("a was not measured again with the offload on")
		}
		expect(t, n, "a"+vx+"yes", "c"+vx+"yes")
	})
}

// A tunnel that delivered is not called broken because the peer is silent, and
// not because of one bad moment.
func TestHysteresis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p, stop := start(t, n, "")
		defer stop()
		p.show(t, world("a"))
		pass(2 * time.Hour)
		n.set(func() { n.silent["a"] = true })
		pass(24 * time.Hour)
		expect(t, n, "a"+vx+"yes")
		if c := n.count("a"); c < 20 {
			t.Errorf("measured %d times in a day of silence", c)
		}
		n.set(func() { n.silent["a"] = false })
		pass(10 * time.Minute)
		if s := p.status(t); s.Reason != "" || s.Delivers != "yes" {
			t.Errorf("after the peer is back: %+v", s)
		}
		// A path that breaks in a way that no setting cures is called broken, but
		// not at the first sight of it.
		reports := len(n.reports)
		n.set(func() { n.refuse, n.broken["a"] = errors.New("not permitted"), NoChecksum })
		pass(2 * time.Hour)
		expect(t, n, "a"+vx+"no")
		if s := p.status(t); !strings.Contains(s.Reason, "not permitted") {
			t.Errorf("the reason does not say why it is not cured: %+v", s)
		}
		if got := len(n.reports) - reports; got > 3 {
			t.Errorf("%d reports for one change: it flaps", got)
		}
	})
}

// What was found outlives a restart, unless the kernel or the card is another.
func TestRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(dir, "probes.json")
		n := newNetwork()
		n.broken["a"] = NoChecksum
		p, stop := start(t, n, file)
		p.show(t, world("a", "b"))
		pass(10 * time.Second)
		stop()
		again := func(kernel string, w tunnelView) (first []string, device_ Setting) {
			m := newNetwork()
			m.broken["a"], m.delay = NoChecksum, time.Minute // so that the first report is seen before any measurement
			p := m.prober(file, kernel)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- p.Run(ctx) }()
			p.show(t, w)
			pass(time.Second)
			first, device_ = m.told(), m.device(device)
			cancel()
			<-done
			return first, device_
		}
		other := world("a", "b")
		for i := range other.tunnels {
			other.tunnels[i].Card = "eth0 mlx5_core"
		}
		moved := world("a", "b")
		moved.tunnels[0].Tunnel.MTU = 8950
		for _, tt := range []struct {
			name   string
			kernel string
			world  tunnelView
			want   []string
			device Setting
		}{
			{"the same", "6.1", world("a", "b"), []string{"a" + vx + "yes", "b" + vx + "yes"}, NoChecksum.effective()},
			{"another MTU: the cure stays, the result does not", "6.1", moved, []string{"b" + vx + "yes"}, NoChecksum.effective()},
			{"another card", "6.1", other, nil, 0},
			{"another kernel", "6.2", world("a", "b"), nil, 0},
		} {
			got, device := again(tt.kernel, tt.world)
			if d := cmp.Diff(tt.want, got); d != "" || device != tt.device {
				t.Errorf("%s: device %v, want %v; reported (-want +got):\n%s", tt.name, device, tt.device, d)
			}
		}
	})
}

// A file that cannot be read costs the findings, not the start.
// TestLeftTunnel: what was found of a tunnel that was given up since does not stand for
// the probe before a move to it, over a restart neither. One in use stays as it is known.
func TestLeftTunnel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tt := range []struct {
		name    string
		restart bool
		inUse   bool
		want    string
	}{
		{"moved to again", false, false, "no"},
		{"moved to again after a restart", true, false, "no"},
		{"in use again", false, true, "yes"},
		{"in use again after a restart", true, true, "yes"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork()
			file := filepath.Join(dir, strings.ReplaceAll(tt.name, " ", "-"))
			p, stop := start(t, n, file)
			p.show(t, world("a"))
			pass(10 * time.Minute) // until it has been written down
			p.show(t, tunnelView{key: testKey})
			if tt.restart {
				pass(10 * time.Minute)
				stop()
				p, stop = start(t, n, file)
			}
			defer func() { stop() }()
			n.set(func() { n.silent["a"] = true })
			w := world("a")
			w.tunnels[0] = w.tunnels[0].with(func(t *dataplane.ProbeTarget) { t.Tunnel.InUse = tt.inUse })
			p.show(t, w)
			pass(time.Minute)
			if got := p.status(t).GetDelivers(); got != tt.want {
				t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
			}
		})
	}
}

func TestDamagedFile(t *testing.T) {
	t.Parallel()
	for _, content := range []string{"", "{", `{"kernel":"6.1","paths":{"x":{"off":["what is that"]}}}`, `{"kernel":"6.1"}`, "null"} {
		file := filepath.Join(t.TempDir(), "probes.json")
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork()
			p, stop := start(t, n, file)
			p.show(t, world("a"))
			pass(10 * time.Second)
			expect(t, n, "a"+vx+"yes")
			stop()
			if known, _ := n.prober(file, "6.1").load(); len(known) != 1 {
				t.Errorf("the file was not replaced by a good one: %v", known)
			}
		})
	}
}

// Many peers cost no more at once than a few.
func TestBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p, stop := start(t, n, "")
		defer stop()
		var nodes []string
		for i := range 500 {
			nodes = append(nodes, fmt.Sprintf("node%d", i))
		}
		p.show(t, world(nodes...))
		pass(10 * time.Second)
		if len(n.told()) != len(nodes) || n.most > atOnce {
			t.Errorf("%d of %d measured, %d at once", len(n.told()), len(nodes), n.most)
		}
		pass(20 * time.Minute)
		if c := n.count("node7"); c != 1 {
			t.Errorf("measured %d times in 20 minutes with nothing wrong", c)
		}
		pass(100 * time.Minute)
		if c := n.count("node7"); c < 2 || c > 3 {
			t.Errorf("measured %d times in two hours", c)
		}
		if n.changes != 1 {
			t.Errorf("%d changes of a device with nothing wrong, want the first", n.changes)
		}
	})
}

// Peers that publish nothing of the encapsulation are measured one after the other,
// and delay none that do.
func TestQuietPeers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.delay = time.Second
		p, stop := start(t, n, "")
		defer stop()
		var nodes []string
		for i := range 60 {
			nodes = append(nodes, fmt.Sprintf("node%d", i))
			n.silent[nodes[i]] = true
		}
		w := world(nodes...)
		for i := range w.tunnels {
			w.tunnels[i].Accepts = false
		}
		p.show(t, w)
		pass(10 * time.Second)
		if n.most != 1 {
			t.Errorf("%d silent peers measured at once", n.most)
		}
		w.tunnels = append(slices.Clone(w.tunnels), target("well"))
		p.show(t, w)
		pass(1500 * time.Millisecond)
		if n.count("well") != 1 {
			t.Error("a peer that accepts the encapsulation waits for those that are silent")
		}
		pass(2 * time.Minute)
		for _, node := range nodes {
			if c := n.count(node); c != 1 {
				t.Errorf("%s was measured %d times", node, c)
			}
		}
		// One that comes to accept it is measured at once.
		w.tunnels = slices.Clone(w.tunnels)
		w.tunnels[7].Accepts = true
		p.show(t, w)
		pass(1500 * time.Millisecond)
		if c := n.count("node7"); c != 2 {
			t.Errorf("a peer that accepts the encapsulation now was measured %d times", c)
		}
	})
}

// Without the cluster's key nothing is asked and nothing told: the core would
// wait for answers that cannot come.
func TestWithoutKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p, stop := start(t, n, "")
		defer stop()
		w := world("a")
		w.key = nil
		p.show(t, w)
		pass(time.Minute)
		if n.count("a") != 0 || len(n.reports) != 0 {
			t.Errorf("measured %d times, reported %v", n.count("a"), n.reports)
		}
		p.show(t, world("a"))
		pass(time.Second)
		expect(t, n, "a"+vx+"yes")
		if _, err := (Sockets{}).Measure(t.Context(), target("a"), nil); !errors.Is(err, errNoKey) {
			t.Errorf("Measure without a key: %v", err)
		}
	})
}

func TestRetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.broken["a"] = NoChecksum
		p, stop := start(t, n, "")
		defer stop()
		p.show(t, world("a", "b"))
		pass(10 * time.Second)
		n.set(func() { n.broken["a"] = 0 }) // a driver was mended
		pass(3 * time.Hour)
		if got := n.device(device); got&NoChecksum == 0 {
			t.Error("the offload came back by itself, at the risk of traffic")
		}
		if _, err := p.Tunnels(t.Context(), []string{"a"}, false); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Second)
		if got := n.device(device); got != 0 {
			t.Errorf("device after the retry: %v", got)
		}
		expect(t, n, "a"+vx+"yes", "b"+vx+"yes")
	})
}

// A form that carries both families delivers if nothing in it is lost.
func TestBothFamiliesInOneForm(t *testing.T) {
	t.Parallel()
	yes, no, unknown := dataplane.Delivery{Result: dataplane.Yes}, dataplane.Delivery{Result: dataplane.No}, dataplane.Delivery{}
	small := dataplane.Delivery{Result: dataplane.Yes, MTU: 1300}
	smaller := dataplane.Delivery{Result: dataplane.Yes, MTU: 1280}
	for _, tt := range []struct{ a, b, want dataplane.Delivery }{
		{yes, no, no},
		{no, yes, no},
		{yes, unknown, yes},
		{unknown, yes, yes},
		{unknown, no, no},
		{yes, small, small},
		{small, yes, small},
		{small, smaller, smaller},
		{smaller, small, smaller},
		{unknown, unknown, unknown},
	} {
		if got := join(tt.a, tt.b); got != tt.want {
			t.Errorf("join(%+v, %+v) = %+v, want %+v", tt.a, tt.b, got, tt.want)
		}
	}
}

// Whatever happens and in whichever order, once it is quiet a device has off
// exactly what its present peers need, and every peer that answers delivers.
func TestQuietEnd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(rapid.IntRange(0, 6), 1, 12).Draw(rt, "steps")
		nodes := []string{"a", "b", "c"}
		pick := rapid.SliceOfN(rapid.SampledFrom(nodes), 12, 12).Draw(rt, "nodes")
		faults := rapid.SliceOfN(rapid.SampledFrom([]Setting{0, NoChecksum, NoTCPSegments, NoUDPSegments}), 12, 12).Draw(rt, "faults")
		waits := rapid.SliceOfN(rapid.SampledFrom([]time.Duration{0, 10 * time.Millisecond, 30 * time.Millisecond, time.Minute}), 12, 12).Draw(rt, "waits")
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork()
			p, stop := start(t, n, "")
			defer stop()
			present := map[string]bool{"a": true}
			show := func() { p.show(t, world(slices.Sorted(maps.Keys(present))...)) }
			show()
			for i, step := range steps {
				switch step {
				case 0, 1:
					present[pick[i]] = true
					show()
				case 2:
					delete(present, pick[i])
					show()
				case 3:
					n.set(func() { n.broken[pick[i]] = faults[i] })
				case 4:
					n.set(func() { n.silent[pick[i]] = !n.silent[pick[i]] })
				case 5:
					n.set(func() { n.refuse = errors.New("busy") })
				case 6:
					n.set(func() { n.refuse = nil })
				}
				pass(waits[i])
			}
			n.set(func() { n.refuse = nil; clear(n.silent) })
			pass(3 * time.Hour)
			if _, err := p.Tunnels(t.Context(), nil, true); err != nil {
				t.Fatal(err)
			}
			pass(3 * time.Hour)
			var want Setting
			var delivered []string
			for _, node := range slices.Sorted(maps.Keys(present)) {
				want |= n.broken[node]
				delivered = append(delivered, node+vx+"yes")
			}
			if len(present) > 0 && n.device(device) != want.effective() {
				rt.Fatalf("device has %v, want %v", n.device(device), want.effective())
			}
			if d := cmp.Diff(delivered, n.told()); d != "" {
				rt.Fatalf("reported (-want +got):\n%s", d)
			}
		})
	})
}

// TestPause: nothing is to be had from measuring a peer again that has no prober, and
// what was found of it again is no reason to write the file again.
func TestPause(t *testing.T) {
	t.Parallel()
	failed := errors.New("the device has no address yet")
	for _, tt := range []struct {
		name        string
		track       track
		err         error
		least, most time.Duration
	}{
		{"well", track{result: dataplane.Yes}, nil, 45 * time.Minute, 75 * time.Minute},
		{"gets lost", track{result: dataplane.No, failures: 20}, nil, 45 * time.Second, 75 * time.Second},
		{"silent", track{Target: Target{ProbeTarget: &dataplane.ProbeTarget{ProbePath: &dataplane.ProbePath{}}, Accepts: true}, failures: 20}, nil, 225 * time.Second, 375 * time.Second},
		{"silent once", track{Target: Target{ProbeTarget: &dataplane.ProbeTarget{ProbePath: &dataplane.ProbePath{}}, Accepts: true}, failures: 1}, nil, 750 * time.Millisecond, 1250 * time.Millisecond},
		{"no prober", track{failures: 1}, nil, 45 * time.Minute, 75 * time.Minute},
		{"not measured", track{failures: 1}, failed, 750 * time.Millisecond, 1250 * time.Millisecond},
	} {
		if got := tt.track.pause(tt.err); got < tt.least || got > tt.most {
			t.Errorf("%s: %v, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}

	p := newTunnels(TunnelConfig{Sink: newNetwork(), Rules: newNetwork(), Driver: func(string) string { return "" }}, slog.New(slog.DiscardHandler), newAsking(), nil)
	p.saved = map[string]record{}
	target := target("node2")
	target.Accepts = false
	now := time.Now()
	p.set(tunnelView{key: []byte("key"), tunnels: []Target{target}}, now)
	for i := range 5 {
		p.settle(&attempt{target: target}, now)
		if p.changed() || len(p.records()) > 0 {
			t.Errorf("after measurement %d something is to be saved", i+1)
		}
	}
	delivers := func(yes dataplane.Answer) {
		p.settle(&attempt{target: target, verdict: verdict{result: yes}, finding: Finding{Answered: true}}, now)
	}
	delivers(dataplane.Yes)
	if !p.changed() || len(p.records()) != 1 {
		t.Error("that a tunnel delivers is not saved")
	}
	if delivers(dataplane.Yes); p.changed() {
		t.Error("the same is saved again")
	}
	for range doubts {
		delivers(dataplane.No)
	}
	if !p.changed() || len(p.records()) != 0 {
		t.Error("that a tunnel delivered stays, though it does not any more")
	}
}

// portRecord notes what the devices were when source ports were set.
type portRecord struct {
	n    *simulated
	mu   sync.Mutex
	sets []string
}

func (p *portRecord) Run(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func (p *portRecord) Set(port uint16, peers []netip.AddrPort) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := fmt.Sprint(port, peers, " with ", p.n.device(device)); !slices.Contains(p.sets, s) {
		p.sets = append(p.sets, s)
	}
	return nil
}

// Where the source port is rewritten, no checksum is left to the device, before the first
// packet is and until the last has been; also by a daemon that begins with what the
// previous one left.
func TestPinnedChecksums(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		file := filepath.Join(t.TempDir(), "probes.json")
		to := netip.MustParseAddrPort("10.0.0.2:4789")
		k := peerKey{"b", dataplane.IPv4}
		begin := func() (p *Prober, ports *portRecord, stop func()) {
			ports = &portRecord{n: n}
			p = n.prober(file, "6.1")
			p.cfg.Underlay = UnderlayConfig{Enabled: true, Interval: time.Second, SourcePorts: ports}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- p.Run(ctx) }()
			return p, ports, func() {
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) {
					t.Errorf("Run = %v", err)
				}
			}
		}
		pin := func(p *Prober, to netip.AddrPort) {
			t.Helper()
			err := p.ask(t.Context(), func(l *loop) {
				l.eng.peers[k] = &peer{key: k, target: &dataplane.ProbeTarget{ProbePath: &dataplane.ProbePath{Encap: vxlanForm()}}, pin: to}
				delete(l.eng.gone, k)
				l.eng.changed[k] = true
			})
			if err != nil {
				t.Error(err)
			}
			pass(time.Second)
		}
		check := func(ports *portRecord, off Setting, want ...string) {
			t.Helper()
			ports.mu.Lock()
			defer ports.mu.Unlock()
			if d := cmp.Diff(want, ports.sets); d != "" {
				t.Errorf("source ports (-want +got):\n%s", d)
			}
			if got := n.device(device); got != off.effective() {
				t.Errorf("%v, want %v", got, off)
			}
		}
		p, ports, stop := begin()
		p.show(t, world("b"))
		pass(time.Second)
		check(ports, 0, "0 [] with all offloads on")
		pin(p, to)
		const off = "checksum off, TCP segmentation off, UDP segmentation off"
		check(ports, NoChecksum, "0 [] with all offloads on", "4789 [10.0.0.2:4789] with "+off)
		stop()

		changes := n.changes
		p, ports, stop = begin()
		p.show(t, world("b"))
		pass(time.Second)
		if n.changes > changes+1 {
			t.Errorf("%d changes of the device", n.changes-changes)
		}
		check(ports, NoChecksum)
		pin(p, netip.AddrPort{})
		check(ports, 0, "4789 [] with "+off)
		stop()
	})
}
