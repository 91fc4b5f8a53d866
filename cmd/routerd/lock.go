package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func lockPath(runDir string) string { return filepath.Join(runDir, "routerd.lock") }

// lockHost makes sure that one daemon uses a run directory: two would take
// each other's routes for leftovers. The lock goes with the process.
func lockHost(runDir string) (*os.File, error) {
	if err := os.MkdirAll(runDir, 0o700); err != nil {
		return nil, fmt.Errorf("make runDir: %w", err)
	}
	path := lockPath(runDir)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another routerd runs with runDir %s (it holds %s): stop it first, or give this one another runDir and stateDir", runDir, path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// kernelLock is the name of an abstract unix socket. Those belong to a network
// namespace (unix(7)), which is what only one daemon may write to, and go with
// the process.
const kernelLock = "@routerd.kernel"

// lockKernel makes sure that one daemon writes to this network namespace,
// whatever the run directories.
func lockKernel(ctx context.Context) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "unix", kernelLock)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, errors.New("another routerd runs in this network namespace, with another runDir: two would take each other's routes for leftovers; stop it first, or give this one a network namespace of its own")
	}
	if err != nil {
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	return l, nil
}
