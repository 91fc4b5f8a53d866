// Package credentials_test has pods come and go on a whole cluster while all by which its
// daemons and its API server know each other becomes something else.
package credentials_test

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/kube/cluster"
)

var (
	world = cluster.World{Config: cluster.Config{Nodes: 2, Manifests: "../../../configs/kubernetes"}}
	lasts = flag.Duration("for", 0, "how long pods come and go at least; 0: until each credential was replaced once, with kubelets that ask for other tokens because they are started again and not in time")
	every = flag.Duration("every", time.Second, "how often a pod is started")
)

func TestMain(m *testing.M) {
	world.Config.Flags(flag.CommandLine)
	flag.Parse()
	code, err := world.Main(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}
