package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is the longest path that the kernel takes for a unix socket
// (UNIX_PATH_MAX without the final zero).
const maxSocketPath = 107

// ErrInUse says that another process serves on the socket.
var ErrInUse = errors.New("another daemon serves on it")

// Listen makes a unix socket that only the owner of the process opens: mode
// 0600, in a directory that it makes with mode 0700 if it is missing. A socket
// that a killed daemon left is replaced, one on which somebody answers is not:
// that is [ErrInUse]. A lock on path.lock, held until the listener is closed,
// decides between two that start at once.
func Listen(path string) (net.Listener, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := listenLocked(path)
	if err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &listener{UnixListener: l, path: path, lock: lock}, nil
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrInUse
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func listenLocked(path string) (*net.UnixListener, error) {
	if err := answers(path); err != nil {
		return nil, err
	}
	// The socket is made in a directory that nobody else enters and moved into
	// place with its final mode, so that there is no moment in which others can
	// open it, nor one in which a restarted daemon's clients find none.
	tmp, err := os.MkdirTemp(filepath.Dir(path), ".s")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	birth := filepath.Join(tmp, "s")
	if n := max(len(birth), len(path)); n > maxSocketPath {
		return nil, fmt.Errorf("the path is too long: with the %d bytes that its making takes it must not exceed %d", max(0, len(birth)-len(path)), maxSocketPath)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: birth, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(birth, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	if err := os.Rename(birth, path); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// answerTimeout is how long a process on the socket may take to accept.
const answerTimeout = time.Second

// answers returns an error unless path is free or a socket that nobody serves.
func answers(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("there is a file that is not a socket (%s): remove it or choose another path", info.Mode())
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		_ = c.Close()
		return ErrInUse
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// A full queue, a timeout: somebody has it open.
	return fmt.Errorf("%w: %w", ErrInUse, err)
}

// listener removes the socket and gives the lock back when it is closed.
type listener struct {
	*net.UnixListener
	path string
	lock *os.File
	once sync.Once
	err  error
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.once.Do(func() {
		// Before the lock is given back: afterwards the path may be another's.
		l.err = errors.Join(os.Remove(l.path), l.UnixListener.Close(), l.lock.Close())
	})
	return l.err
}
