package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func runIn(t *testing.T, n *netnstest.Netns, commands ...string) {
	t.Helper()
	for _, c := range commands {
		err := n.Do(func() error {
			f := strings.Fields(c)
			out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", c, err, out)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// ports records what a prober wants of VXLAN's source port.
type ports struct {
	mu  sync.Mutex
	set []netip.AddrPort
}

func (*ports) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (p *ports) Set(_ uint16, peers []netip.AddrPort) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.set = peers
	return nil
}

// realHost is a prober in a network namespace of its own.
type realHost struct {
	t       *testing.T
	name    string
	ns      *netnstest.Netns
	prober  *Prober
	ports   ports
	targets chan []dataplane.ProbeTarget

	mu  sync.Mutex
	got map[string]dataplane.Reach
	log bytes.Buffer
}

// The host is also its core.
func (h *realHost) Probes(ctx context.Context) <-chan []dataplane.ProbeTarget {
	return until(ctx, h.targets)
}

// until hands over what comes from in, and ends with ctx.
func until[T any](ctx context.Context, in <-chan T) <-chan T {
	out := make(chan T)
	go func() {
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case v := <-in:
				select {
				case out <- v:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return out
}

func (*realHost) Delivery(context.Context, dataplane.Family, map[string][]dataplane.Delivery) error {
	return errors.New("tunnels are not measured here")
}

func (h *realHost) Reach(_ context.Context, f dataplane.Family, m map[string]dataplane.Reach) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f == dataplane.IPv4 {
		if h.got == nil {
			h.got = map[string]dataplane.Reach{}
		}
		maps.Copy(h.got, m)
	}
	return nil
}

func (h *realHost) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.log.Write(b)
}

// start runs the prober until the test ends, or stop is called.
func (h *realHost) start(s store.Store, stateFile string) (stop func()) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- h.ns.Do(func() error {
			asker, err := neighbour.Open()
			if err != nil {
				return err
			}
			h.mu.Lock()
			h.prober = New(Config{
				Node: h.name, Store: s, Core: h, Log: slog.New(slog.NewTextHandler(h, nil)), File: stateFile,
				Underlay: UnderlayConfig{Enabled: true, Interval: time.Second, SourcePorts: &h.ports, Neighbours: asker},
			})
			p := h.prober
			h.mu.Unlock()
			return p.Run(ctx)
		})
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			h.t.Errorf("Run on %s: %v", h.name, err)
		}
		if h.t.Failed() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.t.Logf("log of %s:\n%s", h.name, h.log.String())
		}
	})
	h.t.Cleanup(stop)
	await.True(h.t, "the prober of "+h.name, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.prober != nil
	})
	return stop
}

// expect waits until the host found this.
func (h *realHost) expect(want map[string]dataplane.Reach) {
	h.t.Helper()
	await.Until(h.t, "what "+h.name+" found", func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if diff := cmp.Diff(want, h.got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

func (h *realHost) tell(mtu int, targets ...dataplane.ProbeTarget) {
	u := dataplane.Underlay{
		Links:     []dataplane.UnderlayLink{{Index: h.index(), Name: "eth0", MTU: mtu, Up: true}},
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: targets[0].Local}},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: targets[0].Local.Masked(), Link: "eth0"}, {Prefix: netip.MustParsePrefix("0.0.0.0/0"), Gateway: targets[0].Local.Masked().Addr().Next(), Link: "eth0"},
		},
	}
	h.prober.HandleUnderlay(u)
	h.targets <- targets
}

func (h *realHost) index() int {
	var n int
	err := h.ns.Do(func() error {
		out, err := exec.Command("ip", "-o", "link", "show", "eth0").Output()
		if err == nil {
			_, err = fmt.Sscanf(string(out), "%d:", &n)
		}
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}

// rig is two subnets with a router between: a and c in one, b in the other,
// whose packets may be 1400 bytes long.
func rig(t *testing.T) (a, b, c *realHost) {
	router := netnstest.New(t)
	make1 := func(name, dev, addr, gw string) *realHost {
		h := &realHost{t: t, name: name, ns: netnstest.New(t), targets: make(chan []dataplane.ProbeTarget, 1)}
		runIn(t, router, "ip link add "+dev+" type veth peer name eth0 netns "+h.ns.Path, "ip link set "+dev+" up")
		runIn(t, h.ns, "ip link set lo up", "ip link set eth0 up", "ip addr add "+addr+"/24 dev eth0", "ip route add default via "+gw)
		return h
	}
	runIn(t, router, "ip link set lo up", "ip link add br0 type bridge", "ip link set br0 up", "sysctl -qw net.ipv4.ip_forward=1")
	a, b, c = make1("a", "va", "10.9.1.11", "10.9.1.1"), make1("b", "vb", "10.9.2.11", "10.9.2.1"), make1("c", "vc", "10.9.1.12", "10.9.1.1")
	runIn(t, router, "ip link set va master br0", "ip link set vc master br0", "ip addr add 10.9.1.1/24 dev br0", "ip addr add 10.9.2.1/24 dev vb",
		"ip link set vb mtu 1400",
		// Nobody is told that packets are too large.
		"nft add table ip f", "nft add chain ip f o { type filter hook output priority 0; }", "nft add rule ip f o icmp type destination-unreachable drop")
	return a, b, c
}

func underlayTarget(node, local, registered string) dataplane.ProbeTarget {
	return dataplane.ProbeTarget{
		Node: node, Registered: netip.MustParseAddr(registered), ProbePath: &dataplane.ProbePath{
			Family: dataplane.IPv4, Uplink: "eth0", Local: netip.MustParsePrefix(local),
			Encap: dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, Port: 4789},
		},
	}
}

// TestProber measures a real network of two subnets, in both forms.
func TestProber(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{dataplane.DriverVXLAN, dataplane.DriverIPIP} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			a, b, c := rig(t)
			s := memory.New()
			file := filepath.Join(t.TempDir(), "probes.json")
			stop := a.start(s, file)
			b.start(s, "")
			c.start(s, "")
			form := func(ts ...dataplane.ProbeTarget) []dataplane.ProbeTarget {
				for i := range ts {
					if driver == dataplane.DriverIPIP {
						ts[i].Encap = dataplane.Encap{Driver: driver, Outer: dataplane.IPv4}
					}
				}
				return ts
			}
			forA := form(underlayTarget("b", "10.9.1.11/24", "10.9.2.11"), underlayTarget("c", "10.9.1.11/24", "10.9.1.12"))
			a.tell(1500, forA...)
			b.tell(1500, form(underlayTarget("a", "10.9.2.11/24", "10.9.1.11"), underlayTarget("c", "10.9.2.11/24", "10.9.1.12"))...)
			c.tell(1500, form(underlayTarget("a", "10.9.1.12/24", "10.9.1.11"), underlayTarget("b", "10.9.1.12/24", "10.9.2.11"))...)
			want := map[string]dataplane.Reach{"b": {MTU: 1400}, "c": {Near: dataplane.Yes}}
			a.expect(want)
			st, err := a.prober.Paths(t.Context())
			if err != nil || st.State != "" || len(st.Paths) != 2 || !st.Paths[0].Answers || st.Paths[0].Rtt.AsDuration() <= 0 {
				t.Errorf("status %+v, %v", st, err)
			}
			// The next run begins with that.
			stop()
			a.got = nil
			next := New(Config{Node: "a", Store: s, Core: a, Log: slog.New(slog.DiscardHandler), File: file, Underlay: UnderlayConfig{Enabled: true}})
			if err := next.Restore(t.Context()); err != nil {
				t.Fatal(err)
			}
			a.expect(want)
		})
	}
}

// A host with another key is not listened to, until it reads the right one.
func TestAnotherKey(t *testing.T) {
	t.Parallel()
	a, _, c := rig(t)
	right, wrong := memory.New(), memory.New()
	a.start(right, "")
	c.start(wrong, "")
	a.tell(1500, underlayTarget("c", "10.9.1.11/24", "10.9.1.12"))
	c.tell(1500, underlayTarget("a", "10.9.1.12/24", "10.9.1.11"))
	await.Until(t, "forged messages", func() error {
		if na, nc := a.prober.counts.forged.Load(), c.prober.counts.forged.Load(); na < 3 || nc < 3 {
			return fmt.Errorf("%d and %d", na, nc)
		}
		return nil
	})
	st, err := a.prober.Paths(t.Context())
	if err != nil || st.Paths[0].Answers {
		t.Errorf("status %+v, %v", st, err)
	}
}

func TestKeyIsMadeOnce(t *testing.T) {
	t.Parallel()
	s := memory.New()
	keys := make([][]byte, 20)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], err = store.SharedSecret(t.Context(), s, underlaySecret); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, k := range keys {
		if len(k) != 32 || !bytes.Equal(k, keys[0]) {
			t.Fatal("two hosts have different keys")
		}
	}
	short := memory.New()
	if _, err := short.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.SecretKey(underlaySecret), Value: &store.Secret{Key: []byte("short")}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.SharedSecret(t.Context(), short, underlaySecret); err == nil || !strings.Contains(err.Error(), "delete it") {
		t.Errorf("a short key: %v", err)
	}
}

func TestPublish(t *testing.T) {
	t.Parallel()
	s := memory.New()
	if err := publish(t.Context(), s, "node1", "198.51.100.1"); err != nil {
		t.Errorf("of a node that is not registered: %v", err)
	}
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Annotations: map[string]string{"theirs": "stays"}}}
	if _, err := store.Create(t.Context(), s, n); err != nil {
		t.Fatal(err)
	}
	get := func() (map[string]string, store.Revision) {
		t.Helper()
		obj, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
		if err != nil {
			t.Fatal(err)
		}
		return obj.Value.(*store.Node).Annotations, obj.Revision
	}
	for _, tt := range []struct {
		value string
		want  map[string]string
	}{
		{"198.51.100.1", map[string]string{"theirs": "stays", store.AnnotationTunnelAddress: "198.51.100.1"}},
		{"", map[string]string{"theirs": "stays"}},
	} {
		if err := publish(t.Context(), s, "node1", tt.value); err != nil {
			t.Fatal(err)
		}
		got, rev := get()
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("annotations (-want +got):\n%s", diff)
		}
		if err := publish(t.Context(), s, "node1", tt.value); err != nil {
			t.Fatal(err)
		}
		if _, again := get(); again != rev {
			t.Error("what is published already was written again")
		}
	}
}

// What somebody else wrote into this host's annotation is put right, and a
// publishing prober without measuring does that too.
func TestPublishOnly(t *testing.T) {
	t.Parallel()
	s := memory.New()
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
	if _, err := store.Create(t.Context(), s, n); err != nil {
		t.Fatal(err)
	}
	p := New(Config{
		Node: "node1", Store: s, Core: &realHost{}, Log: slog.New(slog.DiscardHandler),
		Underlay: UnderlayConfig{Addresses: []netip.Addr{netip.MustParseAddr("198.51.100.7")}},
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = p.Run(ctx) })
	wg.Go(func() {
		for b := range s.Watch(ctx, store.KindNode) {
			p.HandleStore(clustertest.Step(p.cfg.Node, b))
		}
	})
	published := func() error {
		obj, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
		if err != nil {
			return err
		}
		if got := obj.Value.(*store.Node).Annotations[store.AnnotationTunnelAddress]; got != "198.51.100.7" {
			return fmt.Errorf("published %s", got)
		}
		return nil
	}
	await.Until(t, "the annotation", published)
	if err := publish(t.Context(), s, "node1", "192.0.2.1"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the annotation that somebody changed", published)
}

// A state file that is broken, or lies, costs nothing but what it held.
func TestBadStateFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := New(Config{Node: "a", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "probes.json"), Former: filepath.Join(dir, "reach.json")})
	const lies = `[{"node":"","family":4}, {"node":"b","family":5}, {"node":"c","family":4,"addr":"2001:db8::1"}, {"node":"d","family":4,"mtu":-1}, {"node":"e","family":4,"near":9}, {"node":"f","family":6}]`
	const one = `[{"node":"b","family":4,"addr":"198.51.100.1"}]`
	boot := `{"boot":"` + p.boot + `","underlay":`
	for _, tt := range []struct {
		name, file, former string
		want               int
	}{
		{"nothing", "", "", 0},
		{"broken", "{", "{", 0},
		{"empty", "{}", "[]", 0},
		{"null", "null", "null", 0},
		{"good", boot + one + "}", "", 1},
		{"lies", boot + lies + "}", "", 1},
		{"of another boot", `{"boot":"x","underlay":` + one + "}", "", 0},
		{"the former file", "", one, 1},
		{"lies in the former file", `{"kernel":"x","paths":{}}`, lies, 1},
		{"the former file does not count any more", boot + "[]}", one, 0},
	} {
		for path, text := range map[string]string{p.cfg.File: tt.file, p.cfg.Former: tt.former} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, got := p.load(); len(got) != tt.want {
			t.Errorf("%s gives %v, want %d entries", tt.name, got, tt.want)
		}
	}
}

// The files of earlier versions are read at the first start, and one takes their
// place.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	release, err := KernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Node: "a", Store: memory.New(), Core: &realHost{}, Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "probes.json"), Former: filepath.Join(dir, "reach.json"),
		Underlay: UnderlayConfig{Enabled: true, Interval: time.Second},
	}
	for path, text := range map[string]string{
		cfg.File:   `{"kernel":"` + release + `","paths":{"carrier":{"path":"way","result":1,"off":["checksum off"],"at":5}}}`,
		cfg.Former: `[{"node":"b","family":4,"near":1,"addr":"198.51.100.1","port":20001,"mtu":1400,"pin":"198.51.100.1:20001"}]`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantUnder := map[peerKey]saved{{"b", dataplane.IPv4}: {known: known{
		Reach: dataplane.Reach{Near: dataplane.Yes, Addr: netip.MustParseAddr("198.51.100.1"), Port: 20001, MTU: 1400}, Pin: netip.MustParseAddrPort("198.51.100.1:20001"),
	}}}
	wantTunnels := map[string]record{"carrier": {Path: "way", Result: dataplane.Yes, Need: NoChecksum, At: 5}}
	for _, when := range []string{"first", "second"} {
		p := New(cfg)
		tunnels, underlay := p.load()
		if !reflect.DeepEqual(underlay, wantUnder) || !maps.Equal(tunnels, wantTunnels) {
			t.Errorf("at the %s start: %+v and %+v", when, underlay, tunnels)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
		if _, err := os.Stat(cfg.Former); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the former file after the %s start: %v", when, err)
		}
	}
}
