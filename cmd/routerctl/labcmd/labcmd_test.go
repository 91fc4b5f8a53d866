package labcmd

import (
	"bytes"
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
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/labtest"
	"github.com/routerd/routerd/store"
)

// The test binary plays routerd and its plugin, and is routerctl itself where a
// test needs a process to send signals to.
func TestMain(m *testing.M) {
	main := func() error {
		cmd := New(os.Stdout, os.Stderr)
		cmd.SetArgs(os.Args[1:])
		return cmd.Execute()
	}
	if !labtest.Play(map[string]func() error{"routerctl": main}) {
		os.Exit(m.Run())
	}
}

func labName(t *testing.T, suffix string) string {
	t.Helper()
	name := fmt.Sprintf("lc%d-%s", os.Getpid(), suffix)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
		defer cancel()
		if err := lab.Down(ctx, name); err != nil {
			t.Error(err)
		}
		labtest.NothingLeft(t, name, filepath.Join(lab.Root, name))
	})
	return name
}

func call(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := New(&out, &errOut)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(await.Context(t))
	return out.String(), errOut.String(), err
}

func mustCall(t *testing.T, args ...string) string {
	t.Helper()
	out, errOut, err := call(t, args...)
	if err != nil {
		t.Fatalf("lab %v: %v\n%s", args, err, errOut)
	}
	return out
}

func TestCommands(t *testing.T) {
	t.Parallel()
	bin := labtest.BinDir(t)
	name := labName(t, "cmd")
	out, progress, err := call(t, "up", "--name", name, "--nodes", "2", "--pods", "1", "--encapsulation", "VXLAN", "--bin-dir", bin)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "lab "+name+" is up") || !strings.Contains(out, name+"-node2-pod1") {
		t.Errorf("up prints:\n%s", out)
	}
	if !regexp.MustCompile(`(?m)^ +\d+\.\ds  starting routerd on node1`).MatchString(progress) {
		t.Errorf("progress:\n%s", progress)
	}
	if out := mustCall(t, "list"); !regexp.MustCompile(`(?m)^` + name + ` +VXLAN +node1,node2 +2$`).MatchString(out) {
		t.Errorf("list prints:\n%s", out)
	}
	if out := mustCall(t, "exec", "--name", name, "node1/pod1", "--", "sh", "-c", "echo $0 in", "--flag"); out != "--flag in\n" {
		t.Errorf("exec prints %q", out)
	}
	var exit *ExitError
	if _, _, err := call(t, "exec", "--name", name, "node2", "--", "sh", "-c", "exit 42"); !errors.As(err, &exit) || exit.ExitCode() != 42 {
		t.Errorf("exec of a command that fails: %v, want exit code 42", err)
	}
	d := filepath.Join(lab.Root, name, "node1", "state", "etcd", "pki")
	want := "export ETCD_ENDPOINTS=https://10.1.0.11:2379\nexport ETCD_CA_CERT_FILE=" + d + "/ca.crt\nexport ETCD_CERT_FILE=" + d + "/client.crt\nexport ETCD_KEY_FILE=" + d + "/client.key\n"
	if diff := cmp.Diff(want, mustCall(t, "env", "--name", name)); diff != "" {
		t.Errorf("env (-want +got):\n%s", diff)
	}
	mustCall(t, "attach", "--name", name, "node1/web")
	mustCall(t, "kill", "--name", name, "node1")
	if out := mustCall(t, "status", "--name", name); !strings.Contains(out, "routerd does not run") || !strings.Contains(out, "web") {
		t.Errorf("status after kill:\n%s", out)
	}
	mustCall(t, "restart", "--name", name, "node1")
	mustCall(t, "detach", "--name", name, "node1/web")
	if out := mustCall(t, "status", "--name", name); strings.Contains(out, "no:") || strings.Contains(out, "web") {
		t.Errorf("status after restart and detach:\n%s", out)
	}
	if s, err := Socket(name, "node2"); err != nil || s != filepath.Join(lab.Root, name, "node2", "routerd.sock") {
		t.Errorf("Socket: %s, %v", s, err)
	}
	if _, err := Socket(name, "node7"); err == nil || !strings.Contains(err.Error(), "node1, node2") {
		t.Errorf("Socket of no host: %v", err)
	}
	mustCall(t, "down", "--name", name)
	if _, err := Socket(name, "node1"); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("Socket of no lab: %v", err)
	}
	mustCall(t, "down", "--name", name)
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	topology := filepath.Join(t.TempDir(), "t.yaml")
	if err := os.WriteFile(topology, []byte("nodes: [{name: a, rack: west}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	bin := labtest.BinDir(t)
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"up", "--encapsulation", "GRE"}, "VXLANCrossSubnet"},
		{[]string{"up", "--nodes", "0"}, "--nodes 0"},
		{[]string{"up", "--pods", "-1"}, "--pods -1"},
		{[]string{"up", "--name", "A/B"}, `"A/B"`},
		{[]string{"up", "--name", "bad-in", "-f", topology, "--bin-dir", bin}, "nodes[0] (a).rack"},
		{[]string{"up", "-f", topology, "--nodes", "2"}, "filename nodes"},
		{[]string{"up", "-f", "/no/such/file"}, "/no/such/file"},
		{[]string{"up", "--name", "bad-in", "--bin-dir", t.TempDir()}, "make build"},
		{[]string{"exec", "--name", "no-such-lab", "node1", "--", "true"}, "no-such-lab"},
		{[]string{"exec", "node1"}, "at least 2"},
		{[]string{"env", "--name", "no-such-lab"}, "labs of this machine"},
		{[]string{"demo", "--encapsulation", "GRE"}, "--encapsulation"},
		{[]string{"up", "extra"}, "extra"},
	} {
		if _, _, err := call(t, tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("lab %v: %v, want an error with %q", tt.args, err, tt.want)
		}
	}
}

func TestTopologyFile(t *testing.T) {
	t.Parallel()
	name := labName(t, "file")
	topology := filepath.Join(t.TempDir(), "t.yaml")
	text := `
racks: [{name: west, cidr: 10.7.0.0/24}]
nodes: [{name: edge, rack: west, address: 10.7.0.99}]
pool: {encapsulation: IPIP}
pods: 3
`
	if err := os.WriteFile(topology, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, _, err := call(t, "up", "--name", name, "-f", topology, "--pods", "1", "--bin-dir", labtest.BinDir(t))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "10.7.0.99") || !strings.Contains(out, "pod1") || strings.Contains(out, "pod2") {
		t.Errorf("up prints:\n%s", out)
	}
	if out := mustCall(t, "list"); !regexp.MustCompile(name + ` +IPIP +edge +1`).MatchString(out) {
		t.Errorf("list prints:\n%s", out)
	}
}

// interrupt starts routerctl, waits until its progress says so, sends the
// signal and returns when it has ended.
func interrupt(t *testing.T, bin string, sig syscall.Signal, moment string, args ...string) {
	t.Helper()
	cmd := exec.Command(filepath.Join(bin, "routerctl"), args...)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	timer := time.AfterFunc(await.Patience, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	var seen bytes.Buffer
	buf := make([]byte, 4096)
	for !strings.Contains(seen.String(), moment) {
		n, err := r.Read(buf)
		seen.Write(buf[:n])
		if err != nil {
			t.Fatalf("%v before %q:\n%s", err, moment, &seen)
		}
	}
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(&seen, r) // until it and all that it started have ended
	if err := cmd.Wait(); err == nil {
		t.Error("exit code 0 after an interruption")
	}
}

// Ctrl-C at any moment leaves nothing behind.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	bin := labtest.BinDir(t, "routerctl")
	for suffix, moment := range map[string]string{
		"i-start": "building the underlay",
		"i-first": "starting routerd on node1",
		"i-more":  "starting routerd on 2 more",
		"i-pods":  "attaching",
	} {
		t.Run(suffix, func(t *testing.T) {
			t.Parallel()
			name := labName(t, suffix)
			interrupt(t, bin, syscall.SIGINT, moment, "up", "--name", name, "--bin-dir", bin)
			labtest.NothingLeft(t, name, filepath.Join(lab.Root, name))
		})
	}
	t.Run("demo", func(t *testing.T) {
		t.Parallel()
		// The played pods cannot reach each other, so that the demo waits for
		// them; the played machine waits for the signal.
		machine := filepath.Join(t.TempDir(), "vm")
		told := machine + ".told"
		script := "#!/bin/sh\ntrap 'echo told >" + told + "; exit 1' TERM\nwhile :; do read -t 1 x </dev/zero || sleep 0.05; done\n"
		if err := os.WriteFile(machine, []byte(script), 0o700); err != nil { //nolint:gosec // it is a program
			t.Fatal(err)
		}
		name := labName(t, "i-demo")
		interrupt(t, bin, syscall.SIGTERM, "BGP sessions", "demo", "--name", name, "--bin-dir", bin, "--vm-runner", machine,
			"--encapsulation", "VXLAN", "--encapsulation", "IPIP", "--nodes", "2", "--pods", "0")
		labtest.NothingLeft(t, name, filepath.Join(lab.Root, name))
		if ok, err := lab.Supported(store.IPIP); err != nil {
			t.Error(err)
		} else if b, _ := os.ReadFile(told); !ok && string(b) != "told\n" {
			t.Error("the virtual machine was not told to end")
		}
	})
}

func TestVMResults(t *testing.T) {
	t.Parallel()
	modes := []store.Encapsulation{store.IPIP, store.IPIPCrossSubnet}
	good := []modeResult{
		{Encapsulation: store.IPIP, Where: "here", Asked: 6, Answered: 6},
		{Encapsulation: store.IPIPCrossSubnet, Where: "here", Asked: 6, Answered: 6},
	}
	b, err := json.Marshal(good)
	if err != nil {
		t.Fatal(err)
	}
	partial := append([]modeResult{}, good...)
	partial[1].Answered = 5
	p, err := json.Marshal(partial)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, trailer string
		err           error
		want          []bool
	}{
		{"all well", string(b) + "\npoweroff", nil, []bool{true, true}},
		{"one pair short", string(p), errors.New("exit status 1"), []bool{true, false}},
		{"nothing told", "", nil, []bool{false, false}},
		{"cut off", string(b[:30]), nil, []bool{false, false}},
		{"one told", `[{"encapsulation":"IPIP","pairsAsked":2,"pairsAnswered":2}]`, nil, []bool{true, false}},
		{"no machine", "", errors.New("no qemu"), []bool{false, false}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := vmResults(tt.trailer, vmOutcome{err: tt.err}, modes)
			var ok []bool
			for _, r := range got {
				ok = append(ok, r.ok())
				if !r.ok() && r.Error == "" && r.Asked == r.Answered {
					t.Errorf("%s failed without a reason", r.Encapsulation)
				}
				if r.Where != "VM" {
					t.Errorf("where: %q", r.Where)
				}
			}
			if diff := cmp.Diff(tt.want, ok); diff != "" {
				t.Errorf("ok (-want +got):\n%s\n%+v", diff, got)
			}
		})
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	tab := newTable("A", "LONG HEADING", "C")
	tab.add("größer", "x", "")
	tab.add("b", "y", "z")
	var b strings.Builder
	if err := tab.print(&b, "  "); err != nil {
		t.Fatal(err)
	}
	want := "  A       LONG HEADING  C\n  größer  x\n  b       y             z\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}
