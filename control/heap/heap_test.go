package heap

import (
	"errors"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// The heap is kept to a share of what the host gives, unless the environment says
// otherwise. Not parallel: the limit is the process's.
func TestMemoryLimit(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(before) })
	for _, tt := range []struct {
		name   string
		env    string
		limits memlimit.Provider
		want   int64
		says   string
	}{
		{"limited", "", memlimit.Limit(1000 << 20), 900 << 20, "memory is limited"},
		{"not limited", "", func() (uint64, error) { return 0, memlimit.ErrNoLimit }, math.MaxInt64, ""},
		{"no cgroups", "", func() (uint64, error) { return 0, memlimit.ErrNoCgroup }, 1 << 40, ""},
		{"not known", "", func() (uint64, error) { return 0, errors.New("odd mounts") }, 1 << 40, "odd mounts"},
		{"told", "1TiB", memlimit.Limit(1000 << 20), 1 << 40, "memory is limited"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			debug.SetMemoryLimit(1 << 40)
			t.Setenv("GOMEMLIMIT", tt.env) // puts it back
			if tt.env == "" {
				os.Unsetenv("GOMEMLIMIT")
			}
			var out strings.Builder
			Limit(slog.New(slog.NewTextHandler(&out, nil)), tt.limits)
			if got := debug.SetMemoryLimit(-1); got != tt.want {
				t.Errorf("limit %d, want %d", got, tt.want)
			}
			if !strings.Contains(out.String(), tt.says) || tt.says == "" && out.Len() > 0 {
				t.Errorf("log %q, want %q in it", out.String(), tt.says)
			}
		})
	}
}

// Who allocates is noted where profiles can be asked for. Not parallel: the rate is the
// process's.
func TestProfiled(t *testing.T) {
	before := runtime.MemProfileRate
	t.Cleanup(func() { runtime.MemProfileRate = before })
	for _, asked := range []bool{true, false} {
		runtime.MemProfileRate = before
		Profiled(asked)
		if got := runtime.MemProfileRate > 0; got != asked {
			t.Errorf("profiles asked for %t: noted %t", asked, got)
		}
	}
}

// What a burst has left goes back when it is over; a heap that is as large as it has to be, or
// was collected for that a moment ago, stays as it is.
func TestReleaseDue(t *testing.T) {
	t.Parallel()
	const mib, long, never = 1 << 20, 24 * time.Hour, -1
	start := time.Now()
	for _, tt := range []struct {
		name       string
		held, left uint64
		since      time.Duration // the last time, or never and the start
		allocated  uint64        // since the last look
		want       bool
	}{
		{"the first reading is over", 90 * mib, 0, never, mib, true},
		{"the first reading goes on", 90 * mib, 0, never, 30 * mib, false},
		{"a burst is over", 200 * mib, 60 * mib, long, mib, true},
		{"a burst goes on", 200 * mib, 60 * mib, time.Minute, 5 * mib, false},
		{"a burst goes on for long", 200 * mib, 60 * mib, 96 * time.Second, 5 * mib, true},
		{"hardly more", 67 * mib, 60 * mib, long, 0, false},
		{"hardly more than much", 220 * mib, 200 * mib, long, 0, false},
		{"too soon", 200 * mib, 60 * mib, 35 * time.Second, 0, false},
		{"again", 200 * mib, 60 * mib, 36 * time.Second, 0, true},
		{"a start so slow that it counted as over, too soon", 140 * mib, 5 * mib, 9 * time.Second, 0, false},
		{"a start so slow that it counted as over", 140 * mib, 5 * mib, 10 * time.Second, 0, true},
		{"a large heap too soon", 4000 * mib, 1000 * mib, 9 * time.Minute, 0, false},
		{"a large heap", 4000 * mib, 1000 * mib, 10 * time.Minute, 0, true},
	} {
		r, now := release{began: start, allocated: 7 * mib}, start.Add(10*time.Second)
		if tt.since != never {
			now = start.Add(tt.since)
			r.done(tt.left, start)
		}
		if got := r.due(tt.held, 7*mib+tt.allocated, now); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
	r := release{began: start}
	if !r.due(90*mib, 30*mib, start.Add(time.Minute)) {
		t.Error("a first reading that goes on for a minute is not waited for")
	}
}

// TestPace: the heap grows by what the collector looks at. Tables without pointers, which
// it does not, make it run sooner and not later.
func TestPace(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	for _, tt := range []struct {
		name         string
		live, looked uint64
		want         int
	}{
		{"nothing yet", 0, 0, 100},
		{"a small heap", 20 * mib, 15 * mib, 100},
		{"a cluster's objects", 200 * mib, 195 * mib, 100},
		{"large tables", 120 * mib, 22 * mib, 25},
		{"500,000 prefixes", 125 * mib, 10 * mib, 14},
		{"very large tables", 2000 * mib, 25 * mib, 10},
	} {
		if got := pace(tt.live, tt.looked); got != tt.want {
			t.Errorf("%s: %d %%, want %d", tt.name, got, tt.want)
		}
	}
}

// TestPaceFollows: the pace in force follows what is alive from collection to collection,
// and GOGC in the environment goes before it. Not parallel: the pace is the process's.
func TestPaceFollows(t *testing.T) {
	before := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(before) })
	t.Setenv("GOGC", "100")
	Pace(t.Context())
	table := make([]uint64, 30<<20)
	inForce := func() uint64 {
		s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	runtime.GC()
	runtime.GC()
	if got := inForce(); got != 100 {
		t.Errorf("%d %% in force, though the environment says 100", got)
	}
	os.Unsetenv("GOGC")
	Pace(t.Context())
	follows := func(what string, ok func(uint64) bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !ok(inForce()); runtime.GC() {
			if time.Now().After(end) {
				t.Fatalf("%s: %d %% in force", what, inForce())
			}
		}
	}
	follows("with a large table", func(p uint64) bool { return p < 50 })
	runtime.KeepAlive(table) // and to here: it is garbage from now on
	follows("without it", func(p uint64) bool { return p == 100 })
}
