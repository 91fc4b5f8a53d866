package workload

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	"golang.org/x/sys/unix"
)

// ErrNoNamespace says that a path does not lead to a network namespace: the
// container is gone.
var ErrNoNamespace = errors.New("no such network namespace")

// namespace is an open network namespace.
type namespace struct {
	fd   int
	path string
}

// ownNamespace is the path of the calling thread's own network namespace.
const ownNamespace = "/proc/thread-self/ns/net"

// openNamespace opens the network namespace at path. It does not wait: the path is
// the caller's word, and to open a FIFO for reading waits for a writer (fifo(7)).
func openNamespace(path string) (*namespace, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open %s: %w", path, ErrNoNamespace)
	}
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOTDIR) {
		// A socket (open(2)), or something below a plain file.
		return nil, fmt.Errorf("%s is not a namespace: %w", path, ErrNoNamespace)
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	// The path of a namespace that was unmounted but not removed is a plain
	// file; setns would say no more than "invalid argument".
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("statfs %s: %w", path, err)
	}
	if st.Type != unix.NSFS_MAGIC {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%s is not a namespace: %w", path, ErrNoNamespace)
	}
	return &namespace{fd: fd, path: path}, nil
}

func (n *namespace) close() { _ = unix.Close(n.fd) }

// same reports whether n and m are one namespace.
func (n *namespace) same(m *namespace) (bool, error) {
	var a, b unix.Stat_t
	if err := errors.Join(unix.Fstat(n.fd, &a), unix.Fstat(m.fd, &b)); err != nil {
		return false, fmt.Errorf("compare network namespaces: %w", err)
	}
	return a.Dev == b.Dev && a.Ino == b.Ino, nil
}

// here reports whether the calling thread is known to be in the namespace.
func (n *namespace) here() bool {
	var own, ns unix.Stat_t
	return unix.Stat(ownNamespace, &own) == nil && unix.Fstat(n.fd, &ns) == nil && own.Dev == ns.Dev && own.Ino == ns.Ino
}

// do calls fn on a thread that is in the namespace: sockets that fn opens
// belong there, and so does /proc/sys/net. Where the calling thread is in it,
// as in the host's, fn is called there.
//
// A thread that cannot be brought back is never unlocked, so the runtime ends
// it with the goroutine instead of giving it to another.
func (n *namespace) do(fn func() error) error {
	runtime.LockOSThread()
	if n.here() {
		defer runtime.UnlockOSThread()
		return fn()
	}
	runtime.UnlockOSThread()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := openNamespace(ownNamespace)
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.close()
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace %s: %w", n.path, err)
			return
		}
		err = fn()
		if unix.Setns(home.fd, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}
