// Package systemd is what the daemon has to do with the manager of its unit: readiness,
// its status line and watchdog (sd_notify(3)), and why it is being stopped.
package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Notify reports to systemd that the daemon serves, keeps its status line up
// to date, and feeds its watchdog for as long as live returns nil. It does
// nothing when systemd did not start the daemon.
//
// READY means that the sockets answer, not that the host is ready for
// workloads: a datastore that is away must not make systemd restart the daemon.
func Notify(ctx context.Context, log *slog.Logger, live func() error, statusLine func() string) {
	notify := func(state string) { send(log, state) }
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("watchdog settings of systemd not understood", "error", err)
	}
	notify(daemon.SdNotifyReady)
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	if interval > 0 {
		tick.Reset(interval / 3)
	}
	last := ""
	for {
		if s := statusLine(); s != last {
			notify("STATUS=" + s)
			last = s
		}
		if interval > 0 {
			if err := live(); err != nil {
				log.Error("not live; the watchdog is not fed", "error", err)
			} else {
				notify(daemon.SdNotifyWatchdog)
			}
		}
		select {
		case <-ctx.Done():
			notify(daemon.SdNotifyStopping)
			return
		case <-tick.C:
		}
	}
}

// Stopping says that the daemon stops, which may take so long.
func Stopping(log *slog.Logger, limit time.Duration) {
	send(log, fmt.Sprintf("%s\nEXTEND_TIMEOUT_USEC=%d", daemon.SdNotifyStopping, limit.Microseconds()))
}

func send(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd was not notified", "state", state, "error", err)
	}
}
