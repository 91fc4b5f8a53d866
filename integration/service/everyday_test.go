package service

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// everyday has calicoctl's everyday command lines, and the files that they name.
const everyday = "../../cmd/routerctl/testdata/scripts/everyday.txtar"

// TestEverydayLines: calicoctl's everyday command lines do on a host with a daemon and its embedded datastore what
// cmd/routerctl TestScripts holds with an etcd alone.
func TestEverydayLines(t *testing.T) {
	t.Parallel()
	bin, host, dir := binDir(t), newSpace(t, "everyday"), t.TempDir()
	uplink(t, host, "10.1.0.11/24")
	lines := unpack(t, dir)
	var log bytes.Buffer
	t.Cleanup(func() { // when it has ended
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", log.String())
		}
	})
	run := filepath.Join(dir, "run")
	start(t, host, &log, []string{filepath.Join(bin, "routerd"), "run", "--node-name", "node1"}, "ROUTERD_RUNDIR="+run, "ROUTERD_STATEDIR="+filepath.Join(dir, "state"))
	// on runs a command line on the host.
	on := func(line string) (code int, out string) {
		cmd := exec.Command("sh", "-c", line)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "ROUTERD_SOCKET="+filepath.Join(run, config.OperatorSocketName), "SSH_CONNECTION=")
		var b bytes.Buffer
		cmd.Stdout, cmd.Stderr = &b, &b
		if err := ns.Start(host, cmd); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // the exit code says it
		return cmd.ProcessState.ExitCode(), b.String()
	}
	await.Until(t, "the daemon is ready", func() error {
		if code, out := on("routerctl node status"); code != 0 {
			return fmt.Errorf("exit code %d: %s", code, out)
		}
		return nil
	})
	if code, out := on("routerctl doctor"); code != 0 {
		t.Errorf("a host that has just started is not well: exit code %d: %s", code, out)
	}
	hold := 0
	for _, line := range lines {
		f := strings.SplitN(line+" ", " | ", 3)
		if len(f) != 3 {
			t.Fatalf("%q: want CODE | COMMAND | PATTERN", line)
		}
		want, err := strconv.Atoi(f[0])
		if err != nil {
			t.Fatal(err)
		}
		code, out := on("routerctl " + f[1])
		if pattern := regexp.MustCompile("(?m)" + strings.TrimSpace(f[2])); code == want && pattern.MatchString(out) {
			hold++
			continue
		}
		t.Errorf("%s: exit code %d, want %d and %q:\n%s", f[1], code, want, strings.TrimSpace(f[2]), out)
	}
	t.Logf("%d of %d lines do as calicoctl does", hold, len(lines))
}

// unpack writes the files that the lines name, and returns the lines.
func unpack(t *testing.T, dir string) []string {
	t.Helper()
	archive, err := txtar.ParseFile(everyday)
	if err != nil {
		t.Fatal(err)
	}
	ipip, err := lab.Supported(store.IPIP)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range archive.Files {
		if f.Name == "lines.txt" {
			lines = strings.Split(strings.TrimRight(string(f.Data), "\n"), "\n")
		}
		if !ipip { // routerctl would refuse it, which calicoctl does not
			f.Data = bytes.ReplaceAll(f.Data, []byte("ipipMode:"), []byte("vxlanMode:"))
		}
		path := filepath.Join(dir, f.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, f.Data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if len(lines) == 0 {
		t.Fatalf("%s has no lines", everyday)
	}
	return lines
}
