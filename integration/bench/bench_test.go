package bench

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/integration/lab/ns"
)

func TestTable(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	err := WriteTable(&b, []Row{
		{"CNI ADD", 3, 12, "ptp", Milliseconds},
		{"routes", 123456, 50000, "ip -batch", PerSecond},
		{"nothing measured", 0, 0, "bare", PerSecond},
		{"a member", 0.046, 18, "nft", Milliseconds},
		{"a sync", 4000, 0, "", Milliseconds},
		{"its heap", 128, 0, "", MiB},
		{"idle", 0.046, 0, "", Percent},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := `WHAT              ROUTERD    REFERENCE  TIMES AS FAST  REFERENCE IS
CNI ADD           3.0 ms     12.0 ms    4.00           ptp
routes            123000/s   50000/s    2.47           ip -batch
nothing measured  0/s        0/s        –              bare
a member          0.05 ms    18.0 ms    391.30         nft
a sync            4000.0 ms  –          –              none at hand
its heap          128 MiB    –          –              none at hand
idle              0.05 %     –          –              none at hand
`
	if b.String() != want {
		t.Errorf("table\n%s\nwant\n%s", b.String(), want)
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	if got := Percentile(nil, 50); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
	ds := []time.Duration{50, 10, 40, 20, 30}
	for p, want := range map[float64]time.Duration{0.1: 10, 20: 10, 50: 30, 95: 50, 100: 50} {
		if got := Percentile(ds, p); got != want {
			t.Errorf("p%g of %v is %v, want %v", p, ds, got, want)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		ds := rapid.SliceOfN(rapid.Map(rapid.Int64Range(0, 1000), func(v int64) time.Duration { return time.Duration(v) }), 1, 50).Draw(rt, "durations")
		p := rapid.Float64Range(0.001, 100).Draw(rt, "p")
		got := Percentile(ds, p)
		below, upTo := 0, 0
		for _, d := range ds {
			if d < got {
				below++
			}
			if d <= got {
				upTo++
			}
		}
		need := p / 100 * float64(len(ds))
		if float64(upTo) < need || float64(below) >= need && below > 0 && float64(below) > math.Ceil(need)-1 {
			rt.Fatalf("p%g of %v is %v: %d are below it, %d up to it", p, ds, got, below, upTo)
		}
	})
}

func TestEachCallsEveryNumberOnce(t *testing.T) {
	t.Parallel()
	const n = 100
	var calls [n]atomic.Int32
	var now, most atomic.Int32
	took, err := Each(t.Context(), n, 7, func(_ context.Context, i int) error {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		calls[i].Add(1)
		return nil
	})
	if err != nil || len(took) != n {
		t.Fatalf("%d durations, error %v", len(took), err)
	}
	for i := range calls {
		if c := calls[i].Load(); c != 1 {
			t.Errorf("%d was called %d times", i, c)
		}
	}
	if most.Load() > 7 {
		t.Errorf("%d at once, want at most 7", most.Load())
	}
}

func TestEachStopsAtAnError(t *testing.T) {
	t.Parallel()
	bad := errors.New("bad")
	var calls atomic.Int32
	_, err := Each(t.Context(), 1_000_000, 2, func(_ context.Context, i int) error {
		calls.Add(1)
		if i == 3 {
			return bad
		}
		return nil
	})
	if !errors.Is(err, bad) || !strings.Contains(err.Error(), "number 3") {
		t.Errorf("error %v, want that of number 3", err)
	}
	if calls.Load() == 1_000_000 {
		t.Error("it went on after the error")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Each(ctx, 5, 1, func(context.Context, int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
}

// The references have to do the work that they are measured for.
func TestReferencesProgramTheirRoutes(t *testing.T) {
	t.Parallel()
	prefixes := routePrefixes(1000)
	for name, program := range map[string]func(space string) error{
		"batch": func(space string) error { _, err := routesByIPBatch(t.Context(), space, prefixes); return err },
		"bare":  func(space string) error { _, err := routesBare(t.Context(), space, prefixes); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			space := "rdbench-" + name + strconv.Itoa(os.Getpid())
			err := inRouteSpace(t.Context(), space, func() error {
				if err := program(space); err != nil {
					return err
				}
				out, err := exec.Command("ip", "-n", space, "route", "show", "proto", "77").Output()
				if err != nil {
					return err
				}
				if got := strings.Count(string(out), "\n"); got != len(prefixes) {
					t.Errorf("%d routes, want %d", got, len(prefixes))
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if ns.Exists(space) {
				t.Errorf("namespace %s is still there", space)
			}
		})
	}
}

// Small runs of what the table is made of: each has to end well, and with a
// number in every cell.
func TestMeasurements(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	for name, measure := range map[string]func() ([]Row, error){
		"ipam":   func() ([]Row, error) { return MeasureIPAM(t.Context(), time.Millisecond, log) },
		"routes": func() ([]Row, error) { return MeasureRoutes(t.Context(), 2000, log) },
		"label":  func() ([]Row, error) { return MeasureLabelChange(t.Context(), 40, 4, log) },
		"scale": func() ([]Row, error) {
			size := Scale{Nodes: 300, Colds: 1, Single: 3, Settle: 100 * time.Millisecond, Idle: time.Second}
			return MeasureScale(t.Context(), Programs{Dir: programs(t)}, size, func(s string) { t.Log(s) })
		},
		"cni": func() ([]Row, error) {
			dir := programs(t)
			return MeasureCNIHost(t.Context(), dir, CNICounts{
				OneByOne: 3, AtOnce: 10, Callers: 5, Delays: []time.Duration{50 * time.Millisecond}, Delayed: 3,
			}, func(s string) { t.Log(s) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rows, err := measure()
			if err != nil {
				t.Fatal(err)
			}
			complete(t, rows)
		})
	}
}

// programs is where those of make build are.
func programs(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(cmp.Or(os.Getenv("ROUTERD_BIN"), "../../bin"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "routerd-cni")); err != nil {
		t.Fatalf("%v: run make build", err)
	}
	return dir
}

// TestPolicySync is not parallel: it measures the memory of this process.
func TestPolicySync(t *testing.T) {
	rows, err := MeasurePolicySync(1000, 50)
	if err != nil {
		t.Fatal(err)
	}
	complete(t, rows)
}

// complete fails the test where a row lacks a number that it should have.
func complete(t *testing.T, rows []Row) {
	t.Helper()
	if len(rows) == 0 {
		t.Error("no rows")
	}
	for _, r := range rows {
		idle := r.Unit == Percent && r.Ours == 0
		if !(r.Ours > 0 || idle) || (r.Reference > 0) != (r.Against != "") {
			t.Errorf("row %+v lacks a number, or what it is of", r)
		}
	}
}

func TestPluginConfigIsWhatARuntimeHandsOver(t *testing.T) {
	t.Parallel()
	b, err := pluginConfig(cni.ConflistOptions{Name: "net1", Socket: "/run/x/cni.sock", Version: "1.0.0"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := cni.ParseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "net1" || c.Type != cni.PluginType || c.CNIVersion != "1.0.0" || c.Socket != "/run/x/cni.sock" {
		t.Errorf("configuration %s", b)
	}
}
