package bfd

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
)

// TestMain plays BFD's process when a test starts it.
func TestMain(m *testing.M) {
	if os.Getenv("BFD_PROCESS") != "" {
		c, err := net.FileConn(os.NewFile(Descriptor, "daemon"))
		if err == nil {
			err = Serve(context.Background(), c)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// hosts is two namespaces on one wire, each with an IPv4 and an IPv6 address.
type hosts struct {
	names [2]string
	v4    [2]netip.Addr
	v6    [2]netip.Addr
	local [2]netip.Addr // link-local, with zone
}

var networks atomic.Int32 // makes their names distinct

func newHosts(t *testing.T) *hosts {
	t.Helper()
	n := &hosts{}
	id := fmt.Sprintf("bfd%d-%d", os.Getpid(), networks.Add(1))
	for i := range n.names {
		n.names[i] = fmt.Sprintf("%s-%d", id, i)
		if err := ns.Create(n.names[i]); err != nil {
			t.Fatal("namespaces are needed, so run as root:", err)
		}
		t.Cleanup(func() {
			if err := ns.Delete(n.names[i]); err != nil {
				t.Error(err)
			}
		})
		n.v4[i] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
		n.v6[i] = netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i+1))
		n.local[i] = netip.MustParseAddr(fmt.Sprintf("fe80::%d%%wire", i+1))
	}
	n.ip(t, 0, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", n.names[1])
	for i := range n.names {
		n.ip(t, i, "link", "set", "lo", "up")
		n.ip(t, i, "addr", "add", n.v4[i].String()+"/24", "dev", "wire")
		n.ip(t, i, "addr", "add", n.v6[i].String()+"/64", "dev", "wire", "nodad")
		n.ip(t, i, "addr", "add", n.local[i].WithZone("").String()+"/64", "dev", "wire", "nodad")
		n.ip(t, i, "link", "set", "wire", "up")
	}
	return n
}

func (n *hosts) ip(t *testing.T, i int, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", n.names[i]}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// side is an engine in a namespace.
type side struct {
	*Engine
	mu      sync.Mutex
	changes []Status
	stop    func()
}

func (n *hosts) engine(t *testing.T, i int) *side {
	t.Helper()
	s := &side{}
	s.Engine = NewEngine(func(st Status) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.changes = append(s.changes, st)
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := ns.Do(n.names[i], func() error { s.Run(ctx); return nil }); err != nil {
			t.Error(err)
		}
	})
	s.stop = func() { cancel(); wg.Wait() }
	t.Cleanup(s.stop)
	return s
}

// waitFor waits until every session of the engine is in the state.
func waitFor(t *testing.T, e interface{ Status() []Status }, state State) {
	t.Helper()
	await.Until(t, "sessions "+state.String(), func() error {
		all := e.Status()
		for _, s := range all {
			if s.State != state {
				return fmt.Errorf("%+v", s)
			}
		}
		if len(all) == 0 {
			return fmt.Errorf("no session")
		}
		return nil
	})
}

func (n *hosts) session(from int, a [2]netip.Addr, multihop bool, tt Timing) Session {
	return Session{Key{a[from], a[1-from], multihop}, tt}
}

// TestEngine brings sessions of each kind up between two engines, cuts the wire, and takes one side down.
func TestEngine(t *testing.T) {
	t.Parallel()
	n := newHosts(t)
	a, b := n.engine(t, 0), n.engine(t, 1)
	tt := timing(50*ms, 50*ms, 3)
	want := func(i int) []Session {
		return []Session{
			n.session(i, n.v4, false, tt), n.session(i, n.v6, false, tt), n.session(i, n.v4, true, tt), n.session(i, n.v6, true, tt),
		}
	}
	a.Set(want(0))
	b.Set(want(1))
	waitFor(t, a, Up)
	waitFor(t, b, Up)
	n.ip(t, 1, "link", "set", "wire", "down")
	waitFor(t, a, Down)
	for _, s := range a.Status() {
		if !s.Failed || s.Diagnostic != TimeExpired {
			t.Errorf("after the cut: %+v", s)
		}
	}
	n.ip(t, 1, "link", "set", "wire", "up")
	n.ip(t, 1, "addr", "replace", n.v6[1].String()+"/64", "dev", "wire", "nodad") // it goes with the link
	waitFor(t, a, Up)
	waitFor(t, b, Up)
	b.stop()
	waitFor(t, a, Down)
	for _, s := range a.Status() {
		if s.Failed || s.RemoteState != AdminDown {
			t.Errorf("after the other side was stopped: %+v", s)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.changes {
		if s.State == Up && s.RemoteState < Init {
			t.Errorf("up without the peer: %+v", s)
		}
	}
}

// TestForwarded: packets that a router has forwarded count for no session over one hop (RFC 5881 section 5).
func TestForwarded(t *testing.T) {
	t.Parallel()
	n := newHosts(t)
	a := n.engine(t, 0)
	a.Set([]Session{n.session(0, n.v4, false, timing(50*ms, 50*ms, 3))})
	send := func(ttl int) {
		err := ns.Do(n.names[1], func() error {
			c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.v4[1], 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.v4[0], Port)))
			if err != nil {
				return err
			}
			defer c.Close()
			raw, err := c.SyscallConn()
			if err != nil {
				return err
			}
			if err := setSocket(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl) }); err != nil {
				return err
			}
			p := Packet{State: Down, Multiplier: 3, My: 7, MinTx: slow, MinRx: slow}
			_, err = c.Write(p.Append(nil))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	send(254)
	send(ttl) // what comes after it has been read when this one has
	await.True(t, "a packet", func() bool { return a.Status()[0].Received > 0 })
	if s := a.Status()[0]; s.Received != 1 {
		t.Errorf("%d packets were counted; want the one with TTL 255", s.Received)
	}
}

// TestPortTaken: another BFD on the host is named, and the session comes up when it is gone.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	n := newHosts(t)
	var taken *net.UDPConn
	err := ns.Do(n.names[0], func() (err error) {
		taken, err = net.ListenUDP("udp4", &net.UDPAddr{Port: Port})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	a, b := n.engine(t, 0), n.engine(t, 1)
	a.Set([]Session{n.session(0, n.v4, false, timing(50*ms, 50*ms, 3))})
	b.Set([]Session{n.session(1, n.v4, false, timing(50*ms, 50*ms, 3))})
	if s := a.Status()[0]; !strings.Contains(s.Fault, "listen on UDP port 3784, which another program may have") {
		t.Errorf("fault %q", s.Fault)
	}
	taken.Close()
	waitFor(t, a, Up)
	if s := a.Status()[0]; s.Fault != "" {
		t.Errorf("fault %q", s.Fault)
	}
}

// process is a supervisor whose process lives in a namespace.
type process struct {
	*Supervisor
	mu      sync.Mutex
	changes []Status
	cmds    []*exec.Cmd
	stop    func()
}

func (n *hosts) process(t *testing.T, i int) *process {
	t.Helper()
	p := &process{}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := func() *exec.Cmd {
		cmd := exec.Command("ip", "netns", "exec", n.names[i], self)
		cmd.Env = append(os.Environ(), "BFD_PROCESS=1")
		cmd.Stderr = os.Stderr
		p.mu.Lock()
		defer p.mu.Unlock()
		p.cmds = append(p.cmds, cmd)
		return cmd
	}
	p.Supervisor = NewSupervisor(slog.New(slog.DiscardHandler), command, func(s Status) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.changes = append(p.changes, s)
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	p.stop = func() { cancel(); wg.Wait() }
	t.Cleanup(p.stop)
	return p
}

// waitFor waits until both sessions are in the state, and returns them.
func (p *process) waitFor(t *testing.T, state State) (all []Status) {
	t.Helper()
	await.Until(t, "sessions "+state.String(), func() (err error) {
		all, err = p.Status(t.Context())
		if err != nil {
			return err
		}
		if len(all) != 2 || all[0].State != state || all[1].State != state {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	return all
}

// TestProcess holds sessions of 50 ms × 3 while the daemon, here this test, computes on all processors and waits for its
// collector: none goes down. Then a process is killed: it is started again, and what happened is told.
func TestProcess(t *testing.T) {
	n := newHosts(t)
	a, b := n.process(t, 0), n.process(t, 1)
	tt := timing(50*ms, 50*ms, 3)
	want := func() {
		a.Set([]Session{n.session(0, n.v4, false, tt), n.session(0, n.local, false, tt)})
		b.Set([]Session{n.session(1, n.v4, false, tt), n.session(1, n.local, false, tt)})
		a.waitFor(t, Up)
		b.waitFor(t, Up)
	}
	want()
	for i := 1; ; i++ {
		before := stolen(t)
		compute(5 * time.Second)
		var late []string
		for _, p := range []*process{a, b} {
			for _, s := range p.waitFor(t, Up) {
				if s.Flaps != 0 {
					late = append(late, fmt.Sprintf("%+v", s))
				}
			}
		}
		if late == nil {
			break
		}
		// What no process ran for, no scheduling prevents: another five seconds tell.
		if lost := stolen(t) - before; lost < 50*ms || i == 5 {
			t.Fatalf("under load, while the hypervisor kept processors for %v:\n%s", lost, strings.Join(late, "\n"))
		}
		// Both sides forget their flaps with their sessions.
		a.Set(nil)
		b.Set(nil)
		for _, p := range []*process{a, b} {
			p.waitForNone(t)
		}
		want()
	}

	a.mu.Lock()
	killed := a.cmds[len(a.cmds)-1].Process
	a.mu.Unlock()
	if err := killed.Kill(); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the other side's word of it", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, s := range b.changes {
			if s.State == Down && s.Failed {
				return true
			}
		}
		return false
	})
	a.waitFor(t, Up)
	b.waitFor(t, Up)

	// An orderly end is no failure to the other side, and no session is left when none is wanted.
	a.Set(nil)
	for _, s := range b.waitFor(t, Down) {
		if s.Failed {
			t.Errorf("after the orderly end: %+v", s)
		}
	}
	a.waitForNone(t)
}

// compute keeps all processors busy with goroutines of this process, and its collector too.
func compute(d time.Duration) {
	end := time.Now().Add(d)
	var wg sync.WaitGroup
	for range 2 * runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for time.Now().Before(end) {
				all := make([][]byte, 1000)
				for i := range all {
					all[i] = make([]byte, 1000)
				}
				runtime.KeepAlive(all)
			}
		})
	}
	wg.Wait()
}

// stolen is how long the hypervisor has kept this machine's processors for others since it started: proc_stat(5).
func stolen(t *testing.T) time.Duration {
	t.Helper()
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	ticks, err := strconv.ParseInt(strings.Fields(string(b))[8], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ticks) * 10 * ms // USER_HZ is 100
}

// waitForNone waits until the process has ended.
func (p *process) waitForNone(t *testing.T) {
	t.Helper()
	await.Until(t, "no process", func() error {
		all, err := p.Status(t.Context())
		if err != nil || len(all) > 0 {
			return fmt.Errorf("%v, %w", all, err)
		}
		return nil
	})
}

// TestHostStalls: where no process runs for longer than the detection time, as on a virtual machine whose processors the
// hypervisor takes, each side finds its timer expired before it could read or the other could send. No session goes down.
func TestHostStalls(t *testing.T) {
	n := newHosts(t)
	p := [2]*process{n.process(t, 0), n.process(t, 1)}
	tt := timing(50*ms, 50*ms, 3)
	for i := range p {
		p[i].Set([]Session{n.session(i, n.v4, false, tt), n.session(i, n.local, false, tt)})
	}
	for i := range p {
		p[i].waitFor(t, Up)
	}
	for range 5 {
		for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			for i := range p {
				p[i].mu.Lock()
				err := p[i].cmds[0].Process.Signal(s)
				p[i].mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
			}
			<-time.After(400 * ms) // the stall, and the time after it
		}
	}
	for i := range p {
		for _, s := range p[i].waitFor(t, Up) {
			if s.Flaps != 0 {
				t.Errorf("side %d: %+v", i, s)
			}
		}
	}
}

// peer is a program of others in the second namespace.
func (n *hosts) start(t *testing.T, args ...string) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command("ip", append([]string{"netns", "exec", n.names[1]}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", args[0], out.String())
		}
	})
	return &out
}

// TestBIRD runs sessions with BIRD: up, a change of timing, down by the wire, down by an orderly end on each side.
func TestBIRD(t *testing.T) {
	t.Parallel()
	n := newHosts(t)
	dir := t.TempDir()
	conf := func(extra string) string {
		return fmt.Sprintf("router id 192.0.2.2;\nprotocol device {}\nprotocol bfd {\n interface \"wire\" { min rx interval 50 ms; min tx interval 60 ms; multiplier 4; };\n multihop { min rx interval 50 ms; min tx interval 60 ms; };\n%s}\n", extra)
	}
	neighbors := fmt.Sprintf(" neighbor %v dev \"wire\";\n neighbor %v dev \"wire\";\n neighbor %v local %v multihop yes;\n", n.v4[0], n.v6[0], n.v4[0], n.v4[1])
	file := filepath.Join(dir, "bird.conf")
	write := func(s string) {
		if err := os.WriteFile(file, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(conf(neighbors))
	n.start(t, "bird", "-f", "-c", file, "-s", filepath.Join(dir, "ctl"))
	birdc := func(args ...string) string {
		out, _ := exec.Command("birdc", append([]string{"-s", filepath.Join(dir, "ctl")}, args...)...).CombinedOutput()
		return string(out)
	}
	a := n.engine(t, 0)
	want := func(tt Timing) []Session {
		return []Session{n.session(0, n.v4, false, tt), n.session(0, n.v6, false, tt), n.session(0, n.v4, true, tt)}
	}
	a.Set(want(timing(50*ms, 70*ms, 3)))
	waitFor(t, a, Up)
	await.Until(t, "BIRD's sessions up", func() error {
		if out := birdc("show", "bfd", "sessions"); strings.Count(out, "Up") != 3 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	for _, s := range a.Status() {
		if s.Key.Multihop {
			continue
		}
		if s.Detection != 4*70*ms || s.Interval != 50*ms {
			t.Errorf("timing with BIRD: %+v", s)
		}
	}
	a.Set(want(timing(100*ms, 100*ms, 5)))
	await.Until(t, "BIRD's view of the new timing", func() error {
		if out := birdc("show", "bfd", "sessions"); strings.Count(out, "0.500") != 3 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	n.ip(t, 1, "link", "set", "wire", "down")
	waitFor(t, a, Down)
	n.ip(t, 1, "link", "set", "wire", "up")
	n.ip(t, 1, "addr", "replace", n.v6[1].String()+"/64", "dev", "wire", "nodad")
	waitFor(t, a, Up)
	flaps := 0
	for _, s := range a.Status() {
		flaps += int(s.Flaps)
	}
	if flaps < 3 {
		t.Errorf("%d flaps of three sessions", flaps)
	}
	write(conf("")) // BIRD takes its sessions down administratively
	birdc("configure")
	waitFor(t, a, Down)
	for _, s := range a.Status() {
		if s.Failed && s.RemoteState == AdminDown {
			t.Errorf("BIRD ended the session in order, which counts as a failure: %+v", s)
		}
	}
}

// TestFRR runs a session with FRR's bfdd.
func TestFRR(t *testing.T) {
	t.Parallel()
	n := newHosts(t)
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} { // FRR runs as a user of its own
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	conf := fmt.Sprintf("bfd\n peer %v local-address %v interface wire\n  receive-interval 60\n  transmit-interval 50\n  detect-multiplier 4\n  no shutdown\n !\n!\n", n.v4[0], n.v4[1])
	file := filepath.Join(dir, "frr.conf")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	sock := filepath.Join(dir, "zserv")
	n.start(t, "/usr/lib/frr/zebra", "-z", sock, "-i", filepath.Join(dir, "zebra.pid"), "--vty_socket", dir, "-P", "0", "-f", "/dev/null", "--log", "stdout")
	await.True(t, "zebra", func() bool { _, err := os.Stat(sock); return err == nil })
	n.start(t, "/usr/lib/frr/bfdd", "-z", sock, "-i", filepath.Join(dir, "bfdd.pid"), "--vty_socket", dir, "--bfdctl", filepath.Join(dir, "bfdctl"), "-P", "0", "-f", file, "--log", "stdout")
	vtysh := func(cmds ...string) string {
		args := []string{"--vty_socket", dir, "-d", "bfdd"}
		for _, c := range cmds {
			args = append(args, "-c", c)
		}
		out, _ := exec.Command("vtysh", args...).CombinedOutput()
		return string(out)
	}
	a := n.engine(t, 0)
	a.Set([]Session{n.session(0, n.v4, false, timing(50*ms, 50*ms, 3))})
	await.Until(t, "the session up", func() error {
		if s := a.Status()[0]; s.State != Up {
			return fmt.Errorf("%+v\n%s", s, vtysh("show bfd peers"))
		}
		return nil
	})
	await.Until(t, "FRR's session up", func() error {
		if out := vtysh("show bfd peers"); !strings.Contains(out, "Status: up") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	await.Until(t, "FRR's timing", func() error {
		if s := a.Status()[0]; s.Interval != 60*ms || s.Detection != 4*50*ms {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	vtysh("configure terminal", "bfd", fmt.Sprintf("peer %v local-address %v interface wire", n.v4[0], n.v4[1]), "shutdown")
	waitFor(t, a, Down)
	if s := a.Status()[0]; s.Failed || s.RemoteState != AdminDown {
		t.Errorf("FRR shut the session down, which counts as a failure: %+v", s)
	}
}
