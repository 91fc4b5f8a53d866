package ns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
)

// testSpace makes a namespace that goes with the test.
func testSpace(t *testing.T, suffix string) string {
	t.Helper()
	name := fmt.Sprintf("nst%d-%s", os.Getpid(), suffix)
	if err := Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
		defer cancel()
		if err := errors.Join(KillAll(ctx, name), Delete(name)); err != nil {
			t.Error(err)
		}
	})
	return name
}

func TestCreateAndDelete(t *testing.T) {
	t.Parallel()
	name := testSpace(t, "create")
	if err := Create(name); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second creation: %v, want fs.ErrExist", err)
	}
	var inside []string
	err := Do(name, func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			inside = append(inside, l.Name)
		}
		return err
	})
	if err != nil || !slices.Equal(inside, []string{"lo"}) {
		t.Errorf("devices inside: %v, %v; want lo alone", inside, err)
	}
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil || !strings.Contains(string(out), name) {
		t.Errorf("ip netns list does not show %s: %s%v", name, out, err)
	}
	for range 2 { // the second finds nothing
		if err := Delete(name); err != nil {
			t.Error(err)
		}
	}
	if Exists(name) {
		t.Error("still there")
	}
}

// A creation killed between the file and the mount leaves a plain file.
func TestDeleteHalfMade(t *testing.T) {
	t.Parallel()
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("nst%d-half", os.Getpid())
	if err := os.WriteFile(Path(name), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := Do(name, func() error { return nil }); err == nil {
		t.Error("entered a plain file")
	}
	if err := Delete(name); err != nil || Exists(name) {
		t.Errorf("delete: %v, exists: %v", err, Exists(name))
	}
}

func TestCreateAtOnce(t *testing.T) {
	t.Parallel()
	const n = 16
	name := fmt.Sprintf("nst%d-race", os.Getpid())
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = Create(name) })
	}
	wg.Wait()
	t.Cleanup(func() {
		if err := Delete(name); err != nil {
			t.Error(err)
		}
	})
	made := 0
	for _, err := range errs {
		switch {
		case err == nil:
			made++
		case !errors.Is(err, fs.ErrExist):
			t.Error(err)
		}
	}
	if made != 1 {
		t.Errorf("%d creations succeeded, want 1", made)
	}
}

// What runs inside must not change where the rest of the process is.
func TestDoLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	name := testSpace(t, "do")
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := Do(name, func() error {
				in, err := os.Readlink("/proc/thread-self/ns/net")
				if err == nil && in == before {
					err = errors.New("not inside")
				}
				return err
			}); err != nil {
				t.Error(err)
			}
			if out, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || out != before {
				t.Errorf("outside: %s, %v; want %s", out, err, before)
			}
		})
	}
	wg.Wait()
}

func sleeper(t *testing.T, name string, args ...string) Process {
	t.Helper()
	if len(args) == 0 {
		args = []string{"sleep", "1000"}
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := Start(name, cmd); err != nil {
		t.Fatal(err)
	}
	p, err := Find(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Release(); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestKillAll(t *testing.T) {
	t.Parallel()
	name, other := testSpace(t, "kill"), testSpace(t, "spare")
	mine := []Process{sleeper(t, name), sleeper(t, name), sleeper(t, name, "sh", "-c", "trap '' TERM; sleep 1000 & wait")}
	spared := sleeper(t, other)
	if err := KillAll(await.Context(t), name, "no-such-namespace"); err != nil {
		t.Fatal(err)
	}
	if pids, err := PIDs(name); err != nil || len(pids) != 0 {
		t.Errorf("still inside: %v, %v", pids, err)
	}
	for _, p := range mine {
		if p.Alive() {
			t.Errorf("process %d lives", p.PID)
		}
	}
	if !spared.Alive() {
		t.Error("killed a process of another namespace")
	}
}

// A pid that another process has by now must never be signalled.
func TestReusedPID(t *testing.T) {
	t.Parallel()
	name := testSpace(t, "reuse")
	p := sleeper(t, name)
	earlier := Process{PID: p.PID, Start: p.Start - 1}
	if earlier.Alive() {
		t.Error("another process counts as alive")
	}
	if err := earlier.Signal(unix.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal: %v, want os.ErrProcessDone", err)
	}
	if err := earlier.Wait(t.Context()); err != nil {
		t.Errorf("wait: %v, want nil at once", err)
	}
	if !p.Alive() {
		t.Error("the wrong process was killed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for a live process: %v, want context.DeadlineExceeded", err)
	}
	if (Process{}).Alive() {
		t.Error("the zero process counts as alive")
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	rest := strings.Repeat(" 0", 18) + " 4711 0 0"
	for _, tt := range []struct {
		in    string
		state byte
		start uint64
		err   bool
	}{
		{"1 (init) S" + rest, 'S', 4711, false},
		{"1 (a) b (c)) Z" + rest, 'Z', 4711, false},
		{"1 init S", 0, 0, true},
		{"1 (x) S 1 2", 0, 0, true},
		{"1 (x) S" + strings.Repeat(" x", 30), 0, 0, true},
	} {
		state, start, err := parseStat([]byte(tt.in))
		if state != tt.state && !tt.err || start != tt.start || (err != nil) != tt.err {
			t.Errorf("parseStat(%q) = %c, %d, %v", tt.in, state, start, err)
		}
	}
}

func TestStartMounted(t *testing.T) {
	t.Parallel()
	name := testSpace(t, "mounted")
	src, dst := t.TempDir(), t.TempDir()
	if err := os.WriteFile(src+"/file", []byte("seen"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd := exec.Command("sh", "-c", "ls /sys/class/net; cat "+dst+"/file")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := StartMounted(name, cmd, Bind{src, dst}, Bind{src, dst + "/absent"}); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || out.String() != "lo\nseen" {
		t.Errorf("output %q, %v; want the namespace's devices and the bound file", out.String(), err)
	}
	if _, err := os.Stat(dst + "/file"); err == nil {
		t.Error("the bind is seen outside")
	}
}
