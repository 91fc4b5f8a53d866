package cluster_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/routerd/routerd/integration/kube/cluster"
)

var (
	world cluster.World
	nodes = flag.Int("nodes", 3, "how many nodes the cluster has")
)

func TestMain(m *testing.M) {
	flag.Parse()
	world.Config = cluster.Config{Nodes: *nodes, Manifests: "../../../configs/kubernetes/new-cluster"}
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
