package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
)

// everything shows all that is in a host's kernel that a cleanup could touch.
func (h *host) everything() string {
	h.t.Helper()
	var b strings.Builder
	for _, args := range []string{
		"ip addr", "ip -d link show type vxlan", "ip -d route show table all", "ip -d nexthop", "ip rule", "ip neigh show nud permanent",
		"bridge fdb show", "nft list ruleset",
	} {
		out, err := h.exec(strings.Fields(args)...)
		if err != nil {
			h.t.Fatal(err)
		}
		fmt.Fprintf(&b, "# %s\n%s", args, out)
	}
	return b.String()
}

// intoThePool are strangers' routes that overlap the default pool, which a
// daemon does not make where they are already.
func intoThePool() []string {
	return []string{"192.168.200.0/26 via 10.1.0.99 metric 50 proto static", "blackhole 192.168.201.0/26 metric 51 proto bird"}
}

// strangers puts on a host what looks like routerd's and is not.
func (h *host) strangers() {
	h.t.Helper()
	for _, args := range []string{
		"ip link add calico-test0 type bridge", "ip link set calico-test0 up", "ip addr add 172.30.0.1/24 dev calico-test0",
		"ip link add calixyz type veth peer name veth-other", "ip link set calixyz up", "ip link set calixyz alias user:routerd",
		"ip link add vxlan7 type vxlan id 7 dstport 4790 local 10.1.0.11 dev eth0", "ip link set vxlan7 up", "ip link set vxlan7 alias routerd",
		"ip addr add 172.31.0.1/24 dev vxlan7",
		"ip link add vxlan.calicolab type vxlan id 77 dstport 4791", "ip link set vxlan.calicolab up alias routerd",
		"ip route add 192.168.200.0/26 via 10.1.0.99 table 77 proto static",
		"ip nexthop add id 4712 via 10.1.0.99 dev eth0 proto zebra onlink", "ip route add 198.51.100.0/24 nhid 4712 proto zebra",
		"ip neigh add 10.1.0.98 lladdr 66:00:00:00:00:98 dev eth0 nud permanent",
		"ip rule add from 192.168.0.0/16 lookup 77 priority 77",
		"bridge fdb add 66:00:00:00:00:97 dev vxlan7 dst 10.1.0.97 self permanent",
		"nft add table inet routerd-test", "nft add table ip routerd",
	} {
		if _, err := h.exec(strings.Fields(args)...); err != nil {
			h.t.Fatal(err)
		}
	}
}

// cleanupConfig gives the daemon directories of its own for CNI, and returns
// them and the file that names its protocol.
func (h *host) cleanupConfig() (conflist, protocols string) {
	h.t.Helper()
	confDir := filepath.Join(h.dir, "net.d")
	protocols = filepath.Join(h.dir, "routerd.conf")
	if err := os.MkdirAll(confDir, 0o755); err != nil {
		h.t.Fatal(err)
	}
	h.config["address"] = map[string]any{"ipv4": "interface=eth0"}
	h.config["cni"] = map[string]any{"confDir": confDir, "binDir": filepath.Join(h.dir, "cni-bin")}
	return filepath.Join(confDir, cni.ConflistName), protocols
}

func TestCleanup(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	conflist, protocols := h.cleanupConfig()
	h.strangers()
	for _, r := range intoThePool() {
		h.ip("route add " + r)
	}
	before := h.everything()
	for _, r := range intoThePool() {
		h.ip("route del " + r)
	}
	cleanup := func(args ...string) (int, string) {
		t.Helper()
		return h.routerd(append([]string{"cleanup", "--config", h.writeConfig(), "--rt-protos", protocols}, args...)...)
	}
	// Calico gives its device the name that ours has.
	h.ip("link add vxlan.calico type vxlan id 4096 dstport 4789 local 10.1.0.11 dev eth0 nolearning")
	h.ip("link set vxlan.calico up")
	if code, out := cleanup("--yes"); code != 0 || out != "nothing of routerd's is on this host\n" {
		t.Fatalf("on a host that never had routerd: %d %s", code, out)
	}
	h.ip("link del vxlan.calico")
	r := h.start()
	r.ready()
	r.program()
	for _, r := range intoThePool() {
		h.ip("route add " + r)
	}
	c, err := config.Load(h.writeConfig())
	if err != nil {
		t.Fatal(err)
	}
	b, err := cni.Conflist(conflistOptions(c))
	if err != nil {
		t.Fatal(err)
	}
	plugin, loopback := filepath.Join(c.CNI.BinDir, cni.PluginType), filepath.Join(c.CNI.BinDir, cni.LoopbackType)
	if err := errors.Join(os.Mkdir(c.CNI.BinDir, 0o755), os.Symlink(cni.PluginType, loopback)); err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{conflist: string(b), protocols: "# ours\n77\trouterd\n", plugin: "a plugin"} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	// While the daemon runs it refuses, and says which process it is.
	code, out := cleanup("--yes")
	if want := fmt.Sprintf("runs with process id %d and would put everything back: stop it first", r.cmd.Process.Pid); code == 0 || !strings.Contains(out, want) {
		t.Errorf("beside a daemon: %d %s\nwant %s", code, out, want)
	}
	r.kill(syscall.SIGKILL)
	// As a kill in the middle of a write leaves it.
	cut := filepath.Join(h.runDir(), ".reach.json.42.tmp")
	if err := os.WriteFile(cut, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	busy := h.everything()

	code, dry := cleanup("--dry-run")
	if code != 0 {
		t.Fatalf("dry run: %d %s", code, dry)
	}
	for _, want := range []string{
		"would remove route 192.168.200.0/26 nhid ", "would remove nexthop id ", "would remove link vxlan.calico type vxlan ",
		"would remove address ", "would remove link cali", "would remove nftables table inet routerd\n", "would remove file " + conflist + "\n",
		"would remove file " + protocols + "\n", "would remove file " + filepath.Join(h.runDir(), "cni.sock") + "\n",
		"would remove file " + cut + "\n", "would remove file " + plugin + "\n", "would remove file " + loopback + "\n",
	} {
		if !strings.Contains(dry, want) {
			t.Errorf("the dry run does not say %q:\n%s", want, dry)
		}
	}
	if diff := cmp.Diff(busy, h.everything()); diff != "" {
		t.Errorf("a dry run changes (-before +after):\n%s", diff)
	}
	// Without an answer nothing is removed.
	if code, out := cleanup(); code == 0 || !strings.Contains(out, "nothing was removed") {
		t.Errorf("unanswered: %d %s", code, out)
	}
	if diff := cmp.Diff(busy, h.everything()); diff != "" {
		t.Errorf("without an answer it changes (-before +after):\n%s", diff)
	}

	// Workloads would have no network.
	if code, out := cleanup("--yes"); code == 0 || !strings.Contains(out, "workloads are attached, which would have no network (cali") {
		t.Errorf("with workloads: %d %s", code, out)
	}
	if diff := cmp.Diff(busy, h.everything()); diff != "" {
		t.Errorf("it changes, with workloads (-before +after):\n%s", diff)
	}

	code, out = cleanup("--yes", "--force")
	if code != 0 {
		t.Errorf("cleanup: %d %s", code, out)
	}
	for line := range strings.Lines(dry) {
		if want := strings.Replace(line, "would remove", "removed", 1); !strings.Contains(out, want) {
			t.Errorf("the dry run promised %s", line)
		}
	}
	if diff := cmp.Diff(before, h.everything()); diff != "" {
		t.Errorf("the host is not as it was before routerd (-before +after):\n%s", diff)
	}
	for _, path := range []string{conflist, protocols, plugin, loopback, h.runDir()} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			list, _ := os.ReadDir(path)
			t.Errorf("%s: %v %v", path, err, list)
		}
	}
	if _, err := os.Stat(filepath.Join(h.dir, "state")); err != nil {
		t.Errorf("the state: %v", err)
	}
	if code, out := cleanup("--yes"); code != 0 || out != "nothing of routerd's is on this host\n" {
		t.Errorf("the second time: %d %s", code, out)
	}
	if code, out := cleanup("--yes", "--purge"); code != 0 {
		t.Errorf("purge: %d %s", code, out)
	}
	if _, err := os.Stat(filepath.Join(h.dir, "state")); !os.IsNotExist(err) {
		t.Errorf("the state after a purge: %v", err)
	}
}

// TestCleanupLeavesChangedFiles: a configuration that somebody edited is his.
func TestCleanupLeavesChangedFiles(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	conflist, protocols := h.cleanupConfig()
	loopback := filepath.Join(h.dir, "cni-bin", cni.LoopbackType)
	if err := os.Mkdir(filepath.Dir(loopback), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{conflist: "{}", protocols: "77 routerd\n78 mine\n", loopback: "another's"} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	code, out := h.routerd("cleanup", "--yes", "--config", h.writeConfig(), "--rt-protos", protocols)
	want := fmt.Sprintf("left alone: %s was changed since routerd wrote it\nleft alone: %s was changed since routerd wrote it\nnothing of routerd's is on this host\n", conflist, protocols)
	if code != 0 || out != want {
		t.Errorf("%d %s\nwant %s", code, out, want)
	}
	for _, path := range []string{conflist, protocols, loopback} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestCleanupKilled kills it at random moments; the next completes it.
func TestCleanupKilled(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	_, protocols := h.cleanupConfig()
	h.strangers()
	before := h.everything()
	var batch strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&batch, "route add blackhole 172.%d.%d.%d/32 proto 77\n", 16+i>>16, i>>8&255, i&255)
	}
	fmt.Fprintln(&batch, "link add vxlan.calico type vxlan id 4096 dstport 4789 local 10.1.0.11 dev eth0\nlink set vxlan.calico up alias routerd")
	file := filepath.Join(h.dir, "batch")
	if err := os.WriteFile(file, []byte(batch.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"cleanup", "--yes", "--config", h.writeConfig(), "--rt-protos", protocols}
	middle := 0
	for range 4 {
		// What the last round left is refused, and stays.
		_, _ = h.exec("ip", "-force", "-batch", file)
		cmd, hold := h.command(args...)
		out := &log{}
		cmd.Stdout, cmd.Stderr = out, out
		if err := h.ns.Do(cmd.Start); err != nil {
			t.Fatal(err)
		}
		await.Until(t, "the list", func() error {
			if len(out.lines("to be removed: link vxlan.calico")) == 0 {
				return fmt.Errorf("not told yet: %d bytes", len(out.String()))
			}
			return nil
		})
		late := time.AfterFunc(time.Duration(rand.IntN(1000))*time.Millisecond, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		late.Stop()
		hold.Close()
		if left := strings.Count(h.ip("route show proto 77"), "\n"); err != nil && left > 0 {
			t.Logf("killed with %d routes left", left)
			middle++
		}
	}
	code, out := h.routerd(args...)
	if code != 0 {
		t.Errorf("after the kills: %d %s", code, out)
	}
	if diff := cmp.Diff(before, h.everything()); diff != "" {
		t.Errorf("the host is not as it was before (-before +after):\n%s", diff)
	}
	t.Logf("%d of 4 were killed in the middle", middle)
}
