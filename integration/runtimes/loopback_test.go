package runtimes

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/integration/lab/ns"
)

// TestLoopback: what install-cni installs is a loopback plugin as runtimes call it, in
// the way of containerd 1.6: before the network, with "cni-loopback" for its name.
func TestLoopback(t *testing.T) {
	h := newHost(t, "loopback")
	h.must(nil, filepath.Join(h.bin, "routerd"), "install-cni", "--bin-dir", h.pluginDir(), "--conf-dir", h.confDir())
	space := h.space + "-c"
	h.namespace(space)
	call := func(verb string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(h.pluginDir(), cni.LoopbackType))
		cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_PATH=" + h.pluginDir(), "CNI_CONTAINERID=c1", "CNI_IFNAME=lo", "CNI_NETNS=" + ns.Path(space)}
		cmd.Stdin = bytes.NewReader([]byte(`{"cniVersion": "0.3.1", "name": "cni-loopback", "type": "loopback"}`))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", verb, err, out)
		}
		return string(out)
	}
	if out := call("ADD"); !strings.Contains(out, `"127.0.0.1/8"`) || !strings.Contains(out, `"cniVersion": "0.3.1"`) {
		t.Errorf("ADD: %s", out)
	}
	h.must(nil, "ip", "netns", "exec", space, "ping", "-c", "1", "-w", "10", "127.0.0.1")
	call("DEL")
	if out := h.must(nil, "ip", "-n", space, "link", "show", "lo"); strings.Contains(out, ",UP") {
		t.Errorf("after DEL: %s", out)
	}
	if out := call("VERSION"); !strings.Contains(out, "0.3.1") {
		t.Errorf("VERSION: %s", out)
	}
}
