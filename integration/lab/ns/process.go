package ns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Process identifies a process beyond its life: a pid alone may be another's
// after a while, a pid with its start time may not.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks after boot: field 22 of /proc/PID/stat
}

// Find returns the process that has this pid now. The error matches
// [os.ErrProcessDone] when there is none, or only a zombie.
func Find(pid int) (Process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, os.ErrProcessDone)
	}
	state, start, err := parseStat(b)
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	if state == 'Z' || state == 'X' {
		return Process{}, fmt.Errorf("process %d: %w", pid, os.ErrProcessDone)
	}
	return Process{PID: pid, Start: start}, nil
}

// parseStat reads the state and the start time from /proc/PID/stat. The
// command, in parentheses, may itself hold spaces and parentheses.
func parseStat(b []byte) (state byte, start uint64, err error) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, 0, errors.New("stat without a command")
	}
	f := bytes.Fields(b[i+1:]) // from field 3 on
	if len(f) < 20 || len(f[0]) != 1 {
		return 0, 0, errors.New("stat is too short")
	}
	start, err = strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("start time: %w", err)
	}
	return f[0][0], start, nil
}

// Alive reports whether the process runs. A zombie does not; one that is a
// child of the caller is reaped.
func (p Process) Alive() bool {
	if p.PID <= 0 {
		return false
	}
	q, err := Find(p.PID)
	if err == nil {
		return p == q
	}
	// Reaping is harmless where it is not our child: ECHILD.
	_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
	return false
}

// open returns a descriptor that stands for the process and no other.
func (p Process) open() (int, error) {
	if p.PID <= 0 {
		return -1, fmt.Errorf("process: %w", os.ErrProcessDone)
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = os.ErrProcessDone
		}
		return -1, fmt.Errorf("process %d: %w", p.PID, err)
	}
	// The descriptor is bound to whoever has the pid; looked at after that, the
	// start time tells whether it is ours.
	if !p.Alive() {
		unix.Close(fd)
		return -1, fmt.Errorf("process %d: %w", p.PID, os.ErrProcessDone)
	}
	return fd, nil
}

// Signal sends a signal. The error matches [os.ErrProcessDone] when the
// process has ended, even if its pid is in use again.
func (p Process) Signal(sig unix.Signal) error {
	fd, err := p.open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = os.ErrProcessDone
		}
		return fmt.Errorf("send %v to process %d: %w", sig, p.PID, err)
	}
	return nil
}

// Wait returns when the process has ended, with all of its threads, or with
// ctx's error. A zombie may have threads that still end, and until they have,
// its files are open and its locks are held.
func (p Process) Wait(ctx context.Context) error {
	if p.PID <= 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
	if err != nil {
		return nil // it ended meanwhile
	}
	if _, start, err := parseStat(b); err != nil || start != p.Start {
		return err // the pid is another's
	}
	for {
		const slice = 50 // ms: how late the end of ctx may be seen
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, slice)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", p.PID, err)
		}
		if n > 0 {
			// Reaping is harmless where it is not our child: ECHILD.
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
			return nil
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wait for process %d: %w", p.PID, err)
		}
	}
}
