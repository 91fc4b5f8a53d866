package hostlocal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/integration/await"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, what string, s Store, want ...string) {
	t.Helper()
	var addrs []netip.Addr
	for _, a := range want {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	got, err := s.Addresses()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
	if diff := cmp.Diff(addrs, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "networks")
	s := Store(dir)
	check(t, "none yet", s)
	for path, text := range map[string]string{
		"cbr0/10.244.1.3":         "c1\r\neth0",
		"cbr0/10.244.1.2":         "c2\r\neth0",
		"cbr0/fd00::2":            "c1\r\neth0",
		"cbr0/10.244.1.4":         "c3", // as before CNI 0.7
		"cbr0/last_reserved_ip.0": "10.244.1.9",
		"cbr0/lock":               "",
		"other/10.244.1.2":        "c9\r\nnet1",
		"other/10.244.1.77":       "",
		"stray":                   "10.244.1.8",
	} {
		write(t, filepath.Join(dir, path), text)
	}
	check(t, "given", s, "10.244.1.2", "10.244.1.3", "10.244.1.4", "10.244.1.77", "fd00::2")
	if err := s.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	check(t, "without c1", s, "10.244.1.2", "10.244.1.4", "10.244.1.77")
	for _, c := range []string{"c3", "unknown"} {
		if err := s.Release(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
	check(t, "without c3", s, "10.244.1.2", "10.244.1.77")
	if err := s.Release(t.Context(), ""); err == nil {
		t.Error("a container without an id frees addresses")
	}
	if _, err := os.Stat(filepath.Join(dir, "cbr0/last_reserved_ip.0")); err != nil {
		t.Error(err)
	}
	if _, err := Store(filepath.Join(dir, "stray")).Addresses(); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a store that cannot be read: %v", err)
	}
}

// TestLocked: a lock that another process holds delays a release as long as its context
// allows, and no longer; the address stays.
func TestLocked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := Store(dir)
	write(t, filepath.Join(dir, "cbr0/10.244.1.2"), "c1\r\neth0")
	unlock, err := lock(t.Context(), filepath.Join(dir, "cbr0"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*lockRetry)
	defer cancel()
	if err := s.Release(ctx, "c1"); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "cbr0/lock is held") {
		t.Errorf("released under another's lock: %v", err)
	}
	check(t, "locked", s, "10.244.1.2")
	done := make(chan error)
	go func() { done <- s.Release(t.Context(), "c1") }()
	unlock()
	if err := <-done; err != nil {
		t.Error(err)
	}
	check(t, "unlocked", s)
}

// TestFollow: who follows a store hears of each address, also in a network that comes
// later.
func TestFollow(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "cni/networks")
	s := Store(dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lists := make(chan []netip.Addr, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		s.Follow(ctx, func() {
			list, err := s.Addresses()
			if err != nil {
				t.Error(err)
			}
			lists <- list
		})
	})
	until := func(what string, n int) {
		t.Helper()
		for {
			select {
			case l := <-lists:
				if len(l) == n {
					return
				}
			case <-await.Context(t).Done():
				t.Fatalf("%s: never heard of", what)
			}
		}
	}
	until("the start", 0)
	for i, network := range []string{"a", "a", "b"} {
		write(t, filepath.Join(dir, network, fmt.Sprintf("10.0.0.%d", i+1)), "c\r\neth0")
		until("an address in "+network, i+1)
	}
	if err := s.Release(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	until("their end", 0)
	cancel()
	wg.Wait()
}

// TestPlugin: what the plugin itself gives is read, and what is freed here it gives
// again.
func TestPlugin(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := Store(dir)
	run := func(command, container string) string {
		t.Helper()
		cmd := exec.Command("/usr/lib/cni/host-local")
		cmd.Env = []string{"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + container, "CNI_NETNS=/none", "CNI_IFNAME=eth0", "CNI_PATH=/usr/lib/cni"}
		cmd.Stdin = strings.NewReader(`{"cniVersion":"0.3.1","name":"cbr0","type":"bridge","ipam":{"type":"host-local","dataDir":"` + dir + `","ranges":[[{"subnet":"10.244.1.0/29"}]]}}`)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("host-local %s: %v: %s", command, err, out)
		}
		return string(out)
	}
	for i := range 5 { // all that there is
		run("ADD", fmt.Sprint("c", i))
	}
	check(t, "given", s, "10.244.1.2", "10.244.1.3", "10.244.1.4", "10.244.1.5", "10.244.1.6")
	if err := s.Release(t.Context(), "c3"); err != nil {
		t.Fatal(err)
	}
	if out := run("ADD", "c9"); !strings.Contains(out, "10.244.1.5/29") {
		t.Errorf("what was freed is not given again: %s", out)
	}
	run("DEL", "c9")
	got, err := s.Addresses()
	if err != nil || slices.Contains(got, netip.MustParseAddr("10.244.1.5")) {
		t.Errorf("after the plugin's DEL: %v, %v", got, err)
	}
}
