// Package netnstest makes network namespaces for tests.
package netnstest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Netns is a network namespace that ends with the test.
type Netns struct {
	// Path leads to the namespace, also for other processes, until [Netns.End].
	// From then on there is nothing at it.
	Path string
	end  func()
}

// New makes a network namespace. It needs root.
func New(t testing.TB) *Netns {
	t.Helper()
	type result struct {
		file *os.File
		err  error
	}
	c := make(chan result)
	go func() {
		// The thread is in the new namespace for good: it is not unlocked, so it
		// ends here.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			c <- result{err: fmt.Errorf("unshare (are you root?): %w", err)}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		c <- result{f, err}
	}()
	r := <-c
	if r.err != nil {
		t.Fatalf("make network namespace: %v", r.err)
	}
	// The number of a closed file is soon another file's, so what is handed out
	// is a link that goes first.
	n := &Netns{Path: filepath.Join(t.TempDir(), "netns")}
	if err := os.Symlink(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), r.file.Fd()), n.Path); err != nil {
		_ = r.file.Close()
		t.Fatalf("name network namespace: %v", err)
	}
	n.end = sync.OnceFunc(func() {
		_ = os.Remove(n.Path)
		_ = r.file.Close()
	})
	t.Cleanup(n.end)
	return n
}

// End ends the namespace before the test does. The kernel removes its devices
// some time later.
func (n *Netns) End() { n.end() }

// Do calls fn in the namespace and returns its error.
func (n *Netns) Do(fn func() error) error {
	c := make(chan error)
	go func() {
		runtime.LockOSThread() // see New
		f, err := os.Open(n.Path)
		if err != nil {
			c <- err
			return
		}
		defer func() { _ = f.Close() }()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			c <- err
			return
		}
		c <- fn()
	}()
	return <-c
}

// Mount mounts a namespace until the test ends, as container runtimes do, and returns
// where.
func Mount(t testing.TB, path string) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "mounted")
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(path, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("mount network namespace: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount network namespace: %v", err)
		}
	})
	return at
}
