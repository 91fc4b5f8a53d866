package ui

import (
	"os"
	"testing"

	"github.com/routerd/routerd/integration/lab/bring"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "ui"

func TestMain(m *testing.M) { os.Exit(bring.Main(m, labPrefix)) }
