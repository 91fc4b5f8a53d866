package hostile

import (
	"context"
	"flag"
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

// ofIPIP names the tests that need the kernel's ipip, which only the stage in the virtual
// machine has for sure: it runs these alone, and without it they are left to it.
const ofIPIP = "^TestIPIP$"

func TestMain(m *testing.M) {
	if err := choose(); err != nil {
		fmt.Fprintln(os.Stderr, "hostile:", err)
		os.Exit(1)
	}
	os.Exit(bring.Main(m, labPrefix))
}

// choose sets which tests run, unless the caller names them.
func choose() error {
	flag.Parse()
	if os.Getenv("ROUTERD_STAGE") == "vm" {
		if flag.Lookup("test.run").Value.String() != "" {
			return nil
		}
		fmt.Printf("hostile: in the virtual machine only %s, unless -run names others\n", ofIPIP)
		return flag.Set("test.run", ofIPIP)
	}
	ok, err := lab.Supported(store.IPIP)
	if err != nil || ok {
		return err
	}
	fmt.Printf("hostile: this kernel has no ipip: %s is left to the stage in the virtual machine (make test-vm)\n", ofIPIP)
	return flag.Set("test.skip", ofIPIP)
}

// bringUp brings a lab up that goes with the test.
func bringUp(t *testing.T, suffix string, top lab.Topology) *lab.Lab {
	t.Helper()
	return bring.Up(t, 5*time.Minute, labPrefix, suffix, top, bring.BinDir())
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
