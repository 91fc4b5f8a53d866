// Command routerctl is the operator's tool for routerd: it reads and writes
// the cluster's resources as calicoctl does, and shows what the daemon on this
// host does and why.
//
// It talks to the daemon through its unix socket, which only root can open.
// Resources go through the same socket, where the daemon serves etcd's key
// value service; with ETCD_ENDPOINTS set they are read and written in that
// etcd directly, with no daemon involved.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/routerd/routerd/cmd/routerctl/labcmd"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := invocation{plugin: filepath.Base(os.Args[0]) == pluginName}.run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, environment)
	stop()
	os.Exit(code)
}

// invocation is as what routerctl was called.
type invocation struct{ plugin bool } // kubectl's, see [app.asPlugin]

// run executes one command line and returns the exit code: 0 for success, 1
// when the command failed or when what it asked about is not well, 2 when the
// command line itself is wrong. It is all of the program: tests call it.
func (p invocation) run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	safeOut, safeErr := &printable{w: stdout}, &printable{w: stderr}
	a := &app{
		streams: streams{stdin: stdin, stdout: safeOut, stderr: safeErr, rawOut: stdout, rawErr: stderr},
		waits:   waits{settle: settleTime, patience: patience, every: lookEvery},
		daemon:  &daemon{getenv: getenv, resolveLab: labcmd.Socket, plugin: p.plugin},
		args:    args,
	}
	root := a.command()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(safeOut)
	root.SetErr(safeErr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if _, _, unknown := root.Find(args); unknown != nil { // cobra's error has no type
		name := ""
		if _, scan := fmt.Sscanf(unknown.Error(), "unknown command %q", &name); scan == nil {
			err = unknownCommand(root, name)
		}
	}
	var own interface {
		error
		ExitCode() int
	}
	if errors.As(err, &own) {
		return own.ExitCode()
	}
	fmt.Fprintln(safeErr, a.called("routerctl: "+err.Error()))
	var usage *usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// exitCode is an error that has been printed already.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// ExitCode returns the code with which the program is to end.
func (c exitCode) ExitCode() int { return int(c) }

// usageError says that the command line is wrong.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error {
	return &usageError{message: fmt.Sprintf(format, args...)}
}
