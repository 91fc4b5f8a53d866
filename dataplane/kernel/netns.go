package kernel

import (
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace that stays reachable from any thread.
type namespace struct{ f *os.File }

// currentNamespace returns that of the calling thread.
func currentNamespace() (*namespace, error) {
	f, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	return &namespace{f}, nil
}

func (n *namespace) Close() error { return n.f.Close() }

// same reports whether the calling thread is in n.
func (n *namespace) same() (bool, error) {
	here, err := os.Stat(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	if err != nil {
		return false, err
	}
	there, err := n.f.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(here, there), nil
}

// do calls fn on a thread that is in n. Where the process is in n itself no
// privilege is needed; otherwise CAP_SYS_ADMIN is.
func (n *namespace) do(fn func() error) error {
	runtime.LockOSThread()
	if same, err := n.same(); err == nil && same {
		defer runtime.UnlockOSThread()
		return fn()
	}
	runtime.UnlockOSThread()
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { err = n.enter(fn) })
	wg.Wait()
	return err
}

// enter calls fn in n on the calling goroutine's thread, and brings the thread
// back. A thread that cannot be brought back stays locked, so that it ends
// with its goroutine and no other ever runs in the wrong namespace.
func (n *namespace) enter(fn func() error) error {
	runtime.LockOSThread()
	if same, err := n.same(); err != nil || same {
		defer runtime.UnlockOSThread()
		if err != nil {
			return fmt.Errorf("compare network namespaces: %w", err)
		}
		return fn()
	}
	home, err := currentNamespace()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	if err := unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", os.NewSyscallError("setns", err))
	}
	ferr := fn()
	if err := unix.Setns(int(home.f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("return to network namespace: %w", os.NewSyscallError("setns", err))
	}
	runtime.UnlockOSThread()
	return ferr
}
