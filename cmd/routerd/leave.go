package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// unitVariable names the environment variable in which the systemd unit says its own name (%n). Without it every stop is taken
// for a restart.
const unitVariable = "ROUTERD_UNIT"

// ending is what a stop of the daemon is part of.
type ending int

const (
	endingRestart  ending = iota // it comes again
	endingStop                   // the service is stopped for good
	endingShutdown               // the host is
)

// endingOf reads from the output of `systemctl list-jobs` (columns JOB, UNIT, TYPE, STATE) why a unit is stopped: a restart keeps
// its job of that type until the new process is started, a shutdown of any kind starts shutdown.target (systemd.special(7)).
func endingOf(jobs, unit string) ending {
	is := endingRestart
	for line := range strings.Lines(jobs) {
		f := strings.Fields(line)
		switch {
		case len(f) < 3:
		case f[1] == "shutdown.target" && f[2] == "start":
			return endingShutdown
		case f[1] == unit && f[2] == "stop":
			is = endingStop
		}
	}
	return is
}

// askSystemd returns why a unit is being stopped.
func askSystemd(ctx context.Context, unit string) (ending, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
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
		return endingRestart, fmt.Errorf("systemctl list-jobs: %w", err)
	}
}

// terminated reports whether a program was ended by the signal that ends the daemon too. Systemd sends it to every process of the
// unit, and looks for further ones until there is none (systemd.kill(5), KillMode=control-group), so one that is started meanwhile
// can be hit. KillMode=mixed would spare it, and kill the process of BFD before that has taken leave of its peers.
func terminated(failed *exec.ExitError) bool {
	status, ok := failed.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// askLimit is how long systemd may take to answer: on a host that goes down it stops all services at once. It is less than
// TimeoutStopSec= in the unit, so that a systemd that says nothing costs nobody the orderly end.
const askLimit = 10 * time.Second

// leaveQuiet is for how long workloads must have been sent nothing; stopMargin is what the stop itself may take after that,
// as TimeoutStopSec= in the unit.
const (
	leaveQuiet = 5 * time.Second
	stopMargin = 15 * time.Second
)

// leave does what `routerctl node drain --wait` does, when the daemon is stopped for good, and returns when it may end. A
// restart changes nothing: graceful restart has peers keep this host's routes.
func (d *router) leave(ctx context.Context) {
	unit, limit := os.Getenv(unitVariable), d.cfg.BGP.DrainOnStop
	if d.bgp == nil || unit == "" || limit == 0 {
		return
	}
	why, err := askSystemd(ctx, unit)
	if err != nil {
		d.log.Warn("systemd does not say whether the daemon is stopped for good, so peers are not notified", "unit", unit, "error", err)
		return
	}
	if why == endingRestart || !d.bgp.Attracts() {
		return
	}
	state := fmt.Sprintf("%s\nEXTEND_TIMEOUT_USEC=%d", daemon.SdNotifyStopping, (limit + stopMargin).Microseconds())
	if _, err := daemon.SdNotify(false, state); err != nil {
		d.log.Warn("systemd was not notified", "state", state, "error", err)
	}
	d.leaving.Store(true)
	if d.node.Status().Drain != store.DrainWithdrawn {
		d.log.Info("stopped for good: peers are asked to prefer other ways", "at_most", limit)
		d.bgp.Leave()
		if !becomesQuiet(ctx, d.operator.Delivered, limit) && why != endingShutdown {
			d.log.Warn("workloads are still sent packets, so nothing is withdrawn: peers keep the routes for their restart time, as over a restart", "waited", limit)
			return
		}
	}
	d.bgp.Withdraw()
}

// becomesQuiet waits until workloads have been sent nothing for a while, at most until a limit, and reports whether they have.
// While it is not known what they are sent, they may be sent something.
func becomesQuiet(ctx context.Context, delivered func() (uint64, error), limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return async.Still(ctx, leaveQuiet, func() (n uint64, known bool, _ error) {
		n, err := delivered()
		return n, err == nil, nil
	}, nil) == nil
}
