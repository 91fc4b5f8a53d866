package workload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// ErrNoNamespace says that a path does not lead to a network namespace: the
// container is gone.
var ErrNoNamespace = errors.New("no such network namespace")

// namespace is an open network namespace.
type namespace struct {
	file *os.File
	path string
}

// ownNamespace is the path of the calling thread's own network namespace.
const ownNamespace = "/proc/thread-self/ns/net"

// openNamespace opens the network namespace at path.
func openNamespace(path string) (*namespace, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open %s: %w", path, ErrNoNamespace)
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	// The path of a namespace that was unmounted but not removed is a plain
	// file; setns would say no more than "invalid argument".
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("statfs %s: %w", path, err)
	}
	if st.Type != unix.NSFS_MAGIC {
		_ = f.Close()
		return nil, fmt.Errorf("%s is not a namespace: %w", path, ErrNoNamespace)
	}
	return &namespace{file: f, path: path}, nil
}

func (n *namespace) fd() int { return int(n.file.Fd()) }

func (n *namespace) close() { _ = n.file.Close() }

// same reports whether n and m are one namespace.
func (n *namespace) same(m *namespace) (bool, error) {
	a, err := n.file.Stat()
	if err != nil {
		return false, err
	}
	b, err := m.file.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(a, b), nil
}

// do calls fn on a thread that is in the namespace: sockets that fn opens
// belong there, and so does /proc/sys/net.
//
// A thread that cannot be brought back is never unlocked, so the runtime ends
// it with the goroutine instead of giving it to another.
func (n *namespace) do(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open(ownNamespace)
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open own network namespace: %w", err)
			return
		}
		defer func() { _ = home.Close() }()
		if err := unix.Setns(n.fd(), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace %s: %w", n.path, err)
			return
		}
		err = fn()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}
