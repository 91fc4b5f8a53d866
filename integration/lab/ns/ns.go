// Package ns makes named network namespaces, runs code and commands in them
// and finds the processes that live in them.
//
// Names are those of ip-netns(8): files in [Dir]. All functions are safe for
// concurrent use.
package ns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Dir is where iproute2 keeps named network namespaces.
const Dir = "/run/netns"

// Path returns the file that stands for the namespace.
func Path(name string) string { return filepath.Join(Dir, name) }

// Exists reports whether a namespace, or a leftover file, of this name is
// there.
func Exists(name string) bool {
	_, err := os.Lstat(Path(name))
	return err == nil
}

// Create makes an empty namespace. It matches [fs.ErrExist] when the name is
// taken.
func Create(name string) error {
	if err := prepareDir(); err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	path := Path(name)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	err = onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		self := fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		return mount(self, path, "bind", unix.MS_BIND)
	})
	if err != nil {
		return errors.Join(fmt.Errorf("create network namespace %s: %w", name, err), os.Remove(path))
	}
	return nil
}

// prepareDir makes Dir a mount point that propagates, as ip-netns(8) does: were
// it left to a later "ip netns add", the namespaces mounted before would stay
// pinned below the new mount after their deletion.
func prepareDir() error {
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return err
	}
	d, err := os.Open(Dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", Dir, err)
	}
	err = mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC)
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		if err := mount(Dir, Dir, "none", unix.MS_BIND|unix.MS_REC); err != nil {
			return err
		}
		err = mount("", Dir, "none", unix.MS_SHARED|unix.MS_REC)
	}
	return err
}

func mount(source, target, fstype string, flags uintptr) error {
	if err := unix.Mount(source, target, fstype, flags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// Delete removes the name. The namespace goes when the last process in it has
// ended, and its devices with it. A name that does not exist is not an error.
func Delete(name string) error {
	path := Path(name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	// EINVAL: a file that nothing is mounted on, left by a creation cut short.
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete network namespace %s: unmount: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete network namespace %s: %w", name, err)
	}
	return nil
}

// onOwnThread runs f on a thread that ends with it, so that whatever f does to
// its thread's namespaces cannot reach other goroutines.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// Do runs f inside the namespace. Sockets that f opens stay in the namespace;
// goroutines that f starts do not run in it.
func Do(name string, f func() error) error {
	return onOwnThread(func() error {
		if err := enter(name); err != nil {
			return err
		}
		return f()
	})
}

func enter(name string) error {
	fd, err := unix.Open(Path(name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", name, err)
	}
	return nil
}

// Start starts cmd inside the namespace. Its SysProcAttr must not set
// Pdeathsig: the thread that starts it ends at once.
func Start(name string, cmd *exec.Cmd) error {
	return Do(name, cmd.Start)
}

// Bind is a directory that a command sees in place of another.
type Bind struct{ Source, Target string }

// StartMounted is like [Start], in a mount namespace of the command's own in
// which /sys belongs to the network namespace and each bind whose target
// exists is in place. Tools like ip(8) then show what belongs to the host that
// the namespace stands for.
func StartMounted(name string, cmd *exec.Cmd, binds ...Bind) error {
	return onOwnThread(func() error {
		if err := enter(name); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare mount namespace: %w", err)
		}
		// Slave: what is mounted here is not seen outside, but namespaces named
		// later outside are seen here.
		if err := mount("", "/", "none", unix.MS_SLAVE|unix.MS_REC); err != nil {
			return err
		}
		if err := mountSys(name); err != nil {
			return err
		}
		for _, b := range binds {
			if _, err := os.Stat(b.Target); err != nil {
				continue
			}
			if err := mount(b.Source, b.Target, "none", unix.MS_BIND); err != nil {
				return err
			}
		}
		return cmd.Start()
	})
}

// mountSys puts a sysfs over /sys: sysfs shows the devices of the network
// namespace in which it was mounted.
func mountSys(name string) error {
	var st unix.Statfs_t
	if err := unix.Statfs("/sys", &st); err != nil || st.Type != unix.SYSFS_MAGIC {
		return nil // a machine without sysfs has nothing to show
	}
	var flags uintptr
	if st.Flags&unix.ST_RDONLY != 0 {
		flags |= unix.MS_RDONLY
	}
	return mount(name, "/sys", "sysfs", flags)
}

// PIDs returns the processes whose network namespace is one of those named,
// without the calling process. Names that do not exist are ignored.
func PIDs(names ...string) ([]int, error) {
	type id struct{ dev, ino uint64 }
	wanted := make(map[id]bool, len(names))
	for _, n := range names {
		var st unix.Stat_t
		if err := unix.Stat(Path(n), &st); err == nil {
			wanted[id{st.Dev, st.Ino}] = true
		}
	}
	if len(wanted) == 0 {
		return nil, nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat("/proc/"+e.Name()+"/ns/net", &st); err == nil && wanted[id{st.Dev, st.Ino}] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// KillAll ends every process in the named namespaces with SIGKILL and waits
// until they are gone.
func KillAll(ctx context.Context, names ...string) error {
	for {
		pids, err := PIDs(names...)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			p, err := Find(pid)
			if err != nil {
				continue // ended by itself
			}
			if err := p.Signal(unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return err
			}
			if err := p.Wait(ctx); err != nil {
				return err
			}
		}
		// Again: one of them may have started another meanwhile.
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("end processes: %w", err)
		}
	}
}

// DoNew runs f inside a new namespace without a name, which goes with the last
// thing that f left open in it.
func DoNew(f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return f()
	})
}
