package enrol

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/config"
)

// Systemd is how the service is started, where there is a systemd.
type Systemd struct {
	Booted    string // is there if the system was booted with it: sd_booted(3)
	UnitReads string // the configuration that the unit's daemon reads
}

const unitName = "routerd.service"

func (s Systemd) isThere() bool {
	_, err := os.Lstat(s.Booted)
	return err == nil
}

func (s Systemd) run(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, bytesOrNothing(out))
	}
	return nil
}

func bytesOrNothing(b []byte) string { return cmp.Or(strings.TrimSpace(string(b)), "it says nothing") }

// service has the daemon run, and be ready.
type service struct {
	Config
	node  string
	began time.Time
	say   func(format string, args ...any)
}

// run starts the daemon, where systemd is there, and waits until it is ready.
func (s *service) run(ctx context.Context) error {
	if !s.Start || s.File != s.Systemd.UnitReads || !s.Systemd.isThere() {
		command := "routerd run"
		if s.File != config.DefaultFile {
			command += " --config " + s.File
		}
		s.say("This host is configured. To start routerd, or start it anew: %s", command)
		return nil
	}
	for _, args := range [][]string{{"enable", unitName}, {"restart", unitName}} {
		if err := s.Systemd.run(ctx, args...); err != nil {
			return fmt.Errorf("this host is configured, and routerd is not started: %w; see journalctl -u routerd, and run the same command again", err)
		}
	}
	s.say("Started %s.", unitName)
	return s.awaitReady(ctx)
}

// awaitReady waits for the daemon, and says what it waits for.
func (s *service) awaitReady(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, s.Wait)
	defer cancel()
	pause := async.Backoff{Min: 50 * time.Millisecond, Max: 500 * time.Millisecond}
	said := ""
	for {
		h, err := s.Health(waiting, s.Host.OperatorSocket())
		why := notReady(h, err)
		if why == "" {
			s.say("%s is ready, %.1f s after the start of this command.", s.node, time.Since(s.began).Seconds())
			return nil
		}
		if err == nil && why != said {
			s.say("Waiting until %s is ready: %s", s.node, why)
			said = why
		}
		if err := pause.Wait(waiting); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("this host is configured and routerd is started, but not ready after %s: %s; see routerctl node status and journalctl -u routerd", s.Wait, cmp.Or(said, why))
		}
	}
}

func notReady(h *apiv1.Health, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case h.GetReady().GetOk():
		return ""
	}
	return cmp.Or(h.GetReady().GetReason(), "it does not say why")
}
