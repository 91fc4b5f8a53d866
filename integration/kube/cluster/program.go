package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// program is a running program of the cluster, with its log in a file.
type program struct {
	log  string
	cmd  *exec.Cmd
	died chan struct{} // closed when it has ended
}

// start starts a program. What it writes is appended to a file.
func start(log string, cmd *exec.Cmd) (*program, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &program{log: log, cmd: cmd, died: make(chan struct{})}
	go func() {
		defer close(p.died)
		_ = cmd.Wait() // a program that is stopped ends with an error
	}()
	return p, nil
}

// stop ends the program: with SIGTERM, and when ctx ends before it does with SIGKILL.
func (p *program) stop(ctx context.Context) {
	_ = p.cmd.Process.Signal(unix.SIGTERM) // it may have ended
	select {
	case <-p.died:
	case <-ctx.Done():
		_ = p.cmd.Process.Kill()
		<-p.died
	}
}

// tail returns the end of a log.
func tail(log string) string {
	text, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// poll looks again and again until check returns nil, ctx ends or one of the programs
// does, of which the error has the last words.
func poll(ctx context.Context, what string, check func() error, of ...*program) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		for _, p := range of {
			select {
			case <-p.died:
				return fmt.Errorf("%s: %w; the program has ended:\n%s", what, err, tail(p.log))
			default:
			}
		}
		select {
		case <-ctx.Done():
			var words strings.Builder
			for _, p := range of {
				fmt.Fprintf(&words, "\n%s:\n%s", p.log, tail(p.log))
			}
			return fmt.Errorf("%s: %w: %w%s", what, ctx.Err(), err, words.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// output runs a command and returns what it printed.
func output(cmd *exec.Cmd) (string, error) {
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s%s", strings.Join(cmd.Args, " "), err, out.String(), errOut.String())
	}
	return out.String(), nil
}
