package scenarios

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/store"
)

// stage is what one run of the tests covers.
type stage struct {
	modes   []store.Encapsulation
	missing []store.Encapsulation // this kernel has no device for them
	binDir  string
}

// labPrefix begins the names of this package's labs.
const labPrefix = "sc"

// vmScenarios are what the virtual machine runs by itself: what is promised for
// IPIP, with one lab of both families, in which near packets are plain and far
// ones go through ipip and ip6tnl. Others take minutes there; -run names them.
const vmScenarios = "^(TestModes|TestModeChanges|TestNAT)$|^TestFamilies$/^IPIPCrossSubnet_over_dual$"

func TestMain(m *testing.M) {
	flag.Parse()
	s, err := newStage()
	if err == nil {
		err = bring.RemoveOrphans(labPrefix)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "scenarios:", err)
		os.Exit(1)
	}
	fmt.Printf("scenarios: encapsulations of this stage: %v\n", s.modes)
	if len(s.missing) > 0 {
		fmt.Printf("scenarios: this kernel has no device for %v: left to the stage in the virtual machine (make test-vm)\n", s.missing)
	}
	if emulated() && flag.Lookup("test.run").Value.String() == "" {
		fmt.Printf("scenarios: in the virtual machine only %s, unless -run names others\n", vmScenarios)
		if err := flag.Set("test.run", vmScenarios); err != nil {
			fmt.Fprintln(os.Stderr, "scenarios:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// newStage says what to run, or what is missing to run anything.
func newStage() (stage, error) {
	if os.Geteuid() != 0 {
		return stage{}, fmt.Errorf("network namespaces need root: run the tests with sudo")
	}
	var s stage
	s.binDir = os.Getenv("ROUTERD_BIN")
	if s.binDir == "" {
		s.binDir = filepath.Join("..", "..", "bin")
	}
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		if _, err := os.Stat(filepath.Join(s.binDir, p)); err != nil {
			return stage{}, fmt.Errorf("%w: run \"make build\" first, or say by ROUTERD_BIN where the programs are", err)
		}
	}
	modes := store.Encapsulations()
	named := os.Getenv("ROUTERD_MODES")
	if named == "" && emulated() {
		named = string(store.IPIP) + "," + string(store.IPIPCrossSubnet)
	}
	if named != "" {
		modes = nil
		for n := range strings.SplitSeq(named, ",") {
			e, err := store.ParseEncapsulation(n)
			if err != nil {
				return stage{}, fmt.Errorf("ROUTERD_MODES: %w", err)
			}
			modes = append(modes, e)
		}
	}
	for _, e := range modes {
		ok, err := lab.Supported(e)
		switch {
		case err != nil:
			return stage{}, err
		case ok:
			s.modes = append(s.modes, e)
		case named != "":
			return stage{}, fmt.Errorf("%s was asked for, and this kernel has no device for it", e)
		default:
			s.missing = append(s.missing, e)
		}
	}
	return s, nil
}

// beside lets a test run beside others: a lab waits for timers most of the time. The
// virtual machine's processor is emulated, and one lab takes it whole.
func beside(t *testing.T) {
	t.Helper()
	if !emulated() {
		t.Parallel()
	}
}

func binDir(t *testing.T) string {
	t.Helper()
	s, err := newStage()
	if err != nil {
		t.Fatal(err)
	}
	return s.binDir
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// bringUp brings a lab up that goes with the test; what its daemons logged is
// shown when the test fails.
func bringUp(t *testing.T, suffix string, top lab.Topology) *lab.Lab {
	t.Helper()
	return bringFrom(t, suffix, top, binDir(t))
}

// bringFrom is bringUp with programs of a directory of its own.
func bringFrom(t *testing.T, suffix string, top lab.Topology, bin string) *lab.Lab {
	t.Helper()
	limit := 2 * time.Minute
	if emulated() {
		limit = 5 * time.Minute // of an emulated CPU's time a lab takes half a minute
	}
	return bring.Up(t, limit, labPrefix, suffix, top, bin)
}

// topology is the default one with n hosts.
func topology(n, pods int, e store.Encapsulation) lab.Topology {
	top := lab.DefaultTopology(n)
	top.Pods, top.Pool.Encapsulation = &pods, e
	return top
}

// poll asks again and again until there is nothing to object to; it fails the
// test with the last objection.
func poll(t *testing.T, what string, objection func() string) {
	t.Helper()
	pollFor(t, await.Patience, what, objection)
}

// pollFor is poll for what may take longer than others.
func pollFor(t *testing.T, d time.Duration, what string, objection func() string) {
	t.Helper()
	ctx := within(t, d)
	for {
		o := objection()
		if o == "" {
			return
		}
		tick := time.NewTimer(20 * time.Millisecond)
		select {
		case <-ctx.Done():
			tick.Stop()
			t.Fatalf("%s, after %v: %s", what, d, o)
		case <-tick.C:
		}
	}
}

// output runs a command in the lab that must succeed.
func output(t *testing.T, l *lab.Lab, where string, args ...string) string {
	t.Helper()
	out, err := l.Output(await.Context(t), where, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
