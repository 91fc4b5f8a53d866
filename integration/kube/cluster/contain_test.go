package cluster_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

const (
	// hangVariable has this program be one that hangs, contained, with things left open.
	hangVariable = "ROUTERD_CLUSTER_HANG"
	hangPrefix   = "rdkhang"
)

// hang makes what a cluster has outside of its namespaces, and more in them, says so
// and stays.
func hang() (code int, err error) {
	name, code, err := cluster.Contain(hangPrefix)
	if name == "" || err != nil {
		return code, err
	}
	dir := filepath.Join(cluster.Dir(name), "mounted")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 1, err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return 1, err
	}
	if err := cluster.MakeCgroup(name + "/below"); err != nil {
		return 1, err
	}
	cmd := exec.Command("sh", "-c", `trap "" TERM INT HUP; echo $$ >/sys/fs/cgroup/memory/`+name+`/below/cgroup.procs 2>&1; echo made; setsid sleep 1000`)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return 1, cmd.Run()
}

// left lists what a run has outside of its namespaces.
func left(t *testing.T) (paths []string) {
	t.Helper()
	for _, pattern := range []string{filepath.Join(os.TempDir(), hangPrefix+"*"), "/sys/fs/cgroup/*/" + hangPrefix + "*"} {
		l, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, l...)
	}
	return paths
}

// hanging starts a program that hangs, and returns when all is made that may be left.
func hanging(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "ROUTERD_CLUSTER_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, hangVariable+"=1")
	said, err := os.CreateTemp(t.TempDir(), "said")
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		_ = cmd.Wait() // it was waited for, or killed just now
	})
	await.Until(t, "it hangs", func() error {
		text, err := os.ReadFile(said.Name())
		if err == nil && !strings.Contains(string(text), "made") {
			err = fmt.Errorf("it says %q", text)
		}
		return err
	})
	if len(left(t)) == 0 {
		t.Fatal("it has nothing outside of its namespaces")
	}
	return cmd
}

// TestInterrupted: of a contained run that a signal ends nothing is left, and of one
// that was killed outright the next removes what is left.
func TestInterrupted(t *testing.T) {
	cmd := hanging(t)
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 130 {
		t.Errorf("interrupted, it ends with %v", err)
	}
	if l := left(t); len(l) > 0 {
		t.Errorf("interrupted, it leaves %q", l)
	}

	killed := hanging(t)
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = killed.Wait()
	before := left(t)
	if len(before) == 0 {
		t.Fatal("killed, it leaves nothing: this test tries nothing")
	}
	next := hanging(t)
	for _, path := range before {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the next run leaves %s: %v", path, err)
		}
	}
	if err := next.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = next.Wait()
	if l := left(t); len(l) > 0 {
		t.Errorf("ended, it leaves %q", l)
	}
}
