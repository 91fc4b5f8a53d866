package hostile

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/store"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "ho"

func TestMain(m *testing.M) { os.Exit(bring.Main(m, labPrefix)) }

// bringUp brings a lab up that goes with the test.
func bringUp(t *testing.T, suffix string, top lab.Topology) *lab.Lab {
	t.Helper()
	return bring.Up(t, 2*time.Minute, labPrefix, suffix, top, bring.BinDir())
}

// topology is the default one with n hosts and pods on each.
func topology(n, pods int, e store.Encapsulation) lab.Topology {
	top := lab.DefaultTopology(n)
	top.Pods, top.Pool.Encapsulation = &pods, e
	return top
}

// poll asks again and again until there is nothing to object to; it fails the
// test with the last objection.
func poll(t *testing.T, what string, objection func() string) {
	t.Helper()
	await.Until(t, what, func() error {
		if o := objection(); o != "" {
			return fmt.Errorf("%s", o)
		}
		return nil
	})
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

// within is a context that ends with the test, or earlier.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
