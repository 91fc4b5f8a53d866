package runtimes_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/routerd/routerd/integration/kube/cluster"
)

var world = cluster.World{Config: cluster.Config{
	Nodes: 2, Manifests: "../../../configs/kubernetes", Runtime: cluster.Containerd2, CNIVersion: "1.1.0",
}}

func TestMain(m *testing.M) {
	world.Config.Flags(flag.CommandLine)
	flag.Parse()
	code, err := world.Main(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}
