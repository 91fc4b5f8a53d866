// Package clock gives a running process a wall clock of its own, which tests let
// jump: no namespace covers CLOCK_REALTIME, and the machine's own clock is
// everybody's. It writes code over that of the process's vDSO, by which Go's programs
// and the C library read the time (vdso(7)). The monotonic clock and timers go on as
// they were, as they do when a host's clock jumps; so does what the kernel stamps by
// itself, such as files. For x86-64, as root, and for tests alone.
package clock

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// functions of the vDSO that read the wall clock, and the code that takes their place:
// it asks the kernel and adds the seconds at an address. hole is where the distance to
// that address goes, counted from the hole's end.
var functions = map[string]struct {
	code []byte
	hole int
}{
	// clock_gettime(2) of CLOCK_REALTIME, 0, and CLOCK_REALTIME_COARSE, 5.
	"__vdso_clock_gettime": {[]byte{
		0xb8, unix.SYS_CLOCK_GETTIME, 0, 0, 0, // mov eax, clock_gettime
		0x0f, 0x05, // syscall
		0x85, 0xc0, // test eax, eax
		0x75, 0x13, // jnz end
		0x85, 0xff, // test edi, edi
		0x74, 0x05, // jz add
		0x83, 0xff, 0x05, // cmp edi, 5
		0x75, 0x0a, // jne end
		0x48, 0x8b, 0x0d, 0, 0, 0, 0, // add: mov rcx, [rip+seconds]
		0x48, 0x01, 0x0e, // add [rsi], rcx
		0xc3, // end: ret
	}, 23},
	// gettimeofday(2)
	"__vdso_gettimeofday": {[]byte{
		0xb8, unix.SYS_GETTIMEOFDAY, 0, 0, 0, // mov eax, gettimeofday
		0x0f, 0x05, // syscall
		0x85, 0xc0, // test eax, eax
		0x75, 0x0f, // jnz end
		0x48, 0x85, 0xff, // test rdi, rdi
		0x74, 0x0a, // jz end
		0x48, 0x8b, 0x0d, 0, 0, 0, 0, // mov rcx, [rip+seconds]
		0x48, 0x01, 0x0f, // add [rdi], rcx
		0xc3, // end: ret
	}, 19},
	// time(2)
	"__vdso_time": {[]byte{
		0xb8, unix.SYS_TIME, 0, 0, 0, // mov eax, time
		0x0f, 0x05, // syscall
		0x48, 0x03, 0x05, 0, 0, 0, 0, // add rax, [rip+seconds]
		0x48, 0x85, 0xff, // test rdi, rdi
		0x74, 0x03, // jz end
		0x48, 0x89, 0x07, // mov [rdi], rax
		0xc3, // end: ret
	}, 10},
}

// Set lets a process's wall clock differ by so much from the machine's, in whole
// seconds, from now on and until the process ends; its children have the machine's.
// The process is stopped for a moment, and goes on afterwards also if it was stopped
// before.
func Set(ctx context.Context, pid int, by time.Duration) error {
	if err := set(ctx, pid, int64(by/time.Second)); err != nil {
		return fmt.Errorf("set the clock of process %d %v off: %w", pid, by, err)
	}
	return nil
}

func set(ctx context.Context, pid int, seconds int64) (err error) {
	start, end, err := find(pid)
	if err != nil {
		return err
	}
	mem, err := os.OpenFile(procFile(pid, "mem"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	image := make([]byte, end-start)
	if _, err := mem.ReadAt(image, start); err != nil {
		return fmt.Errorf("read the vDSO: %w", err)
	}
	patched, err := patch(image, seconds)
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	defer func() {
		if e := unix.Kill(pid, unix.SIGCONT); err == nil {
			err = e
		}
	}()
	if err := outside(ctx, pid, start, end); err != nil {
		return err
	}
	if _, err := mem.WriteAt(patched, start); err != nil {
		return fmt.Errorf("write the vDSO: %w", err)
	}
	return nil
}

// patch returns a vDSO's image with the code that adds so many seconds.
func patch(image []byte, seconds int64) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("read the vDSO: %w", err)
	}
	if f.Machine != elf.EM_X86_64 {
		return nil, fmt.Errorf("the vDSO is for %v: want x86-64", f.Machine)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("read the vDSO: %w", err)
	}
	out := bytes.Clone(image)
	data := len(out) - 8 // behind all of the file, in what fills the page
	binary.LittleEndian.PutUint64(out[data:], uint64(seconds))
	found := 0
	for _, s := range symbols {
		with, ok := functions[s.Name]
		if !ok {
			continue
		}
		if s.Size < uint64(len(with.code)) {
			return nil, fmt.Errorf("%s has %d bytes, too few for %d", s.Name, s.Size, len(with.code))
		}
		at := int(s.Value)
		copy(out[at:], with.code)
		hole := at + with.hole
		binary.LittleEndian.PutUint32(out[hole:], uint32(data-hole-4))
		found++
	}
	if found != len(functions) {
		return nil, fmt.Errorf("the vDSO has %d of the %d functions that read the clock", found, len(functions))
	}
	return out, nil
}

func procFile(pid int, name ...string) string {
	return filepath.Join(append([]string{"/proc", strconv.Itoa(pid)}, name...)...)
}

// find returns where a process has its vDSO.
func find(pid int) (start, end int64, err error) {
	maps, err := os.ReadFile(procFile(pid, "maps"))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		if _, err := fmt.Sscanf(line, "%x-%x ", &start, &end); err != nil {
			return 0, 0, fmt.Errorf("read %q: %w", line, err)
		}
		return start, end, nil
	}
	return 0, 0, errors.New("the process has no vDSO")
}

// pause is between two looks at a process that is being stopped.
const pause = time.Millisecond

// outside waits until all threads of a process that was sent SIGSTOP are stopped, none
// of them within a range of its memory. One that is goes on for a moment.
func outside(ctx context.Context, pid int, start, end int64) error {
	for {
		stopped, inside, err := threads(pid, start, end)
		if err != nil {
			return err
		}
		if stopped && !inside {
			return nil
		}
		if inside {
			if err := unix.Kill(pid, unix.SIGCONT); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until it is stopped: %w", ctx.Err())
		case <-time.After(pause):
		}
		if inside {
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
				return err
			}
		}
	}
}

// threads looks at all threads of a process: whether they are stopped, and whether one
// executes what lies in a range.
func threads(pid int, start, end int64) (stopped, inside bool, err error) {
	tasks, err := os.ReadDir(procFile(pid, "task"))
	if err != nil {
		return false, false, err
	}
	stopped = true
	for _, t := range tasks {
		// A thread that has ended meanwhile executes nothing.
		stat, err := os.ReadFile(procFile(pid, "task", t.Name(), "stat"))
		if err != nil {
			continue
		}
		// proc_pid_stat(5): the state follows the name in parentheses.
		if i := bytes.LastIndexByte(stat, ')'); i+2 >= len(stat) || stat[i+2] != 'T' {
			stopped = false
			continue
		}
		call, err := os.ReadFile(procFile(pid, "task", t.Name(), "syscall"))
		if err != nil {
			continue
		}
		// proc_pid_syscall(5): the program counter comes last.
		fields := strings.Fields(string(call))
		pc, err := strconv.ParseInt(strings.TrimPrefix(fields[len(fields)-1], "0x"), 16, 64)
		if err != nil {
			return false, false, fmt.Errorf("read where thread %s is: %q", t.Name(), call)
		}
		inside = inside || pc >= start && pc < end
	}
	return stopped, inside, nil
}
