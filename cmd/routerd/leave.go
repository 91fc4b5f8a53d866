package main

import (
	"context"
	"os"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/systemd"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

// unitVariable names the environment variable in which the systemd unit says its own name (%n). Without it the Node says what
// a stop is part of, if this host knows Kubernetes' API; without that every stop is taken for a restart.
const unitVariable = "ROUTERD_UNIT"

// leaveQuiet is for how long workloads must have been sent nothing; stopMargin is what the stop itself may take after that,
// as TimeoutStopSec= in the unit.
const (
	leaveQuiet = 5 * time.Second
	stopMargin = 15 * time.Second
)

// leaver has the host leave when the daemon is stopped for good.
type leaver struct {
	daemon
	bgp       *bgp.Controller // nil: not enabled
	agent     *node.Agent
	api       *kube.Store            // nil: this host does not know it
	delivered func() (uint64, error) // packets to workloads
	leaving   *atomic.Bool           // set when no more workloads are to come
}

// leave does what `routerctl node drain --wait` does, when the daemon is stopped for good, and returns when it may end. A
// restart changes nothing: graceful restart has peers keep this host's routes.
func (l leaver) leave(ctx context.Context) {
	limit := l.BGP.DrainOnStop
	if l.bgp == nil || limit == 0 || !l.bgp.Attracts() {
		return
	}
	why, err := l.whyStopped(ctx)
	if err != nil {
		l.log.Warn("it is not known whether the daemon is stopped for good, so peers are not notified", "error", err)
		return
	}
	if why == systemd.Restart {
		return
	}
	systemd.Stopping(l.log, limit+stopMargin)
	l.leaving.Store(true)
	if l.agent.Status().Drain != store.DrainWithdrawn {
		l.log.Info("stopped for good: peers are asked to prefer other ways", "at_most", limit)
		l.bgp.Leave()
		if !becomesQuiet(ctx, l.delivered, limit) && why != systemd.Shutdown {
			l.log.Warn("workloads are still sent packets, so nothing is withdrawn: peers keep the routes for their restart time, as over a restart", "waited", limit)
			return
		}
	}
	l.bgp.Withdraw()
}

// whyStopped returns what the daemon's end is part of. With an error it is a restart.
func (l leaver) whyStopped(ctx context.Context) (systemd.Ending, error) {
	if unit := os.Getenv(unitVariable); unit != "" {
		return systemd.WhyStopped(ctx, unit)
	}
	if l.api == nil {
		return systemd.Restart, nil
	}
	ctx, cancel := context.WithTimeout(ctx, systemd.AskLimit)
	defer cancel()
	g, err := l.api.Going(ctx, l.name)
	return endingOf(g), err
}

// endingOf returns what the end of a pod is part of on a node that goes, or does not. A pod of a DaemonSet that ends on a node that
// was cordoned may be replaced there, as in an upgrade; taken for a stop it costs no packet, for nothing is withdrawn that is in use.
func endingOf(g kube.Going) systemd.Ending {
	switch {
	case g.ShuttingDown:
		return systemd.Shutdown
	case g.Cordoned:
		return systemd.Stop
	}
	return systemd.Restart
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
