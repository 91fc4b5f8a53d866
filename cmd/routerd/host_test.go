package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/yaml"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enrol"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

// asDaemon is set in the environment of a test binary that is to be routerd.
const asDaemon = "ROUTERD_TEST_AS_DAEMON"

func TestMain(m *testing.M) {
	clustertest.Main()
	if os.Getenv(asDaemon) == "" {
		os.Exit(m.Run())
	}
	// Whatever becomes of the test, its daemon ends with it: file 3 is a pipe
	// that only the test holds open.
	go func() {
		var b [1]byte
		_, _ = os.NewFile(3, "parent").Read(b[:])
		os.Exit(3)
	}()
	if os.Getenv(withoutNetfilter) != "" {
		if err := refuseNetfilter(); err != nil {
			fmt.Fprintln(os.Stderr, "refuse netfilter:", err)
			os.Exit(4)
		}
	}
	if unitReads := os.Getenv(underSystemd); unitReads != "" {
		c := newJoinCommand(enrol.Systemd{Booted: "/", UnitReads: unitReads})
		c.SetArgs(os.Args[2:])
		c.SilenceUsage = true
		if c.Execute() != nil {
			os.Exit(1)
		}
		return
	}
	main()
}

// host is a network namespace with an uplink, and the directories of a daemon.
type host struct {
	t      *testing.T
	ns     *netnstest.Netns
	dir    string
	config map[string]any // overrides what writeConfig makes
	env    []string
	wrap   []string // what starts the daemon; empty: nothing
}

// newHost makes a host whose device eth0 has an address.
func newHost(t *testing.T, addr string) *host {
	t.Helper()
	// Not t.TempDir: the path of a socket has at most 107 bytes.
	dir, err := os.MkdirTemp("", "routerd") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	h := &host{t: t, ns: netnstest.New(t), dir: dir, config: map[string]any{}}
	h.ip("link set lo up")
	// first-found passes over names that begin with veth.
	h.ip("link add eth0 type veth peer name veth-wire")
	h.ip("link set veth-wire up")
	h.ip("link set eth0 up")
	h.ip("addr add " + addr + " dev eth0")
	return h
}

func (h *host) runDir() string { return filepath.Join(h.dir, "run") }

// exec runs a command in the namespace.
func (h *host) exec(args ...string) (string, error) {
	var out []byte
	err := h.ns.Do(func() (err error) {
		out, err = exec.Command(args[0], args[1:]...).CombinedOutput()
		return err
	})
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// ip runs ip(8), which must succeed.
func (h *host) ip(args string) string {
	h.t.Helper()
	out, err := h.exec(append([]string{"ip"}, strings.Fields(args)...)...)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// lists checks that a listing of ip(8) contains a text.
func (h *host) lists(args, want string) error {
	out, err := h.exec(append([]string{"ip"}, strings.Fields(args)...)...)
	if err == nil && !strings.Contains(out, want) {
		err = fmt.Errorf("ip %s: want %q in:\n%s", args, want, out)
	}
	return err
}

func (h *host) writeConfig() string {
	h.t.Helper()
	c := map[string]any{"stateDir": filepath.Join(h.dir, "state"), "runDir": h.runDir(), "nodeName": "node1", "logLevel": "debug"}
	for k, v := range h.config {
		if c[k] = v; v == nil {
			delete(c, k)
		}
	}
	b, err := yaml.Marshal(c)
	if err != nil {
		h.t.Fatal(err)
	}
	path := filepath.Join(h.dir, "routerd.yaml")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// command returns routerd with arguments, to be started by start. The caller
// closes the returned file when the process may end.
func (h *host) command(args ...string) (*exec.Cmd, *os.File) {
	h.t.Helper()
	self, err := os.Executable()
	if err != nil {
		h.t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		h.t.Fatal(err)
	}
	args = slices.Concat(h.wrap, []string{self}, args)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), asDaemon+"=1")
	cmd.Env = append(cmd.Env, h.env...)
	cmd.ExtraFiles = []*os.File{r}
	return cmd, w
}

// routerd runs a command of routerd to its end.
func (h *host) routerd(args ...string) (code int, output string) {
	h.t.Helper()
	cmd, hold := h.command(args...)
	defer hold.Close()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	return h.finish(cmd, &out)
}

// finish runs cmd, which is to end by itself.
func (h *host) finish(cmd *exec.Cmd, out *bytes.Buffer) (code int, output string) {
	h.t.Helper()
	if err := h.ns.Do(cmd.Start); err != nil {
		h.t.Fatal(err)
	}
	late := time.AfterFunc(await.Patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		h.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

// log is what a daemon wrote.
type log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// lines returns the lines that contain all words.
func (l *log) lines(words ...string) []string {
	return slices.DeleteFunc(strings.Split(l.String(), "\n"), func(line string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) })
	})
}

// tells waits until the daemon's log has as many lines with all words. What the
// daemon has written before it answers may still be on its way here.
func (r *running) tells(lines int, words ...string) {
	r.t.Helper()
	await.Until(r.t, fmt.Sprintf("the log tells %q", words), func() error {
		if n := len(r.log.lines(words...)); n != lines {
			return fmt.Errorf("%d times, want %d", n, lines)
		}
		return nil
	})
}

// running is a daemon.
type running struct {
	*host
	cmd  *exec.Cmd
	log  *log
	hold *os.File
	done chan struct{} // closed when it has ended
	op   apiv1.OperatorClient
	cni  apiv1.CNIClient
}

// start starts the daemon. It is killed when the test ends.
func (h *host) start() *running {
	h.t.Helper()
	return h.startFrom(h.writeConfig())
}

// startFrom is start with a configuration that is there.
func (h *host) startFrom(file string) *running {
	h.t.Helper()
	cmd, hold := h.command("run", "--config", file)
	r := &running{host: h, cmd: cmd, hold: hold, log: &log{}, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = r.log, r.log
	if err := h.ns.Do(cmd.Start); err != nil {
		h.t.Fatal(err)
	}
	go func() {
		defer close(r.done)
		_ = cmd.Wait() // how it ended is asked of ProcessState
	}()
	h.t.Cleanup(func() {
		r.kill(syscall.SIGKILL)
		hold.Close()
		if h.t.Failed() {
			h.t.Logf("log of the daemon:\n%s", r.log)
		}
	})
	r.op = apiv1.NewOperatorClient(r.dial(config.OperatorSocketName))
	r.cni = apiv1.NewCNIClient(r.dial(config.CNISocketName))
	return r
}

func (r *running) dial(socket string) *grpc.ClientConn {
	r.t.Helper()
	c, err := grpc.NewClient("unix://"+filepath.Join(r.runDir(), socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// kill sends a signal that ends the daemon and returns how it ended.
func (r *running) kill(sig syscall.Signal) *os.ProcessState {
	r.t.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		r.t.Error(err)
	}
	return r.ended()
}

// ended waits for the daemon's end.
func (r *running) ended() *os.ProcessState {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(await.Patience):
		_ = r.cmd.Process.Kill()
		<-r.done
		r.t.Errorf("the daemon did not end within %s", await.Patience)
	}
	return r.cmd.ProcessState
}

// node asks the daemon about its host.
func (r *running) node() (*apiv1.NodeResponse, error) {
	select {
	case <-r.done:
		return nil, fmt.Errorf("the daemon has ended: %s", r.cmd.ProcessState)
	default:
	}
	return r.op.Node(await.Context(r.t), &apiv1.NodeRequest{}, grpc.WaitForReady(true))
}

// when waits until the daemon's answer is as f wants it, and returns it.
func (r *running) when(what string, f func(*apiv1.NodeResponse) error) *apiv1.NodeResponse {
	r.t.Helper()
	var n *apiv1.NodeResponse
	await.Until(r.t, what, func() (err error) {
		if n, err = r.node(); err != nil {
			return err
		}
		return f(n)
	})
	return n
}

// ready waits until the host is ready.
func (r *running) ready() *apiv1.NodeResponse {
	r.t.Helper()
	return r.when("ready", func(n *apiv1.NodeResponse) error {
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			return errors.New("not ready: " + c.GetReason())
		}
		return nil
	})
}

// condition returns a condition of the host's health.
func conditionOf(n *apiv1.NodeResponse, name string) *apiv1.Check {
	for _, c := range n.GetHealth().GetConditions() {
		if c.GetName() == name {
			return c
		}
	}
	return nil
}

// mentions returns an error unless s contains all words.
func mentions(s string, words ...string) error {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return fmt.Errorf("want %q in %q", w, s)
		}
	}
	return nil
}

// store opens the daemon's own datastore, or the one at a socket.
func (h *host) store(socket string) *etcd.Store {
	h.t.Helper()
	if socket == "" {
		socket = filepath.Join(h.runDir(), config.EtcdSocketName)
	}
	s, err := etcd.Open(h.t.Context(), etcd.Config{Endpoints: []string{"unix://" + socket}})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { s.Close() })
	return s
}

// addNode registers another host, with a block of the default pool.
func (h *host) addNode(s store.Store, name, addr, vtep, block string) {
	h.t.Helper()
	n := &store.Node{}
	n.Name = name
	n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: addr}
	n.Spec.IPv4VXLANTunnelAddr = vtep
	if _, err := store.Create(h.t.Context(), s, n); err != nil {
		h.t.Fatal(err)
	}
	h.addBlock(s, name, block)
}

// addBlock gives a block to a host.
func (h *host) addBlock(s store.Store, node, block string) {
	h.t.Helper()
	cidr := netip.MustParsePrefix(block)
	_, err := s.Txn(h.t.Context(), store.Op{
		Action: store.Put, If: store.IfAbsent(), Object: store.Object{Key: store.BlockKey(cidr), Value: freeBlock(cidr, node)},
	}, store.Op{
		Action: store.Put, If: store.IfAbsent(),
		Object: store.Object{Key: store.AffinityKey(node, cidr), Value: &store.Affinity{State: store.AffinityConfirmed}},
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// freeBlock is a block of a host of which no address is in use.
func freeBlock(cidr netip.Prefix, node string) *store.Block {
	affinity := "host:" + node
	b := &store.Block{CIDR: cidr.String(), Affinity: &affinity}
	for i := range 1 << (32 - cidr.Bits()) {
		b.Allocations = append(b.Allocations, nil)
		b.Unallocated = append(b.Unallocated, i)
	}
	return b
}

// attach gives a new workload an interface.
func (r *running) attach(id string) (*apiv1.AddResponse, error) {
	r.t.Helper()
	return r.attachWithin(await.Patience, id)
}

// attachWithin is attach by a runtime that waits for so long.
func (r *running) attachWithin(d time.Duration, id string) (*apiv1.AddResponse, error) {
	r.t.Helper()
	pod := netnstest.New(r.t)
	ctx, cancel := context.WithTimeout(r.t.Context(), d)
	defer cancel()
	return r.cni.Add(ctx, &apiv1.AddRequest{
		Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: id, Ifname: "eth0"},
		Workload:   &apiv1.Workload{Orchestrator: "cni", Namespace: "default"},
		Netns:      pod.Path, AssignIpv4: true,
	}, grpc.WaitForReady(true))
}

// listen takes a TCP port in the namespace until the test ends.
func (h *host) listen(addr string) {
	h.t.Helper()
	ap := netip.MustParseAddrPort(addr)
	err := h.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		h.t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}); err != nil {
			return err
		}
		return unix.Listen(fd, 1)
	})
	if err != nil {
		h.t.Fatal(err)
	}
}
