package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/lab/stall"
	"github.com/routerd/routerd/store"
)

// TestWithoutConfiguration: a host with nothing but directories is a cluster
// of one, ready for workloads.
func TestWithoutConfiguration(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config = map[string]any{"nodeName": nil, "logLevel": nil}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	conf := h.writeConfig()
	if code, out := h.routerd("health", "--config", conf); code != 1 || mentions(out, "ask the daemon at", "routerd.sock") != nil {
		t.Errorf("health before the start: exit code %d, %s", code, out)
	}
	stalls, err := stall.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := h.start()
	n := r.ready()
	got := map[string]string{
		"name": n.GetName(), "address": n.GetIpv4Address(), "uplink": n.GetUplink(), "method": n.GetAddressMethod(),
		"datastore": n.GetDatastore(), "mtu": fmt.Sprint(n.GetWorkloadMtu()),
	}
	for k, want := range map[string]string{
		"name": strings.ToLower(name), "address": "10.1.0.11/24", "uplink": "eth0", "method": "first-found",
		"datastore": "embedded", "mtu": "1450",
	} {
		if got[k] != want {
			t.Errorf("%s is %q, want %q", k, got[k], want)
		}
	}
	if len(n.GetPools()) != 1 || n.GetPools()[0].GetCidr() != "192.168.0.0/16" || !n.GetPools()[0].GetUsable() {
		t.Errorf("pools: %v; want the default pool", n.GetPools())
	}
	if _, err := r.cni.Status(t.Context(), &apiv1.StatusRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Errorf("CNI STATUS: %v", err)
	}
	for _, args := range [][]string{{"health"}, {"health", "--live"}, {"health", "--ready"}} {
		if code, out := h.routerd(append(args, "--config", conf)...); code != 0 {
			t.Errorf("%s: exit code %d, %s", strings.Join(args, " "), code, out)
		}
	}
	if _, err := h.store("").Get(t.Context(), store.ResourceKey(store.KindNode, n.GetName())); err != nil {
		t.Errorf("the host is not registered: %v", err)
	}
	if st := r.kill(syscall.SIGTERM); st.ExitCode() != 0 {
		t.Errorf("SIGTERM: %s", st)
	}
	// What is normal is no cause for alarm. That the whole machine stands still
	// for as long as a timeout is not normal.
	stalls.Stop()
	fail := t.Errorf
	if stalls.Longest() > stoodStill {
		fail = t.Logf
	}
	for _, level := range []string{"level=WARN", "level=ERROR"} {
		if l := slices.DeleteFunc(r.log.lines(level), aboutMachine); len(l) > 0 {
			fail("a first start and a stop, with a stall of %s, logged:\n%s", stalls.Longest(), strings.Join(l, "\n"))
		}
	}
	for _, line := range r.log.lines("component=") {
		if strings.Count(line, "component=") > 1 {
			t.Errorf("component twice: %s", line)
		}
	}
}

// stoodStill is a stall within which timeouts run out: etcd's shortest, of a
// linearizable read, is of 500 ms.
const stoodStill = 400 * time.Millisecond

// aboutMachine reports whether a line of the log is etcd's word on how long
// something took: on a machine whose processors were taken away that is as it
// should be.
func aboutMachine(line string) bool {
	return strings.Contains(line, "component=etcd") && slices.ContainsFunc([]string{
		"apply request took too long", "request stats", "slow fdatasync",
		"waiting for ReadIndex response took too long, retrying", "ignored out-of-date read index response",
	}, func(message string) bool { return strings.Contains(line, `message="`+message) })
}

func TestNotRoot(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	if err := os.Chmod(h.dir, 0o755); err != nil { // for the other user to read the configuration
		t.Fatal(err)
	}
	cmd, hold := h.command("run", "--config", h.writeConfig())
	defer hold.Close()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Path = "/proc/self/exe" // others may not enter the directory of a test's binary
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	code, text := h.finish(cmd, &out)
	if err := mentions(text, "must be root", "sudo", "systemd"); code != 1 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
}

func TestSecondDaemon(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	r := h.start()
	r.ready()
	code, out := h.routerd("run", "--config", h.writeConfig())
	if err := mentions(out, "another routerd runs", h.runDir(), "stop it"); code != 1 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	other := &host{t: t, ns: h.ns, dir: t.TempDir(), config: map[string]any{"runDir": h.dir + "/other"}}
	code, out = other.routerd("run", "--config", other.writeConfig())
	if err := mentions(out, "another routerd runs in this network namespace", "stop it"); code != 1 || err != nil {
		t.Errorf("with a run directory of its own: exit code %d, %v", code, err)
	}
	r.ready() // undisturbed

	// The lock goes with the process, however it ends.
	r.kill(syscall.SIGKILL)
	h.start().ready()
}

func TestConfigurationRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	for what, test := range map[string]struct {
		config map[string]any
		want   []string
	}{
		"unknown key": {map[string]any{"datastore": map[string]any{"endpoint": "http://10.0.0.1:2379"}}, []string{"routerd.yaml", "datastore", "endpoint", "datastore.endpoints"}},
		"bad value":   {map[string]any{"defaultPool": map[string]any{"blockSize": 33}}, []string{"defaultPool.blockSize", "33", "want 20 to 32"}},
		"wrong type":  {map[string]any{"bgp": map[string]any{"enabled": "perhaps"}}, []string{"bgp.enabled", "bool"}},
	} {
		h.config = test.config
		code, out := h.routerd("run", "--config", h.writeConfig())
		if err := mentions(out, test.want...); code != 1 || err != nil {
			t.Errorf("%s: exit code %d, %v", what, code, err)
		}
	}
	code, out := h.routerd("run", "--config", filepath.Join(h.dir, "none.yaml"))
	if err := mentions(out, "none.yaml", "no such file"); code != 1 || err != nil {
		t.Errorf("no file: exit code %d, %v", code, err)
	}
}

func TestEmbeddedPortTaken(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.listen("10.1.0.11:2379")
	h.config["datastore"] = map[string]any{"embedded": map[string]any{"listen": "10.1.0.11:2379"}}
	code, out := h.routerd("run", "--config", h.writeConfig())
	if err := mentions(out, "10.1.0.11:2379", "address already in use", "another port"); code != 1 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
}

// TestSocketTaken: what lies where a socket should be and is none is not
// removed.
func TestSocketTaken(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	path := filepath.Join(h.runDir(), "cni.sock")
	if err := errors.Join(os.Mkdir(h.runDir(), 0o700), os.WriteFile(path, []byte("mine"), 0o600)); err != nil {
		t.Fatal(err)
	}
	code, out := h.routerd("run", "--config", h.writeConfig())
	if err := mentions(out, path); code != 1 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "mine" {
		t.Errorf("the file was touched: %q, %v", b, err)
	}
}
