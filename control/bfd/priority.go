package bfd

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// prioritize has this process scheduled before all others that are not real-time ones, for what it computes is little
// and late after milliseconds. Where that is not allowed (it takes CAP_SYS_NICE, or RLIMIT_RTPRIO of at least one), the
// process runs like any other: sched(7).
func prioritize() error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("list this process's threads: %w", err)
	}
	attr := unix.SchedAttr{Policy: unix.SCHED_RR, Priority: 1}
	attr.Size = unix.SizeofSchedAttr
	for _, t := range tasks {
		id, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		// Threads that start later inherit it. One that has ended is none of ours.
		if err := unix.SchedSetAttr(id, &attr, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("ask for real-time scheduling: %w", err)
		}
	}
	return nil
}
