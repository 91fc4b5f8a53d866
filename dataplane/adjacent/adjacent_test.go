package adjacent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// wire is two namespaces joined by a veth pair with link-local addresses,
// fe80::a on the device near of the first and fe80::b on far of the second.
type wire struct {
	t    *testing.T
	a, b *netnstest.Netns
}

func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t, netnstest.New(t), netnstest.New(t)}
	w.run(w.a, "ip link add near type veth peer name far netns "+w.b.Path)
	w.run(w.a, "sysctl -qw net.ipv6.conf.near.addr_gen_mode=1")
	w.run(w.b, "sysctl -qw net.ipv6.conf.far.addr_gen_mode=1")
	w.run(w.a, "sysctl -qw net.ipv6.neigh.near.retrans_time_ms=50") // so that silence is found soon
	w.run(w.b, "ip link set far up")
	w.run(w.b, "ip addr add fe80::b/64 dev far nodad")
	w.run(w.a, "ip link set near up")
	w.run(w.a, "ip addr add fe80::a/64 dev near nodad")
	return w
}

func (w *wire) run(n *netnstest.Netns, command string) {
	w.t.Helper()
	err := n.Do(func() error {
		f := strings.Fields(command)
		out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
		if err != nil {
			w.t.Errorf("%s: %v\n%s", command, err, out)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// underlay is what there is in a namespace.
func (w *wire) underlay(n *netnstest.Netns) (u dataplane.Underlay) {
	w.t.Helper()
	err := n.Do(func() error {
		ifs, err := net.Interfaces()
		for _, i := range ifs {
			l := dataplane.UnderlayLink{Index: i.Index, Name: i.Name, Up: i.Flags&net.FlagRunning != 0}
			copy(l.MAC[:], i.HardwareAddr)
			u.Links = append(u.Links, l)
			list, err := i.Addrs()
			if err != nil {
				return err
			}
			for _, a := range list {
				u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: i.Name, Prefix: netip.MustParsePrefix(a.String())})
			}
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return u
}

// side is a Tracker under test with what it told last.
type side struct {
	*Tracker
	t    *testing.T
	mu   sync.Mutex
	told map[string]Link
	stop func()
}

func (w *wire) track(n *netnstest.Netns) *side {
	w.t.Helper()
	s := &side{t: w.t}
	s.Tracker = New(slog.New(slog.DiscardHandler), func(l map[string]Link) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.told = l
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Do(func() error { return s.Run(ctx) }) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			w.t.Errorf("run: %v", err)
		}
	})
	w.t.Cleanup(s.stop)
	return s
}

func (s *side) wait(device string, want Link) {
	s.t.Helper()
	await.Until(s.t, device, func() error {
		s.mu.Lock()
		got, known := s.told[device]
		s.mu.Unlock()
		diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
		if !known || diff != "" {
			return fmt.Errorf("told of: %t (-want +got):\n%s", known, diff)
		}
		return nil
	})
}

// TestWire: a neighbour that says nothing is found and becomes a router when it
// advertises itself; one that is there with another address takes its place when
// the kernel finds that the first does not answer; a device goes and comes.
func TestWire(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	near := w.track(w.a)
	near.Want([]string{"near", "missing"})
	near.HandleUnderlay(w.underlay(w.a))
	near.wait("near", Link{Up: true, Addr: addrs("fe80::a")[0], Hosts: addrs("fe80::b")})

	far := w.track(w.b)
	far.Want([]string{"far"})
	far.HandleUnderlay(w.underlay(w.b))
	far.wait("far", Link{Up: true, Addr: addrs("fe80::b")[0], Routers: addrs("fe80::a")})
	near.wait("near", Link{Up: true, Addr: addrs("fe80::a")[0], Routers: addrs("fe80::b")})
	far.stop()

	// The kernel is not to find out by itself that b goes.
	w.run(w.a, "ip neigh replace fe80::b dev near lladdr 02:00:00:00:00:01 nud permanent")
	w.run(w.b, "ip addr del fe80::b/64 dev far")
	w.run(w.b, "ip addr add fe80::c/64 dev far nodad")
	again := w.track(w.b)
	again.Want([]string{"far"})
	again.HandleUnderlay(w.underlay(w.b))
	near.wait("near", Link{Up: true, Addr: addrs("fe80::a")[0], Routers: addrs("fe80::b", "fe80::c")})
	w.run(w.a, "ip neigh replace fe80::b dev near lladdr 02:00:00:00:00:01 nud probe")
	near.wait("near", Link{Up: true, Addr: addrs("fe80::a")[0], Routers: addrs("fe80::c")})

	w.run(w.a, "ip link set near down")
	near.HandleUnderlay(w.underlay(w.a))
	near.wait("near", Link{Routers: addrs("fe80::c")})
	near.Want(nil)
	near.Want([]string{"near"})
	near.HandleUnderlay(dataplane.Underlay{})
	near.waitNone()
}

// TestWantedLater: what the kernel knows of a link is found also when its device
// is wanted later, and when it is wanted again.
func TestWantedLater(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	w.run(w.a, "ip link add other type veth peer name rehto")
	near := w.track(w.a)
	near.HandleUnderlay(w.underlay(w.a))
	near.Want([]string{"other"})
	near.wait("other", Link{})
	w.run(w.b, "ip link set far arp off") // says nothing any more
	w.run(w.a, "ip neigh flush dev near")
	w.run(w.a, "ip neigh replace fe80::d dev near lladdr 02:00:00:00:00:01 nud permanent")
	for range 2 {
		near.Want([]string{"near", "other"})
		near.waitHost("near", addrs("fe80::d")[0])
		near.Want([]string{"other"})
		near.waitGone("near")
	}
}

// waitHost waits until a host is known, whoever else is.
func (s *side) waitHost(device string, a netip.Addr) {
	s.t.Helper()
	s.poll(func() bool { return slices.Contains(s.told[device].Hosts, a) })
}

func (s *side) waitGone(device string) {
	s.t.Helper()
	s.poll(func() bool { _, known := s.told[device]; return !known })
}

// poll waits until what was told is as it should be.
func (s *side) poll(done func() bool) {
	s.t.Helper()
	await.Until(s.t, "what is told", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !done() {
			return fmt.Errorf("last: %+v", s.told)
		}
		return nil
	})
}

func (s *side) waitNone() {
	s.t.Helper()
	s.poll(func() bool { return len(s.told) == 0 })
}

// sent is a sender that keeps what it was given.
type sent struct {
	joined []int
	left   []int
	types  []byte
	fail   bool
}

func (s *sent) join(link int) error { s.joined = append(s.joined, link); return nil }

func (s *sent) leave(link int) error { s.left = append(s.left, link); return nil }

func (s *sent) send(_ int, _ netip.Addr, _ net.IP, message []byte) error {
	if s.fail {
		return os.ErrInvalid
	}
	s.types = append(s.types, message[0])
	return nil
}

// TestWatch goes through what is heard and sent without a network.
func TestWatch(t *testing.T) {
	t.Parallel()
	const rs, ra, ping = 133, 134, 128
	now := time.Unix(1000, 0)
	out := &sent{}
	w := newWatch(slog.New(slog.DiscardHandler), out)
	link := func(up bool) dataplane.Underlay {
		return dataplane.Underlay{
			Links: []dataplane.UnderlayLink{{Index: 7, Name: "eth1", Up: up}, {Index: 8, Name: "eth2", Up: true}},
			Addresses: []dataplane.UnderlayAddress{
				{Link: "eth1", Prefix: netip.MustParsePrefix("fd00::7/64")},
				{Link: "eth1", Prefix: netip.MustParsePrefix("fe80::8/64"), Tentative: true},
				{Link: "eth1", Prefix: netip.MustParsePrefix("fe80::7/64")},
			},
		}
	}
	b, c := addrs("fe80::b")[0], addrs("fe80::c")[0]
	for _, step := range []struct {
		name string
		do   func()
		sent []byte
		want Link
	}{
		{"down", func() { w.set([]string{"eth1"}, link(false), now) }, nil, Link{Addr: addrs("fe80::7")[0]}},
		{"up", func() { w.set([]string{"eth1"}, link(true), now) }, []byte{ra, rs, ping}, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"the same again", func() { w.set([]string{"eth1"}, link(true), now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"nobody yet", func() { w.tick(now) }, []byte{ra, rs, ping}, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"itself", func() { w.heard(heard{7, addrs("fe80::7")[0], advertises}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"asked too often", func() { w.heard(heard{7, b, solicits}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"answered later", func() { now = now.Add(pause); w.answer(now) }, []byte{ra}, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"and once", func() { now = now.Add(pause); w.answer(now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"a host", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: b}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Hosts: addrs("fe80::b")}},
		{"the host is silent once", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: b, Answer: dataplane.No}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"the host answers", func() { w.heard(heard{7, b, answers}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Hosts: addrs("fe80::b")}},
		{"asked", func() { now = now.Add(pause); w.heard(heard{7, b, solicits}, now) }, []byte{ra}, Link{Up: true, Addr: addrs("fe80::7")[0], Hosts: addrs("fe80::b")}},
		{"a router, just after", func() { w.heard(heard{7, addrs("fe80::d")[0], advertises}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::d"), Hosts: addrs("fe80::b")}},
		{"it is silent", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: addrs("fe80::d")[0], Answer: dataplane.No}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Hosts: addrs("fe80::b")}},
		{"a router", func() { now = now.Add(pause); w.heard(heard{7, c, advertises}, now) }, []byte{ra}, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c"), Hosts: addrs("fe80::b")}},
		{"the router again", func() { now = now.Add(pause); w.heard(heard{7, c, advertises}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c"), Hosts: addrs("fe80::b")}},
		{"on another link", func() { w.heard(heard{8, c, advertises}, now) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c"), Hosts: addrs("fe80::b")}},
		{"the host is silent", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: b, Answer: dataplane.No}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c")}},
		{"the router is silent", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: c, Answer: dataplane.No}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0]}},
		{"the router answers", func() { w.neighbour(neighbour.Event{LinkIndex: 7, Addr: c, Answer: dataplane.Yes}) }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c")}},
		{"nothing is sent", func() { out.fail = true; w.tick(now); out.fail = false }, nil, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c")}},
		{"somebody is known", func() { w.tick(now) }, []byte{ra}, Link{Up: true, Addr: addrs("fe80::7")[0], Routers: addrs("fe80::c")}},
	} {
		out.types = nil
		step.do()
		if diff := cmp.Diff(step.sent, out.types); diff != "" {
			t.Errorf("%s: sent (-want +got):\n%s", step.name, diff)
		}
		if diff := cmp.Diff(step.want, w.links()["eth1"], cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
	if !slices.Equal(out.joined, []int{7}) {
		t.Errorf("joined on %v", out.joined)
	}
	w.set(nil, dataplane.Underlay{}, now)
	if len(w.links())+len(w.present) != 0 {
		t.Errorf("of devices that are gone there is %v and %v", w.links(), w.present)
	}
	if !slices.Equal(out.left, []int{7}) {
		t.Errorf("left on %v", out.left)
	}
}

// TestBounded: who claims many addresses on a link fills little, is not
// remembered where nobody asked, and keeps no router out.
func TestBounded(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	out := &sent{}
	w := newWatch(slog.New(slog.DiscardHandler), out)
	both := dataplane.Underlay{Links: []dataplane.UnderlayLink{{Index: 7, Name: "eth1", Up: true}, {Index: 8, Name: "pod", Up: true}}}
	w.set([]string{"eth1"}, both, now)
	claim := func(link int, from byte, k kind) {
		for i := range 1000 {
			a := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 13: from, 14: byte(i >> 8), 15: byte(i)})
			w.heard(heard{link, a, k}, now)
			w.neighbour(neighbour.Event{LinkIndex: link, Addr: a, Answer: dataplane.Yes})
		}
	}
	count := func(what string, hosts, routers int) {
		t.Helper()
		l := w.links()["eth1"]
		if len(l.Hosts) != hosts || len(l.Routers) != routers || len(w.present) != 1 || len(w.present[7]) > mostNeighbours {
			t.Errorf("%s: %d hosts and %d routers on the link, want %d and %d; %d links are remembered", what, len(l.Hosts), len(l.Routers), hosts, routers, len(w.present))
		}
	}
	claim(8, 1, advertises)
	count("on a link that nobody asked for", 0, 0)
	claim(7, 2, answers)
	count("hosts", mostNeighbours, 0)
	w.heard(heard{7, addrs("fe80::b")[0], advertises}, now)
	count("a router among them", mostNeighbours-1, 1)
	w.neighbour(neighbour.Event{LinkIndex: 7, Addr: addrs("fe80::b")[0], Answer: dataplane.No})
	claim(7, 3, answers)
	count("a silent one gives way", mostNeighbours, 0)
	claim(7, 4, advertises)
	count("routers", 0, mostNeighbours)
	w.set(nil, both, now)
	if len(w.present)+len(w.devices) != 0 || !slices.Equal(out.left, []int{7}) {
		t.Errorf("of a device that is not wanted there is %v and %v, left on %v", w.present, w.devices, out.left)
	}
}

// answer makes an echo request a reply.
func answer(b []byte) []byte {
	b[0] = 129
	return b
}

// TestMeaning: what came over a router or from nowhere is no advertisement.
func TestMeaning(t *testing.T) {
	t.Parallel()
	ra, rs := advertisement(dataplane.MAC{2}), solicitation(dataplane.MAC{})
	bad := slices.Clone(ra)
	bad[1] = 1
	for _, c := range []struct {
		name      string
		message   []byte
		hops      int
		linkLocal bool
		want      kind
	}{
		{"advertisement", ra, 255, true, advertises},
		{"over a router", ra, 254, true, nothing},
		{"from a global address", ra, 255, false, nothing},
		{"short", ra[:15], 255, true, nothing},
		{"of another code", bad, 255, true, nothing},
		{"solicitation", rs, 255, false, solicits},
		{"short solicitation", rs[:7], 255, true, nothing},
		{"empty", nil, 255, true, nothing},
		{"echo", echo(1), 255, true, nothing},
		{"answer", answer(echo(1)), 64, true, answers},
		{"answer to somebody else", answer(make([]byte, 8)), 64, true, nothing},
		{"answer from afar", answer(echo(1)), 64, false, nothing},
	} {
		if got := meaning(c.message, c.hops, c.linkLocal); got != c.want {
			t.Errorf("%s: means %d, want %d", c.name, got, c.want)
		}
	}
}
