package doctor

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "dr"

func TestMain(m *testing.M) {
	flag.Parse()
	if err := check(); err != nil {
		fmt.Fprintln(os.Stderr, "doctor:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// check says what is missing to run anything.
func check() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("network namespaces need root: run the tests with sudo")
	}
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		if _, err := os.Stat(filepath.Join(binDir(), p)); err != nil {
			return fmt.Errorf("%w: run \"make build\" first, or say by ROUTERD_BIN where the programs are", err)
		}
	}
	return bring.RemoveOrphans(labPrefix)
}

// binDir is where the programs are.
func binDir() string {
	if d := os.Getenv("ROUTERD_BIN"); d != "" {
		return d
	}
	return filepath.Join("..", "..", "bin")
}

// bringUp brings a lab up that goes with the test.
func bringUp(t *testing.T, suffix string, top lab.Topology) *lab.Lab {
	t.Helper()
	return bring.Up(t, 2*time.Minute, labPrefix, suffix, top, binDir())
}

// run runs a command in the lab that must succeed.
func run(t *testing.T, l *lab.Lab, where string, args ...string) {
	t.Helper()
	if _, err := l.Output(await.Context(t), where, args...); err != nil {
		t.Fatal(err)
	}
}
