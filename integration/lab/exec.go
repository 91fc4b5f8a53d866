package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Streams are what a command reads and writes; a nil one is empty or thrown
// away.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Result is what came of a command.
type Result struct {
	Stdout, Stderr string
	Code           int // exit code; 128 + the signal's number if a signal ended it
}

// Exec runs a command on a host, in a pod (HOST/POD) or on the spine, and
// returns what it printed. A command that exits with another code than 0 is
// not an error. The command ends with ctx.
func (l *Lab) Exec(ctx context.Context, where string, args ...string) (Result, error) {
	var out, errOut bytes.Buffer
	code, err := l.Run(ctx, where, Streams{Out: &out, Err: &errOut}, args...)
	return Result{out.String(), errOut.String(), code}, err
}

// Output is Exec for a command that must succeed; it returns its output.
func (l *Lab) Output(ctx context.Context, where string, args ...string) (string, error) {
	r, err := l.Exec(ctx, where, args...)
	if err != nil {
		return "", err
	}
	if r.Code != 0 {
		return "", fmt.Errorf("run %v on %s: exit code %d: %s", args, where, r.Code, bytes.TrimSpace([]byte(r.Stderr+r.Stdout)))
	}
	return r.Stdout, nil
}

// copyWithin is how long the copying of what a command printed may take once it
// has ended, and is cut short only where something that it left behind keeps
// the pipe open: machines whose processors were taken away, or busy with
// hundreds of commands, took more than a second.
const copyWithin = 30 * time.Second

// cancelWithin is the same for a command whose context has ended: nobody is
// interested in what it printed.
const cancelWithin = time.Second

// endsSoon bounds for how long the end of cmd is waited for.
func endsSoon(cmd *exec.Cmd) {
	cmd.WaitDelay = copyWithin
	cmd.Cancel = func() error {
		cmd.WaitDelay = cancelWithin // os/exec reads it after this
		return cmd.Process.Kill()
	}
}

// Run runs a command with the caller's streams and returns its exit code. The
// command sees the /sys of the namespace, and ip(8) there knows routerd's
// protocol by its name.
func (l *Lab) Run(ctx context.Context, where string, s Streams, args ...string) (int, error) {
	if err := l.checkWhere(where); err != nil {
		return 0, err
	}
	if len(args) == 0 {
		return 0, errors.New("run: no command given")
	}
	protos, err := l.protocolNames()
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.In, s.Out, s.Err
	endsSoon(cmd)
	err = ns.StartMounted(l.Space(where), cmd, ns.Bind{Source: protos, Target: protocolsDir})
	if err == nil {
		err = cmd.Wait()
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case ctx.Err() != nil:
		return 0, fmt.Errorf("run %v on %s: %w", args, where, ctx.Err())
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode(), nil
	case errors.As(err, &exit):
		return 128 + signalOf(exit), nil
	}
	return 0, fmt.Errorf("run %v on %s: %w", args, where, err)
}

func (l *Lab) checkWhere(where string) error {
	host, pod := splitPod(where)
	if pod != "" {
		_, err := l.Pod(host, pod)
		return err
	}
	if _, ok := l.topology.node(host); !ok && host != spineName && !slices.Contains(l.topology.routers(), host) {
		return fmt.Errorf("host %s: not in lab %s; want one of %v, HOST/POD, %s or a rack behind NAT", host, l.name, l.Hosts(), spineName)
	}
	return nil
}

// protocolsDir is where ip(8) reads further names of routing protocols.
const protocolsDir = "/etc/iproute2/rt_protos.d"

// protocolNames returns a directory to be seen in place of protocolsDir: a
// machine on which routerd is not installed does not know its protocol's name.
func (l *Lab) protocolNames() (string, error) {
	d := filepath.Join(dir(l.name), ".rt_protos.d")
	if err := os.MkdirAll(d, 0o755); err != nil {
		return "", fmt.Errorf("name routerd's protocol: %w", err)
	}
	path := filepath.Join(d, "routerd.conf")
	if _, err := os.Stat(path); err == nil {
		return d, nil
	}
	return d, atomicfile.Write(path, []byte("77 routerd\n"), 0o644)
}

// signalOf returns the number of the signal that ended a command.
func signalOf(e *exec.ExitError) int {
	if ws, ok := e.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return int(ws.Signal())
	}
	return 0
}
