package systemd

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Ending is what a stop of the daemon is part of.
type Ending int

// What a stop can be part of.
const (
	Restart  Ending = iota // it comes again
	Stop                   // the service is stopped for good
	Shutdown               // the host is
)

// endingOf reads from the output of `systemctl list-jobs` (columns JOB, UNIT, TYPE, STATE) why a unit is stopped: a restart keeps
// its job of that type until the new process is started, a shutdown of any kind starts shutdown.target (systemd.special(7)).
func endingOf(jobs, unit string) Ending {
	is := Restart
	for line := range strings.Lines(jobs) {
		f := strings.Fields(line)
		switch {
		case len(f) < 3:
		case f[1] == "shutdown.target" && f[2] == "start":
			return Shutdown
		case f[1] == unit && f[2] == "stop":
			is = Stop
		}
	}
	return is
}

// WhyStopped returns why a unit is being stopped. With an error it is [Restart]: a systemd
// that does not answer must not have a restart taken for a stop for good.
func WhyStopped(ctx context.Context, unit string) (Ending, error) {
	ctx, cancel := context.WithTimeout(ctx, AskLimit)
	defer cancel()
	for {
		out, err := exec.CommandContext(ctx, "systemctl", "list-jobs", "--no-legend", "--plain", "--no-pager", "--full").Output()
		var failed *exec.ExitError
		switch {
		case err == nil:
			return endingOf(string(out), unit), nil
		case errors.As(err, &failed) && ctx.Err() == nil && terminated(failed):
			continue
		case failed != nil:
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return Restart, fmt.Errorf("systemctl list-jobs: %w", err)
	}
}

// terminated reports whether a program was ended by the signal that ends the daemon too. Systemd sends it to every process of the
// unit, and looks for further ones until there is none (systemd.kill(5), KillMode=control-group), so one that is started meanwhile
// can be hit. KillMode=mixed would spare it, and kill the process of BFD before that has taken leave of its peers.
func terminated(failed *exec.ExitError) bool {
	status, ok := failed.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// AskLimit is how long systemd may take to answer: on a host that goes down it stops all services at once. It is less than
// TimeoutStopSec= in the unit, so that a systemd that says nothing costs nobody the orderly end.
const AskLimit = 10 * time.Second
