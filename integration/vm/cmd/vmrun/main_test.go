package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/routerd/routerd/integration/await"
)

// asVMRun makes this test binary behave as vmrun, so that a test can start,
// signal and kill it.
const asVMRun = "ROUTERD_TEST_AS_VMRUN"

func TestMain(m *testing.M) {
	if os.Getenv(asVMRun) != "" {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func TestBadCommandLines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "no command given"},
		{[]string{"--file", "a:b", "true"}, "want host:guest with an absolute path"},
		{[]string{"--env", "=x", "true"}, "want NAME=value"},
		{[]string{"--bin", "/nonexistent", "true"}, "make build"},
		{[]string{"--timeout", "soon", "true"}, "timeout"},
	} {
		var stderr bytes.Buffer
		if status := run(c.args, io.Discard, &stderr); status != exitFailed || !strings.Contains(stderr.String(), c.want) {
			t.Errorf("vmrun %q: status %d and %q: want %d and %q", c.args, status, stderr.String(), exitFailed, c.want)
		}
	}
}

func TestTestBinaryRunsInItsOwnDirectory(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	pkg := filepath.Join(root, "dataplane", "kernel")
	if err := os.MkdirAll(filepath.Join(pkg, "testdata"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := &options{}
	o.config.Command = []string{"/tmp/go-build1/kernel.test", "-test.v"}
	o.asTest(root, pkg)
	guest := map[string]string{}
	for _, f := range o.config.Files {
		guest[f.Host] = f.Guest
	}
	if got, want := o.config.Dir, "/opt/routerd/src/dataplane/kernel"; got != want {
		t.Errorf("directory %s, want %s", got, want)
	}
	if got, want := o.config.Command[0], guest["/tmp/go-build1/kernel.test"]; got != want {
		t.Errorf("runs %s, and the binary is at %s", got, want)
	}
	if got, want := guest[filepath.Join(pkg, "testdata")], "/opt/routerd/src/dataplane/kernel/testdata"; got != want {
		t.Errorf("testdata at %q, want %q", got, want)
	}
}

// However vmrun ends, no machine and no file of it stays.
func TestNothingStaysBehind(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		signal syscall.Signal // 0: none, the timeout ends it
		status int
		files  bool // may stay: nobody could remove them
	}{
		{"interrupted", syscall.SIGINT, exitFailed, false},
		{"killed", syscall.SIGKILL, -1, true},
		{"timeout", 0, exitTimeout, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tmp := t.TempDir()
			args := []string{"sleep", "1000"}
			if c.signal == 0 {
				args = append([]string{"--timeout", "3s"}, args...)
			}
			var out bytes.Buffer
			cmd := exec.Command(os.Args[0], args...)
			cmd.Env = append(os.Environ(), asVMRun+"=1", "TMPDIR="+tmp)
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if c.signal != 0 {
				await.True(t, "the machine to start", func() bool { return len(processes(t, tmp)) > 0 })
				if err := cmd.Process.Signal(c.signal); err != nil {
					t.Error(err)
				}
			}
			err := cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != c.status {
				t.Errorf("status %d (%v), want %d: %s", got, err, c.status, out.String())
			}
			await.True(t, "the machine to end", func() bool { return len(processes(t, tmp)) == 0 })
			left, err := os.ReadDir(tmp)
			if err != nil {
				t.Fatal(err)
			}
			if len(left) > 0 && !c.files {
				t.Errorf("files stay behind: %v", left)
			}
		})
	}
}

// processes returns QEMU's processes that use files below dir.
func processes(t *testing.T, dir string) []string {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, l := range lines {
		b, err := os.ReadFile(l)
		if err == nil && bytes.HasPrefix(filepathBase(b), []byte("qemu-system")) && bytes.Contains(b, []byte(dir)) {
			found = append(found, l)
		}
	}
	return found
}

// filepathBase returns a command line from the last element of its program's
// path on.
func filepathBase(cmdline []byte) []byte {
	program, _, _ := bytes.Cut(cmdline, []byte{0})
	return program[bytes.LastIndexByte(program, '/')+1:]
}
