package workload

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestOpenFIFO: a FIFO in the place of a namespace is refused and not waited for.
func TestOpenFIFO(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "netns")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		_, err := openNamespace(path)
		got <- err
	}()
	select {
	case err := <-got:
		if !errors.Is(err, ErrNoNamespace) {
			t.Errorf("open a FIFO: %v, want %v", err, ErrNoNamespace)
		}
	case <-time.After(10 * time.Second):
		t.Error("to open a FIFO waits for a writer")
	}
	ns, err := openNamespace(ownNamespace)
	if err != nil {
		t.Fatal(err)
	}
	ns.close()
}

// TestOpenOther: what is no namespace is named as such, so that the caller does
// not take it for a fault that passes.
func TestOpenOther(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "socket")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	for _, path := range []string{plain, filepath.Join(plain, "net"), socket, filepath.Join(dir, "gone")} {
		if ns, err := openNamespace(path); !errors.Is(err, ErrNoNamespace) {
			t.Errorf("open %s: %v, want %v", path, err, ErrNoNamespace)
			if err == nil {
				ns.close()
			}
		}
	}
}
