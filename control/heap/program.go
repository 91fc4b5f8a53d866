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

// forgetProgram takes the pages of the program's file out of the process: a start runs
// through most of the code once, and needs little of it again. They stay in the host's page
// cache for as long as it has room for them, so what is needed comes back without reading
// the disk (madvise(2), MADV_DONTNEED). Only what cannot be written is given back: nothing
// is lost by that, apart from breakpoints that a debugger or a uprobe has set.
func forgetProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("find the program's file: %w", err)
	}
	f, err := os.Open("/proc/self/maps")
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

// mappings lists where a file is mapped so that nobody can write to it, by /proc/PID/maps
// (proc_pid_maps(5)).
func mappings(maps io.Reader, file string) ([]mapping, error) {
	var out []mapping
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 6 || strings.Join(f[5:], " ") != file || strings.Contains(f[1], "w") {
			continue
		}
		from, to, ok := strings.Cut(f[0], "-")
		a, errA := strconv.ParseUint(from, 16, 64)
		b, errB := strconv.ParseUint(to, 16, 64)
		if !ok || errA != nil || errB != nil || b < a {
			return nil, fmt.Errorf("/proc/self/maps: %q is no range of addresses", f[0])
		}
		out = append(out, mapping{uintptr(a), uintptr(b)})
	}
	return out, lines.Err()
}
