package main

import (
	"context"
	"os"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/systemd"
	"github.com/routerd/routerd/store"
)

// unitVariable names the environment variable in which the systemd unit says its own name (%n). Without it every stop is taken
// for a restart.
const unitVariable = "ROUTERD_UNIT"

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
	why, err := systemd.WhyStopped(ctx, unit)
	if err != nil {
		d.log.Warn("systemd does not say whether the daemon is stopped for good, so peers are not notified", "unit", unit, "error", err)
		return
	}
	if why == systemd.Restart || !d.bgp.Attracts() {
		return
	}
	systemd.Stopping(d.log, limit+stopMargin)
	d.leaving.Store(true)
	if d.node.Status().Drain != store.DrainWithdrawn {
		d.log.Info("stopped for good: peers are asked to prefer other ways", "at_most", limit)
		d.bgp.Leave()
		if !becomesQuiet(ctx, d.operator.Delivered, limit) && why != systemd.Shutdown {
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
