package main

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestCleanupGivesReserveBack: a host that routerd is taken off holds no address
// ready any more, and says so where the datastore cannot be reached.
func TestCleanupGivesReserveBack(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["bgp"] = map[string]any{"enabled": false}
	_, protocols := h.cleanupConfig()
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	s := startStore(t, dir, socket)
	r := h.start()
	r.ready()
	c := h.store(socket)
	await.Until(t, "the reserve", func() error {
		n, err := ipam.Held(t.Context(), c, "node1")
		if err == nil && n == 0 {
			err = errors.New("it is empty")
		}
		return err
	})
	r.kill(syscall.SIGKILL)
	s.Close()
	cleanup := func(args ...string) string {
		t.Helper()
		code, out := h.routerd(append([]string{"cleanup", "--config", h.writeConfig(), "--rt-protos", protocols}, args...)...)
		if code != 0 {
			t.Fatalf("cleanup %v: %d %s", args, code, out)
		}
		return out
	}
	if out := cleanup("--dry-run"); !strings.Contains(out, "left alone: the addresses that node node1 holds ready") {
		t.Errorf("without the datastore: %s", out)
	}
	startStore(t, dir, socket)
	if out := cleanup("--yes"); !strings.Contains(out, "removed reserve of ") {
		t.Errorf("with the datastore: %s", out)
	}
	if _, err := c.Get(t.Context(), store.HandleKey(store.ReserveHandle("node1"))); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the reserve's handle: %v", err)
	}
	// Started again it has one as before.
	r = h.start()
	r.ready()
	await.Until(t, "the reserve again", func() error {
		n, err := ipam.Held(t.Context(), c, "node1")
		if err == nil && n == 0 {
			err = errors.New("it is empty")
		}
		return err
	})
}
