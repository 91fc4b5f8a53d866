package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// These tests start real machines. One run takes about as long as a boot, so
// each run answers many questions.

// cache is shared with vmrun: the machine under test is the one in use.
const cache = "../../.cache/vm"

// runMachine runs a shell script in a machine.
func runMachine(t *testing.T, ctx context.Context, script string, files ...File) (status int, stdout, stderr, progress string, err error) {
	t.Helper()
	var out, errOut, prog bytes.Buffer
	status, err = Run(ctx, Config{
		Cache: cache, Files: files, Env: []string{"GREETING=it's me"}, Dir: "/tmp",
		Command: []string{"sh", "-c", script},
		Stdout:  &out, Stderr: &errOut, Progress: &prog,
	})
	return status, out.String(), errOut.String(), prog.String(), err
}

func TestMachine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	payload := bytes.Repeat([]byte{0, 1, 0xff, '\n'}, 100_000)
	write(t, filepath.Join(dir, "in"), string(payload), 0o755)
	// Output in the order in which the checks below read it.
	status, stdout, stderr, _, err := runMachine(t, t.Context(), `
set -e
echo "$GREETING"; pwd; hostname; date +%s
ip link add r0 type vrf table 10; ip link add d0 type dummy; ip link add v0 type veth peer name v1
ip link add x0 type vxlan id 4096 dstport 4789; ip link add b0 type bridge
modprobe ipip; ip -o -d link show tunl0 | grep -o "ipip any"
ip nexthop add id 7 dev lo; ip nexthop show
nft add table inet t; nft 'add chain inet t c { type nat hook postrouting priority 100; }'; nft add rule inet t c masquerade
nft list ruleset | grep -c masquerade
ip netns add a; ip netns exec a ip link set lo up; ip netns exec a ping -q -c1 127.0.0.1 | grep -o "1 received"
tc qdisc add dev v0 root netem delay 1ms; tc qdisc show dev v0 | grep -o netem
tcpdump --version 2>&1 | grep -c libpcap; bird --version 2>&1 | grep -c BIRD
stat -c %a /payload/in
echo to the other side >&2
cat /payload/in
exit 42`, File{Host: dir, Guest: "/payload"})
	if err != nil {
		t.Fatalf("%v\n%s%s", err, stdout, stderr)
	}
	if status != 42 {
		t.Errorf("status %d, want 42\n%.2000s%s", status, stdout, stderr)
	}
	if stderr != "to the other side\n" {
		t.Errorf("errors %q", stderr)
	}
	text, ok := strings.CutSuffix(stdout, string(payload))
	if !ok {
		t.Errorf("%d bytes came out in place of the %d-byte file at the end", len(stdout), len(payload))
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	var clock int64
	if len(lines) > 3 {
		if _, err := fmt.Sscan(lines[3], &clock); err != nil {
			t.Errorf("clock %q: %v", lines[3], err)
		}
		lines[3] = ""
	}
	if off := time.Since(time.Unix(clock, 0)); off.Abs() > 5*time.Minute {
		t.Errorf("the machine's clock is %s off", off)
	}
	want := "it's me\n/tmp\nvm\n\nipip any\nid 7 dev lo scope host \n1\n1 received\nnetem\n1\n1\n755"
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("the machine said\n%s\nwant\n%s", got, want)
	}
}

func TestMachineThatDiesHasNoResult(t *testing.T) {
	t.Parallel()
	_, stdout, _, _, err := runMachine(t, t.Context(), `echo before; echo c >/proc/sysrq-trigger; echo after`)
	if !errors.Is(err, ErrNoResult) {
		t.Fatalf("error %v, want %v", err, ErrNoResult)
	}
	if !strings.Contains(err.Error(), "sysrq triggered crash") {
		t.Errorf("the error does not show the console: %v", err)
	}
	if stdout != "before\n" {
		t.Errorf("output %q", stdout)
	}
}

func TestMachineIsKilledWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Cancel as soon as the command runs: after that only the kill can end it.
	out := &notify{word: "running", tell: cancel}
	var errOut, progress bytes.Buffer
	_, err := Run(ctx, Config{
		Cache: cache, Command: []string{"sh", "-c", "echo running; sleep 1000"},
		Stdout: out, Stderr: &errOut, Progress: &progress,
	})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "was stopped") {
		t.Fatalf("error %v: want one that says that the machine was stopped", err)
	}
}

func TestMachineRefusesBadInput(t *testing.T) {
	t.Parallel()
	_, _, _, _, err := runMachine(t, t.Context(), "true", File{Host: "/nonexistent/thing", Guest: "/x"})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/thing") {
		t.Errorf("error %v: want one that names the file", err)
	}
	_, err = Run(t.Context(), Config{Cache: cache})
	if err == nil || !strings.Contains(err.Error(), "no command") {
		t.Errorf("error %v: want one that says that there is no command", err)
	}
}

// notify calls tell when word was written to it.
type notify struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	word string
	tell func()
}

func (n *notify) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.buf.Write(p)
	if strings.Contains(n.buf.String(), n.word) {
		n.tell()
	}
	return len(p), nil
}
