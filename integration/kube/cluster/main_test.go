package cluster_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/routerd/routerd/integration/kube/cluster"
)

var world = cluster.World{Config: cluster.Config{Nodes: 3, Manifests: "../../../configs/kubernetes"}}

func TestMain(m *testing.M) {
	world.Config.Flags(flag.CommandLine)
	flag.Parse()
	do := func() (int, error) { return world.Main(m) }
	if os.Getenv(hangVariable) != "" {
		do = hang
	}
	code, err := do()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}
