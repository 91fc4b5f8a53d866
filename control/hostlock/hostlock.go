// Package hostlock makes sure that one routerd alone uses a run directory, and that one alone
// writes to a network namespace: two would take each other's routes for leftovers. A lock goes
// with the process that holds it.
package hostlock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// howToStop has another routerd of the host end and not come back.
const howToStop = "a service of the host: systemctl disable --now routerd; a pod: kubectl label node NODE routerd.io/daemon=no"

// File is the lock of a run directory.
func File(runDir string) string { return filepath.Join(runDir, "routerd.lock") }

// Dir takes the lock of a run directory.
func Dir(runDir string) (*os.File, error) {
	if err := os.MkdirAll(runDir, 0o700); err != nil {
		return nil, fmt.Errorf("make runDir: %w", err)
	}
	path := File(runDir)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another routerd runs with runDir %s (it holds %s): stop it first (%s), or give this one another runDir and stateDir", runDir, path, howToStop)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// namespaceLock is the name of an abstract unix socket. Those belong to a network
// namespace (unix(7)), which is what only one daemon may write to, and go with
// the process.
const namespaceLock = "@routerd.kernel"

// Namespace takes the lock of this network namespace, whatever the run directories.
func Namespace(ctx context.Context) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "unix", namespaceLock)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("another routerd runs in this network namespace, with another runDir: two would take each other's routes for leftovers; stop it first (%s), or give this one a network namespace of its own", howToStop)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	return l, nil
}

// DirHeld says which process holds the lock of a run directory; err is that of [Dir].
func DirHeld(runDir string, err error) error { return runsAlready(fileHolder(File(runDir)), err) }

// NamespaceHeld says which process holds the lock of this network namespace; err is that of
// [Namespace].
func NamespaceHeld(ctx context.Context, err error) error {
	return runsAlready(namespaceHolder(ctx), err)
}

// runsAlready names a process; 0: not known.
func runsAlready(pid int, err error) error {
	if pid == 0 {
		return err
	}
	name := "process"
	if b, rerr := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm")); rerr == nil {
		name = strings.TrimSpace(string(b))
	}
	return fmt.Errorf("%s runs with process id %d and would put everything back: stop it first (systemctl stop routerd)", name, pid)
}

// namespaceHolder returns the process that holds the lock of this network
// namespace; 0: not known.
func namespaceHolder(ctx context.Context) int {
	c, err := new(net.Dialer).DialContext(ctx, "unix", namespaceLock)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	// An error leaves the number at 0.
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}

// fileHolder returns the process that holds flock(2) on a file, as
// /proc/locks (proc_locks(5)) says; 0: not known.
func fileHolder(path string) int {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0
	}
	b, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	return lockHolder(b, st.Ino)
}

// lockHolder finds in /proc/locks who holds flock(2) on an inode.
func lockHolder(locks []byte, inode uint64) int {
	for line := range bytes.Lines(locks) {
		f := strings.Fields(string(line))
		if len(f) < 6 || f[1] != "FLOCK" {
			continue
		}
		// The fields are number, kind, mode, access, process, device:inode.
		if i := strings.LastIndexByte(f[5], ':'); i >= 0 && f[5][i+1:] == strconv.FormatUint(inode, 10) {
			if pid, err := strconv.Atoi(f[4]); err == nil && pid > 0 {
				return pid
			}
		}
	}
	return 0
}
