package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/labtest"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
)

// up brings a lab of played programs up.
func up(t *testing.T, suffix string, top Topology) *Lab {
	t.Helper()
	l, err := Up(await.Context(t), Options{Name: labName(t, suffix), Topology: top, BinDir: binDir(t)})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestUpAndDown(t *testing.T) {
	t.Parallel()
	var progress []string
	name := labName(t, "up")
	o := Options{Name: name, BinDir: binDir(t), Progress: func(s string) { progress = append(progress, s) }}
	l, err := Up(await.Context(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(progress) < 4 {
		t.Errorf("progress: %q", progress)
	}
	if labs, err := List(); err != nil || !slices.Contains(labs, name) {
		t.Errorf("List() = %v, %v", labs, err)
	}
	hosts, err := l.Status(await.Context(t))
	if err != nil || len(hosts) != 3 {
		t.Fatalf("status: %+v, %v", hosts, err)
	}
	for _, h := range hosts {
		if !h.Ready || h.PID == 0 || len(h.Pods) != 2 || h.Pods[0].MTU != 1450 {
			t.Errorf("status %+v", h)
		}
	}
	if _, err := Up(await.Context(t), o); err == nil || !strings.Contains(err.Error(), "is up") {
		t.Errorf("second up: %v, want an error that says it is up", err)
	}
	o.Replace = true
	if _, err := Up(await.Context(t), o); err != nil {
		t.Errorf("up in place of the other: %v", err)
	}
	again, err := Open(name)
	if err != nil || !slices.Equal(again.Hosts(), l.Hosts()) {
		t.Errorf("open: %v, %v", again, err)
	}
	for range 2 {
		if err := Down(await.Context(t), name); err != nil {
			t.Error(err)
		}
	}
	nothingLeft(t, name)
	if _, err := Open(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open after down: %v, want fs.ErrNotExist", err)
	}
}

// Hosts of both racks reach each other through the spine, with full-size
// packets, and each has one address and one default route.
func TestUnderlay(t *testing.T) {
	t.Parallel()
	l := up(t, "under", Topology{Nodes: DefaultTopology(4).Nodes, Pods: new(0)})
	m, err := l.ReachabilityMatrix(await.Context(t), traffic.Options{Size: 1500, DF: true})
	if err != nil {
		t.Fatal(err)
	}
	if asked, answered := m.Pairs(); asked != 12 || answered != 12 {
		t.Errorf("%d pairs of %d: %v", answered, asked, m.Failures())
	}
	for to, ttl := range map[string]int{"node2": 64, "node3": 63, "node4": 64} {
		r, err := l.Ping(await.Context(t), "node1", to, traffic.Options{})
		if err != nil || r.TTL != ttl {
			t.Errorf("node1 → %s: %+v, %v; want TTL %d", to, r, err, ttl)
		}
	}
	out, err := l.Output(await.Context(t), "node3", "ip", "-4", "route")
	if want := "default via 10.2.0.1 dev eth0 \n10.2.0.0/24 dev eth0 proto kernel scope link src 10.2.0.11 \n"; err != nil || out != want {
		t.Errorf("routes of node3: %q, %v; want %q", out, err, want)
	}
}

func TestCapture(t *testing.T) {
	t.Parallel()
	l := up(t, "capt", Topology{Pods: new(0)})
	icmp := func(p Packet) bool { return p.Payload().Proto == ProtoICMP }
	c, err := l.Capture("node1", uplink, icmp)
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.Ping(await.Context(t), "node1", "node3", traffic.Options{Size: 1500, DF: true})
	if err != nil || !r.OK {
		t.Fatalf("ping: %+v, %v", r, err)
	}
	got, err := c.WaitFor(await.Context(t), 2)
	if err != nil {
		t.Error(err)
	}
	c.Stop()
	if len(got) != 2 || got[0].String() != "10.1.0.11 > 10.2.0.11 proto 1 ttl 64 length 1500 DF" ||
		!strings.HasPrefix(got[1].String(), "10.2.0.11 > 10.1.0.11 proto 1 ttl 63 length 1500") {
		t.Errorf("captured %v; want the request and its answer", got)
	}
	if _, err := l.Capture("node1", "eth9", nil); err == nil || !strings.Contains(err.Error(), "eth9") {
		t.Errorf("no such device: %v", err)
	}
	if _, err := l.Capture("node9", "eth0", nil); err == nil || !strings.Contains(err.Error(), "node1") {
		t.Errorf("no such host: %v, want an error that lists the hosts", err)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	l := up(t, "exec", Topology{Nodes: DefaultTopology(1).Nodes, Pods: new(1)})
	ctx := await.Context(t)
	for _, tt := range []struct {
		where string
		args  []string
		want  Result
	}{
		{"node1", []string{"sh", "-c", "echo out; echo err >&2; exit 3"}, Result{"out\n", "err\n", 3}},
		{"node1", []string{"sh", "-c", "kill -9 $$"}, Result{"", "", 137}},
		{"node1/pod1", []string{"ls", "/sys/class/net"}, Result{"eth0\nfar0\nlo\n", "", 0}},
		{"spine", []string{"ls", "/sys/class/net"}, Result{"lo\nnode1\nrack1\nrack2\n", "", 0}},
		{"node1", []string{"sh", "-c", "ip route add blackhole 10.9.0.0/16 proto 77; ip route show 10.9.0.0/16"}, Result{"blackhole 10.9.0.0/16 proto routerd \n", "", 0}},
	} {
		got, err := l.Exec(ctx, tt.where, tt.args...)
		if err != nil || got != tt.want {
			t.Errorf("%s %q = %+v, %v; want %+v", tt.where, tt.args, got, err, tt.want)
		}
	}
	for where, want := range map[string]string{"node9": "node1", "node1/pod9": "pod9"} {
		if _, err := l.Exec(ctx, where, "true"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", where, err, want)
		}
	}
	if _, err := l.Exec(ctx, "node1", "no-such-command"); err == nil || !strings.Contains(err.Error(), "no-such-command") {
		t.Errorf("no such command: %v", err)
	}
	if _, err := l.Exec(ctx, "node1"); err == nil {
		t.Error("no command: no error")
	}
	// Also if something that the command started keeps its output open.
	for _, command := range []string{"exec sleep 1000", "sleep 1000 & sleep 1000"} {
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		begin := time.Now()
		_, err := l.Exec(short, "node1", "sh", "-c", command)
		cancel()
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took >= copyWithin {
			t.Errorf("end of ctx: %s: %v after %s", command, err, took)
		}
	}
}

func TestPods(t *testing.T) {
	t.Parallel()
	l := up(t, "pods", Topology{Pods: new(0)})
	ctx := await.Context(t)
	var where []string
	for i := range 10 {
		where = append(where, "node2/"+podName(i))
	}
	pods, err := l.AttachPods(ctx, where...)
	if err != nil || len(pods) != 10 {
		t.Fatalf("attach: %v, %v", pods, err)
	}
	ids := make(map[string]bool)
	for _, p := range pods {
		ids[p.ContainerID] = true
	}
	if len(ids) != 10 {
		t.Errorf("container ids are not unique: %v", pods)
	}
	for where, want := range map[string]string{"node2/pod3": "already", "node9/pod1": "node1", "node2/Pod": "lower case", "node2": "HOST/POD"} {
		if _, err := l.AttachPod(ctx, where); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("attach %s: %v, want an error with %q", where, err, want)
		}
	}
	// A plugin that refuses leaves nothing, and takes the others of the call
	// with it.
	_, err = l.AttachPods(ctx, "node1/good", "node1/bad")
	var cniErr *types.Error
	if !errors.As(err, &cniErr) || cniErr.Code != 11 || !strings.Contains(err.Error(), "datastore unavailable") {
		t.Errorf("refused ADD: %v", err)
	}
	if ns.Exists(l.Space("node1/bad")) || ns.Exists(l.Space("node1/good")) {
		t.Error("a namespace is left of a refused ADD")
	}
	if err := l.DetachPods(ctx, append(where[5:], "node2/none")...); err == nil || !strings.Contains(err.Error(), "node2/none") {
		t.Errorf("detach of a pod that is not there: %v", err)
	}
	left, err := l.Pods()
	if err != nil || len(left) != 5 {
		t.Errorf("pods left: %v, %v; want 5", left, err)
	}
	if a, err := l.Addr("node2/pod1"); err != nil || a != netip.AddrFrom4([4]byte{127, 0, 0, 1}) {
		t.Errorf("address %s, %v", a, err)
	}
}

// A namespace that someone else made under one of our names is not touched, nor
// what runs in it.
func TestForeignNamespace(t *testing.T) {
	t.Parallel()
	name := labName(t, "alien")
	space := name + "-node2"
	if err := ns.Create(space); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := ns.Delete(space); err != nil {
			t.Error(err)
		}
	}()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := ns.Start(space, cmd); err != nil {
		t.Fatal(err)
	}
	_, err := Up(await.Context(t), Options{Name: name, BinDir: binDir(t)})
	if err == nil || !strings.Contains(err.Error(), "ip netns delete "+space) {
		t.Errorf("up: %v, want an error with the cure", err)
	}
	if pids, err := ns.PIDs(space); err != nil || len(pids) != 1 {
		t.Errorf("the stranger's process: %v, %v", pids, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // it was killed
}

func TestUpFails(t *testing.T) {
	t.Parallel()
	play := func(how string) Topology {
		top := DefaultTopology(3)
		top.Nodes[1].Config = map[string]any{"play": how}
		return top
	}
	t.Run("a daemon dies", func(t *testing.T) {
		t.Parallel()
		name := labName(t, "die")
		_, err := Up(await.Context(t), Options{Name: name, Topology: play("die"), BinDir: binDir(t)})
		if err == nil || !strings.Contains(err.Error(), "host node2") || !strings.Contains(err.Error(), "in use by node9") {
			t.Errorf("got %v, want the host and the last lines of its log", err)
		}
		nothingLeft(t, name)
	})
	t.Run("the caller gives up", func(t *testing.T) {
		t.Parallel()
		name := labName(t, "stop")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		o := Options{Name: name, Topology: play("never-ready"), BinDir: binDir(t), Progress: func(s string) {
			if strings.Contains(s, "2 more hosts") {
				cancel()
			}
		}}
		_, err := Up(ctx, o)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want context.Canceled", err)
		}
		nothingLeft(t, name)
	})
	t.Run("never ready", func(t *testing.T) {
		t.Parallel()
		name := labName(t, "never")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var up sync.WaitGroup
		var err error
		up.Go(func() {
			_, err = Up(ctx, Options{Name: name, Topology: play("never-ready"), BinDir: binDir(t)})
		})
		await.True(t, "the daemon's first answer", func() bool {
			b, _ := os.ReadFile(logFile(name, "node2"))
			return strings.Contains(string(b), labtest.AskedAgain)
		})
		cancel()
		up.Wait()
		if err == nil || !strings.Contains(err.Error(), "played: never-ready") {
			t.Errorf("got %v, want the daemon's reason", err)
		}
		nothingLeft(t, name)
	})
	t.Run("no binaries", func(t *testing.T) {
		t.Parallel()
		name := labName(t, "nobin")
		_, err := Up(t.Context(), Options{Name: name, BinDir: t.TempDir()})
		if err == nil || !strings.Contains(err.Error(), "make build") || !strings.Contains(err.Error(), "routerd-cni") {
			t.Errorf("got %v, want the cure", err)
		}
		nothingLeft(t, name)
	})
	t.Run("bad name", func(t *testing.T) {
		t.Parallel()
		if _, err := Up(t.Context(), Options{Name: "../x", BinDir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "lab name") {
			t.Errorf("got %v", err)
		}
	})
}

// The caller of up is killed at some point on the way; down finds everything.
func TestUpKilled(t *testing.T) {
	t.Parallel()
	bin := binDir(t)
	for suffix, when := range map[string]func(lab string) bool{
		"k-ns":   func(lab string) bool { return ns.Exists(lab + "-spine") },
		"k-wire": func(lab string) bool { return ns.Exists(lab + "-node3") },
		"k-log":  func(lab string) bool { _, err := os.Stat(logFile(lab, "node1")); return err == nil },
		"k-all":  func(lab string) bool { _, err := os.Stat(Socket(lab, "node3")); return err == nil },
		"k-pod":  func(lab string) bool { return ns.Exists(lab + "-node3-pod2") },
	} {
		t.Run(suffix, func(t *testing.T) {
			t.Parallel()
			name := labName(t, suffix)
			cmd := exec.Command(filepath.Join(bin, "lab-up"), name, bin)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			// Not await.Until, whose looks become rare: the moment passes.
			for ctx := await.Context(t); !when(name); {
				if err := pause(ctx, time.Millisecond); err != nil {
					t.Fatalf("the moment to kill: %v", err)
				}
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			if suffix == "k-all" {
				// The next up of the same name cleans up too.
				if _, err := Up(await.Context(t), Options{Name: name, BinDir: bin, Replace: true}); err != nil {
					t.Error(err)
				}
			}
			if err := Down(await.Context(t), name); err != nil {
				t.Error(err)
			}
			nothingLeft(t, name)
		})
	}
}

func TestRestartAndKill(t *testing.T) {
	t.Parallel()
	top := DefaultTopology(2)
	top.Pods = new(0)
	l := up(t, "again", top)
	ctx := await.Context(t)
	for _, tt := range []struct {
		name string
		host string
		do   func() error
	}{
		{"running", "node1", func() error { return nil }},
		{"killed", "node1", func() error { return l.Kill(ctx, "node1", unix.SIGKILL) }},
		{"stopped", "node1", func() error { return l.Kill(ctx, "node1", unix.SIGSTOP) }},
		{"ended", "node1", func() error { return l.Kill(ctx, "node1", unix.SIGTERM) }},
	} {
		before, err := l.Daemon(tt.host)
		if err != nil {
			t.Fatal(err)
		}
		if err := tt.do(); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err := l.Restart(ctx, tt.host); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		after, err := l.Daemon(tt.host)
		if err != nil || after == before || before.Alive() || !after.Alive() {
			t.Errorf("%s: before %+v, after %+v, %v", tt.name, before, after, err)
		}
		r, err := l.Node(ctx, tt.host)
		if err != nil || int(r.GetPid()) != after.PID {
			t.Errorf("%s: %v answers, %v; want %d", tt.name, r.GetPid(), err, after.PID)
		}
	}
	if err := l.Kill(ctx, "node1", unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := l.Kill(ctx, "node1", unix.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("kill of a dead daemon: %v, want os.ErrProcessDone", err)
	}
	if err := l.Restart(ctx, "node9"); err == nil || !strings.Contains(err.Error(), "node9") {
		t.Errorf("restart of no host: %v", err)
	}
	status, err := l.Status(ctx)
	if err != nil || status[0].PID != 0 || status[0].Ready || !status[1].Ready {
		t.Errorf("status %+v, %v", status, err)
	}
}

// Two labs at once, with equal hosts, do not see each other.
func TestTwoLabs(t *testing.T) {
	t.Parallel()
	labs := make([]*Lab, 2)
	var wg sync.WaitGroup
	for i, s := range []string{"two-a", "two-b"} {
		name, bin := labName(t, s), binDir(t)
		wg.Go(func() {
			var err error
			if labs[i], err = Up(await.Context(t), Options{Name: name, BinDir: bin}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if err := labs[0].Down(await.Context(t)); err != nil {
		t.Error(err)
	}
	hosts, err := labs[1].Status(await.Context(t))
	if err != nil || len(hosts) != 3 || !hosts[0].Ready || !hosts[2].Ready {
		t.Errorf("the other lab: %+v, %v", hosts, err)
	}
}

// The spine's BIRD takes a block from one host into its kernel and tells the
// others of it. A BIRD on the host stands for routerd here.
func TestSpineBGP(t *testing.T) {
	t.Parallel()
	name := labName(t, "bgp")
	top, err := Topology{Spine: Spine{BGP: new(true)}}.Complete()
	if err != nil {
		t.Fatal(err)
	}
	bird, err := findBird()
	if err != nil {
		t.Fatal(err)
	}
	l := &Lab{name: name, topology: top, binDir: binDir(t)}
	if err := os.MkdirAll(dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeState(&state{Name: name, Topology: top}); err != nil {
		t.Fatal(err)
	}
	if err := buildUnderlay(t.Context(), name, top); err != nil {
		t.Fatal(err)
	}
	if err := l.startBird(); err != nil {
		t.Fatal(err)
	}
	for i, n := range top.Nodes {
		rack, _ := top.rack(n.Rack)
		d := filepath.Join(dir(name), n.Name)
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
		conf := strings.NewReplacer("ADDR", n.Address.String(), "PEER", rack.Gateway().String(), "N", string(rune('1'+i))).Replace(`
router id ADDR;
protocol device {}
protocol static { ipv4; route 192.168.N.0/26 blackhole; }
protocol kernel { ipv4 { export where source = RTS_BGP; }; }
protocol bgp { local ADDR as 64512; neighbor PEER as 64999; allow local as 1; connect delay time 1; ipv4 { import all; export where source = RTS_STATIC; }; }
`)
		if err := os.WriteFile(d+"/bird.conf", []byte(conf), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := startDetached(l.Space(n.Name), d+"/bird.out", bird, "-f", "-c", d+"/bird.conf", "-s", d+"/bird.ctl"); err != nil {
			t.Fatal(err)
		}
	}
	for where, want := range map[string][]string{
		"spine": {"192.168.1.0/26 via 10.1.0.11 dev rack1 ", "192.168.2.0/26 via 10.1.0.12 dev rack1 ", "192.168.3.0/26 via 10.2.0.11 dev rack2 "},
		// Within the rack the spine names the owner, else itself.
		"node1": {"192.168.2.0/26 via 10.1.0.12 dev eth0 ", "192.168.3.0/26 via 10.1.0.1 dev eth0 "},
		"node3": {"192.168.1.0/26 via 10.2.0.1 dev eth0 ", "192.168.2.0/26 via 10.2.0.1 dev eth0 "},
	} {
		await.Until(t, "routes of "+where, func() error {
			out, err := l.Output(await.Context(t), where, "ip", "route", "show", "proto", "bird")
			for _, w := range want {
				if err == nil && !strings.Contains(out, w) {
					err = fmt.Errorf("no %q in\n%s", w, out)
				}
			}
			return err
		})
	}
}
