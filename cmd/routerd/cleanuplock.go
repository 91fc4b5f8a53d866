package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lock makes sure that no daemon runs, and that none starts before unlock.
func (cl *cleanup) lock(ctx context.Context) (unlock func(), err error) {
	alone, err := lockKernel(ctx)
	if err != nil {
		return nil, runsAlready(kernelLockHolder(ctx), err)
	}
	path := lockPath(cl.cfg.RunDir)
	// Without the file no daemon ever used the directory; it is not made here.
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return func() { _ = alone.Close() }, nil
	}
	host, err := lockHost(cl.cfg.RunDir)
	if err != nil {
		return nil, errors.Join(runsAlready(fileLockHolder(path), err), alone.Close())
	}
	return func() { _, _ = host.Close(), alone.Close() }, nil
}

// runsAlready says which process holds a lock; 0: not known.
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

// kernelLockHolder returns the process that holds the lock of this network
// namespace; 0 if it cannot be told.
func kernelLockHolder(ctx context.Context) int {
	c, err := new(net.Dialer).DialContext(ctx, "unix", kernelLock)
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

// fileLockHolder returns the process that holds flock(2) on a file, as
// /proc/locks (proc_locks(5)) tells; 0 if it cannot be told.
func fileLockHolder(path string) int {
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
