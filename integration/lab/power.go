package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// boot leaves a kernel what a host's network has before the daemon starts: the devices of the
// underlay, with their addresses and routes.
const boot = `set -e
nft flush ruleset
ip nexthop flush
for family in -4 -6; do ip $family route flush table all proto 77; done
ip -br link | while read -r name _; do
	case $name in lo|eth*) ;; *) ip link del "${name%%@*}" ;; esac
done`

// LosePower ends a host's daemon and pods, of which neither hears before, and leaves its kernel
// and run directory as a boot does: what is on disk stays. Start does what the boot does then.
func (l *Lab) LosePower(ctx context.Context, host string) error {
	if err := l.Kill(ctx, host, unix.SIGKILL); err != nil {
		return err
	}
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return err
	}
	defer release()
	pods, err := l.Pods()
	if err != nil {
		return err
	}
	for _, p := range pods {
		if p.Host != host {
			continue
		}
		if err := l.forget(ctx, p); err != nil {
			return fmt.Errorf("lose pod %s: %w", p, err)
		}
	}
	if _, err := l.Output(ctx, host, "sh", "-c", boot); err != nil {
		return fmt.Errorf("leave %s as a boot does: %w", host, err)
	}
	files, err := os.ReadDir(hostDir(l.name, host))
	if err != nil {
		return fmt.Errorf("look into the run directory of %s: %w", host, err)
	}
	for _, f := range files {
		// Those and the directories, with the daemon's state, would be on the host's disk.
		if f.IsDir() || f.Name() == configName || f.Name() == filepath.Base(logFile(l.name, host)) {
			continue
		}
		if err := os.Remove(filepath.Join(hostDir(l.name, host), f.Name())); err != nil {
			return fmt.Errorf("empty the run directory of %s: %w", host, err)
		}
	}
	return nil
}
