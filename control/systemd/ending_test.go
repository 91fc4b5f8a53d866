package systemd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEndingOf(t *testing.T) {
	t.Parallel()
	const unit = "routerd.service"
	for _, c := range []struct {
		name, jobs string
		want       Ending
	}{
		{"killed by hand", "", Restart},
		{"stopped", "  731 routerd.service stop running\n", Stop},
		{"restarted", "731 routerd.service restart running\n", Restart},
		{"another is stopped", "731 routerd-exporter.service stop running\n732 routerd.service restart running\n", Restart},
		{"stopped among others", "730 etcd.service restart running\n731 routerd.service stop running\n", Stop},
		{"reboot", "900 reboot.target start waiting\n901 shutdown.target start waiting\n902 routerd.service stop running\n", Shutdown},
		{"shutdown is cancelled", "901 shutdown.target stop waiting\n902 routerd.service restart running\n", Restart},
		{"no table", "No jobs running.\n\n", Restart},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := endingOf(c.jobs, unit); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}

// A systemd that does not answer must not have a restart taken for a stop for good.
func TestWhyStopped(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	script := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := WhyStopped(t.Context(), "routerd.service"); err == nil || got != Restart {
		t.Errorf("without systemctl: %d, %v", got, err)
	}
	script("echo 'Failed to connect to bus' >&2; echo '1 routerd.service stop running'; exit 1")
	if got, err := WhyStopped(t.Context(), "routerd.service"); err == nil || got != Restart || !strings.Contains(err.Error(), "Failed to connect to bus") {
		t.Errorf("without a bus: %d, %v", got, err)
	}
	script("[ -e " + dir + "/again ] || { : >" + dir + "/again; kill -TERM $$; }; echo '1 routerd.service stop running'")
	if got, err := WhyStopped(t.Context(), "routerd.service"); err != nil || got != Stop {
		t.Errorf("hit by the signal that ends the daemon: %d, %v", got, err)
	}
	script("echo '1 routerd.service stop running'")
	if got, err := WhyStopped(t.Context(), "routerd.service"); err != nil || got != Stop {
		t.Errorf("stopped: %d, %v", got, err)
	}
}
