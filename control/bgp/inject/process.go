package inject

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// process is one of the host: its number comes again, its start does not.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in the kernel's ticks since the host booted
}

// startOf reads when a process was started (proc(5), /proc/pid/stat, field 22); 0: there is none, or it is dead and
// only waited for.
func startOf(pid int) uint64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The second field is the program's name in parentheses, which may hold anything.
	f := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(f) < 20 || string(f[0]) == "Z" {
		return 0
	}
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return 0
	}
	return start
}

// sinceBoot is CLOCK_BOOTTIME, which goes on over a restart of the daemon and over sleep, and which cannot be set.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // since Linux 2.6.39 there is no error
	}
	return time.Duration(ts.Nano())
}
