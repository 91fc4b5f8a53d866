package cluster_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/kube/cluster"
)

// world is the contained run's, with the cluster of all tests: it takes a while to come
// up, so the first that wants it brings it up.
type world struct {
	name    string
	once    sync.Once
	cluster *cluster.Cluster
	err     error
}

var shared world

var nodes = flag.Int("nodes", 3, "how many nodes the cluster has")

func TestMain(m *testing.M) {
	flag.Parse()
	do := func() (int, error) { return run(m) }
	if os.Getenv(hangVariable) != "" {
		do = hang
	}
	code, err := do()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	name, code, err := cluster.Contain("rdkube")
	if name == "" || err != nil {
		return code, err
	}
	shared.name = name
	code = m.Run()
	if shared.cluster != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		shared.cluster.Close(ctx)
	}
	return code, nil
}

// up returns the cluster.
func up(t *testing.T) *cluster.Cluster {
	t.Helper()
	shared.once.Do(func() {
		bin, kubeBin := programs(t)
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
		defer cancel()
		shared.cluster, shared.err = cluster.Up(ctx, cluster.Config{
			Name: shared.name, Nodes: *nodes, Bin: bin, KubeBin: kubeBin, Manifests: "../../../configs/kubernetes/new-cluster",
		})
		if shared.err == nil {
			for _, part := range shared.cluster.Times {
				t.Logf("%-40s %6.1f s", part.What, part.Time.Seconds())
			}
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

// programs returns the directories of routerd's programs and of Kubernetes'.
func programs(t *testing.T) (bin, kubeBin string) {
	t.Helper()
	for _, d := range []struct {
		dir                              *string
		variable, usual, program, target string
	}{
		{&bin, "ROUTERD_BIN", "../../../bin", "routerd", "build"},
		{&kubeBin, "KUBE_BIN", "../../../.cache/kube", "kubelet", "kube-tools"},
	} {
		dir, err := filepath.Abs(cmp.Or(os.Getenv(d.variable), d.usual))
		if err == nil {
			_, err = os.Stat(filepath.Join(dir, d.program))
		}
		if err != nil {
			t.Fatalf("%v: run \"make %s\" first, or say by %s where the programs are", err, d.target, d.variable)
		}
		*d.dir = dir
	}
	return bin, kubeBin
}
