package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestEndingOf(t *testing.T) {
	t.Parallel()
	const unit = "routerd.service"
	for _, c := range []struct {
		name, jobs string
		want       ending
	}{
		{"killed by hand", "", endingRestart},
		{"stopped", "  731 routerd.service stop running\n", endingStop},
		{"restarted", "731 routerd.service restart running\n", endingRestart},
		{"another is stopped", "731 routerd-exporter.service stop running\n732 routerd.service restart running\n", endingRestart},
		{"stopped among others", "730 etcd.service restart running\n731 routerd.service stop running\n", endingStop},
		{"reboot", "900 reboot.target start waiting\n901 shutdown.target start waiting\n902 routerd.service stop running\n", endingShutdown},
		{"shutdown is cancelled", "901 shutdown.target stop waiting\n902 routerd.service restart running\n", endingRestart},
		{"no table", "No jobs running.\n\n", endingRestart},
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
func TestAskSystemd(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	script := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := askSystemd(t.Context(), "routerd.service"); err == nil || got != endingRestart {
		t.Errorf("without systemctl: %d, %v", got, err)
	}
	script("echo 'Failed to connect to bus' >&2; echo '1 routerd.service stop running'; exit 1")
	if got, err := askSystemd(t.Context(), "routerd.service"); err == nil || got != endingRestart || !strings.Contains(err.Error(), "Failed to connect to bus") {
		t.Errorf("without a bus: %d, %v", got, err)
	}
	script("[ -e " + dir + "/again ] || { : >" + dir + "/again; kill -TERM $$; }; echo '1 routerd.service stop running'")
	if got, err := askSystemd(t.Context(), "routerd.service"); err != nil || got != endingStop {
		t.Errorf("hit by the signal that ends the daemon: %d, %v", got, err)
	}
	script("echo '1 routerd.service stop running'")
	if got, err := askSystemd(t.Context(), "routerd.service"); err != nil || got != endingStop {
		t.Errorf("stopped: %d, %v", got, err)
	}
}

// What the daemon takes for granted of its unit.
func TestStopFitsTheUnit(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../configs/systemd/routerd.service")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)$`).FindSubmatch(b)
	if m == nil {
		t.Fatal("the unit has no TimeoutStopSec")
	}
	limit, err := time.ParseDuration(string(m[1]) + "s")
	if err != nil {
		t.Fatal(err)
	}
	if stopMargin != limit {
		t.Errorf("a stop may take %s, and the unit says %s", stopMargin, limit)
	}
	if askLimit > limit-leaveQuiet {
		t.Errorf("systemd may take %s to answer, which leaves too little of %s for the stop", askLimit, limit)
	}
}

func TestBecomesQuiet(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		count func(call int) (uint64, error)
		want  bool
		after time.Duration
	}{
		{"nothing is sent", func(int) (uint64, error) { return 7, nil }, true, 5 * time.Second},
		{"it ends", func(call int) (uint64, error) { return uint64(min(call, 10)), nil }, true, 15 * time.Second},
		{"it goes on", func(call int) (uint64, error) { return uint64(call), nil }, false, 30 * time.Second},
		{"a workload goes and its counter with it", func(call int) (uint64, error) { return uint64(max(10-call, 0)), nil }, true, 15 * time.Second},
		{"nobody knows", func(int) (uint64, error) { return 7, errors.New("no such file") }, false, 30 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				from, call := time.Now(), 0
				got := becomesQuiet(t.Context(), func() (uint64, error) { call++; return c.count(call - 1) }, 30*time.Second)
				if took := time.Since(from); got != c.want || took != c.after {
					t.Errorf("%t after %s, want %t after %s", got, took, c.want, c.after)
				}
			})
		})
	}
}
