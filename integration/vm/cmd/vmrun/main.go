// Command vmrun runs a command in a virtual machine with Debian's kernel; see
// package vm. It exits with the command's status.
//
//	vmrun [flags] [--] command [argument…]
//
// It also serves as the -exec program of go test, which then runs each test
// binary in a machine of its own, in the directory that it would have on the
// host:
//
//	CGO_ENABLED=0 go test -exec 'vmrun --bin bin' ./dataplane/kernel
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/routerd/routerd/integration/vm"
)

// binDir is where the machine has the programs of --bin.
const binDir = "/opt/routerd/bin"

// Exit statuses of vmrun itself, as of env(1) and timeout(1): high, so that
// they are not taken for those of a test.
const (
	exitFailed  = 125
	exitTimeout = 124
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	opts, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err == nil {
		err = opts.complete()
	}
	if err != nil {
		fmt.Fprintln(stderr, "vmrun:", err)
		return exitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, opts.timeout)
	defer cancel()
	cfg := opts.config
	cfg.Stdout, cfg.Stderr, cfg.Progress = stdout, stderr, stderr
	status, err := vm.Run(ctx, cfg)
	if err == nil {
		return status
	}
	// What the timeout cut short need not say so: a program that it killed does not.
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		fmt.Fprintf(stderr, "vmrun: no end after %s (--timeout): %v\n", opts.timeout, err)
		return exitTimeout
	}
	fmt.Fprintln(stderr, "vmrun:", err)
	return exitFailed
}

// options are the parsed command line.
type options struct {
	config  vm.Config
	timeout time.Duration
	bin     string
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("vmrun", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprintln(stderr, "usage: vmrun [flags] [--] command [argument…]\n\nRuns a command in a virtual machine with Debian's kernel and exits with its status.\n\nflags:")
		fs.PrintDefaults()
	}
	fs.StringVar(&o.config.Cache, "cache", "", "`directory` that keeps the kernel and the base image (default .cache/vm in the module's root)")
	fs.StringVar(&o.config.Kernel, "kernel", "", "`kernel` to run: \"backports\" is Debian's newest for its stable release (default: that of this host's release)")
	fs.Func("package", "`package` of Debian's stable release, whose programs the machine has in the place of this host's; may be repeated", func(s string) error {
		o.config.Packages = append(o.config.Packages, s)
		return nil
	})
	fs.Func("tool", "`program` of this host that the machine has too, with its libraries; may be repeated", func(s string) error {
		o.config.Tools = append(o.config.Tools, s)
		return nil
	})
	fs.DurationVar(&o.timeout, "timeout", 10*time.Minute, "kill the machine after this `time`")
	fs.StringVar(&o.bin, "bin", "", "`directory` of static programs; the machine has it as "+binDir+", first in PATH and as ROUTERD_BIN")
	fs.IntVar(&o.config.CPUs, "cpus", 2, "`number` of CPUs")
	fs.IntVar(&o.config.MemoryMiB, "memory", 3072, "memory in `MiB`")
	fs.StringVar(&o.config.Accel, "accel", "", "QEMU's `accelerator` (default: tcg)")
	fs.BoolVar(&o.config.Systemd, "systemd", false, "this host's systemd is the machine's first process, and the command a service of it")
	fs.StringVar(&o.config.Dir, "dir", "", "working `directory` of the command in the machine")
	fs.Func("file", "`host:guest`: a file or directory for the machine; may be repeated", func(s string) error {
		host, guest, ok := strings.Cut(s, ":")
		if !ok || host == "" || !path.IsAbs(guest) {
			return fmt.Errorf("want host:guest with an absolute path for guest")
		}
		o.config.Files = append(o.config.Files, vm.File{Host: host, Guest: guest})
		return nil
	})
	fs.Func("env", "`NAME=value` for the command; may be repeated", func(s string) error {
		if name, _, ok := strings.Cut(s, "="); !ok || name == "" {
			return fmt.Errorf("want NAME=value")
		}
		o.config.Env = append(o.config.Env, s)
		return nil
	})
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() == 0 {
		return nil, errors.New("no command given (vmrun -h shows the usage)")
	}
	o.config.Command = fs.Args()
	return o, nil
}

// complete derives what the flags leave open.
func (o *options) complete() error {
	cwd, err := os.Getwd()
	if err != nil {
		return err
	}
	root, err := moduleRoot(cwd)
	if err != nil && (o.config.Cache == "" || strings.HasSuffix(o.config.Command[0], ".test")) {
		return err
	}
	if o.config.Cache == "" {
		o.config.Cache = filepath.Join(root, ".cache", "vm")
	}
	// Collecting garbage costs more than memory where each instruction is
	// translated: a third of all the time a lab takes. A later --env overrides.
	o.config.Env = append([]string{"GOGC=800"}, o.config.Env...)
	if o.bin != "" {
		st, err := os.Stat(o.bin)
		if err != nil {
			return fmt.Errorf("--bin: %w (make build makes it)", err)
		}
		if !st.IsDir() {
			return fmt.Errorf("--bin %s: not a directory", o.bin)
		}
		o.config.Files = append(o.config.Files, vm.File{Host: o.bin, Guest: binDir})
		o.config.Env = append(o.config.Env, "ROUTERD_BIN="+binDir,
			"PATH="+binDir+":/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	}
	if strings.HasSuffix(o.config.Command[0], ".test") {
		o.asTest(root, cwd)
	}
	return nil
}

// asTest prepares for a test binary that go test hands over: the binary comes
// along with its package's testdata and the sample configurations, at the
// places where a test finds them from its own directory.
func (o *options) asTest(root, cwd string) {
	const guestRoot = "/opt/routerd/src"
	rel, err := filepath.Rel(root, cwd)
	if err != nil {
		rel = "."
	}
	dir := path.Join(guestRoot, filepath.ToSlash(rel))
	test := path.Join(dir, filepath.Base(o.config.Command[0]))
	o.config.Files = append(o.config.Files,
		vm.File{Host: o.config.Command[0], Guest: test},
		vm.File{Host: filepath.Join(root, "go.mod"), Guest: path.Join(guestRoot, "go.mod")})
	for _, d := range []string{filepath.Join(cwd, "testdata"), filepath.Join(root, "configs")} {
		if st, err := os.Stat(d); err == nil && st.IsDir() {
			rel, err := filepath.Rel(root, d)
			if err == nil {
				o.config.Files = append(o.config.Files, vm.File{Host: d, Guest: path.Join(guestRoot, filepath.ToSlash(rel))})
			}
		}
	}
	if o.config.Dir == "" {
		o.config.Dir = dir
	}
	o.config.Command[0] = test
}

// moduleRoot returns the nearest directory at or above dir with a go.mod.
func moduleRoot(dir string) (string, error) {
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("no go.mod at or above %s: run vmrun in the repository or say --cache", dir)
		}
	}
}
