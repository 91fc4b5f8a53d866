package main

import (
	"errors"
	"os"
	"regexp"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/systemd"
	"github.com/routerd/routerd/store/kube"
)

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
	if systemd.AskLimit > limit-leaveQuiet {
		t.Errorf("systemd may take %s to answer, which leaves too little of %s for the stop", systemd.AskLimit, limit)
	}
}

// What the daemon takes for granted of its pod: the API's answer, the drain by default and the stop fit its time.
func TestStopFitsThePod(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../configs/kubernetes/base/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ +terminationGracePeriodSeconds: (\d+)$`).FindSubmatch(b)
	if m == nil {
		t.Fatal("the DaemonSet has no terminationGracePeriodSeconds")
	}
	limit, err := time.ParseDuration(string(m[1]) + "s")
	if err != nil {
		t.Fatal(err)
	}
	if need := systemd.AskLimit + config.Default().BGP.DrainOnStop + stopMargin; limit < need {
		t.Errorf("a stop may take %s, and the DaemonSet gives it %s", need, limit)
	}
}

func TestEndingOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		going kube.Going
		want  systemd.Ending
	}{
		{kube.Going{}, systemd.Restart},
		{kube.Going{Cordoned: true}, systemd.Stop},
		{kube.Going{ShuttingDown: true}, systemd.Shutdown},
		{kube.Going{Cordoned: true, ShuttingDown: true}, systemd.Shutdown},
	} {
		if got := endingOf(tt.going); got != tt.want {
			t.Errorf("%+v: %d, want %d", tt.going, got, tt.want)
		}
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
