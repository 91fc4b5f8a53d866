package felix

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

// program makes one of that name that waits. Not beside others: what is open for writing in a process that another
// test forks cannot be executed.
func program(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho\nread _\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// start runs a program in a namespace until the test ends.
func start(t *testing.T, ns *netnstest.Netns, program string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait() // it was not to say anything
	})
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil { // it runs, by its name
		t.Fatal(err)
	}
}

// running returns the commands that [Running] finds in a namespace, without their processes.
func running(t *testing.T, ns *netnstest.Netns) (out []string) {
	t.Helper()
	var list []string
	if err := ns.Do(func() (err error) { list, err = Running(); return err }); err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		s, _, _ = strings.Cut(s[strings.LastIndex(s, "/")+1:], " (")
		out = append(out, s)
	}
	return out
}

// What runs in another network namespace is another host's, as in a lab.
func TestRunning(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		program []string
		want    []string
	}{
		"Felix in calico-node":      {[]string{"calico-node", "-felix"}, []string{"calico-node -felix"}},
		"Felix of a package":        {[]string{"calico-felix"}, []string{"calico-felix"}},
		"Calico as one program":     {[]string{"calico", "component", "node", "felix"}, []string{"calico component node felix"}},
		"another part of Calico":    {[]string{"calico", "component", "typha"}, nil},
		"Typha":                     {[]string{"calico-typha"}, nil},
		"a client with such a name": {[]string{"calico", "node", "status"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := program(t, tt.program[0])
			t.Parallel()
			ns := netnstest.New(t)
			start(t, ns, path, tt.program[1:]...)
			if diff := cmp.Diff(tt.want, running(t, ns)); diff != "" {
				t.Errorf("here (-want +got):\n%s", diff)
			}
			if got := running(t, netnstest.New(t)); got != nil {
				t.Errorf("in another namespace: %q", got)
			}
		})
	}
}

func TestRunningBIRD(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	dir := filepath.Join(t.TempDir(), "calico")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var l net.Listener
	if err := ns.Do(func() (err error) { l, err = net.Listen("unix", filepath.Join(dir, "bird.ctl")); return err }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"bird.ctl"}, running(t, ns)); diff != "" {
		t.Errorf("while it runs (-want +got):\n%s", diff)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // what a BIRD that is killed leaves
	l.Close()
	await.True(t, "the socket to go", func() bool { return running(t, ns) == nil })
}

func TestBirds(t *testing.T) {
	t.Parallel()
	text := `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 20001 /run/bird/bird.ctl
0000000000000000: 00000002 00000000 00010000 0001 01 20002 /var/run/calico/bird.ctl
0000000000000000: 00000003 00000000 00000000 0001 03 20003 /var/run/calico/bird.ctl
0000000000000000: 00000002 00000000 00010000 0001 01 20004 /var/run/calico/bird6.ctl
0000000000000000: 00000003 00000000 00000000 0001 03 20005
`
	if diff := cmp.Diff([]string{"BIRD at /var/run/calico/bird.ctl", "BIRD at /var/run/calico/bird6.ctl"}, birds(text)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
