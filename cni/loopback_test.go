package cni

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// The loopback of a network namespace is set up and down, and a name that is no
// interface is an error.
func TestSetLoopback(t *testing.T) {
	t.Parallel()
	err := ns.DoNew(func() error {
		path := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		up := func() bool {
			lo, err := net.InterfaceByName("lo")
			return err == nil && lo.Flags&net.FlagUp != 0
		}
		if up() {
			t.Error("the loopback of a new namespace is up")
		}
		if err := checkLoopback(path, "lo"); err == nil || !strings.Contains(err.Error(), "interface lo is down") {
			t.Errorf("check: %v", err)
		}
		for range 2 {
			if err := setLoopback(path, "lo", true); err != nil || !up() {
				t.Errorf("up: %v, %v", err, up())
			}
		}
		if err := checkLoopback(path, "lo"); err != nil {
			t.Errorf("check: %v", err)
		}
		if err := setLoopback(path, "lo", false); err != nil || up() {
			t.Errorf("down: %v, %v", err, up())
		}
		if err := setLoopback(path, "lo1", true); err == nil || !strings.Contains(err.Error(), "interface lo1") {
			t.Errorf("no interface: %v", err)
		}
		return setLoopback(path, "lo", true)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := setLoopback("/nowhere", "lo", true); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no namespace: %v", err)
	}
}

// The plugin is the loopback's only where there is none.
func TestInstallLoopback(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	binary := filepath.Join(dir, "plugin")
	if err := os.WriteFile(binary, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, theirs := range []string{"", "another"} {
		bin := filepath.Join(dir, "bin"+theirs)
		link := filepath.Join(bin, LoopbackType)
		if theirs != "" {
			if err := os.MkdirAll(bin, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(link, []byte(theirs), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if _, err := Install(InstallOptions{Binary: binary, BinDir: bin, ConfDir: dir}); err != nil {
				t.Fatal(err)
			}
			want := theirs
			if want == "" {
				want = "program"
			}
			if got, err := os.ReadFile(link); err != nil || string(got) != want {
				t.Errorf("loopback is %q, %v; want %q", got, err, want)
			}
		}
	}
}
