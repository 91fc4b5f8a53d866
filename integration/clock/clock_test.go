package clock

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
)

// childEnv makes the test's binary a process that says what time it has when asked.
const childEnv = "ROUTERD_TEST_CLOCK"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		start := time.Now()
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			now := time.Now()
			fmt.Println(now.UnixNano(), int64(now.Sub(start)))
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A process's wall clock jumps, while its monotonic clock goes on, and again, and
// back; another process's does not.
func TestSet(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	answers := bufio.NewScanner(out)
	var last time.Duration
	for _, by := range []time.Duration{0, time.Hour, -time.Hour, 24 * time.Hour, 0} {
		if err := Set(await.Context(t), cmd.Process.Pid, by); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		fmt.Fprintln(in)
		if !answers.Scan() {
			t.Fatal("no answer")
		}
		after := time.Now()
		var wall int64
		var mono time.Duration
		if _, err := fmt.Sscan(answers.Text(), &wall, &mono); err != nil {
			t.Fatal(err)
		}
		if at := time.Unix(0, wall).Add(-by); at.Before(before) || at.After(after) {
			t.Errorf("%v off: it says %v, and it is between %v and %v", by, time.Unix(0, wall), before, after)
		}
		if mono < last || mono > last+await.Patience {
			t.Errorf("%v off: its monotonic clock went from %v to %v", by, last, mono)
		}
		last = mono
	}
}

// The C library's programs read the same clock.
func TestSetC(t *testing.T) {
	t.Parallel()
	// bash's EPOCHREALTIME is gettimeofday(2), its %()T is time(2).
	cmd := exec.CommandContext(t.Context(), "bash", "-c", `while read -r _; do printf '%s %(%s)T\n' "${EPOCHREALTIME%[.,]*}" -1; done`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	answers := bufio.NewScanner(out)
	ask := func() (day, seconds int64) {
		fmt.Fprintln(in)
		if !answers.Scan() {
			t.Fatal("no answer")
		}
		if _, err := fmt.Sscan(answers.Text(), &day, &seconds); err != nil {
			t.Fatal(err)
		}
		return day, seconds
	}
	ask()
	if err := Set(await.Context(t), cmd.Process.Pid, -time.Hour); err != nil {
		t.Fatal(err)
	}
	day, seconds := ask()
	for what, got := range map[string]int64{"gettimeofday": day, "time": seconds} {
		if d := time.Now().Unix() - got - 3600; d < -1 || d > 60 {
			t.Errorf("%s: %d s from where it was set to", what, d)
		}
	}
}

func TestPatchRefuses(t *testing.T) {
	t.Parallel()
	if _, err := patch([]byte("no ELF"), 1); err == nil || !strings.Contains(err.Error(), "read the vDSO") {
		t.Errorf("got %v", err)
	}
	if err := Set(t.Context(), 0, time.Hour); err == nil {
		t.Error("process 0 has a clock")
	}
}
