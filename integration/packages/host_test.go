package packages

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
)

const (
	hostAddr = "10.1.0.11"
	torAddr  = "10.1.0.1"
	torSpace = "tor"
	podSpace = "pod"
	// rate is of packets a second, which an emulated processor carries.
	rate = 50
)

// host is this machine, with routerd's service, a switch that runs BIRD in a
// namespace, and a pod.
type host struct {
	t      *testing.T
	dir    string
	tor    output // of BIRD
	routes output // of the switch's kernel, as they change
	pod    netip.Addr
}

// output collects what a program writes.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

// take returns what was written since the last call.
func (o *output) take() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.b.String()
	o.b.Reset()
	return s
}

// has reports whether something was written since the last call of take.
func (o *output) has(s string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return bytes.Contains(o.b.Bytes(), []byte(s))
}

// newHost makes the network around this machine.
func newHost(t *testing.T) *host {
	t.Helper()
	if b, err := os.ReadFile("/proc/1/comm"); err != nil || strings.TrimSpace(string(b)) != "systemd" || os.Getenv("ROUTERD_STAGE") != "vm" {
		t.Fatalf("the first process here is %q (%v): this test installs packages on the machine that it runs on: make test-package", b, err)
	}
	h := &host{t: t, dir: t.TempDir()}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := exec.Command("journalctl", "--no-pager", "-o", "short-monotonic", "-u", "routerd").CombinedOutput()
			t.Logf("journal of routerd (%v):\n%s\nlog of the switch:\n%s", err, out, h.tor.take())
		}
	})
	for _, d := range []string{"info", "updates", "triggers"} {
		if err := os.MkdirAll(filepath.Join("/var/lib/dpkg", d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.write("/var/lib/dpkg/status", "")
	for _, s := range []string{torSpace, podSpace} {
		if err := ns.Create(s); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { // for the next test
		for _, s := range []string{torSpace, podSpace} {
			if err := ns.Delete(s); err != nil {
				t.Error(err)
			}
		}
		// The kernel takes a namespace down by and by, and what is plugged into it.
		devices, err := net.Interfaces()
		if err != nil {
			t.Error(err)
		}
		for _, d := range devices {
			if d.Name != "eth0" && !strings.HasPrefix(d.Name, "cali") {
				continue
			}
			if out, err := exec.Command("ip", "link", "del", d.Name).CombinedOutput(); err != nil && !bytes.Contains(out, []byte("Cannot find device")) {
				t.Errorf("delete %s: %v: %s", d.Name, err, out)
			}
		}
		for _, d := range []string{"/etc/routerd", "/var/lib/routerd", "/run/routerd"} {
			if err := os.RemoveAll(d); err != nil {
				t.Error(err)
			}
		}
	})
	for _, args := range []string{
		"link add eth0 type veth peer name host netns " + torSpace,
		"addr add " + hostAddr + "/24 dev eth0", "link set eth0 up",
		"-n " + torSpace + " addr add " + torAddr + "/24 dev host", "-n " + torSpace + " link set host up",
	} {
		h.run("ip", strings.Fields(args)...)
	}
	h.startTor()
	return h
}

// What the switch says of a route that it accepts, and of one that carries
// GRACEFUL_SHUTDOWN (RFC 8326). What is waited for is read from the output of
// programs that run: to start one again and again would take an emulated
// processor from what is tested.
const (
	accepted = "accepted"
	leaving  = "GRACEFUL_SHUTDOWN of"
	// back is said when all routes are there again after a restart (RFC 4724).
	back = "graceful restart done"
)

func (h *host) startTor() {
	h.t.Helper()
	conf := filepath.Join(h.dir, "bird.conf")
	h.write(conf, fmt.Sprintf(`router id %[1]s;
log stderr all;
protocol device {}
protocol kernel { ipv4 { export all; }; }
filter seen { if (65535, 0) ~ bgp_community then print "%[3]s ", net; print "%[4]s ", net; accept; }
protocol bgp node {
  local %[1]s as 64999;
  neighbor %[2]s as 64512;
  debug { states, events };
  connect retry time 1; error wait time 1, 2;
  ipv4 { import filter seen; export none; };
}
`, torAddr, hostAddr, leaving, accepted))
	h.startInTor(&h.routes, "ip", "monitor", "route")
	h.startInTor(&h.tor, "bird", "-f", "-c", conf, "-s", filepath.Join(h.dir, "bird.ctl"), "-P", filepath.Join(h.dir, "bird.pid"))
}

// startInTor starts a program in the switch, which ends with the test.
func (h *host) startInTor(to *output, name string, args ...string) {
	h.t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = to, to
	if err := ns.Start(torSpace, cmd); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
}

// waitTor waits until the switch has said something.
func (h *host) waitTor(what, word string) {
	h.t.Helper()
	await.True(h.t, what+": "+word, func() bool { return h.tor.has(word) })
}

// waitWithdrawn waits until the switch has no route to the pod any more.
func (h *host) waitWithdrawn(what string) {
	h.t.Helper()
	await.True(h.t, what+": the switch's route goes", func() bool { return h.routes.has("Deleted ") })
	if r := h.torRoute(); r != "" {
		h.t.Errorf("%s: the switch sends on: %s", what, r)
	}
}

func (h *host) write(name, text string) {
	h.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)); err != nil {
		h.t.Fatal(err)
	}
}

// limit bounds one command. An emulated processor that has a tenth of a real one
// takes minutes to install a package.
const limit = 10 * time.Minute

// try runs a command to its end.
func (h *host) try(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), limit)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func (h *host) run(name string, args ...string) string {
	h.t.Helper()
	out, err := h.try(name, args...)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// unit returns a property of routerd's service.
func (h *host) unit(property string) string {
	h.t.Helper()
	return strings.TrimSpace(h.run("systemctl", "show", "--value", "-p", property, "routerd.service"))
}

func (h *host) expectUnit(want map[string]string) {
	h.t.Helper()
	for p, w := range want {
		if got := h.unit(p); got != w {
			h.t.Errorf("%s of routerd.service is %q, want %q", p, got, w)
		}
	}
}

// apply gives routerctl a manifest, as soon as there is somebody to take it.
func (h *host) apply(manifest string) {
	h.t.Helper()
	f := filepath.Join(h.dir, "manifest.yaml")
	h.write(f, manifest)
	await.Until(h.t, "routerctl apply", func() error {
		_, err := h.try("routerctl", "apply", "-f", f)
		return err
	})
}

// serve has the host serve a pod, to which the switch sends.
func (h *host) serve() {
	h.t.Helper()
	h.apply("apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: tor}\nspec: {peerIP: " + torAddr + ", asNumber: 64999}\n" +
		"---\napiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {name: from-outside}\nspec: {selector: all(), types: [Ingress], ingress: [{action: Allow}]}\n")
	h.addPod()
	h.inService()
}

// addPod attaches the pod.
func (h *host) addPod() {
	h.t.Helper()
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "routerd", "type": cni.PluginType, "ipam": map[string]string{"type": cni.PluginType},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	var out []byte
	await.Until(h.t, "ADD", func() error {
		cmd := exec.CommandContext(h.t.Context(), "/usr/bin/"+cni.PluginType)
		cmd.Env = []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_PATH=/usr/bin", "CNI_NETNS=" + ns.Path(podSpace)}
		cmd.Stdin = bytes.NewReader(conf)
		if out, err = cmd.CombinedOutput(); err != nil { // a host that is not ready yet says so
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal(out, &result); err != nil || len(result.IPs) != 1 {
		h.t.Fatalf("ADD: %v: %s", err, out)
	}
	h.pod = result.IPs[0].Address.Addr()
}

// torRoute returns the switch's route to the pod.
func (h *host) torRoute() string {
	h.t.Helper()
	out, err := h.try("ip", "-n", torSpace, "route", "get", h.pod.String())
	if err != nil {
		return ""
	}
	return out
}

// inService waits until the host is ready and the switch sends to the pod.
func (h *host) inService() {
	h.t.Helper()
	h.waitTor("in service", accepted)
	await.Until(h.t, "the host is ready", func() error {
		_, err := h.try("routerd", "health")
		return err
	})
	await.True(h.t, "the switch's route to the pod", func() bool { return strings.Contains(h.torRoute(), "via "+hostAddr) })
}

// startFlow has the switch send to the pod.
func (h *host) startFlow() *traffic.Flow {
	h.t.Helper()
	f, err := traffic.StartFlow(h.t.Context(), torSpace, h.pod, rate, traffic.Options{})
	if err != nil {
		h.t.Fatal(err)
	}
	h.more(f)
	return f
}

// more waits until the flow has got further answers.
func (h *host) more(f *traffic.Flow) {
	h.t.Helper()
	if err := f.WaitReceived(await.Context(h.t), f.Report().Received+rate); err != nil {
		h.t.Fatal(err)
	}
}

// endFlow ends it; nothing of it may have been lost.
func (h *host) endFlow(during string, f *traffic.Flow) {
	h.t.Helper()
	r := f.Stop()
	h.t.Logf("%s: %s", during, r)
	if r.Lost() > 0 {
		h.t.Errorf("%s: packets are lost: %s", during, r)
	}
}

// restarts does what ends with another process of the daemon: the switch goes on
// sending by the routes that it has, and all of it arrives.
func (h *host) restarts(what string, do func()) {
	h.t.Helper()
	h.tor.take()
	h.routes.take()
	f := h.startFlow()
	before := h.unit("MainPID")
	do()
	h.waitTor(what, back)
	h.inService()
	h.more(f)
	h.endFlow(what, f)
	if after := h.unit("MainPID"); after == before || after == "0" {
		h.t.Errorf("%s: process %s before, %s after", what, before, after)
	}
	if out := h.routes.take(); strings.Contains(out, "Deleted") {
		h.t.Errorf("%s: the switch's routes changed:\n%s", what, out)
	}
	if out := h.tor.take(); strings.Contains(out, leaving) {
		h.t.Errorf("%s: the host drains:\n%s", what, out)
	}
	h.expectUnit(map[string]string{"ActiveState": "active", "SubState": "running", "Result": "success"})
}
