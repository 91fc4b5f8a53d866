package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	stageVariable = "ROUTERD_CLUSTER_STAGE"
	nameVariable  = "ROUTERD_CLUSTER_NAME"
)

// Contain runs the calling program once more, with the same arguments, in PID,
// network, mount, UTS and IPC namespaces of its own. All that is started in there
// ends with it, however it ends, and its mounts, devices and rules go with it; the
// directory and the cgroups that are left are removed then. A run that was killed
// before it could do that is cleaned up after by the next with the same prefix: what
// is outside of the namespaces is named by it and the pid of who looks after that.
//
// The caller returns with code if it is not the contained one, which gets its name.
func Contain(prefix string) (name string, code int, err error) {
	switch os.Getenv(stageVariable) {
	case "":
		code, err = contain(prefix)
		return "", code, err
	case "init":
		code, err = initProcess()
		return "", code, err
	}
	return os.Getenv(nameVariable), 0, nil
}

// contain starts the init process of the namespaces, waits for it and cleans up.
func contain(prefix string) (code int, err error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("namespaces need root: run it with sudo")
	}
	if err := removeOrphans(prefix); err != nil {
		return 1, err
	}
	name := prefix + strconv.Itoa(os.Getpid())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	defer signal.Stop(signals)

	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), stageVariable+"=init", nameVariable+"="+name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  unix.SIGKILL,
	}
	// The kernel sends Pdeathsig when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start in namespaces: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the exit code says it
	}()
	interrupted := false
	select {
	case <-ended:
	case <-signals:
		interrupted = true
		// The first process of a PID namespace takes all others with it.
		_ = cmd.Process.Kill() // it may have ended
		<-ended
	}
	code = cmd.ProcessState.ExitCode()
	if interrupted || code < 0 {
		code = 130
	}
	if err := remove(name); err != nil {
		return max(code, 1), fmt.Errorf("clean up: %w", err)
	}
	return code, nil
}

// initProcess is the first process of the namespaces: it makes them usable, starts
// the program proper and waits for all that ends, also for orphans.
func initProcess() (code int, err error) {
	for _, m := range []struct {
		source, target, fstype string
		flags                  uintptr
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
	} {
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, ""); err != nil {
			return 1, fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := os.Setenv(stageVariable, "run"); err != nil {
		return 1, err
	}
	p, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return 1, fmt.Errorf("start the program: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 1, fmt.Errorf("wait for the program: %w", err)
		case pid == p.Pid && status.Signaled():
			return 128 + int(status.Signal()), nil
		case pid == p.Pid:
			return status.ExitStatus(), nil
		}
	}
}

// Dir is where a contained run keeps its files.
func Dir(name string) string { return filepath.Join(os.TempDir(), name) }

// hierarchies lists the mounted hierarchies of cgroups.
func hierarchies() ([]string, error) {
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 2 && (f[2] == "cgroup" || f[2] == "cgroup2") {
			out = append(out, f[1])
		}
	}
	return out, nil
}

// removeOrphans removes what runs left whose process is gone.
func removeOrphans(prefix string) error {
	found, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	if err != nil {
		return err
	}
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		l, err := filepath.Glob(filepath.Join(h, prefix+"*"))
		if err != nil {
			return err
		}
		found = append(found, l...)
	}
	for _, path := range found {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), prefix))
		if err != nil || unix.Kill(pid, 0) == nil {
			continue
		}
		if err := remove(filepath.Base(path)); err != nil {
			return fmt.Errorf("remove what an earlier run left: %w", err)
		}
	}
	return nil
}

// remove removes the directory and the cgroups of a run that has ended.
func remove(name string) error {
	errs := []error{os.RemoveAll(Dir(name))}
	all, err := hierarchies()
	errs = append(errs, err)
	for _, h := range all {
		errs = append(errs, removeCgroup(filepath.Join(h, name)))
	}
	return errors.Join(errs...)
}

// dying is how long the processes of a run that was killed may take to end.
const dying = 20 * time.Second

// removeCgroup removes a cgroup with those below it, which hold no process, or only
// such as are about to end.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	for end := time.Now().Add(dying); ; <-time.After(10 * time.Millisecond) {
		err := unix.Rmdir(dir)
		if errors.Is(err, unix.EBUSY) && time.Now().Before(end) && errors.Join(errs...) == nil {
			continue
		}
		if err != nil {
			errs = append(errs, &fs.PathError{Op: "rmdir", Path: dir, Err: err})
		}
		return errors.Join(errs...)
	}
}

// shares is the weight of a run's pods against the machine's processes of 1024 each.
const shares = "20480"

// MakeCgroup makes a cgroup, below those that are there, in every hierarchy, with
// the processors and memory nodes of the one above.
func MakeCgroup(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		dir := h
		for part := range strings.SplitSeq(name, "/") {
			above := dir
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make cgroup: %w", err)
			}
			// All pods together count as one process of the machine otherwise, and the
			// daemon, which is one of them, starves where others are busy.
			if err := os.WriteFile(filepath.Join(dir, "cpu.shares"), []byte(shares), 0); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
				return fmt.Errorf("make cgroup: %w", err)
			}
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				raw, err := os.ReadFile(filepath.Join(above, file))
				if errors.Is(err, fs.ErrNotExist) {
					continue // another hierarchy, or version 2, which inherits
				}
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, file), raw, 0o644)
				}
				if err != nil {
					return fmt.Errorf("make cgroup: %w", err)
				}
			}
		}
	}
	return nil
}
