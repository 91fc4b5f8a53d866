package service

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
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
)

const unit = "../../configs/systemd/routerd.service"

// The capabilities of the unit, and no more, are enough to attach a container
// and to detach it, also where its namespace is named by a process that has
// more capabilities than the daemon: without SYS_PTRACE that fails.
func TestUnitsCapabilitiesSuffice(t *testing.T) {
	t.Parallel()
	bin, host, pod := binDir(t), newSpace(t, "host"), newSpace(t, "pod")
	uplink(t, host, "10.77.0.1/24")

	dir := t.TempDir()
	var log bytes.Buffer
	t.Cleanup(func() { // when it has ended
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", log.String())
		}
	})
	daemon := start(t, host, &log, append([]string{"setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=" + boundingSet(t)},
		filepath.Join(bin, "routerd"), "run", "--node-name", "svc"), "ROUTERD_RUNDIR="+dir, "ROUTERD_STATEDIR="+filepath.Join(dir, "state"))
	container := start(t, pod, io.Discard, []string{"sleep", "1000"})
	netns := fmt.Sprintf("/proc/%d/ns/net", container.Process.Pid)

	settings := map[string]any{
		"cniVersion": "1.0.0", "name": "net", "type": cni.PluginType, "socket": filepath.Join(dir, config.CNISocketName),
		"ipam": map[string]any{"type": cni.PluginType},
	}
	call := func(verb string) (string, error) {
		conf, err := json.Marshal(settings)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, cni.PluginType))
		cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_PATH=" + bin, "CNI_NETNS=" + netns}
		cmd.Stdin = bytes.NewReader(conf)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	// Until the daemon is ready it says so.
	var out string
	var err error
	await.Until(t, "ADD", func() error {
		if out, err = call("ADD"); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	if !strings.Contains(out, `"sandbox": "`+netns+`"`) {
		t.Errorf("ADD: %s", out)
	}
	settings["prevResult"] = json.RawMessage(out)
	if out, err = call("CHECK"); err != nil {
		t.Errorf("CHECK: %v: %s", err, out)
	}
	if out, err = call("DEL"); err != nil {
		t.Errorf("DEL: %v: %s", err, out)
	}
	stop(t, daemon)
	if strings.Contains(log.String(), "not permitted") || strings.Contains(log.String(), "permission denied") {
		t.Errorf("the daemon lacks something:\n%s", log.String())
	}
}

// binDir is where the programs are.
func binDir(t *testing.T) string {
	t.Helper()
	bin, err := filepath.Abs(cmp.Or(os.Getenv("ROUTERD_BIN"), "../../bin"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bin, "routerd")); err != nil {
		t.Fatalf("%v: run make build", err)
	}
	return bin
}

// newSpace makes a network namespace until the test ends.
func newSpace(t *testing.T, suffix string) string {
	t.Helper()
	name := fmt.Sprintf("rdsvc%d-%s", os.Getpid(), suffix)
	if err := ns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.KillAll(context.Background(), name); err != nil { //nolint:usetesting // the test's context has ended by then
			t.Error(err)
		}
		if err := ns.Delete(name); err != nil {
			t.Error(err)
		}
	})
	return name
}

// uplink gives a namespace a device eth0 with an address.
func uplink(t *testing.T, space, addr string) {
	t.Helper()
	for _, args := range []string{
		"link set lo up", "link add eth0 type veth peer name far0", "addr add " + addr + " dev eth0",
		"link set eth0 up", "link set far0 up",
	} {
		if out, err := exec.Command("ip", append([]string{"-n", space}, strings.Fields(args)...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
}

// boundingSet returns the unit's capabilities as setpriv(1) writes them.
func boundingSet(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.+)$`).FindSubmatch(b)
	if m == nil {
		t.Fatalf("%s has no CapabilityBoundingSet", unit)
	}
	set := "-all"
	for c := range strings.FieldsSeq(string(m[1])) {
		set += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	return set
}

// start runs a program in a namespace until the test ends.
func start(t *testing.T, space string, out io.Writer, args []string, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := ns.Start(space, cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			stop(t, cmd)
		}
	})
	return cmd
}

// stop ends a process; its output is complete afterwards.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // its status is that of the signal
}
