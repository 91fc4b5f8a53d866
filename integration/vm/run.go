package vm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// File is a file or directory of this host and where it appears in the machine.
type File struct {
	Host  string
	Guest string // absolute
}

// Config says what to run. The zero value of an optional field means its
// default.
type Config struct {
	Cache   string   // required: directory that keeps the kernel and the base image
	Command []string // required: program and arguments; looked up in the machine
	Files   []File   // optional: what the machine gets beside the base image
	Env     []string // optional: "NAME=value"
	Dir     string   // optional: working directory of the command; default /root
	Systemd bool     // optional: this host's systemd is the first process, and the command a service of it
	Kernel  string   // optional: [Backports]; default: of this host's release

	Packages []string // optional: of Debian's stable release, whose programs the machine has in the place of this host's

	Tools []string // optional: programs of this host beside the usual ones; they come with their libraries

	CPUs      int    // default 2
	MemoryMiB int    // default 3072
	Accel     string // QEMU's accelerator; default TCG, which works everywhere

	// The writers are used from different goroutines: where two of them are
	// one, it has to be safe for that, as an *os.File is.
	Stdout   io.Writer // required: what the command prints
	Stderr   io.Writer // required
	Progress io.Writer // required: one line per step
}

// tcg is the default accelerator: one thread for each CPU, and room for the
// translation of large Go programs, which the default of an eighth of the
// machine's memory does not promise.
const tcg = "tcg,thread=multi,tb-size=512"

// cpu has everything that TCG knows, random numbers in hardware above all, but
// not the fifth level of page tables, which only costs time.
const cpu = "max,la57=off"

// ErrNoResult is returned when the machine ended without reporting a status:
// its kernel died, or it never came up.
var ErrNoResult = errors.New("the machine ended without a result")

// Run starts a machine, runs the command in it and returns the command's exit
// status. A command that could not be run has status 126 or 127, as in a
// shell. The machine is killed when ctx ends, and when this process does.
func Run(ctx context.Context, cfg Config) (int, error) {
	if len(cfg.Command) == 0 {
		return 0, errors.New("no command for the machine")
	}
	if cfg.Kernel != "" && cfg.Kernel != Backports {
		return 0, fmt.Errorf("kernel %q: want %q, or none for that of this host's release", cfg.Kernel, Backports)
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return 0, fmt.Errorf("the test machine needs qemu-system-x86_64 (Debian's package qemu-system-x86; make deps installs it): %w", err)
	}
	img, err := prepare(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer img.base.Close()
	cfg.Files = slices.Concat(img.more, cfg.Files)
	dir, err := os.MkdirTemp("", "routerd-vm-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	initrd := filepath.Join(dir, "initrd")
	// Nothing that the command prints can be mistaken for it.
	mark := "\x00end " + rand.Text() + "\n"
	if err := writeInitrd(ctx, initrd, img.base, cfg, mark); err != nil {
		return 0, err
	}
	m := machine{cfg: cfg, mark: mark, console: filepath.Join(dir, "console"), start: time.Now()}
	if err := m.run(ctx, qemu, m.args(img.kernel.image, initrd)); err != nil {
		return 0, err
	}
	return m.status, nil
}

// writeInitrd writes the base and, after it, the caller's files.
func writeInitrd(ctx context.Context, name string, base io.Reader, cfg Config, mark string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.Copy(f, base); err != nil {
		return fmt.Errorf("copy the base image: %w", err)
	}
	a := newArchive(f)
	for _, file := range cfg.Files {
		a.tree(file.Guest, file.Host)
	}
	if cfg.Systemd {
		if err := addSystemd(ctx, a); err != nil {
			return err
		}
	}
	a.bytes("/etc/vm/command", 0o644, commandScript(cfg))
	a.bytes("/etc/vm/end", 0o644, []byte(mark))
	if err := errors.Join(a.Close(), f.Close()); err != nil {
		return fmt.Errorf("build the machine's files: %w", err)
	}
	return nil
}

// commandScript is what the machine's first process sources to run the command.
func commandScript(cfg Config) []byte {
	var b bytes.Buffer
	for _, e := range cfg.Env {
		name, value, _ := strings.Cut(e, "=")
		fmt.Fprintf(&b, "export %s=%s\n", name, quote(value))
	}
	dir := cfg.Dir
	if dir == "" {
		dir = "/root"
	}
	fmt.Fprintf(&b, "cd %s || exit 126\nexec", quote(dir))
	for _, arg := range cfg.Command {
		b.WriteString(" " + quote(arg))
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// quote quotes s for a POSIX shell.
func quote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// machine is one run.
type machine struct {
	cfg     Config
	mark    string // ends the command's output, and its errors
	console string // file with what the kernel prints
	start   time.Time

	// Written by the reader of the status port, read when it has ended.
	booted bool
	done   bool
	status int
}

// args returns QEMU's arguments. The files 3, 4 and 5 that it inherits are the
// pipes of the command's output, its errors and the status.
func (m *machine) args(kernel, initrd string) []string {
	cpus, mem, accel := m.cfg.CPUs, m.cfg.MemoryMiB, m.cfg.Accel
	if cpus == 0 {
		cpus = 2
	}
	if mem == 0 {
		mem = 3072
	}
	if accel == "" {
		accel = tcg
	}
	args := []string{
		"-machine", "q35", "-accel", accel, "-cpu", cpu, "-smp", strconv.Itoa(cpus), "-m", strconv.Itoa(mem),
		"-nodefaults", "-display", "none", "-no-reboot",
		"-kernel", kernel, "-initrd", initrd,
		// Namespaces and devices go through many RCU grace periods; expedited
		// ones wait less and mean the same.
		"-append", "console=ttyS0 panic=-1 oops=panic loglevel=5 mitigations=off rcupdate.rcu_expedited=1 nowatchdog",
		"-chardev", "file,id=console,path=" + m.console, "-serial", "chardev:console",
		"-device", "virtio-serial-pci",
	}
	for i, port := range []string{"stdout", "stderr", "status"} {
		args = append(args,
			"-chardev", fmt.Sprintf("file,id=%s,path=/dev/fd/%d", port, i+3),
			"-device", fmt.Sprintf("virtserialport,chardev=%s,name=routerd.%s", port, port))
	}
	return args
}

// run starts QEMU, passes on what the ports say and waits for its end.
func (m *machine) run(ctx context.Context, qemu string, args []string) error {
	// The kernel kills QEMU when the thread that started it ends, so that
	// thread has to stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	// The machine does not end itself: what QEMU holds back while we are slow to
	// read would be lost. It is ended when everything has arrived.
	running, stop := context.WithCancel(ctx)
	defer stop()
	var said bytes.Buffer
	cmd := exec.CommandContext(running, qemu, args...)
	cmd.Stdout, cmd.Stderr = &said, &said
	// A group of its own: Ctrl-C on a terminal reaches this process, which
	// then ends QEMU.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	var readers, arriving sync.WaitGroup
	var writeEnds []*os.File
	var copyErr error
	sinks := []func(io.Reader){
		func(r io.Reader) {
			if err := copyUntil(m.cfg.Stdout, r, []byte(m.mark)); err != nil {
				copyErr = fmt.Errorf("pass on the output: %w", err)
			}
		},
		// There is nobody left to tell of an error.
		func(r io.Reader) { _ = copyUntil(m.cfg.Stderr, r, []byte(m.mark)) },
		m.readStatus,
	}
	arriving.Add(len(sinks))
	for _, sink := range sinks {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, w)
		writeEnds = append(writeEnds, w)
		readers.Go(func() {
			defer r.Close()
			sink(r)
			arriving.Done()
			drain(r)
		})
	}
	err := cmd.Start()
	for _, w := range writeEnds {
		w.Close()
	}
	if err == nil {
		readers.Go(func() {
			arriving.Wait()
			if m.done {
				stop()
			}
		})
		err = cmd.Wait()
	}
	readers.Wait()
	if err := m.verdict(ctx, err, strings.TrimSpace(said.String())); err != nil {
		return err
	}
	return copyErr
}

// copyUntil passes on what r has up to a mark, or to its end. When w takes no
// more it reads on, so that the machine does not stand still, and returns why.
func copyUntil(w io.Writer, r io.Reader, mark []byte) error {
	var writeErr error
	pass := func(b []byte) {
		if writeErr == nil {
			_, writeErr = w.Write(b)
		}
	}
	var held []byte // may hold the beginning of the mark
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		held = append(held, buf[:n]...)
		if before, _, found := bytes.Cut(held, mark); found {
			pass(before)
			return writeErr
		}
		if err != nil { // the end: the machine died
			pass(held)
			return writeErr
		}
		keep := min(len(held), len(mark)-1)
		for !bytes.HasSuffix(held, mark[:keep]) {
			keep--
		}
		pass(held[:len(held)-keep])
		held = append(held[:0], held[len(held)-keep:]...)
	}
}

// drain reads to the end. There is nobody left to tell of an error.
func drain(r io.Reader) { _, _ = io.Copy(io.Discard, r) }

// verdict says what became of the machine.
func (m *machine) verdict(ctx context.Context, err error, said string) error {
	total := time.Since(m.start).Seconds()
	switch {
	case m.done:
		fmt.Fprintf(m.cfg.Progress, "vm: the command ended with status %d; %.1fs in all\n", m.status, total)
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("the machine was stopped after %.0fs: %w%s", total, context.Cause(ctx), m.consoleTail())
	case err != nil:
		return fmt.Errorf("run qemu-system-x86_64: %w: %s%s", err, said, m.consoleTail())
	}
	return fmt.Errorf("%w after %.0fs%s", ErrNoResult, total, m.consoleTail())
}

// readStatus follows the status port: "up", then "exit N".
func (m *machine) readStatus(r io.Reader) {
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		word, rest, _ := strings.Cut(sc.Text(), " ")
		switch word {
		case "up":
			m.booted = true
			fmt.Fprintf(m.cfg.Progress, "vm: up after %.1fs\n", time.Since(m.start).Seconds())
		case "exit":
			if n, err := strconv.Atoi(rest); err == nil {
				m.status, m.done = n, true
				return
			}
		}
	}
}

// consoleTail returns the end of what the machine's kernel and first process
// printed, for an error message.
func (m *machine) consoleTail() string {
	const keep = 40
	b, err := os.ReadFile(m.console)
	if err != nil || len(bytes.TrimSpace(b)) == 0 {
		return "; its console is empty"
	}
	lines := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(b), "\r", "")), "\n")
	// A panic says why in its first line, or in those before it where it follows from a fault of the kernel; its
	// trace may be longer than the end.
	begins := func(of ...string) int {
		return slices.IndexFunc(lines, func(l string) bool {
			return slices.ContainsFunc(of, func(s string) bool { return strings.Contains(l, s) })
		})
	}
	if i := begins("Kernel panic"); i >= 0 {
		if fault := begins("BUG: ", "kernel BUG", "Oops: "); fault >= 0 {
			i = min(i, fault)
		}
		lines = lines[i:min(len(lines), i+keep)]
	}
	if len(lines) > keep {
		lines = lines[len(lines)-keep:]
	}
	return "; the end of its console:\n  " + strings.Join(lines, "\n  ")
}
