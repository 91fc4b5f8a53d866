package rpc

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func socketPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "run", "cni.sock")
}

func serve(t *testing.T, l net.Listener) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
}

func TestListen(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, l)
	for p, want := range map[string]os.FileMode{path: os.ModeSocket | 0o600, filepath.Dir(path): os.ModeDir | 0o700} {
		info, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has the mode %s, want %s", p, info.Mode(), want)
		}
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()

	if _, err := Listen(path); !errors.Is(err, ErrInUse) {
		t.Errorf("a second daemon: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stays: %v", err)
	}
	again, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil { // a second Close must not remove the new socket
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Error(err)
	}
	_ = again.Close()
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// What a killed daemon leaves: a socket that nobody serves.
func TestListenReplacesStale(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)

	// Alive it is not replaced, though it does not hold the lock.
	if _, err := Listen(path); !errors.Is(err, ErrInUse) {
		t.Errorf("a served socket: %v", err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, l)
}

func TestListenRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ path, says string }{
		{file, "a file that is not a socket"},
		{filepath.Join(file, "cni.sock"), "not a directory"},
		{filepath.Join(dir, strings.Repeat("a", 120)), "too long"},
	} {
		if _, err := Listen(tt.path); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: got %v, want %q", tt.path, err, tt.says)
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Errorf("the file was touched: %v", err)
	}
}

func TestListenAtOnce(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		won int
	)
	for range 20 {
		wg.Go(func() {
			l, err := Listen(path)
			if err != nil {
				if !errors.Is(err, ErrInUse) {
					t.Error(err)
				}
				return
			}
			serve(t, l)
			mu.Lock()
			defer mu.Unlock()
			won++
		})
	}
	wg.Wait()
	if won != 1 {
		t.Errorf("%d daemons have the socket", won)
	}
}
