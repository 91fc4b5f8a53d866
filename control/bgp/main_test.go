package bgp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/routerd/routerd/integration/await"
)

// Environment of the processes that the test binary starts of itself.
const (
	envInside = "BGP_TEST_INSIDE" // set in the network namespace of the tests
	envChild  = "BGP_TEST_CHILD"  // address of a speaker to be: see child
)

// TestMain runs the tests in a network namespace of their own, so that they
// may use any address and port, 179 too, and leave nothing behind. All of
// 10.77.0.0/16 and of fd77::/32 is local there.
func TestMain(m *testing.M) {
	if a := os.Getenv(envChild); a != "" {
		os.Exit(child(a))
	}
	if socket := os.Getenv(envGoBGP); socket != "" {
		os.Exit(goBGP(socket))
	}
	if slices.Contains(os.Args, "-test.fuzzworker") {
		os.Exit(m.Run()) // its parent made the namespace, which no fuzz target needs
	}
	if os.Getenv(envInside) == "" {
		os.Exit(inNamespace())
	}
	for _, args := range []string{"link set lo up", "route add local 10.77.0.0/16 dev lo", "-6 route add local fd77::/32 dev lo"} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "ip %s: %v: %s\n", args, err, out)
			os.Exit(1)
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil { // a local route is not enough for it
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// inNamespace runs this binary again in a new network namespace.
func inNamespace() int {
	// The tests wait for BGP's timers: more of them than there are processors run at
	// once, unless a flag of this name comes later.
	args := append([]string{"-test.parallel=6"}, os.Args[1:]...)
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), envInside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode()
		}
		fmt.Fprintln(os.Stderr, "start the tests in a network namespace (needs root):", err)
		return 1
	}
	return 0
}

var nets atomic.Uint32 // third octet of the addresses given out; the tests' own bookkeeping

// hosts returns n addresses that no other test uses.
func hosts(t testing.TB, n int) []netip.Addr {
	t.Helper()
	third := nets.Add(1)
	if third > 255 {
		t.Fatal("out of addresses")
	}
	var l []netip.Addr
	for i := range n {
		l = append(l, netip.AddrFrom4([4]byte{10, 77, byte(third), byte(i + 1)}))
	}
	return l
}

// hosts6 is hosts with an IPv6 address beside each IPv4 address.
func hosts6(t testing.TB, n int) (four, six []netip.Addr) {
	t.Helper()
	four = hosts(t, n)
	for _, a := range four {
		b := a.As4()
		six = append(six, netip.AddrFrom16([16]byte{0xfd, 0x77, 4: b[2], 15: b[3]}))
	}
	return four, six
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// poll waits for a condition and fails with what what returns when it does not
// come to hold.
func poll(t testing.TB, what func() string, cond func() bool) {
	t.Helper()
	await.Until(t, "waiting", func() error {
		if !cond() {
			return not(what)
		}
		return nil
	})
}

// not is an error whose text is made when somebody reads it.
type not func() string

func (n not) Error() string { return n() }

// testLog writes a logger's output to the test's log while the test runs.
func testLog(t testing.TB) *slog.Logger {
	w := &logWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

type logWriter struct {
	mu sync.Mutex
	t  testing.TB
}

func (w *logWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}

// run is a speaker under test with what it told.
type run struct {
	*Speaker
	t  testing.TB
	mu sync.Mutex

	paths   map[netip.Prefix]Path
	history []string // "put 192.168.1.0/26", "del …", "reset", "synced"
}

func newRun(t testing.TB, opts SpeakerOptions) *run {
	t.Helper()
	if opts.Log == nil {
		opts.Log = testLog(t)
	}
	r := &run{Speaker: NewSpeaker(opts), t: t, paths: map[netip.Prefix]Path{}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := r.Next(ctx)
			if err != nil {
				return
			}
			r.take(c)
		}
	})
	t.Cleanup(func() {
		stop, done := context.WithTimeout(context.Background(), await.Patience)
		defer done()
		if err := r.Stop(stop, false); err != nil {
			t.Errorf("stop: %v", err)
		}
		cancel()
		wg.Wait()
	})
	return r
}

func (r *run) take(c Changes) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.Reset {
		r.paths = map[netip.Prefix]Path{}
		r.history = append(r.history, "reset")
	}
	for _, a := range c.Down {
		r.history = append(r.history, "lost "+a.String())
	}
	for _, p := range c.Put {
		r.paths[p.Prefix] = p
		r.history = append(r.history, "put "+p.Prefix.String())
	}
	for _, p := range c.Del {
		delete(r.paths, p)
		r.history = append(r.history, "del "+p.String())
	}
	if c.Synced {
		r.history = append(r.history, "synced")
	}
}

func (r *run) path(prefix string) (Path, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.paths[netip.MustParsePrefix(prefix)]
	return p, ok
}

// happened counts entries of the history, from a mark on.
func (r *run) happened(from int, what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, h := range r.history[from:] {
		if h == what {
			n++
		}
	}
	return n
}

func (r *run) mark() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.history)
}

func (r *run) dump() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, p := range r.paths {
		fmt.Fprintf(&b, "\n  %s", p)
	}
	fmt.Fprintf(&b, "\n  history %q", r.history)
	fmt.Fprintf(&b, "\n  peers %+v", r.Peers())
	return b.String()
}

func (r *run) apply(c Config) {
	r.t.Helper()
	if err := r.Apply(context.Background(), c); err != nil {
		r.t.Fatalf("apply: %v", err)
	}
}

func (r *run) status(addr netip.Addr) PeerStatus {
	r.t.Helper()
	for _, p := range r.Peers() {
		if p.Addr == addr {
			return p
		}
	}
	r.t.Fatalf("no peer %s in %+v", addr, r.Peers())
	return PeerStatus{}
}

func (r *run) waitUp(addr netip.Addr) PeerStatus {
	r.t.Helper()
	var st PeerStatus
	poll(r.t, func() string { return fmt.Sprintf("session with %s up; it is %+v", addr, st) },
		func() bool { st = r.status(addr); return st.State == StateUp })
	return st
}

func (r *run) waitInfo(addr netip.Addr, says string) PeerStatus {
	r.t.Helper()
	var st PeerStatus
	poll(r.t, func() string { return fmt.Sprintf("info of %s saying %q; it is %+v", addr, says, st) },
		func() bool { st = r.status(addr); return strings.Contains(st.Info, says) })
	return st
}

func (r *run) waitPath(prefix string) Path {
	r.t.Helper()
	var p Path
	poll(r.t, func() string { return "a path for " + prefix + r.dump() },
		func() bool { var ok bool; p, ok = r.path(prefix); return ok })
	return p
}

func (r *run) waitNoPath(prefix string) {
	r.t.Helper()
	poll(r.t, func() string { return "no path for " + prefix + r.dump() },
		func() bool { _, ok := r.path(prefix); return !ok })
}

// testConfig is a wish with the pool 192.168.0.0/16; the port is 179.
func testConfig(addr netip.Addr, asn uint32, announce []string, peers ...Peer) Config {
	c := Config{
		Node: "node-" + addr.String(), ASN: asn, RouterID: addr, NextHop: addr,
		ListenPort: DefaultPort, ListenAddrs: []netip.Addr{addr}, Peers: peers,
		Pools: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")},
	}
	for _, a := range announce {
		p := netip.MustParsePrefix(a)
		c.Announce, c.Own = append(c.Announce, p), append(c.Own, p)
	}
	return c
}

// to makes a peer as the mesh does.
func to(self, addr netip.Addr, asn uint32) Peer {
	return Peer{
		Name: "node-" + addr.String(), Type: PeerMesh, Addr: addr, Port: DefaultPort, ASN: asn,
		Source: self, PoolsOnly: true, Passive: addr.String() > self.String(),
		RestartTime: defaultRestartTime, HoldTime: defaultHoldTime,
	}
}

// tor makes a peer as a BGPPeer does.
func tor(self, addr netip.Addr, asn uint32) Peer {
	p := to(self, addr, asn)
	p.Name, p.Type, p.PoolsOnly, p.Passive = "tor-"+addr.String(), PeerGlobal, false, false
	return p
}

// waiting makes p's side the passive one.
func waiting(p Peer) Peer {
	p.Passive = true
	return p
}

// child is a speaker in a process of its own, which a test can kill. Its
// argument is "address asn peer peer-asn restarting prefix…"; it speaks until
// its standard input ends, and then stops gracefully.
func child(arg string) int {
	f := strings.Fields(arg)
	self, other := netip.MustParseAddr(f[0]), netip.MustParseAddr(f[2])
	var asn, otherASN uint32
	if _, err := fmt.Sscan(f[1]+" "+f[3], &asn, &otherASN); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	signal.Ignore(syscall.SIGINT)
	s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Restarting: f[4] == "true"})
	p := to(self, other, otherASN)
	p.Passive, p.PoolsOnly = false, false
	if err := s.Apply(context.Background(), testConfig(self, asn, f[5:], p)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err := s.Stop(context.Background(), true); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// process is a child process of a test.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   *syncBuffer
	done  chan struct{}
}

// start runs a program that dies with the test at the latest.
func start(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, log: &syncBuffer{}, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", cmd.Path, err)
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // a killed process is what many tests want
	}()
	t.Cleanup(p.kill)
	return p
}

// kill ends the process as kill -9 does and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended already
	<-p.done
}

func startChild(t testing.TB, self netip.Addr, asn uint32, peer netip.Addr, peerASN uint32, restarting bool, prefixes ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s %d %t %s", envChild, self, asn, peer, peerASN, restarting, strings.Join(prefixes, " ")))
	return start(t, cmd)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// bird is BIRD 2 in the role of a switch or of a node that is not ours.
type bird struct {
	*process
	t          testing.TB
	dir        string
	conf, sock string
}

// startBIRD runs BIRD with a configuration; args are further flags.
func startBIRD(t testing.TB, conf string, args ...string) *bird {
	t.Helper()
	b := &bird{t: t, dir: t.TempDir()}
	b.conf, b.sock = filepath.Join(b.dir, "bird.conf"), filepath.Join(b.dir, "bird.ctl")
	if err := os.WriteFile(b.conf, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	b.start(args...)
	return b
}

func (b *bird) start(args ...string) {
	b.t.Helper()
	path, err := exec.LookPath("bird")
	if err != nil {
		b.t.Fatal("BIRD 2 is needed: run `make deps`, which installs Debian's bird2:", err)
	}
	b.process = start(b.t, exec.Command(path, append([]string{"-f", "-c", b.conf, "-s", b.sock, "-P", b.sock + ".pid"}, args...)...))
	poll(b.t, func() string { return "BIRD answering: " + b.log.String() },
		func() bool {
			_, err := exec.Command("birdc", "-s", b.sock, "show", "status").Output()
			return err == nil
		})
}

// command runs a command that may change something.
func (b *bird) command(args ...string) (string, error) {
	out, err := exec.Command("birdc", append([]string{"-s", b.sock}, args...)...).CombinedOutput()
	return string(out), err
}

func (b *bird) birdc(args ...string) string {
	b.t.Helper()
	out, err := exec.Command("birdc", append([]string{"-r", "-s", b.sock}, args...)...).CombinedOutput()
	if err != nil {
		b.t.Fatalf("birdc %v: %v: %s\n%s", args, err, out, b.log)
	}
	return string(out)
}

func (b *bird) waitFor(says string, args ...string) {
	b.t.Helper()
	out := ""
	poll(b.t, func() string { return fmt.Sprintf("birdc %v saying %q; it says\n%s\n%s", args, says, out, b.log) },
		func() bool { out = b.birdc(args...); return strings.Contains(out, says) })
}

// birdConf is BIRD with one session. It logs every change of a route, so that
// a test sees a withdrawal however short it is. It leaves it to us to connect,
// unless extra says "passive off;". [TestCollision] is about collisions.
func birdConf(self netip.Addr, asn uint32, peer netip.Addr, peerASN uint32, extra string, routes ...string) string {
	var static strings.Builder
	for _, r := range routes {
		fmt.Fprintf(&static, "  route %s blackhole;\n", r)
	}
	return fmt.Sprintf(`router id %[1]s;
log stderr all;
protocol device {}
protocol static { ipv4; %[5]s}
protocol bgp host {
  debug { states, routes };
  local %[1]s port 179 as %[2]d;
  neighbor %[3]s port 179 as %[4]d;
  strict bind yes;
  multihop;
  graceful restart on;
  passive on;
  connect delay time 1; connect retry time 2; error wait time 1, 2; startup hold time 20;
  ipv4 { import all; export where source = RTS_STATIC; };
  %[6]s
}
`, self, asn, peer, peerASN, static.String(), extra)
}
