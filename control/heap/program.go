package heap

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// forgetProgram takes the pages of the program's file out of the process: a start, or another
// burst of work, runs through much of the code once, and needs little of it again. They stay in the host's page
// cache for as long as it has room for them, so what is needed comes back without reading
// the disk (madvise(2), MADV_DONTNEED). Only what cannot be written and never was is given
// back: nothing is lost by that, apart from breakpoints that a debugger or a uprobe sets
// meanwhile.
func forgetProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("find the program's file: %w", err)
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("find where the program is in memory: %w", err)
	}
	defer f.Close()
	list, err := mappings(f, program)
	if err != nil {
		return err
	}
	for _, m := range list {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.from, m.to-m.from, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("give back the pages of %s at %#x: %w", program, m.from, errno)
		}
	}
	return nil
}

// mapping is a range of addresses.
type mapping struct{ from, to uintptr }

// mappings lists where a file is mapped so that nobody can write to it, by
// /proc/PID/smaps (proc_pid_smaps(5)). Where pages are the process's own they have been
// written to: the dynamic linker relocates what is read-only afterwards in a program that
// can be anywhere in memory.
func mappings(smaps io.Reader, file string) (out []mapping, err error) {
	lines := bufio.NewScanner(smaps)
	var m mapping // of the program; zero: another's
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		switch {
		case len(f) == 3 && strings.HasSuffix(f[0], ":"):
			if f[0] == "Anonymous:" && f[1] == "0" && m != (mapping{}) {
				out = append(out, m)
			}
			continue
		case len(f) > 0 && strings.HasSuffix(f[0], ":"): // VmFlags
			continue
		}
		m = mapping{}
		if len(f) < 6 || strings.Join(f[5:], " ") != file || strings.Contains(f[1], "w") {
			continue
		}
		if m, err = parseRange(f[0]); err != nil {
			return nil, err
		}
	}
	return out, lines.Err()
}

func parseRange(s string) (mapping, error) {
	from, to, ok := strings.Cut(s, "-")
	a, errA := strconv.ParseUint(from, 16, 64)
	b, errB := strconv.ParseUint(to, 16, 64)
	if !ok || errA != nil || errB != nil || b < a {
		return mapping{}, fmt.Errorf("/proc/self/smaps: %q is no range of addresses", s)
	}
	return mapping{uintptr(a), uintptr(b)}, nil
}
