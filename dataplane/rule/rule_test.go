package rule

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// enter moves the test into a network namespace of its own. The thread is never
// unlocked, so it ends with the test.
func enter(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace (these tests need root): %v", err)
	}
	run(t, "ip link set lo up")
}

func run(t *testing.T, command string) string {
	t.Helper()
	f := strings.Fields(command)
	out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// shows compares the rules but for the kernel's own.
func shows(t *testing.T, family, want string) {
	t.Helper()
	var got []string
	for line := range strings.Lines(run(t, "ip "+family+" rule show")) {
		if f := strings.Join(strings.Fields(line), " "); f != "" && !strings.HasSuffix(f, "local") && !strings.HasSuffix(f, "main") && !strings.HasSuffix(f, "default") {
			got = append(got, f)
		}
	}
	if diff := cmp.Diff(want, strings.Join(got, "\n")); diff != "" {
		t.Errorf("ip %s rule (-want +got):\n%s", family, diff)
	}
}

// TestRules: a rule is there while somebody uses it, and what a killed run left goes
// at the next start; those of others stay.
func TestRules(t *testing.T) {
	enter(t)
	const protocol = 77
	r, err := Open(protocol)
	if err != nil {
		t.Fatal(err)
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const ours = "77: from all oif eth0 [detached] lookup 7747 proto 77"
	do(r.Add(dataplane.IPv4, "eth0"))
	do(r.Add(dataplane.IPv4, "eth0"))
	do(r.Add(dataplane.IPv6, "eth0"))
	shows(t, "-4", ours)
	shows(t, "-6", ours)
	do(r.Remove(dataplane.IPv4, "eth0"))
	shows(t, "-4", ours)
	do(r.Remove(dataplane.IPv4, "eth0"))
	do(r.Remove(dataplane.IPv6, "eth0"))
	shows(t, "-4", "")
	shows(t, "-6", "")

	const others = "77: from all oif eth0 [detached] lookup 7747 proto static"
	run(t, "ip -4 rule add oif eth0 lookup 7747 priority 77 protocol static")
	do(r.Add(dataplane.IPv4, "eth0"))
	do(r.Add(dataplane.IPv6, "vxlan-v6.calico"))
	do(r.Close())
	if n, err := Sweep(protocol, true); n != 2 || err != nil {
		t.Errorf("left over: %d, %v; want 2", n, err)
	}
	r, err = Open(protocol)
	do(err)
	shows(t, "-4", others)
	shows(t, "-6", "")
	do(r.Close())
}
