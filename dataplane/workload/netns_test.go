package workload

import (
	"errors"
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
