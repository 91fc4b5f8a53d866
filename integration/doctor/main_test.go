package doctor

import (
	"os"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "dr"

func TestMain(m *testing.M) { os.Exit(bring.Main(m, labPrefix)) }

// bringUp brings a lab up that goes with the test.
func bringUp(t *testing.T, suffix string, top lab.Topology) *lab.Lab {
	t.Helper()
	return bring.Up(t, 2*time.Minute, labPrefix, suffix, top, bring.BinDir())
}

// run runs a command in the lab that must succeed.
func run(t *testing.T, l *lab.Lab, where string, args ...string) {
	t.Helper()
	if _, err := l.Output(await.Context(t), where, args...); err != nil {
		t.Fatal(err)
	}
}
