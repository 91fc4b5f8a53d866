package cni

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
)

// TestNetns: what the host has behind symbolic links the daemon is told without them,
// also of a namespace that is gone; the namespace itself is not followed.
func TestNetns(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "run/netns"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "var"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"var/run": "../run", "run/netns/link": "/nowhere/at-all"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Readlink("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ in, want string }{
		{"", ""},
		{dir + "/run/netns/cni-1", dir + "/run/netns/cni-1"},
		{dir + "/var/run/netns/cni-1", dir + "/run/netns/cni-1"},
		{dir + "/var/run/netns/link", dir + "/run/netns/link"},
		{"/proc/self/ns/net", "/proc/" + self + "/ns/net"},
		{dir + "/absent/cni-1", dir + "/absent/cni-1"},
	} {
		c := call{in: &skel.CmdArgs{Netns: tt.in}}
		if got := c.netns(); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.in, got, tt.want)
		}
	}
}
