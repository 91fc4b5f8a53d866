package kernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

// lab is a fresh network namespace with a thread of its own. The thread is
// never unlocked, so it ends with the test, and the namespace with it.
type lab struct {
	t    testing.TB
	work chan func()
}

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, work: make(chan func())}
	ready := make(chan error)
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		ready <- err
		if err != nil {
			return
		}
		for fn := range l.work {
			fn()
		}
	})
	if err := <-ready; err != nil {
		t.Fatalf("make a network namespace (these tests need root): %v", err)
	}
	t.Cleanup(func() {
		close(l.work)
		wg.Wait()
	})
	l.run("ip link set lo up")
	return l
}

// do calls fn in the namespace.
func (l *lab) do(fn func()) {
	done := make(chan struct{})
	l.work <- func() { defer close(done); fn() }
	<-done
}

// try runs a command in the namespace.
func (l *lab) try(command string) (string, error) {
	f := strings.Fields(command)
	var out []byte
	var err error
	l.do(func() { out, err = exec.Command(f[0], f[1:]...).CombinedOutput() })
	return string(out), err
}

// run runs commands in the namespace that must succeed.
func (l *lab) run(commands ...string) string {
	l.t.Helper()
	var all strings.Builder
	for _, c := range commands {
		out, err := l.try(c)
		if err != nil {
			l.t.Fatalf("%s: %v\n%s", c, err, out)
		}
		all.WriteString(out)
	}
	return all.String()
}

// wire makes a pair of devices, up, the first with the address.
func (l *lab) wire(name, peer, addr string) {
	l.t.Helper()
	l.run("ip link add "+name+" type veth peer name "+peer, "ip link set "+name+" up", "ip link set "+peer+" up")
	if addr != "" {
		l.run("ip addr add " + addr + " dev " + name)
	}
	await.Until(l.t, "carrier of "+name, func() error {
		out, err := l.try("ip -o link show " + name)
		if err == nil && !strings.Contains(out, "LOWER_UP") {
			err = errors.New(out)
		}
		return err
	})
}

// sysctl reads a setting of the namespace.
func (l *lab) sysctl(name string) string {
	l.t.Helper()
	var b []byte
	var err error
	l.do(func() { b, err = os.ReadFile(filepath.Join(sysctlRoot, name)) })
	if err != nil {
		l.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// shows polls until a command's output, with its space squeezed, is want.
func (l *lab) shows(command, want string) {
	l.t.Helper()
	want = squeeze(want)
	await.Until(l.t, command, func() error {
		out, err := l.try(command)
		if got := squeeze(out); err != nil || got != want {
			return fmt.Errorf("%v\ngot:\n%s\nwant:\n%s", err, got, want)
		}
		return nil
	})
}

func squeeze(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		if f := strings.Join(strings.Fields(line), " "); f != "" {
			lines = append(lines, f)
		}
	}
	return strings.Join(lines, "\n")
}

// running is a Kernel at work in a lab.
type running struct {
	*Kernel
	t      testing.TB
	cancel context.CancelFunc
	done   chan error
	log    *logBuffer
	drift  map[dataplane.Kind]int
	mu     sync.Mutex
}

// logBuffer keeps what is logged.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type labOption func(cfg *Config, buffer *int, wrap *func(transport) transport)

func everyCheck(d time.Duration) labOption {
	return func(cfg *Config, _ *int, _ *func(transport) transport) { cfg.FullCheck, cfg.ListingShare = d, 1 }
}

func sysctlsIn(dir string) labOption {
	return func(cfg *Config, _ *int, _ *func(transport) transport) { cfg.Sysctls = dir }
}

func listenBuffer(n int) labOption {
	return func(_ *Config, b *int, _ *func(transport) transport) { *b = n }
}

func through(f func(transport) transport) labOption {
	return func(_ *Config, _ *int, w *func(transport) transport) { *w = f }
}

// idle returns a Kernel that is not run.
func (l *lab) idle() *Kernel {
	l.t.Helper()
	var k *Kernel
	var err error
	l.do(func() { k, err = New(Config{Log: slog.New(slog.DiscardHandler)}) })
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { k.Close() })
	return k
}

// start opens and runs a Kernel in the lab. Its full check is an hour away
// unless an option says otherwise, so that what a test sees was noticed.
func (l *lab) start(options ...labOption) *running {
	l.t.Helper()
	r := &running{t: l.t, done: make(chan error, 1), log: &logBuffer{}, drift: map[dataplane.Kind]int{}}
	cfg := Config{
		FullCheck: time.Hour,
		Log:       slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Hooks: Hooks{Drift: func(kind dataplane.Kind, n int) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.drift[kind] += n
		}},
	}
	buffer, wrap := bufferBytes, func(t transport) transport { return t }
	for _, o := range options {
		o(&cfg, &buffer, &wrap)
	}
	var err error
	l.do(func() { r.Kernel, err = open(cfg, buffer, wrap) })
	if err != nil {
		l.t.Fatalf("open kernel: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.done <- r.Run(ctx) }()
	l.t.Cleanup(func() {
		r.stop()
		if l.t.Failed() {
			l.t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// newHost is a lab with the wire up0 to a subnet 10.0.0.0/24, and a Kernel at
// work in it that has a wish from nobody.
func newHost(t testing.TB, options ...labOption) (*lab, *running) {
	t.Helper()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start(options...)
	k.synced()
	return l, k
}

func (r *running) stop() {
	r.cancel()
	if err, ok := <-r.done; ok {
		if err != nil {
			r.t.Errorf("run: %v", err)
		}
		close(r.done)
	}
}

func (r *running) drifted(kind dataplane.Kind) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.drift[kind]
}

// synced says that both sources are.
func (r *running) synced() {
	r.Synced(dataplane.SourceWorkload)
	r.Synced(dataplane.SourceCore)
}

// put adds to the core's wish and waits until it is there.
func (r *running) put(objs ...dataplane.Object) {
	r.t.Helper()
	r.wait(r.Update(dataplane.SourceCore, objs, nil))
}

func (r *running) wait(rev dataplane.Revision) {
	r.t.Helper()
	if err := r.Wait(await.Context(r.t), rev); err != nil {
		r.t.Fatalf("wait: %v\nlog:\n%s", err, r.log)
	}
}

// del withdraws from the core's wish and waits until it is gone.
func (r *running) del(objs ...dataplane.Object) {
	r.t.Helper()
	keys := make([]dataplane.Key, len(objs))
	for i, o := range objs {
		keys[i] = o.Key()
	}
	r.wait(r.Update(dataplane.SourceCore, nil, keys))
}

// ready waits until the first pass is done.
func (r *running) ready() {
	r.t.Helper()
	await.Until(r.t, "ready", func() error {
		if ok, why := r.Ready(); !ok {
			return errors.New(why)
		}
		return nil
	})
}

// failed waits until an object is refused and returns the error.
func (r *running) failed(o dataplane.Object) error {
	r.t.Helper()
	var out error
	await.Until(r.t, o.String()+" refused", func() error {
		s, ok := r.Status(o.Key())
		if !ok || s.State != dataplane.Failed {
			return fmt.Errorf("%v %+v", ok, s)
		}
		out = s.Err
		return nil
	})
	return out
}

func addr(s string) netip.Addr  { return netip.MustParseAddr(s) }
func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func mac(s string) dataplane.MAC {
	m, err := dataplane.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

func via(id dataplane.NextHopID, gw, link string) dataplane.NextHop {
	return dataplane.NextHop{ID: id, Link: link, Gateway: addr(gw), OnLink: true}
}

func group(id dataplane.NextHopID, members ...dataplane.NextHopID) dataplane.NextHopGroup {
	var list []dataplane.GroupMember
	for _, m := range members {
		list = append(list, dataplane.GroupMember{ID: m})
	}
	return dataplane.NextHopGroup{ID: id, Members: dataplane.GroupOf(list...)}
}

func route(prefix string, id dataplane.NextHopID) dataplane.Route {
	return dataplane.Route{Prefix: pfx(prefix), Table: dataplane.MainTable, NextHop: id}
}

func addrPort(ip string, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr(ip), port) }
