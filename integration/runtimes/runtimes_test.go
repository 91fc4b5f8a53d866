package runtimes

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
)

// busybox is the program of every container.
const busybox = "/bin/busybox"

// inContainer reads the address of a container's eth0, as `ip addr` shows it.
func inContainer(t *testing.T, out string) netip.Addr {
	t.Helper()
	m := regexp.MustCompile(`inet (\S+)/32`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no address with /32 in:\n%s", out)
	}
	return netip.MustParseAddr(m[1])
}

// podman returns the command line of podman, with all that it keeps below the
// host's directory, and its environment.
func (h *host) podman() (args, env []string) {
	h.t.Helper()
	conf := filepath.Join(h.dir, "containers.conf")
	err := os.WriteFile(conf, fmt.Appendf(nil, `[network]
network_backend = "cni"
network_config_dir = "/etc/cni/net.d"
cni_plugin_dirs = ["/opt/cni/bin"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
`), 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	return []string{
		"podman", "--root", filepath.Join(h.dir, "pod"), "--runroot", filepath.Join(h.dir, "podrun"),
		"--tmpdir", filepath.Join(h.dir, "podtmp"), "--storage-driver", "vfs",
	}, []string{"CONTAINERS_CONF=" + conf}
}

// build builds the image routerd-test:1 from nothing but busybox.
func (h *host) build() {
	h.t.Helper()
	dir := filepath.Join(h.dir, "image")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		h.t.Fatal(err)
	}
	path, err := exec.LookPath("busybox")
	if err != nil {
		h.t.Fatal(err)
	}
	h.must(nil, "cp", path, filepath.Join(dir, "busybox"))
	if err := os.WriteFile(filepath.Join(dir, "Containerfile"), []byte("FROM scratch\nCOPY busybox "+busybox+"\n"), 0o600); err != nil {
		h.t.Fatal(err)
	}
	podman, env := h.podman()
	h.must(env, append(podman, "build", "--quiet", "--tag", "routerd-test:1", dir)...)
}

func TestPodman(t *testing.T) {
	t.Parallel()
	h := newHost(t, "podman")
	h.build()
	podman, env := h.podman()
	do := func(args ...string) string { h.t.Helper(); return h.must(env, append(podman, args...)...) }
	var addrs []netip.Addr
	for _, name := range []string{"one", "two"} {
		do("run", "--detach", "--name", name, "--network", "rtnet", "routerd-test:1", busybox, "sleep", "1000")
		t.Cleanup(func() { _, _ = h.run(env, append(podman, "rm", "--force", "--time", "0", name)...) })
		addrs = append(addrs, inContainer(t, do("exec", name, busybox, "ip", "addr", "show", "eth0")))
	}
	if addrs[0] == addrs[1] {
		t.Errorf("both containers have %s", addrs[0])
	}
	h.reachable(addrs[0].String())
	do("exec", "one", busybox, "ping", "-c", "1", "-w", "10", addrs[1].String())
	// A container that asks for an address gets it.
	want := netip.PrefixFrom(addrs[0], 26).Masked().Addr().Next().Next().Next().Next().Next().String()
	do("run", "--rm", "--network", "rtnet", "--ip", want, "routerd-test:1", busybox, "ip", "addr", "show", "eth0")
	for _, name := range []string{"one", "two"} {
		do("rm", "--force", "--time", "0", name)
	}
	h.nothingLeft()
}

// containerd starts it and returns the command line of its client.
func (h *host) containerd() (client []string) {
	h.t.Helper()
	conf, socket := filepath.Join(h.dir, "containerd.toml"), filepath.Join(h.dir, "c.sock")
	err := os.WriteFile(conf, fmt.Appendf(nil, `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
address = %q
[ttrpc]
address = %q
`, filepath.Join(h.dir, "ctd"), filepath.Join(h.dir, "ctdstate"), socket, filepath.Join(h.dir, "t.sock")), 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	h.background(nil, "containerd", "--config", conf, "--log-level", "warn")
	client = []string{"ctr", "--address", socket}
	await.Until(h.t, "containerd answers", func() error {
		_, err := h.run(nil, append(client, "version")...)
		return err
	})
	return slices.Clip(client)
}

// runcDir is where runc keeps its containers. Its own place is one for all containerds of
// the machine, and a test that was killed leaves the names of its containers there.
func (h *host) runcDir() string { return filepath.Join(h.dir, "runc") }

func TestContainerd(t *testing.T) {
	t.Parallel()
	h := newHost(t, "containerd")
	h.build()
	podman, env := h.podman()
	archive := filepath.Join(h.dir, "image.tar")
	h.must(env, append(podman, "save", "--quiet", "--format", "docker-archive", "--output", archive, "routerd-test:1")...)
	client := h.containerd()
	ctr := func(args ...string) string {
		t.Helper()
		return h.must(nil, append(client, args...)...)
	}
	ctr("image", "import", "--snapshotter", "native", archive)
	image := strings.TrimSpace(ctr("image", "ls", "-q"))
	ctr("run", "--detach", "--snapshotter", "native", "--cni", "--runc-root", h.runcDir(), image, "one", busybox, "sleep", "1000")
	gone := false
	t.Cleanup(func() {
		if !gone {
			_, _ = h.run(nil, append(client, "task", "kill", "--signal", "9", "one")...)
		}
	})
	addr := inContainer(t, ctr("task", "exec", "--exec-id", "e1", "one", busybox, "ip", "addr", "show", "eth0"))
	h.reachable(addr.String())
	ctr("task", "exec", "--exec-id", "e2", "one", busybox, "ping", "-c", "1", "-w", "10", "10.78.0.1")
	ctr("task", "kill", "--signal", "9", "one")
	await.Until(h.t, "the task can be removed", func() error {
		_, err := h.run(nil, append(client, "task", "rm", "one")...)
		return err
	})
	ctr("container", "rm", "one")
	gone = true
	// ctr detaches a container only where it waits for its end itself: what is
	// left of this one goes with GC, as runtimes of CNI 1.1 ask for it.
	if _, err := h.plugin("GC", "1.1.0", map[string]any{
		"type": cni.PluginType, "socket": h.cniSocket(), "cni.dev/valid-attachments": []any{},
	}); err != nil {
		t.Error(err)
	}
	// ctr's network has a name of its own, which the configuration gives.
	h.nothingLeft()
}

// pod is a network namespace that stands for a container.
func (h *host) pod(name string) (path string) {
	h.t.Helper()
	name = h.space + "-" + name
	h.namespace(name)
	return ns.Path(name)
}

// cnitool builds the CNI project's own tool.
func cnitool(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cnitool")
	cmd := exec.Command("go", "build", "-o", path, "github.com/containernetworking/cni/cnitool")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build cnitool: %v\n%s", err, out)
	}
	return path
}

type cniResult struct {
	IPs []struct {
		Address netip.Prefix
		Gateway string
	}
}

func parseResult(t *testing.T, out string) cniResult {
	t.Helper()
	var r cniResult
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.IPs) == 0 {
		t.Fatalf("no result with addresses: %v: %s", err, out)
	}
	return r
}

// Every verb of CNI 1.1, each with its meaning, by the specification's own tool.
func TestCnitool(t *testing.T) {
	t.Parallel()
	tool := cnitool(t)
	h := newHost(t, "cnitool")
	h.configure("1.1.0", map[string]any{"type": cni.PluginType, "socket": h.cniSocket(), "ipam": map[string]any{"type": cni.PluginType}})
	// libcni keeps results in one place for all networks.
	cache := []string{"HOME=" + h.dir}
	one, two := h.pod("one"), h.pod("two")
	h.must(cache, tool, "status", "rtnet", one)
	addr := parseResult(t, h.must(cache, tool, "add", "rtnet", one)).IPs[0].Address.Addr()
	h.must(cache, tool, "add", "rtnet", two)
	h.reachable(addr.String())
	h.must(cache, tool, "check", "rtnet", one)
	h.must(nil, "ip", "netns", "exec", h.space+"-one", "ip", "addr", "flush", "dev", "eth0")
	if _, err := h.run(cache, tool, "check", "rtnet", one); err == nil || !strings.Contains(err.Error(), "address "+addr.String()+" is missing") {
		t.Errorf("CHECK of a container whose address is gone: %v", err)
	}
	h.must(cache, tool, "del", "rtnet", one)
	h.must(cache, tool, "del", "rtnet", one)
	// GC knows no valid attachment but those that libcni remembers: none is
	// given, so what is left goes.
	if _, err := h.plugin("GC", "1.1.0", map[string]any{
		"type": cni.PluginType, "socket": h.cniSocket(), "cni.dev/valid-attachments": []any{},
	}); err != nil {
		t.Error(err)
	}
	h.nothingLeft()
}

// Other network plugins take their addresses from routerd-cni, and other IPAM
// plugins give addresses to routerd-cni's containers.
func TestOtherPlugins(t *testing.T) {
	t.Parallel()
	tool := cnitool(t)
	h := newHost(t, "others")
	for _, p := range []string{"ptp", "bridge", "host-local", "static", "macvlan"} {
		h.must(nil, "cp", filepath.Join(otherPlugins, p), h.pluginDir())
	}
	own := map[string]any{"type": cni.PluginType}
	for _, tt := range []struct {
		name   string
		plugin map[string]any
		peers  bool // two containers reach each other
		host   bool // and the host reaches them
	}{
		{"ptp", map[string]any{"type": "ptp", "socket": h.cniSocket(), "ipam": own}, true, true},
		{"bridge", map[string]any{"type": "bridge", "bridge": "br0", "isGateway": true, "isDefaultGateway": true, "socket": h.cniSocket(), "ipam": own}, true, true},
		{"macvlan", map[string]any{"type": "macvlan", "master": "eth0", "mode": "bridge", "socket": h.cniSocket(), "ipam": map[string]any{"type": cni.PluginType, "gateway": "none"}}, true, false},
		{"host-local", map[string]any{
			"type": cni.PluginType, "socket": h.cniSocket(),
			"ipam": map[string]any{"type": "host-local", "dataDir": filepath.Join(h.dir, "leases"), "subnet": "10.79.0.0/24"},
		}, true, true},
		{"static", map[string]any{
			"type": cni.PluginType, "socket": h.cniSocket(),
			"ipam": map[string]any{"type": "static", "addresses": []any{map[string]any{"address": "10.79.1.5/24"}}},
		}, false, true},
	} {
		cache := []string{"HOME=" + h.dir}
		h.configure("1.0.0", tt.plugin)
		var addrs []netip.Addr
		var pods []string
		for i := range 2 {
			if i > 0 && !tt.peers {
				break
			}
			pod := h.pod(fmt.Sprintf("%s%d", tt.name, i))
			out, err := h.run(cache, tool, "add", "rtnet", pod)
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			pods = append(pods, pod)
			addrs = append(addrs, parseResult(t, out).IPs[0].Address.Addr())
		}
		if tt.host {
			h.reachable(addrs[0].String())
		}
		if tt.peers {
			await.Until(h.t, tt.name+": the containers reach each other", func() error {
				_, err := h.run(nil, "ip", "netns", "exec", filepath.Base(pods[0]), "ping", "-c", "1", "-W", "1", addrs[1].String())
				return err
			})
		}
		for _, pod := range pods {
			if _, err := h.run(cache, tool, "check", "rtnet", pod); err != nil {
				t.Errorf("%s: check: %v", tt.name, err)
			}
			if _, err := h.run(cache, tool, "del", "rtnet", pod); err != nil {
				t.Errorf("%s: del: %v", tt.name, err)
			}
		}
		h.nothingLeft()
	}
}
