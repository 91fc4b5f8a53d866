package runtimes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

// otherPlugins is where Debian's containernetworking-plugins are.
const otherPlugins = "/usr/lib/cni"

// host is a network namespace with a running routerd.
type host struct {
	t     *testing.T
	space string // the namespace's name
	dir   string
	bin   string // of what make build makes
	pid   int    // of the daemon, whose mounts all others share
}

// newHost brings a host up. Everything of it goes with the test.
func newHost(t *testing.T, name string) *host {
	t.Helper()
	h := newBareHost(t, name)
	h.pid = h.background(nil, filepath.Join(h.bin, "routerd"), "run", "--node-name", name)
	h.awaitReady()
	return h
}

// newBareHost is newHost without a daemon.
func newBareHost(t *testing.T, name string) *host {
	t.Helper()
	bin, err := filepath.Abs(cmp.Or(os.Getenv("ROUTERD_BIN"), "../../bin"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bin, "routerd")); err != nil {
		t.Fatalf("%v: run make build", err)
	}
	// The sockets below it have to be short.
	dir, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", prefix, os.Getpid())) //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, space: fmt.Sprintf("%s%d-%s", prefix, os.Getpid(), name), dir: dir, bin: bin}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, d := range []string{"opt/cni/bin", "etc/net.d"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.namespace(h.space)
	for _, args := range []string{
		"link set lo up", "link add eth0 type veth peer name far0", "addr add 10.78.0.1/24 dev eth0", "link set eth0 up", "link set far0 up",
	} {
		h.must(nil, append([]string{"ip", "-n", h.space}, strings.Fields(args)...)...)
	}
	h.must(nil, "cp", filepath.Join(bin, cni.PluginType), h.pluginDir())
	h.configure("1.0.0", map[string]any{"type": cni.PluginType, "socket": h.cniSocket(), "ipam": map[string]any{"type": cni.PluginType}})
	return h
}

func (h *host) awaitReady() {
	h.t.Helper()
	await.Until(h.t, "routerd is ready", func() error {
		_, err := h.plugin("STATUS", "1.1.0", map[string]any{"type": cni.PluginType, "socket": h.cniSocket()})
		return err
	})
}

func (h *host) pluginDir() string { return filepath.Join(h.dir, "opt/cni/bin") }
func (h *host) confDir() string   { return filepath.Join(h.dir, "etc/net.d") }
func (h *host) cniSocket() string { return filepath.Join(h.dir, "run", config.CNISocketName) }

// namespace makes a network namespace that ends with the test, and what runs in
// it too.
func (h *host) namespace(name string) {
	h.t.Helper()
	if err := ns.Create(name); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := ns.KillAll(context.Background(), name); err != nil { //nolint:usetesting // the test's context has ended by then
			h.t.Error(err)
		}
		if err := ns.Delete(name); err != nil {
			h.t.Error(err)
		}
	})
}

// configure writes the network "rtnet" of one plugin.
func (h *host) configure(version string, plugin map[string]any) {
	h.t.Helper()
	b, err := json.MarshalIndent(map[string]any{"cniVersion": version, "name": "rtnet", "plugins": []any{plugin}}, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(h.confDir(), "10-rtnet.conflist"), b, 0o644)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// plugin executes routerd-cni as a runtime would, without a container.
func (h *host) plugin(verb, version string, conf map[string]any) (string, error) {
	h.t.Helper()
	conf["cniVersion"], conf["name"] = version, "rtnet"
	b, err := json.Marshal(conf)
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.CommandContext(h.t.Context(), filepath.Join(h.pluginDir(), cni.PluginType))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_PATH=" + h.pluginDir()}
	cmd.Stdin = bytes.NewReader(b)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", verb, err, out)
	}
	return string(out), nil
}

// command is a program on the host. All of the host's programs share one view
// of the files, in which the test's plugins and networks are where the runtimes
// look for them; the daemon, which is the first, makes it.
func (h *host) command(env []string, args ...string) *exec.Cmd {
	prefix := []string{"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", h.pid), "--"}
	if h.pid == 0 {
		script := `mount --bind "$0/opt" /opt && mount --bind "$0/etc" /etc/cni && exec "$@"`
		prefix = []string{"unshare", "--mount", "--propagation", "slave", "sh", "-c", script, h.dir}
	}
	args = append(prefix, args...)
	cmd := exec.Command(args[0], args[1:]...) // ended with all of the namespace
	cmd.Env = append(append(os.Environ(),
		"ROUTERD_RUNDIR="+filepath.Join(h.dir, "run"), "ROUTERD_STATEDIR="+filepath.Join(h.dir, "state"),
		"CNI_PATH="+h.pluginDir(), "NETCONFPATH="+h.confDir()), env...)
	return cmd
}

// run runs a program on the host.
func (h *host) run(env []string, args ...string) (string, error) {
	h.t.Helper()
	cmd := h.command(env, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := ns.Start(h.space, cmd); err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s%s", strings.Join(args, " "), err, out.String(), errOut.String())
	}
	return out.String(), nil
}

func (h *host) must(env []string, args ...string) string {
	h.t.Helper()
	out, err := h.run(env, args...)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// background runs a program on the host until the test ends. What it logged is
// shown when the test has failed.
func (h *host) background(env []string, args ...string) (pid int) {
	h.t.Helper()
	log, err := os.Create(filepath.Join(h.dir, filepath.Base(args[0])+".log"))
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := h.command(env, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := ns.Start(h.space, cmd); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			h.t.Error(err)
		}
		_ = cmd.Wait() // its status is that of the signal
		if h.t.Failed() {
			if _, err := log.Seek(0, io.SeekStart); err == nil {
				b, _ := io.ReadAll(log)
				h.t.Logf("%s:\n%s", args[0], b[max(0, len(b)-8000):])
			}
		}
		log.Close()
	})
	return cmd.Process.Pid
}

// viewed runs a program in the background that makes the host's view of the files, and returns
// when it has: until then it is the program that mounts.
func (h *host) viewed(args ...string) (pid int) {
	h.t.Helper()
	pid = h.background(nil, args...)
	await.Until(h.t, "the host's view of its files", func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if comm := strings.TrimSpace(string(b)); err == nil && comm != args[0] {
			err = fmt.Errorf("process %d is still %q", pid, comm)
		}
		return err
	})
	return pid
}

// reachable pings an address from the host.
func (h *host) reachable(addr string) {
	h.t.Helper()
	await.Until(h.t, "the container answers", func() error {
		_, err := h.run(nil, "ping", "-c", "1", "-W", "1", addr)
		return err
	})
}

// workloadAddresses lists what IPAM gave to containers.
func (h *host) workloadAddresses() []string {
	h.t.Helper()
	ctx := await.Context(h.t)
	s, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{"unix://" + filepath.Join(h.dir, "run", config.OperatorSocketName)}})
	if err != nil {
		h.t.Fatal(err)
	}
	defer s.Close()
	var out []string
	err = store.Pages(ctx, s, store.KindIPAMHandle, "", func(objs []store.Object) error {
		for _, o := range objs {
			if strings.HasPrefix(o.Key.Name, "rtnet.") {
				out = append(out, o.Key.Name)
			}
		}
		return nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// nothingLeft expects that no container has an address or a device any more.
func (h *host) nothingLeft() {
	h.t.Helper()
	await.Until(h.t, "everything is given back", func() error {
		if left := h.workloadAddresses(); len(left) > 0 {
			return fmt.Errorf("handles %q", left)
		}
		if out := h.must(nil, "ip", "-br", "link"); regexp.MustCompile(`(?m)^cali`).MatchString(out) {
			return fmt.Errorf("devices:\n%s", out)
		}
		return nil
	})
}
