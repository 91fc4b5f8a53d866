package scenarios

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestInject has programs on a host inject routes, by routerctl and by a BGP session on the loopback, which a switch then has in
// its kernel until they die. A kill of the daemon takes none of them away.
func TestInject(t *testing.T) {
	beside(t)
	l := bringUp(t, "inject", topology(1, 0, store.VXLANCrossSubnet))
	const host = "node1"
	s := newTor(t, l, host, "inj", "198.51.100.9")
	s.startBIRD(64998, "10.255.0.1")
	s.peer(64998)
	s.waitUp()
	routed := func(want bool, prefixes ...string) {
		t.Helper()
		poll(t, fmt.Sprintf("the switch's routes to %v: %t", prefixes, want), func() string {
			for _, p := range prefixes {
				if out := s.ip(s.space, "-4 route show "+p); (out != "") != want {
					return p + ": " + out
				}
			}
			return ""
		})
	}

	holder := startRouterctl(t, l, host, io.Discard, "bgp", "inject", "add", "203.0.113.1/32", "--owner", "lb", "--hold")
	process := exec.Command("sleep", "1000")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	died := make(chan error, 1)
	go func() { died <- process.Wait() }()
	t.Cleanup(func() { _ = process.Process.Kill() })
	routerctl(t, l, host, "", "bgp", "inject", "add", "203.0.113.2/32", "--owner", "vpn", "--pid", fmt.Sprint(process.Process.Pid))
	routerctl(t, l, host, "", "bgp", "inject", "add", "203.0.113.3/32", "--owner", "script", "--ttl", "1h")
	routerctl(t, l, host, `apiVersion: projectcalico.org/v3
kind: BGPPeer
metadata: {name: local}
spec: {node: node1, peerIP: 127.0.0.2, asNumber: 64600}
`, "apply", "-f", "-")
	startLocalBIRD(t, l, host, "203.0.113.4/32")
	all := []string{"203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"}
	routed(true, all...)
	if out, err := tryRouterctl(t, l, host, "", "bgp", "inject", "add", "192.168.7.0/24", "--owner", "lb", "--ttl", "1m"); err == nil || !strings.Contains(err.Error(), "inside the pool 192.168.0.0/16") {
		t.Errorf("a part of a pool: %s, %v", out, err)
	}
	if out := routerctl(t, l, host, "", "bgp", "explain", "203.0.113.2/32"); !strings.Contains(out, "this host for vpn") {
		t.Errorf("explain does not name the owner:\n%s", out)
	}

	m := watchTor(t, s)
	if err := l.Kill(await.Context(t), host, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := l.Restart(await.Context(t), host); err != nil {
		t.Fatal(err)
	}
	s.waitUp()
	poll(t, "the owner's stream after the restart", func() string {
		out, err := tryRouterctl(t, l, host, "", "bgp", "inject", "list")
		if err != nil {
			return err.Error()
		}
		for line := range strings.SplitSeq(out, "\n") {
			if strings.HasPrefix(line, "203.0.113.1/32") && strings.Contains(line, "stream") && strings.Contains(line, "advertised") {
				return ""
			}
		}
		return out
	})
	waitLocalPeer(t, l, host)
	routed(true, all...)
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-died
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // it was killed
	routerctl(t, l, host, "", "bgp", "inject", "withdraw", "--owner", "script", "--all")
	routed(false, all[:3]...)
	routed(true, all[3])
	went := strings.Join(m.stop(t, "Deleted "), "")
	for i, a := range all {
		if n, want := strings.Count(went, "Deleted "+a+" "), min(1, 3-i); n != want {
			t.Errorf("the switch lost the route to %s %d times, want %d: the restart of the daemon takes none away\n%s", a, n, want, went)
		}
	}
}

// startRouterctl runs routerctl on a host beside the test until it is killed.
func startRouterctl(t *testing.T, l *lab.Lab, host string, out io.Writer, args ...string) *exec.Cmd {
	t.Helper()
	dir, err := filepath.Abs(binDir(t))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "routerctl"), append([]string{"--socket", lab.Socket(l.Name(), host)}, args...)...)
	cmd.Stdout = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

// startLocalBIRD runs BIRD on a host as docs/guides/bgp.md has a program that peers over the loopback.
func startLocalBIRD(t *testing.T, l *lab.Lab, host string, prefixes ...string) {
	t.Helper()
	dir := t.TempDir()
	var routes strings.Builder
	for _, p := range prefixes {
		fmt.Fprintf(&routes, "route %s blackhole; ", p)
	}
	conf := filepath.Join(dir, "bird.conf")
	text := fmt.Sprintf(`router id 127.0.0.2;
log stderr all;
protocol device {}
protocol static { ipv4; %s}
protocol bgp routerd {
  local 127.0.0.2 port 1790 as 64600; # routerd has port 179
  strict bind;
  neighbor 127.0.0.1 as 64512;
  multihop;
  connect delay time 1;
  error wait time 1, 2;
  connect retry time 1;
  graceful restart on;
  ipv4 { import none; export where source = RTS_STATIC; };
}
`, routes.String())
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bird", "-f", "-c", conf, "-s", filepath.Join(dir, "ctl"), "-P", filepath.Join(dir, "pid"))
	cmd.Stdout, cmd.Stderr = io.Discard, io.Discard
	if err := ns.Start(l.Space(host), cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	waitLocalPeer(t, l, host)
}

func waitLocalPeer(t *testing.T, l *lab.Lab, host string) {
	t.Helper()
	pollFor(t, time.Minute, "the session on the loopback", func() string {
		r, err := l.Node(await.Context(t), host)
		if err != nil {
			return err.Error()
		}
		for _, p := range r.GetPeers() {
			if p.GetName() == "local" && p.GetState() == "up" && p.GetReceived() > 0 {
				return ""
			}
		}
		return fmt.Sprint(r.GetPeers())
	})
}

// recorder is a program that reports what happens, until it is killed.
type recorder struct {
	cmd *exec.Cmd
	out *monitor
}

// watchTor records what happens to a switch's routes.
func watchTor(t *testing.T, s *tor) *recorder {
	t.Helper()
	w := &recorder{cmd: exec.Command("ip", "-n", s.space, "-4", "monitor", "route"), out: &monitor{}}
	w.cmd.Stdout = w.out
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cmd.Process.Kill() })
	return w
}

// stop ends the program, and returns its lines that hold a text.
func (w *recorder) stop(t *testing.T, part string) (out []string) {
	t.Helper()
	if err := w.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = w.cmd.Wait() // it was killed
	for line := range strings.Lines(w.out.text()) {
		if strings.Contains(line, part) {
			out = append(out, line)
		}
	}
	return out
}
